"""The reference of the gated delta rule against golden vectors and a recurrence written out in float64."""

from collections.abc import Iterator
from itertools import product

import golden
import pytest
import torch
from scan_cases import (
    BF16,
    DIM,
    FP32,
    FRAMES,
    HEADS,
    PER_FRAME,
    STARTS,
    Inputs,
    assert_close,
    assert_same_bits,
    draw,
    draw_state,
    explicit,
    tensors,
)
from torch import Tensor
from torch.nn.functional import silu

from longtake.kernels.delta import Direction
from longtake.kernels.gdn import short_conv
from longtake.kernels.gdn.reference import GdnState, Norm, gdn_scan
from longtake.server.model.rope import rope_tables

OPS = golden.load("gdn_ops")
EPS = 1e-8


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def golden_scan(prefix: str) -> tuple[Inputs, GdnState]:
    """Golden inputs with their tables, and the state before them."""
    grid = {"scan": (7, 4, 6), "scan112": (4, 2, 5)}[prefix]
    x = {name: golden.tokens(OPS[f"{prefix}.{name}"]).contiguous() for name in "qkv"}
    tables = rope_tables(5, grid, x["q"].shape[-1], 10000.0)
    x |= {"cos": tables.cos, "sin": tables.sin} | {name: OPS[f"{prefix}.{name}"] for name in ("beta", "decay")}
    kv, z = golden.key_rows(OPS[f"{prefix}.init_state_kv"]), OPS[f"{prefix}.init_state_z"].squeeze(-1)
    return x, GdnState(kv.contiguous(), z.contiguous())


def relative(ours: Tensor, reference: Tensor) -> float:
    return golden.worst(ours, reference) / float(reference.abs().max())


@pytest.mark.parametrize("prefix", ["scan", "scan112"])
def test_quotient_and_state_match_golden(prefix: str) -> None:
    x, state = golden_scan(prefix)
    found = gdn_scan(**x, direction="both", initial_state=state, eps=EPS)
    assert found.state is not None
    assert relative(found.out, golden.tokens(OPS[f"{prefix}.cached_out.ref64"])) < 1e-6
    assert relative(found.state.kv, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 1e-6
    assert relative(found.state.z, OPS[f"{prefix}.final_state_z"].squeeze(-1)) < 1e-6
    fresh = gdn_scan(**x, direction="both", eps=EPS)
    assert relative(fresh.out, golden.tokens(OPS[f"{prefix}.bidir_out.ref64"])) < 1e-6


@pytest.mark.parametrize(("direction", "name"), [("forward", "fwd"), ("reverse", "rev")])
def test_numerator_and_denominator_match_golden(direction: Direction, name: str) -> None:
    x, state = golden_scan("scan")
    found = gdn_scan(**x, direction=direction, initial_state=state if direction == "forward" else None)
    assert found.denominator is not None
    assert relative(found.out, golden.tokens(OPS[f"scan.{name}_num"])) < 1e-6
    assert relative(found.denominator, golden.tokens(OPS[f"scan.{name}_den"]).squeeze(-1)) < 1e-6


@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("per_frame", [1, 7])
@pytest.mark.parametrize("frames", [1, 3])
def test_forward_equals_the_written_out_recurrence(frames: int, per_frame: int, dim: int) -> None:
    x, state = draw(frames, per_frame, dim), draw_state(dim)
    assert_close(tensors(gdn_scan(**x, initial_state=state)), explicit(x, state))
    assert_close(tensors(gdn_scan(**x)), explicit(x))


@pytest.mark.parametrize("starts", [[0], STARTS, list(range(FRAMES))], ids=str)
def test_reverse_equals_the_written_out_recurrence(starts: list[int]) -> None:
    x = draw()
    assert_close(tensors(gdn_scan(**x, direction="reverse", chunk_starts=starts)), explicit(x, reverse=starts))


def test_reverse_is_exclusive_and_has_no_state() -> None:
    found = gdn_scan(**draw(), direction="reverse")
    assert found.state is None
    assert found.denominator is not None
    assert found.out[:, :-PER_FRAME].any()
    assert not found.out[:, -PER_FRAME:].any()
    assert not found.denominator[:, -PER_FRAME:].any()


@pytest.mark.parametrize("chunk_starts", [None, STARTS], ids=str)
def test_both_is_the_sum_and_keeps_the_forward_state(chunk_starts: list[int] | None) -> None:
    x, state = draw(), draw_state()
    forward = tensors(gdn_scan(**x, initial_state=state, chunk_starts=chunk_starts))
    reverse = tensors(gdn_scan(**x, direction="reverse", chunk_starts=chunk_starts))
    both = gdn_scan(**x, direction="both", initial_state=state, chunk_starts=chunk_starts)
    assert_same_bits(tensors(both), (forward[0] + reverse[0], forward[1] + reverse[1], *forward[2:]))


def test_quotient_adds_eps_once_and_comes_in_the_dtype_of_v() -> None:
    x, state, gate = draw(), draw_state(), draw(dtype=FP32)["v"]
    apart = gdn_scan(**x, direction="both", initial_state=state)
    assert apart.denominator is not None
    quotient = gdn_scan(**x, direction="both", initial_state=state, eps=0.5)
    assert quotient.denominator is None
    expected = apart.out / (apart.denominator + 0.5)[..., None]
    assert_close((quotient.out,), (expected,))
    gated = gdn_scan(**x, direction="both", initial_state=state, eps=0.5, gate=gate)
    assert_close((gated.out,), (expected * silu(gate.double()),))
    assert gdn_scan(**x | {"v": x["v"].bfloat16()}, eps=0.5).out.dtype == BF16


def explicit_norm(x: Tensor, weight: Tensor | None, norm: str, norm_eps: float) -> Tensor:
    """Token by token and head by head."""
    rows = x.clone().flatten(2)
    width = {"none": 0, "head": DIM, "full": HEADS * DIM}[norm]
    for b, n, start in product(range(x.shape[0]), range(x.shape[1]), range(0, HEADS * DIM, width) if width else ()):
        row = rows[b, n, start : start + width]
        row /= ((row @ row) / width + norm_eps).sqrt()
    return (rows if weight is None else rows * weight.double()).view_as(x).clamp(min=0)


@pytest.mark.parametrize("weight", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("norm", ["head", "full"])
def test_raw_tokens_are_normed_rectified_and_scaled(norm: Norm, weight: torch.dtype | None) -> None:
    x = draw()
    raw = x | {"q": torch.randn_like(x["q"]) * 3, "k": torch.randn_like(x["k"]) * 3}
    weights = [None if weight is None else torch.randn(HEADS * DIM).to(weight) for _ in "qk"]
    named = dict(zip(("q_weight", "k_weight"), weights, strict=True))
    prepared = {name: explicit_norm(raw[name], w, norm, 0.1) for name, w in zip("qk", weights, strict=True)}
    prepared["k"] *= 0.09
    found = gdn_scan(**raw, norm=norm, **named, norm_eps=0.1, k_scale=0.09)
    assert_close(tensors(found), explicit(x | prepared))


def test_without_a_norm_tokens_are_rectified_and_keys_scaled_for_both_memories() -> None:
    x = draw()
    signed = x | {"q": torch.randn_like(x["q"]), "k": torch.randn_like(x["k"])}
    prepared = {"q": signed["q"].clamp(min=0), "k": signed["k"].clamp(min=0) * 0.09}
    assert_close(tensors(gdn_scan(**signed, k_scale=0.09)), explicit(x | prepared))


def test_given_inverse_rms_replaces_the_computed_one() -> None:
    x = draw()
    given = tuple((x[name].square().mean(dim=(2, 3)) + 1e-5).rsqrt() for name in "qk")
    computed = tensors(gdn_scan(**x, norm="full", k_scale=0.09))
    assert_close(tensors(gdn_scan(**x, norm="full", k_scale=0.09, inverse_rms=given)), computed)
    halved = gdn_scan(**x, norm="full", k_scale=0.18, inverse_rms=(given[0], given[1] / 2))
    assert_close(tensors(halved), computed)


@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
@pytest.mark.parametrize("repeated", [False, True], ids=["pairs", "repeated"])
def test_tables_come_in_four_forms(*, batched: bool, repeated: bool) -> None:
    x, state = draw(), draw_state()
    tables = {name: x[name].repeat_interleave(2 if repeated else 1, dim=-1) for name in ("cos", "sin")}
    if batched:
        tables = {name: table.expand(2, -1, -1).contiguous() for name, table in tables.items()}
    both = {"direction": "both", "initial_state": state}
    assert_same_bits(tensors(gdn_scan(**x | tables, **both)), tensors(gdn_scan(**x, **both)))


def test_no_tables_are_no_rotation() -> None:
    x = draw()
    still = x | {"cos": torch.ones_like(x["cos"]), "sin": torch.zeros_like(x["sin"])}
    plain = {name: y for name, y in x.items() if name not in ("cos", "sin")}
    assert_same_bits(tensors(gdn_scan(**plain)), tensors(gdn_scan(**still)))


def test_sessions_at_different_frames_share_a_batch() -> None:
    x = draw(frames=3, per_frame=6)
    tables = [rope_tables(start, (3, 2, 3), DIM, 10000.0) for start in (0, 121, 4000)]
    x |= {"cos": torch.stack([t.cos for t in tables]), "sin": torch.stack([t.sin for t in tables])}
    x |= {name: torch.cat((x[name], x[name][:1].flip(1))) for name in ("q", "k", "v", "beta", "decay")}
    state = draw_state(rows=3)
    batched = tensors(gdn_scan(**x, direction="both", initial_state=state))
    for b, table in enumerate(tables):
        single = {name: y[b : b + 1] for name, y in x.items()} | {"cos": table.cos, "sin": table.sin}
        own = GdnState(*(y[b : b + 1] for y in state))
        assert_close(
            tensors(gdn_scan(**single, direction="both", initial_state=own)), tuple(y[b : b + 1] for y in batched)
        )


def test_short_conv_over_the_whole_clip_matches_golden() -> None:
    weight = golden.load("tiny_weights")["blocks.0.attn.conv_k.weight"].squeeze(1)
    y, _ = short_conv(OPS["shortconv.in"].view(1, 7, 24, 64), weight, None)
    assert golden.worst(y.flatten(1, 2), OPS["shortconv.bidirectional"]) < 1e-6


def test_short_conv_by_chunks_matches_golden() -> None:
    weight = golden.load("tiny_weights")["blocks.0.attn.conv_k.weight"].squeeze(1)
    x, tail = OPS["shortconv.in"].view(1, 7, 24, 64), None
    for chunk, frames in (("chunk0", slice(0, 4)), ("chunk1", slice(4, 7))):
        y, tail = short_conv(x[:, frames], weight, tail)
        assert golden.worst(y.flatten(1, 2), OPS[f"shortconv.{chunk}.out"]) < 1e-6
        assert torch.equal(tail[0].transpose(0, 1), OPS[f"shortconv.{chunk}.prefix"])


def test_short_conv_tail_reaches_over_chunks_shorter_than_itself() -> None:
    x = torch.arange(5.0).view(1, 5, 1, 1)
    _, tail = short_conv(x[:, :4], torch.ones(1, 4), None)
    _, tail = short_conv(x[:, 4:], torch.ones(1, 4), tail)
    assert tail.flatten().tolist() == [2, 3, 4]
    assert tail.is_contiguous()


def test_short_conv_refuses_a_tail_of_another_shape() -> None:
    with pytest.raises(ValueError, match="tail must be"):
        short_conv(torch.zeros(1, 3, 7, 5), torch.zeros(5, 4), torch.zeros(1, 2, 7, 5))
    with pytest.raises(ValueError, match="weight must be"):
        short_conv(torch.zeros(1, 3, 7, 5), torch.zeros(4, 4), None)
