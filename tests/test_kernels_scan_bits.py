"""What must not change a bit of the scans on the Triton kernels: repeating, cutting, batching, layouts, neighbours."""

from itertools import pairwise

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, GPU, REAL, Shape, assert_same_bits, mapped, name_of, tensors
from scan_modes import SCANS, Arguments, Results, draw, draw_slots, draw_state, random, run
from torch import Tensor

from longtake.kernels import GdnState, Precision, ReverseInputs
from longtake.server.model.rope import rope_tables

TINY = Shape(1, 3, 2, 1, 16)
PAIR = Shape(2, 1, 2, 1, 16)
BITS: list[tuple[Shape, torch.dtype, Precision]] = [(TINY, BF16, "bf16")]
BITS += [(TINY, FP32, "ieee"), (REAL, BF16, "bf16"), (REAL._replace(frames=4), FP32, "ieee")] * GPU
MODES = {"gdn": "both full weights turned-own state gated", "branch": "both weights state own"}
MODES |= {"cam": "both state"} if GPU else {}
SHARED = ("q_weight", "k_weight", "chunk_starts")
"""Arguments that all batch entries share; so are tables without a batch."""
NAN = float("nan")
BATCHES = [(shape._replace(batch=2), *others) for shape, *others in BITS] if GPU else [(PAIR, BF16, "bf16")]
each_mode = pytest.mark.parametrize("name", MODES)
each_batch = pytest.mark.parametrize(("shape", "dtype", "precision"), BATCHES, ids=name_of)
each_size = pytest.mark.parametrize(("shape", "dtype", "precision"), BITS, ids=name_of)


def entry(x: Arguments, b: int) -> Arguments:
    """Batch entry b alone."""
    own = {name: y for name, y in x.items() if name not in SHARED and not shared_table(name, y)}
    return x | {name: mapped(lambda z: z[b : b + 1].contiguous(), y) for name, y in own.items()}


def shared_table(name: str, y: object) -> bool:
    return name in ("cos", "sin") and isinstance(y, Tensor) and y.ndim == 2


def cut(x: Arguments, shape: Shape, start: int, stop: int) -> Arguments:
    """The frames start … stop − 1, as one chunk."""
    rows = slice(start * shape.per_frame, stop * shape.per_frame)
    by_token = ("q", "k", "v", "gate", "inverse_rms", "projection", "projection_inverse")
    part = {name: mapped(lambda y: y[:, rows].contiguous(), x[name]) for name in by_token if name in x}
    part |= {name: x[name][..., rows, :].contiguous() for name in ("cos", "sin") if name in x}
    part |= {name: x[name][:, :, start:stop].contiguous() for name in ("beta", "decay")}
    return {name: y for name, y in x.items() if name != "chunk_starts"} | part


def run_parts(name: str, parts: list[Arguments], precision: Precision) -> Results:
    """Scans of consecutive frames, each from the state of the one before, joined."""
    state, outs, found = parts[0]["initial_state"], [], ()
    for part in parts:
        found = run(name, part | {"initial_state": state}, precision)
        state = GdnState(*found[-2:]) if name == "gdn" else found[-1]
        outs.append(found[0])
    return (torch.cat(outs, dim=1), *found[1:])


@each_mode
@each_size
def test_repeating_changes_no_bit_and_no_argument(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision
) -> None:
    x = draw(name, shape, dtype, MODES[name])
    before, first = tensors(mapped(Tensor.clone, x)), run(name, x, precision)
    for _ in range(3 if GPU else 1):
        assert_same_bits(run(name, x, precision), first)
    assert_same_bits(tensors(x), before)


@each_mode
@each_size
def test_cutting_a_forward_scan_changes_no_bit(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision
) -> None:
    x = draw(name, shape, dtype, MODES[name]) | {"direction": "forward"}
    whole = run(name, x, precision)
    for at in range(1, shape.frames):
        parts = [cut(x, shape, 0, at), cut(x, shape, at, shape.frames)]
        assert_same_bits(run_parts(name, parts, precision), whole)


@each_mode
@each_size
def test_one_call_by_chunks_equals_a_call_a_chunk_bitwise(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision
) -> None:
    x = draw(name, shape, dtype, MODES[name] + " chunks")
    bounds = [*x["chunk_starts"].tolist(), shape.frames]
    parts = [cut(x, shape, *bound) for bound in pairwise(bounds)]
    whole = run(name, x, precision)
    assert_same_bits(run_parts(name, parts, precision), whole)
    assert_same_bits(run(name, x | {"chunk_starts": bounds[:-1]}, precision), whole)


@each_mode
@each_batch
def test_a_batch_equals_its_single_runs_bitwise(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision
) -> None:
    x = draw(name, shape, dtype, MODES[name])
    whole = run(name, x, precision)
    for b in range(shape.batch):
        assert_same_bits(tuple(y[b : b + 1] for y in whole), run(name, entry(x, b), precision))


@pytest.mark.parametrize("name", ["gdn", "branch"])
def test_sessions_at_different_frames_share_a_batch(name: str) -> None:
    shape = Shape(3, 1, 4, 1, 16)
    x = draw(name, shape, BF16, MODES[name])
    tables = [rope_tables(start, (1, 2, 2), 16, 10000.0) for start in (0, 121, 4000)]
    kinds = ("cos", "sin") if name == "gdn" else ("cam_cos", "cam_sin")
    singles = [[getattr(table, kind).float().to(DEVICE) for kind in kinds] for table in tables]
    batched = dict(zip(("cos", "sin"), map(torch.stack, zip(*singles, strict=True)), strict=True))
    whole = run(name, x | batched)
    for b, (cos, sin) in enumerate(singles):
        single = run(name, entry(x | {"cos": cos, "sin": sin}, b))
        assert_same_bits(tuple(y[b : b + 1] for y in whole), single)
    assert not torch.equal(run(name, x | {"cos": batched["cos"].roll(1, 0)})[0], whole[0])


@each_mode
@each_batch
def test_a_neighbour_of_nan_changes_no_bit(name: str, shape: Shape, dtype: torch.dtype, precision: Precision) -> None:
    x = draw(name, shape, dtype, MODES[name])
    clean = run(name, x, precision)
    own = ["q", "k", "v", "beta", "decay", "initial_state"] + ["projection", "projection_inverse"] * (name == "branch")
    for keys in [[key] for key in own] if GPU else [own]:
        spoilt = {key: mapped(spoil, x[key]) for key in keys}
        found = run(name, x | spoilt, precision)
        assert_same_bits(tuple(y[1:] for y in found), tuple(y[1:] for y in clean))
        assert found[0][0].isnan().any()


def spoil(x: Tensor) -> Tensor:
    """A copy with one NaN in the first batch entry."""
    spoilt = x.clone()
    spoilt[0].view(-1)[0] = NAN
    return spoilt


@pytest.mark.parametrize("key", ["q", "k"])
def test_nan_is_no_zero_to_relu_and_clamps(key: str) -> None:
    x = draw("branch", Shape(1, 1, 1, 1, 16), FP32, "forward bare")
    assert run("branch", x | {key: spoil(x[key])})[0].isnan().all()


@each_mode
@each_size
def test_layouts_change_no_bit(name: str, shape: Shape, dtype: torch.dtype, precision: Precision) -> None:
    x = draw(name, shape, dtype, MODES[name])
    expected = run(name, x, precision)
    dense = [key for key, y in x.items() if tensors(y) and key not in ("q", "k", "v")]
    shifted = {key: mapped(off_alignment, x[key]) for key in dense}
    layouts = [packed, transposed, odd]
    for first in range(3 if GPU else 1):
        views = {key: layouts[(first + i) % 3](x[key]) for i, key in enumerate("qkv")}
        assert_same_bits(run(name, x | views | shifted, precision), expected)


def packed(x: Tensor) -> Tensor:
    """One of three in a projection's output."""
    return torch.stack((x, x + 1, x - 1), dim=2)[:, :, 0]


def transposed(x: Tensor) -> Tensor:
    """Heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def odd(x: Tensor) -> Tensor:
    """Rows that begin anywhere."""
    return torch.cat((x, x[..., :3]), dim=-1)[..., :-3]


def off_alignment(x: Tensor) -> Tensor:
    """The same values one entry behind the start of their memory."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view_as(x).copy_(x)


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        pytest.param("gdn", "both full turned", "both full turned-doubled", id="shared-tables"),
        pytest.param("gdn", "both full turned-own", "both full turned-own-doubled", id="own-tables"),
        pytest.param("branch", "both", "both doubled", id="camera-tables"),
    ],
)
def test_either_form_of_tables_gives_the_same_bits(name: str, one: str, two: str) -> None:
    assert_same_bits(run(name, draw(name, PAIR, BF16, one)), run(name, draw(name, PAIR, BF16, two)))


@pytest.mark.parametrize("norm", ["head", "full"])
def test_no_weight_is_a_weight_of_ones_for_every_head(norm: str) -> None:
    x = draw("gdn", PAIR._replace(batch=1, heads=3), BF16, f"both {norm}")
    ones = torch.ones(3 * 16, device=DEVICE)
    expected = run("gdn", x)
    assert_same_bits(run("gdn", x | {"q_weight": ones, "k_weight": ones}), expected)
    assert_same_bits(run("gdn", x | {"q_weight": ones.to(BF16)}), expected)


@pytest.mark.parametrize("name", ["cam", "branch"])
def test_one_beta_a_frame_is_that_beta_for_each_token(name: str) -> None:
    x = draw(name, PAIR, BF16, "both frame-beta")
    spread = x["beta"][..., None].expand(-1, -1, -1, PAIR.per_frame).contiguous()
    assert_same_bits(run(name, x | {"beta": spread}), run(name, x))


@each_mode
def test_the_last_frame_of_a_reverse_scan_is_zero(name: str) -> None:
    for out in run(name, draw(name, TINY, BF16, "reverse")):
        assert out[:, : -TINY.per_frame].any()
        assert not out[:, -TINY.per_frame :].any()


def blanked(x: Arguments, value: float) -> ReverseInputs:
    """Reverse inputs that hold the value at the first frame of every chunk but the first."""
    frames = x["chunk_starts"][1:]

    def blank(y: Tensor, dim: int) -> Tensor:
        return y.clone().unflatten(dim, (TINY.frames, -1)).index_fill_(dim, frames, value).view_as(y)

    tokens = {name: blank(x[name], 1) for name in "kv"}
    return ReverseInputs(**tokens, **{name: blank(x[name], 2) for name in ("beta", "decay")})


@pytest.mark.parametrize("name", ["gdn", "cam"])
def test_reverse_inputs_at_chunk_starts_are_never_absorbed(name: str) -> None:
    x = draw(name, TINY, BF16, "both state chunks")
    alone = {key: y for key, y in x.items() if key != "chunk_starts"}
    expected = run(name, alone | {"reverse": blanked(x, 0.0)})
    assert_same_bits(run(name, x | {"reverse": blanked(x, NAN)}), expected)


def write(name: str, x: Arguments, out: object) -> Results:
    """Run with `out_state`, whose tensors must be what comes back as the state."""
    found = SCANS[name].public(**x, out_state=out, backend="triton")
    assert [id(y) for y in tensors(found.state)] == [id(y) for y in tensors(out)]
    return tensors(found)


@each_mode
def test_out_state_takes_the_bits_of_a_fresh_state(name: str) -> None:
    x = draw(name, PAIR, BF16, MODES[name])
    state, expected = mapped(Tensor.clone, x["initial_state"]), run(name, x)
    for out in (mapped(lambda y: torch.full_like(y, NAN), state), state, mapped(off_alignment, state)):
        initial = out if out is state else x["initial_state"]
        assert_same_bits(write(name, x | {"initial_state": initial}, out), expected)


@each_mode
def test_a_pool_equals_gathered_states(name: str) -> None:
    x, slots, rows = draw(name, PAIR, BF16, MODES[name]), draw_slots(PAIR), PAIR.batch + 2
    pool: object = draw_state(PAIR, rows) if name == "gdn" else draw_state(PAIR, rows).kv
    others, before = [row for row in range(rows) if row not in slots.tolist()], tensors(mapped(Tensor.clone, pool))
    expected = run(name, x | {"initial_state": mapped(lambda y: y[slots], pool)})
    x |= {"initial_state": pool, "slots": slots}
    assert_same_bits(run(name, x), expected)
    assert_same_bits(tensors(pool), before)
    count = len(tensors(pool))
    found = write(name, x, pool)
    assert_same_bits((*found[:-count], *(y[slots] for y in found[-count:])), expected)
    assert_same_bits(tuple(y[others] for y in found[-count:]), tuple(y[others] for y in before))
    fresh = {key: y for key, y in x.items() if key != "initial_state"}
    start = {key: y for key, y in fresh.items() if key != "slots"}
    assert_same_bits(tuple(y[slots] for y in write(name, fresh, pool)[-count:]), run(name, start)[-count:])


@each_mode
def test_results_share_no_memory_with_arguments_or_each_other(name: str) -> None:
    x = draw(name, PAIR, BF16, MODES[name])
    x["decay"].fill_(1)
    x["beta"].zero_()
    found = run(name, x)
    assert_same_bits(found[-len(tensors(x["initial_state"])) :], tensors(x["initial_state"]))
    places = [y.untyped_storage().data_ptr() for y in (*tensors(x), *found)]
    assert len(set(places)) == len(places)


def test_a_gate_goes_onto_the_quotient_alone() -> None:
    x = draw("gdn", PAIR, FP32, "both full quotient")
    gated = run("gdn", x | {"gate": torch.full_like(x["v"], 1e4)}, "ieee")
    torch.testing.assert_close(gated[0], 1e4 * run("gdn", x, "ieee")[0])
    assert torch.equal(run("gdn", x | {"gate": random(1, *PAIR.tokens)}, "ieee")[1], gated[1])
