"""The references of camera scan and camera branch against golden vectors, the gated delta rule and themselves."""

from collections.abc import Callable, Iterator

import golden
import pytest
import torch
from scan_cases import (
    BF16,
    DIM,
    DOUBLE,
    FP32,
    FRAMES,
    HEADS,
    PER_FRAME,
    STARTS,
    Inputs,
    assert_close,
    assert_same_bits,
    cut,
    draw,
    draw_state,
    explicit,
)
from torch import Tensor

from longtake.kernels.cam.geometry import ray_matrices
from longtake.kernels.cam.prepare_reference import CamTokens, cam_discount, cam_output, cam_prepare
from longtake.kernels.cam.reference import CamOutput, cam_branch, cam_scan
from longtake.kernels.delta import Direction, ReverseInputs
from longtake.kernels.gdn import short_conv
from longtake.server.model.rope import rope_tables

OPS = golden.load("gdn_ops")
WEIGHTS = golden.load("tiny_weights")
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def relative(ours: Tensor, reference: Tensor) -> float:
    return golden.worst(ours, reference) / float(reference.abs().max())


def project(x: Tensor, weights: Inputs, prefix: str, frames: int, heads: int) -> Inputs:
    """Raw camera q, k, v [1,N,H,D] with the short convolution on k."""

    def linear(name: str) -> Tensor:
        weight, bias = weights[f"{prefix}{name}_proj_cam.weight"], weights[f"{prefix}{name}_proj_cam.bias"]
        return torch.nn.functional.linear(x, weight, bias)

    k, _ = short_conv(linear("k").unflatten(1, (frames, -1)), weights[f"{prefix}conv_k_cam.weight"].squeeze(1), None)
    flat = {"q": linear("q"), "k": k.flatten(1, 2), "v": linear("v")}
    norms = {f"{name}_weight": weights[f"{prefix}{name}_norm_cam.weight"] for name in "qk"}
    return {name: y.unflatten(-1, (heads, -1)) for name, y in flat.items()} | norms


def golden_branch(name: str) -> tuple[Inputs, Inputs, Tensor]:
    """Raw tokens with positions, norm weights and key scale; gates; the state before them."""
    if name == "cam":
        x, grid, start = project(OPS["x"], WEIGHTS, "blocks.0.attn.", 7, 4), (7, 4, 6), 3
        x |= {"projection": OPS["cam.P"], "projection_inverse": OPS["cam.P_inv"]}
        gates = {gate: OPS[f"gates.{gate}"] for gate in ("beta", "decay")}
    else:
        frames, height, width = grid = tuple(OPS["cam112.frames_hw"].tolist())
        x, start = project(OPS["cam112.x"], OPS, "cam112.", frames, 1), 9
        matrices = ray_matrices(OPS["cam112.camera_conditions"], height, width)
        x |= dict(zip(("projection", "projection_inverse"), matrices, strict=True))
        gates = {gate: OPS[f"cam112.{gate}"] for gate in ("beta", "decay")}
    dim = x["q"].shape[-1]
    tables = rope_tables(start, grid, dim, 10000.0)
    x |= {"cos": tables.cam_cos.float(), "sin": tables.cam_sin.float()}
    scale = {"k_scale": (dim * grid[1] * grid[2]) ** -0.5}
    return x | scale, gates, golden.key_rows(OPS[f"{name}.init_state_kv"]).contiguous()


@pytest.mark.parametrize(("name", "bound"), [("cam", 1e-6), ("cam112", 2e-6)])
def test_branch_matches_golden(name: str, bound: float) -> None:
    x, gates, state = golden_branch(name)
    found = cam_branch(**x, **gates, initial_state=state)
    assert found.state is not None
    assert relative(found.out.flatten(2), OPS[f"{name}_raw.branch_out"]) < bound
    assert relative(found.state, golden.key_rows(OPS[f"{name}_raw.final_state_kv"])) < bound


@pytest.mark.parametrize(("name", "bound"), [("cam", 1e-6), ("cam112", 2e-6)])
def test_downscaled_branch_matches_golden(name: str, bound: float) -> None:
    x, gates, state = golden_branch(name)
    tokens = cam_prepare(**x, downscale=True)
    beta = cam_discount(gates["beta"], tokens.inflation)
    assert relative(beta, OPS[f"{name}.scan_beta"]) < 1e-6
    found = cam_scan(*tokens[:3], beta, gates["decay"], direction="both", initial_state=state)
    assert found.state is not None
    assert relative(found.state, golden.key_rows(OPS[f"{name}.final_state_kv"])) < bound
    out = cam_output(found.out, x["projection"], x["cos"], x["sin"])
    assert relative(out.flatten(2), OPS[f"{name}.branch_out"]) < bound


@pytest.mark.parametrize("prefix", ["scan", "scan112"])
def test_scan_with_a_state_matches_golden(prefix: str) -> None:
    tokens = [golden.tokens(OPS[f"{prefix}.{name}"]).contiguous() for name in ("q_rot", "k_rot", "v")]
    state = golden.key_rows(OPS[f"{prefix}.init_state_kv"]).contiguous()
    gates = OPS[f"{prefix}.beta"], OPS[f"{prefix}.decay"]
    found = cam_scan(*tokens, *gates, direction="both", initial_state=state)
    assert found.state is not None
    assert relative(found.out, golden.tokens(OPS[f"{prefix}.cam_cached_out.ref64"])) < 1e-6
    assert relative(found.state, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 1e-6


def signed(dtype: torch.dtype = DOUBLE) -> Inputs:
    """Inputs of a camera scan: prepared tokens have any sign."""
    x = draw()
    x = {name: y for name, y in x.items() if name not in ("cos", "sin")}
    signs = {name: torch.where(torch.rand_like(x[name]) < 0.5, -x[name], x[name]) for name in "qk"}
    return {name: y.to(dtype) for name, y in (x | signs).items()}


def tensors(found: CamOutput) -> tuple[Tensor, ...]:
    return tuple(x for x in found if x is not None)


def written_out(x: Inputs, state: Tensor | None = None, reverse: list[int] | None = None) -> tuple[Tensor, ...]:
    """Numerator and state of the recurrence without rotation."""
    half = torch.zeros_like(x["q"][0, :, 0, : DIM // 2])
    whole = None if state is None else draw_state()._replace(kv=state)
    return explicit(x | {"cos": half + 1, "sin": half}, whole, reverse)[::2]


@pytest.mark.parametrize("frame_beta", [False, True], ids=["token-beta", "frame-beta"])
@pytest.mark.parametrize("with_state", [False, True], ids=["empty", "state"])
def test_forward_equals_the_written_out_recurrence(*, with_state: bool, frame_beta: bool) -> None:
    x, state = signed(), draw_state().kv if with_state else None
    if frame_beta:
        x["beta"] = x["beta"][..., 0].contiguous()
    spread = x | {"beta": x["beta"][..., None].expand(-1, -1, -1, PER_FRAME)} if frame_beta else x
    assert_close(tensors(cam_scan(**x, initial_state=state)), written_out(spread, state)[:2])


@pytest.mark.parametrize("starts", [[0], STARTS], ids=str)
def test_reverse_equals_the_written_out_recurrence(starts: list[int]) -> None:
    x = signed()
    found = cam_scan(**x, direction="reverse", chunk_starts=starts)
    assert found.state is None
    assert not found.out[:, -PER_FRAME:].any()
    assert_close(tensors(found), written_out(x, reverse=starts))


def test_both_is_the_sum_and_keeps_the_forward_state() -> None:
    x, state, starts = signed(), draw_state().kv, torch.tensor(STARTS)
    forward = cam_scan(**x, initial_state=state, chunk_starts=starts)
    reverse = cam_scan(**x, direction="reverse", chunk_starts=starts)
    both = cam_scan(**x, direction="both", initial_state=state, chunk_starts=STARTS)
    assert_same_bits(tensors(both), (forward.out + reverse.out, *tensors(forward)[1:]))


@pytest.mark.parametrize("at", range(1, FRAMES))
def test_cutting_a_forward_scan_changes_no_bit(at: int) -> None:
    x, state = signed(FP32), draw_state(dtype=FP32).kv
    first = cam_scan(**cut(x, 0, at), initial_state=state)
    second = cam_scan(**cut(x, at, FRAMES), initial_state=first.state)
    assert second.state is not None
    whole = cam_scan(**x, initial_state=state)
    assert_same_bits((torch.cat((first.out, second.out), dim=1), second.state), tensors(whole))


def test_one_call_by_chunks_equals_a_call_a_chunk_bitwise() -> None:
    x, state = signed(FP32), draw_state(dtype=FP32).kv
    whole = cam_scan(**x, direction="both", initial_state=state, chunk_starts=STARTS)
    outs, carried = [], CamOutput(state, state)
    for first, stop in zip(STARTS, [*STARTS[1:], FRAMES], strict=True):
        carried = cam_scan(**cut(x, first, stop), direction="both", initial_state=carried.state)
        outs.append(carried.out)
    assert_same_bits((torch.cat(outs, dim=1), *tensors(carried)[1:]), tensors(whole))


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "decay"])
def test_each_reverse_input_replaces_that_of_the_reverse_scan_alone(name: str) -> None:
    x = signed()
    other = {name: x[name].flip(1)}
    found = cam_scan(**x, direction="both", reverse=ReverseInputs(**other))
    forward, reverse = cam_scan(**x), cam_scan(**x | other, direction="reverse")
    assert_same_bits(tensors(found), (forward.out + reverse.out, *tensors(forward)[1:]))


@pytest.mark.parametrize(("chunk_starts", "blank"), [(None, 0.0), (STARTS, NAN)], ids=["zeros", "nan"])
def test_blank_reverse_inputs_at_chunk_starts_equal_chunk_starts(chunk_starts: list[int] | None, blank: float) -> None:
    x = signed()
    other = {
        name: torch.unflatten(x[name].clone(), 1 if name in "kv" else 2, (FRAMES, -1))
        for name in ("k", "v", "beta", "decay")
    }
    for name, y in other.items():
        y.index_fill_(1 if name in "kv" else 2, torch.tensor(STARTS[1:]), blank)
        other[name] = y.view_as(x[name])
    found = cam_scan(**x, direction="both", chunk_starts=chunk_starts, reverse=ReverseInputs(**other))
    assert_same_bits(tensors(found), tensors(cam_scan(**x, direction="both", chunk_starts=STARTS)))


def test_a_decay_of_zero_forgets() -> None:
    x = signed()
    x["decay"][:, :, 2] = 0
    found = cam_scan(**x, initial_state=draw_state().kv)
    assert_same_bits(tensors(cam_scan(**cut(x, 2, FRAMES)))[1:], tensors(found)[1:])


def test_out_state_is_written_in_place_and_returned() -> None:
    x, state = signed(FP32), draw_state(dtype=FP32).kv
    out_state = torch.full_like(state, NAN)
    expected = cam_scan(**x, direction="both", initial_state=state)
    found = cam_scan(**x, direction="both", initial_state=state, out_state=out_state)
    assert found.state is out_state
    assert_same_bits(tensors(found), tensors(expected))
    assert cam_scan(**x, initial_state=state, out_state=state).state is state
    assert_same_bits((state,), tensors(expected)[1:])


def test_without_out_state_nothing_is_changed_or_shared() -> None:
    x, state = signed(), draw_state().kv
    x["decay"].fill_(1)
    x["beta"].zero_()
    before = [y.clone() for y in (*x.values(), state)]
    found = cam_scan(**x, direction="both", initial_state=state)
    assert_same_bits((*x.values(), state), tuple(before))
    given = {y.untyped_storage().data_ptr() for y in (*x.values(), state)}
    assert given.isdisjoint(y.untyped_storage().data_ptr() for y in tensors(found))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_pool_equals_gathered_states(*, in_place: bool) -> None:
    x, pool, slots = signed(FP32), draw_state(dtype=FP32, rows=5).kv, torch.tensor([3, 1])
    before = pool.clone()
    expected = cam_scan(**x, initial_state=pool[slots])
    found = cam_scan(**x, initial_state=pool, slots=slots, out_state=pool if in_place else None)
    assert found.state is not None
    assert_same_bits((found.out, found.state[slots] if in_place else found.state), tensors(expected))
    assert_same_bits((pool[[0, 2, 4]],), (before[[0, 2, 4]],))
    assert in_place or torch.equal(pool, before)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "decay"])
def test_nan_stays_in_its_batch_entry(name: str) -> None:
    x = signed()
    expected = tensors(cam_scan(**x, direction="both"))
    x[name][0, 0] = NAN
    found = tensors(cam_scan(**x, direction="both"))
    assert_same_bits(tuple(y[1:] for y in found), tuple(y[1:] for y in expected))
    assert found[0][0].isnan().any()


def draw_branch() -> Inputs:
    """Raw inputs of a branch whose cameras stand far enough away to let keys grow."""
    x = draw()
    x |= {"q": torch.randn_like(x["q"]), "k": torch.randn_like(x["k"])}
    projection = torch.eye(4, dtype=DOUBLE).repeat(2, FRAMES * PER_FRAME, 1, 1)
    projection[..., :3, 3] = torch.randn(2, FRAMES * PER_FRAME, 3, dtype=DOUBLE)
    x |= {"projection": projection, "projection_inverse": torch.linalg.inv(projection).contiguous()}
    return x | {name: x[name][:, : DIM // 4].contiguous() for name in ("cos", "sin")}


def composed(x: Inputs, norms: dict[str, object], *, discount: bool, back: bool, **scan: object) -> tuple[Tensor, ...]:
    """The branch from its parts."""
    positions = {name: x[name] for name in ("projection", "projection_inverse", "cos", "sin")}
    tokens: CamTokens = cam_prepare(x["q"], x["k"], x["v"], **positions, **norms)
    beta = cam_discount(x["beta"], tokens.inflation) if discount else x["beta"]
    assert not discount or (beta < x["beta"]).any()
    out, state = cam_scan(tokens.q, tokens.k, tokens.v, beta, x["decay"], **scan)
    out = cam_output(out, x["projection"], x["cos"], x["sin"]) if back else out
    return (out,) if state is None else (out, state)


@pytest.mark.parametrize("back", [False, True], ids=["ray-frame", "own-frame"])
@pytest.mark.parametrize("discount", [False, True], ids=["raw-beta", "discount"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "both"])
def test_branch_is_its_parts(direction: Direction, *, discount: bool, back: bool) -> None:
    x, scan = draw_branch(), {"direction": direction, "chunk_starts": STARTS}
    if direction != "reverse":
        scan |= {"initial_state": draw_state(rows=4).kv, "slots": torch.tensor([2, 0])}
    norms = {"q_weight": torch.rand(HEADS * DIM), "k_weight": torch.rand(HEADS * DIM), "norm_eps": 0.1, "k_scale": 0.1}
    for norm in ({"norm": "head"}, {"inverse_rms": tuple(torch.rand(2, FRAMES * PER_FRAME) for _ in "qk")}):
        found = cam_branch(**x, **norms, **norm, **scan, discount=discount, output_transform=back)
        assert_same_bits(tensors(found), composed(x, norms | norm, discount=discount, back=back, **scan))


def test_branch_gives_the_dtype_of_v_and_writes_its_state_in_place() -> None:
    x, state = draw_branch(), draw_state(dtype=FP32).kv
    halves = {name: y.to(BF16 if name in "qkv" else FP32) for name, y in x.items()}
    expected = cam_branch(**halves, initial_state=state)
    found = cam_branch(**halves, initial_state=state, out_state=state)
    assert found.out.dtype == BF16
    assert found.state is state
    assert_same_bits(tensors(found), tensors(expected))


Change = Callable[[Inputs], dict[str, object]]
KV, SLOTS = draw_state().kv, torch.tensor([0, 1])
MISFITS: dict[str, tuple[Change, str]] = {
    "direction": (lambda x: {"direction": "backward"}, "direction is one of"),
    "short-k": (lambda x: {"k": x["k"][:, 1:]}, "k must be"),
    "v-elsewhere": (lambda x: {"v": x["v"].to("meta")}, "v must be on cpu"),
    "beta-of-other-frames": (lambda x: {"beta": x["beta"][:, :, 1:, 0].contiguous()}, "beta must be"),
    "beta-not-contiguous": (lambda x: {"beta": x["beta"][..., 0]}, "beta must be contiguous"),
    "decay-of-integers": (lambda x: {"decay": x["decay"].long()}, "decay must be one of"),
    "reverse-with-state": (lambda x: {"direction": "reverse", "initial_state": KV}, "takes no initial_state"),
    "reverse-with-out-state": (lambda x: {"direction": "reverse", "out_state": KV}, "takes no out_state"),
    "kv-of-another-dim": (lambda x: {"initial_state": draw_state(24).kv}, "initial_state .*must be"),
    "kv-in-bf16": (lambda x: {"initial_state": KV.bfloat16()}, "initial_state .*must be one of"),
    "kv-not-contiguous": (lambda x: {"out_state": KV.mT}, "out_state .*must be contiguous"),
    "kv-elsewhere": (lambda x: {"out_state": KV.to("meta")}, "out_state .*must be on cpu"),
    "slots-of-int32": (lambda x: {"initial_state": KV, "slots": SLOTS.int()}, "slots must be one of"),
    "slots-without-pool": (lambda x: {"slots": SLOTS}, "slots are rows of a state pool"),
    "chunks-from-one": (lambda x: {"chunk_starts": [1]}, "chunk_starts must rise from 0"),
    "reverse-inputs-forward": (lambda x: {"reverse": ReverseInputs(q=x["q"])}, "reverse inputs need direction 'both'"),
    "short-reverse-k": (
        lambda x: {"direction": "both", "reverse": ReverseInputs(k=x["k"][:, 1:])}, "reverse k must be",
    ),
    "reverse-inverse-rms": (
        lambda x: {"direction": "both", "reverse": ReverseInputs(inverse_rms=(KV, KV))}, "inverse_rms has no use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused_by_name(name: str) -> None:
    x = signed()
    changes, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        cam_scan(**x | changes(x))
