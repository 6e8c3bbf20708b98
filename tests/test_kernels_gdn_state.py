"""States, chunks and misfits of the gated delta rule's reference."""

from collections.abc import Callable, Iterator

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
    joined,
    tensors,
)
from torch import Tensor

from longtake.kernels.delta import ReverseInputs
from longtake.kernels.gdn.reference import GdnState, gdn_scan

NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("at", range(1, FRAMES))
def test_cutting_a_forward_scan_changes_no_bit(at: int) -> None:
    x, state = draw(dtype=FP32), draw_state(dtype=FP32)
    first = gdn_scan(**cut(x, 0, at), initial_state=state)
    second = gdn_scan(**cut(x, at, FRAMES), initial_state=first.state)
    assert_same_bits(joined(first, second), tensors(gdn_scan(**x, initial_state=state)))


def test_one_call_by_chunks_equals_a_call_a_chunk_bitwise() -> None:
    x, state = draw(dtype=FP32), draw_state(dtype=FP32)
    whole = gdn_scan(**x, direction="both", initial_state=state, chunk_starts=STARTS)
    parts = []
    for first, stop in zip(STARTS, [*STARTS[1:], FRAMES], strict=True):
        parts.append(gdn_scan(**cut(x, first, stop), direction="both", initial_state=state))
        assert parts[-1].state is not None
        state = parts[-1].state
    assert_same_bits(joined(*parts), tensors(whole))


def test_chunk_starts_may_be_a_tensor_and_leave_a_forward_scan_alone() -> None:
    x, starts = draw(), torch.tensor(STARTS)
    both = gdn_scan(**x, direction="both", chunk_starts=starts)
    assert_same_bits(tensors(both), tensors(gdn_scan(**x, direction="both", chunk_starts=STARTS)))
    assert_same_bits(tensors(gdn_scan(**x, chunk_starts=starts)), tensors(gdn_scan(**x)))


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "decay"])
def test_each_reverse_input_replaces_that_of_the_reverse_scan_alone(name: str) -> None:
    x = draw()
    other = {name: x[name].flip(1)}
    found = gdn_scan(**x, direction="both", reverse=ReverseInputs(**other))
    forward, reverse = gdn_scan(**x), gdn_scan(**x | other, direction="reverse")
    assert_same_bits(
        tensors(found)[:2], tuple(a + b for a, b in zip(tensors(forward)[:2], tensors(reverse), strict=True))
    )
    assert_same_bits(tensors(found)[2:], tensors(forward)[2:])


def test_reverse_inverse_rms_scales_the_reverse_scan_alone() -> None:
    x = draw()
    one, two = (tuple(torch.rand(2, FRAMES * PER_FRAME, dtype=DOUBLE) for _ in "qk") for _ in range(2))
    options = {"norm": "full", "k_scale": 0.09}
    found = gdn_scan(**x, **options, direction="both", inverse_rms=one, reverse=ReverseInputs(inverse_rms=two))
    forward = gdn_scan(**x, **options, inverse_rms=one)
    reverse = gdn_scan(**x, **options, direction="reverse", inverse_rms=two)
    assert_same_bits((found.out,), (forward.out + reverse.out,))


def at_chunk_starts(x: Tensor, dim: int, value: float) -> Tensor:
    """A copy holding the value at the first frame of every chunk but the first."""
    frames = torch.unflatten(x.clone(), dim, (FRAMES, -1))
    return frames.index_fill_(dim, torch.tensor(STARTS[1:]), value).view_as(x)


def blanked(x: Inputs, value: float) -> ReverseInputs:
    tokens = {name: at_chunk_starts(x[name], 1, value) for name in "kv"}
    return ReverseInputs(**tokens, **{name: at_chunk_starts(x[name], 2, value) for name in ("beta", "decay")})


def test_reverse_inputs_of_zero_at_chunk_starts_equal_chunk_starts() -> None:
    x = draw()
    expected = tensors(gdn_scan(**x, direction="both", chunk_starts=STARTS))
    assert_same_bits(tensors(gdn_scan(**x, direction="both", reverse=blanked(x, 0.0))), expected)
    scales = tuple(torch.rand(2, FRAMES * PER_FRAME, dtype=DOUBLE) for _ in "qk")
    reverse = blanked(x, 0.0)._replace(inverse_rms=(scales[0], at_chunk_starts(scales[1], 1, 0.0)))
    options = {"direction": "both", "norm": "full", "k_scale": 0.09, "inverse_rms": scales}
    found = gdn_scan(**x, **options, reverse=reverse)
    assert_same_bits(tensors(found), tensors(gdn_scan(**x, **options, chunk_starts=STARTS)))


def test_reverse_inputs_at_chunk_starts_are_never_absorbed() -> None:
    x = draw()
    found = gdn_scan(**x, direction="both", chunk_starts=STARTS, reverse=blanked(x, NAN))
    assert_same_bits(tensors(found), tensors(gdn_scan(**x, direction="both", chunk_starts=STARTS)))


def test_a_decay_of_zero_forgets() -> None:
    x, state = draw(), draw_state()
    x["decay"][:, :, 2] = 0
    found = gdn_scan(**x, initial_state=state)
    assert_close(tensors(found), explicit(x, state))
    later = gdn_scan(**cut(x, 2, FRAMES))
    assert_same_bits(tensors(later)[2:], tensors(found)[2:])


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_out_state_is_written_in_place_and_returned(direction: str) -> None:
    x, state = draw(dtype=FP32), draw_state(dtype=FP32)
    out_state = GdnState(*(torch.full_like(y, NAN) for y in state))
    expected = gdn_scan(**x, direction=direction, initial_state=state)
    found = gdn_scan(**x, direction=direction, initial_state=state, out_state=out_state)
    assert_same_bits(tensors(found), tensors(expected))
    assert found.state is not None
    assert [y.data_ptr() for y in found.state] == [y.data_ptr() for y in out_state]
    again = gdn_scan(**x, direction=direction, initial_state=state, out_state=state)
    assert_same_bits(tensors(again), tensors(expected))
    assert_same_bits(state, tensors(expected)[2:])


def test_without_out_state_nothing_is_changed_or_shared() -> None:
    x, state = draw(), draw_state()
    x["decay"].fill_(1)
    x["beta"].zero_()
    before = [y.clone() for y in (*x.values(), *state)]
    found = gdn_scan(**x, direction="both", initial_state=state, reverse=ReverseInputs(v=x["k"]), chunk_starts=STARTS)
    assert_same_bits((*x.values(), *state), tuple(before))
    assert_same_bits(tensors(found)[2:], state)
    given = {y.untyped_storage().data_ptr() for y in (*x.values(), *state)}
    assert given.isdisjoint(y.untyped_storage().data_ptr() for y in tensors(found))
    assert all(y.is_contiguous() for y in tensors(found))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_pool_equals_gathered_states(*, in_place: bool) -> None:
    x, pool, slots = draw(dtype=FP32), draw_state(dtype=FP32, rows=5), torch.tensor([3, 1])
    before = GdnState(*(y.clone() for y in pool))
    expected = gdn_scan(**x, initial_state=GdnState(*(y[slots] for y in pool)))
    found = gdn_scan(**x, initial_state=pool, slots=slots, out_state=pool if in_place else None)
    assert found.state is not None
    rows = GdnState(*(y[slots] for y in found.state)) if in_place else found.state
    assert_same_bits(tensors(found._replace(state=rows)), tensors(expected))
    assert_same_bits(tuple(y[[0, 2, 4]] for y in pool), tuple(y[[0, 2, 4]] for y in before))
    assert in_place or all(map(torch.equal, pool, before))


def test_a_pool_takes_the_state_of_a_fresh_start() -> None:
    x, pool, slots = draw(), draw_state(rows=3), torch.tensor([2, 0])
    found = gdn_scan(**x, out_state=pool, slots=slots)
    assert found.state is not None
    assert_same_bits(tuple(y[slots] for y in pool), tensors(gdn_scan(**x))[2:])


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "decay"])
def test_nan_stays_in_its_batch_entry(name: str) -> None:
    x, state = draw(), draw_state()
    expected = tensors(gdn_scan(**x, direction="both", initial_state=state))
    x[name][0, 0] = NAN
    found = tensors(gdn_scan(**x, direction="both", initial_state=state))
    assert_same_bits(tuple(y[1:] for y in found), tuple(y[1:] for y in expected))
    assert found[0][0].isnan().any()


def test_half_precision_is_computed_in_fp32_under_autocast_too() -> None:
    x = {name: y.bfloat16() if name in "qkv" else y for name, y in draw(dtype=FP32).items()}
    expected = tensors(gdn_scan(**{name: y.float() for name, y in x.items()}, direction="both"))
    with torch.autocast("cpu", dtype=BF16):
        found = tensors(gdn_scan(**x, direction="both"))
    assert all(y.dtype == FP32 for y in found)
    assert_same_bits(found, expected)


def test_qkv_may_be_views_with_unit_stride_in_the_head() -> None:
    x, packed = draw(), torch.empty(2, FRAMES * PER_FRAME, HEADS, 3, DIM + 1, dtype=DOUBLE)
    views = {name: packed[:, :, :, i, :DIM].copy_(x[name]) for i, name in enumerate("qkv")}
    assert_same_bits(tensors(gdn_scan(**x | views)), tensors(gdn_scan(**x)))


Change = Callable[[Inputs], dict[str, object]]
STATE, SLOTS = draw_state(), torch.tensor([0, 1])
GATE = torch.zeros(2, FRAMES * PER_FRAME, HEADS, DIM)
SCALES = (torch.ones(2, FRAMES * PER_FRAME),) * 2
MISFITS: dict[str, tuple[Change, str]] = {
    "direction": (lambda x: {"direction": "backward"}, "direction is one of"),
    "q-of-three-dims": (lambda x: {"q": x["q"][0]}, "q must be"),
    "short-k": (lambda x: {"k": x["k"][:, 1:]}, "k must be"),
    "v-of-another-dim": (lambda x: {"v": x["v"][..., :8]}, "v must be"),
    "q-of-integers": (lambda x: {"q": x["q"].long()}, "q must be one of"),
    "k-without-unit-stride": (lambda x: {"k": x["k"].mT.contiguous().mT}, "k must have unit stride"),
    "v-elsewhere": (lambda x: {"v": x["v"].to("meta")}, "v must be on cpu"),
    "beta-of-other-tokens": (lambda x: {"beta": x["beta"][..., 1:].contiguous()}, "beta must be"),
    "beta-of-frames": (lambda x: {"beta": x["beta"][..., 0].contiguous()}, "beta must be"),
    "beta-of-integers": (lambda x: {"beta": x["beta"].long()}, "beta must be one of"),
    "beta-not-contiguous": (lambda x: {"beta": x["beta"].mT.contiguous().mT}, "beta must be contiguous"),
    "decay-of-other-frames": (lambda x: {"decay": x["decay"][..., 1:].contiguous()}, "decay .* does not fit"),
    "decay-elsewhere": (lambda x: {"decay": x["decay"].to("meta")}, "decay must be on cpu"),
    "norm": (lambda x: {"norm": "layer"}, "norm is one of"),
    "weight-without-norm": (lambda x: {"q_weight": torch.ones(48)}, "q_weight needs a norm"),
    "weight-of-one-head": (lambda x: {"norm": "head", "k_weight": torch.ones(DIM)}, "k_weight must be"),
    "weight-in-fp16": (lambda x: {"norm": "full", "q_weight": torch.ones(48).half()}, "q_weight must be one of"),
    "inverse-rms-of-heads": (lambda x: {"norm": "head", "inverse_rms": SCALES}, "inverse_rms needs norm 'full'"),
    "inverse-rms-without-norm": (lambda x: {"inverse_rms": SCALES}, "inverse_rms needs norm 'full'"),
    "short-inverse-rms": (
        lambda x: {"norm": "full", "inverse_rms": (SCALES[0], SCALES[1][:, 1:])}, "inverse_rms of k must be",
    ),
    "cos-without-sin": (lambda x: {"sin": None}, "together"),
    "short-sin": (lambda x: {"sin": x["sin"][1:]}, "sin must be"),
    "gate-without-eps": (lambda x: {"gate": GATE}, "gate needs eps"),
    "gate-of-another-shape": (lambda x: {"gate": GATE[:1], "eps": 1.0}, "gate must be"),
    "reverse-with-state": (lambda x: {"direction": "reverse", "initial_state": STATE}, "takes no initial_state"),
    "reverse-with-out-state": (lambda x: {"direction": "reverse", "out_state": STATE}, "takes no out_state"),
    "kv-without-z": (lambda x: {"initial_state": GdnState(STATE.kv, None)}, "kv and z of initial_state come together"),
    "z-without-kv": (lambda x: {"out_state": GdnState(None, STATE.z)}, "kv and z of out_state come together"),
    "kv-of-another-dim": (lambda x: {"initial_state": draw_state(24)}, "initial_state kv must be"),
    "z-of-one-row": (lambda x: {"initial_state": STATE._replace(z=STATE.z[:1])}, "initial_state z must be"),
    "kv-in-bf16": (lambda x: {"initial_state": STATE._replace(kv=STATE.kv.bfloat16())}, "kv must be one of"),
    "kv-not-contiguous": (lambda x: {"out_state": STATE._replace(kv=STATE.kv.mT)}, "out_state kv must be contiguous"),
    "kv-elsewhere": (lambda x: {"initial_state": STATE._replace(kv=STATE.kv.to("meta"))}, "kv must be on cpu"),
    "slots-of-int32": (lambda x: {"initial_state": STATE, "slots": SLOTS.int()}, "slots must be one of"),
    "one-slot": (lambda x: {"initial_state": STATE, "slots": SLOTS[:1]}, "slots must be"),
    "slots-without-pool": (lambda x: {"slots": SLOTS}, "slots are rows of a state pool"),
    "chunks-from-one": (lambda x: {"chunk_starts": [1, 2]}, "chunk_starts must rise from 0"),
    "chunks-past-the-end": (lambda x: {"chunk_starts": [0, FRAMES]}, "chunk_starts must rise from 0"),
    "chunks-descending": (lambda x: {"chunk_starts": [0, 3, 2]}, "chunk_starts must rise from 0"),
    "chunks-of-int32": (lambda x: {"chunk_starts": torch.tensor(STARTS).int()}, "chunk_starts must be one of"),
    "chunks-elsewhere": (lambda x: {"chunk_starts": torch.tensor(STARTS).to("meta")}, "chunk_starts must be on cpu"),
    "reverse-inputs-forward": (lambda x: {"reverse": ReverseInputs(q=x["q"])}, "reverse inputs need direction 'both'"),
    "short-reverse-v": (
        lambda x: {"direction": "both", "reverse": ReverseInputs(v=x["v"][:, 1:])}, "reverse v must be",
    ),
    "short-reverse-decay": (
        lambda x: {"direction": "both", "reverse": ReverseInputs(decay=x["decay"][..., 1:])}, "reverse decay must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused_by_name(name: str) -> None:
    x = draw()
    changes, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        gdn_scan(**x | changes(x))
