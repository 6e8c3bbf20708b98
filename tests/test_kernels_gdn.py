"""The gated delta rule against golden vectors, an explicit float64 recurrence, and itself cut in two."""

import golden
import pytest
import torch
from torch import Tensor

from longtake.kernels.gdn import GdnState, gdn_bidirectional, gdn_merge, gdn_prepare, gdn_scan, short_conv
from longtake.kernels.rope import rotate
from longtake.server.model.rope import rope_tables

OPS = golden.load("gdn_ops")
EPS = 1e-8


def random_scan(frames: int, per_frame: int, dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs of a scan, B = 2 and H = 3, with keys small enough for a contractive transition."""
    torch.manual_seed(frames * 10_000 + per_frame * 100 + dim)
    q, k, v = torch.randn(3, 2, frames * per_frame, 3, dim, dtype=torch.float64)
    q, k = gdn_prepare(q, k, q_weight=None, k_weight=None, eps=1e-5, k_scale=(dim * per_frame) ** -0.5)
    beta = torch.rand(2, 3, frames, per_frame, dtype=torch.float64)
    decay = 0.9 + 0.1 * torch.rand(2, 3, frames, dtype=torch.float64)
    angles = torch.rand(frames * per_frame, dim // 2, dtype=torch.float64) * 6
    named = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay, "cos": angles.cos(), "sin": angles.sin()}
    return {name: x.to(dtype) for name, x in named.items()}


def random_state(dim: int, dtype: torch.dtype = torch.float32) -> GdnState:
    generator = torch.Generator().manual_seed(dim)
    kv = torch.randn(2, 3, dim, dim, generator=generator, dtype=torch.float64)
    return GdnState(kv.to(dtype), torch.rand(2, 3, dim, generator=generator, dtype=torch.float64).to(dtype))


def cut(inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """The frames start … stop − 1 of a scan's inputs."""
    per_frame = inputs["beta"].shape[-1]
    rows = slice(start * per_frame, stop * per_frame)
    cut_tokens = {name: inputs[name][:, rows] for name in "qkv"}
    tables = {name: inputs[name][rows] for name in ("cos", "sin") if name in inputs}
    return cut_tokens | tables | {name: inputs[name][:, :, start:stop] for name in ("beta", "decay")}


def explicit_recurrence(x: dict[str, Tensor], state: GdnState) -> tuple[Tensor, Tensor, GdnState]:
    """M ← g·(I − K̃ᵀ·diag(β)·K̃)·M + K̃ᵀ·diag(β)·V, written out per batch, head and frame."""
    per_frame = x["beta"].shape[-1]
    numerator, denominator = torch.empty_like(x["v"]), torch.empty_like(x["v"][..., 0])
    turned = {name: rotate(x[name], x["cos"], x["sin"]) for name in "qk"}
    kv, z = state.kv.clone(), state.z.clone()
    eye = torch.eye(x["q"].shape[-1], dtype=x["q"].dtype)
    for b, h, f in torch.cartesian_prod(*map(torch.arange, x["decay"].shape)).tolist():
        rows = slice(f * per_frame, (f + 1) * per_frame)
        weighted = torch.diag(x["beta"][b, h, f])
        rotated, plain = turned["k"][b, rows, h], x["k"][b, rows, h]
        fade = x["decay"][b, h, f]
        kv[b, h] = fade * (eye - rotated.T @ weighted @ rotated) @ kv[b, h] + rotated.T @ weighted @ x["v"][b, rows, h]
        z[b, h] = fade * (eye - plain.T @ weighted @ plain) @ z[b, h] + plain.T @ x["beta"][b, h, f]
        numerator[b, rows, h] = turned["q"][b, rows, h] @ kv[b, h]
        denominator[b, rows, h] = x["q"][b, rows, h] @ z[b, h]
    return numerator, denominator, GdnState(kv, z)


def golden_scan(prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor], GdnState]:
    """Golden inputs (plain for the denominator, rotated for the numerator) and the state before them."""
    gates = {name: OPS[f"{prefix}.{name}"] for name in ("beta", "decay")}
    v = golden.tokens(OPS[f"{prefix}.v"])
    plain = {"q": golden.tokens(OPS[f"{prefix}.q"]), "k": golden.tokens(OPS[f"{prefix}.k"]), "v": v}
    turned = {"q": golden.tokens(OPS[f"{prefix}.q_rot"]), "k": golden.tokens(OPS[f"{prefix}.k_rot"]), "v": v}
    state = GdnState(golden.key_rows(OPS[f"{prefix}.init_state_kv"]), OPS[f"{prefix}.init_state_z"].squeeze(-1))
    return plain | gates, turned | gates, state


def relative(ours: Tensor, reference: Tensor) -> float:
    return golden.worst(ours, reference) / float(reference.abs().max())


@pytest.mark.parametrize("prefix", ["scan", "scan112"])
def test_scan_state_and_quotient_match_golden(prefix: str) -> None:
    plain, turned, state = golden_scan(prefix)
    numerator, _, final = gdn_scan(**turned, initial_state=state)
    _, denominator, final_plain = gdn_scan(**plain, initial_state=state)
    reverse = (gdn_scan(**turned, reverse=True)[0], gdn_scan(**plain, reverse=True)[1])
    out = gdn_merge((numerator, denominator), reverse, EPS)
    assert final is not None
    assert final_plain is not None
    assert relative(final.kv, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 1e-6
    assert relative(final_plain.z, OPS[f"{prefix}.final_state_z"].squeeze(-1)) < 1e-6
    assert relative(out, golden.tokens(OPS[f"{prefix}.cached_out.ref64"])) < 1e-6


@pytest.mark.parametrize(("direction", "reverse"), [("fwd", False), ("rev", True)])
def test_numerator_and_denominator_match_golden(direction: str, *, reverse: bool) -> None:
    plain, turned, state = golden_scan("scan")
    seed = None if reverse else state
    numerator, _, _ = gdn_scan(**turned, initial_state=seed, reverse=reverse)
    _, denominator, _ = gdn_scan(**plain, initial_state=seed, reverse=reverse)
    assert relative(numerator, golden.tokens(OPS[f"scan.{direction}_num"])) < 1e-6
    assert relative(denominator, golden.tokens(OPS[f"scan.{direction}_den"]).squeeze(-1)) < 1e-6


def test_one_call_without_state_matches_golden() -> None:
    plain, _, _ = golden_scan("scan")
    tables = rope_tables(5, (7, 4, 6), 16, 10000.0)
    out, _ = gdn_bidirectional(**plain, cos=tables.cos, sin=tables.sin, eps=EPS)
    assert relative(out, golden.tokens(OPS["scan.bidir_out.ref64"])) < 1e-6


@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("per_frame", [1, 7])
@pytest.mark.parametrize("frames", [1, 3])
def test_scan_equals_the_written_out_recurrence(frames: int, per_frame: int, dim: int) -> None:
    inputs, state = random_scan(frames, per_frame, dim, torch.float64), random_state(dim, torch.float64)
    numerator, denominator, final = gdn_scan(**inputs, initial_state=state)
    expected_numerator, expected_denominator, expected = explicit_recurrence(inputs, state)
    assert final is not None
    assert numerator.dtype == torch.float64
    for ours, reference in (
        (numerator, expected_numerator),
        (denominator, expected_denominator),
        (final.kv, expected.kv),
        (final.z, expected.z),
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", range(1, 5))
def test_cutting_a_forward_scan_changes_no_bit(at: int) -> None:
    inputs, state = random_scan(5, 7, 16), random_state(16)
    whole = gdn_scan(**inputs, initial_state=state)
    first = gdn_scan(**cut(inputs, 0, at), initial_state=state)
    second = gdn_scan(**cut(inputs, at, 5), initial_state=first[2])
    assert torch.equal(torch.cat((first[0], second[0]), dim=1), whole[0])
    assert torch.equal(torch.cat((first[1], second[1]), dim=1), whole[1])
    assert whole[2] is not None
    assert second[2] is not None
    assert all(map(torch.equal, second[2], whole[2]))


def test_reverse_scan_is_exclusive_and_uses_the_decay_of_the_absorbed_frame() -> None:
    inputs = random_scan(2, 7, 16, torch.float64)
    numerator, denominator, final = gdn_scan(**inputs, reverse=True)
    assert final is None
    assert not numerator[:, 7:].any()
    assert not denominator[:, 7:].any()
    later = gdn_scan(**cut(inputs, 1, 2))[2]
    assert later is not None
    queries = rotate(inputs["q"], inputs["cos"], inputs["sin"])[:, :7]
    expected = torch.einsum("bshd,bhde->bshe", queries, later.kv)
    torch.testing.assert_close(numerator[:, :7], expected, rtol=0, atol=1e-12)


def test_scan_leaves_its_arguments_alone() -> None:
    inputs, state = random_scan(3, 7, 16), random_state(16)
    before = [x.clone() for x in (*inputs.values(), *state)]
    gdn_bidirectional(**inputs, initial_state=state, eps=EPS)
    assert all(map(torch.equal, (*inputs.values(), *state), before))


def test_results_are_contiguous() -> None:
    numerator, denominator, final = gdn_scan(**random_scan(3, 7, 16), initial_state=random_state(16))
    assert final is not None
    assert all(x.is_contiguous() for x in (numerator, denominator, *final))


def test_half_precision_input_is_computed_in_fp32() -> None:
    inputs = random_scan(3, 7, 16)
    halves = {name: x.bfloat16() for name, x in inputs.items()}
    out, state = gdn_bidirectional(**halves, eps=EPS)
    expected, _ = gdn_bidirectional(**{name: x.float() for name, x in halves.items()}, eps=EPS)
    assert out.dtype == state.kv.dtype == torch.float32
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"reverse": True, "initial_state": random_state(16)}, "no initial_state", id="reverse-with-state"),
        pytest.param({"initial_state": random_state(24)}, "initial_state must be", id="state-of-another-dim"),
        pytest.param({"sin": None}, "together", id="cos-without-sin"),
        pytest.param({"v": torch.zeros(2, 21, 3, 8)}, "differ in shape", id="short-v"),
        pytest.param({"beta": torch.zeros(2, 3, 3, 8)}, "does not fit", id="beta-of-other-frames"),
        pytest.param({"decay": torch.zeros(2, 3, 4)}, "decay must be", id="decay-of-other-frames"),
    ],
)
def test_misfits_are_refused(changes: dict[str, Tensor | bool | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gdn_scan(**(random_scan(3, 7, 16) | changes))


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
