"""The kernels of TTT-linear are as exact as eager PyTorch, forward and backward; and which bits they give."""

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, assert_as_good, assert_same_bits, name_of
from torch import Tensor
from ttt_cases import (
    CASES,
    PACK,
    Case,
    after,
    apart,
    between,
    differentiated,
    draw,
    eager,
    itself,
    joined,
    of_tokens_and_states,
    randomly,
    run,
    true,
)

each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
SMALL = Case(16, tokens=20, batch=2, heads=2)
BY_ENTRY = ("q", "k", "v", "eta", "initial_state", "initial_state_bias")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_results_and_gradients_are_as_exact_as_eager_pytorch(case: Case) -> None:
    x = draw(case)
    pytorch, truth = eager(x), true(x)
    assert_as_good(differentiated(x), pytorch, truth)
    assert_as_good(run(x), pytorch[:3], truth[:3])


@pytest.mark.parametrize("case", [SMALL, PACK._replace(dtype=BF16)], ids=name_of)
def test_without_states_they_are_as_exact(case: Case) -> None:
    x = draw(case, states=False)
    assert_as_good(differentiated(x), eager(x), true(x))


@each_dtype
def test_the_output_before_its_norm_is_as_exact(dtype: torch.dtype) -> None:
    x = draw(SMALL._replace(dtype=dtype)) | {"norm_output": False}
    assert_as_good(differentiated(x), eager(x), true(x))


@pytest.mark.parametrize("dim", [24, 112])
def test_an_output_of_equal_numbers_has_no_norm(dim: int) -> None:
    x = draw(Case(dim, tokens=3))
    x |= {name: torch.zeros_like(x[name]) for name in ("initial_state", "eta")}
    x |= {"initial_state_bias": torch.full_like(x["initial_state_bias"], 777.7)}
    torch.testing.assert_close(run(x)[0], 777.7 + x["b"].expand(1, 3, 1, dim), rtol=1e-6, atol=1e-4)


def test_a_call_repeats_its_bits() -> None:
    x = draw(PACK._replace(dtype=BF16))
    assert_same_bits(differentiated(x), differentiated(x))


@each_dtype
def test_a_batch_is_what_its_entries_are_alone(dtype: torch.dtype) -> None:
    x = draw(SMALL._replace(dtype=dtype))
    whole = of_tokens_and_states(differentiated(x, cotangents=itself))
    for n in range(SMALL.batch):
        alone = differentiated(x | {name: x[name][n : n + 1] for name in BY_ENTRY}, cotangents=itself)
        assert_same_bits(of_tokens_and_states(alone), tuple(y[n : n + 1] for y in whole))
        alone = run(x | {name: x[name][n : n + 1] for name in BY_ENTRY})
        assert_same_bits(alone, tuple(y[n : n + 1] for y in run(x)))


@each_dtype
def test_a_pack_is_what_its_sequences_are_alone(dtype: torch.dtype) -> None:
    x = draw(PACK._replace(dtype=dtype))
    whole = of_tokens_and_states(differentiated(x, cotangents=itself))
    alone = [differentiated(part, cotangents=itself) for part in apart(x, PACK.lengths)]
    assert_same_bits(whole, joined(alone))
    assert_same_bits(run(x), joined([run(part) for part in apart(x, PACK.lengths)]))


def test_lengths_may_be_of_32_bits() -> None:
    x = draw(PACK)
    assert_same_bits(run(x | {"cu_seqlens": x["cu_seqlens"].int()}), run(x))


@each_dtype
def test_a_cut_between_chunks_changes_no_bit(dtype: torch.dtype) -> None:
    x = draw(SMALL._replace(dtype=dtype, tokens=40))
    first = run(between(x, 0, 32))
    second = run(after(between(x, 32, 40), first))
    assert_same_bits((torch.cat((first[0], second[0]), 1), *second[1:]), run(x))


@each_dtype
def test_strides_change_no_bit(dtype: torch.dtype) -> None:
    x = draw(SMALL._replace(dtype=dtype, batch=1))
    expected = differentiated(x)
    q, k, v, eta = (x[name] for name in ("q", "k", "v", "eta"))
    thirds = torch.stack((q, k, v), 2).unbind(2)
    head_first = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, k, v)]
    unaligned = [torch.cat((y, y[..., :3]), -1)[..., :-3] for y in (q, k, v)]
    for views in (thirds, head_first, unaligned):
        strided = dict(zip("qkv", views, strict=True)) | {"eta": eta.transpose(1, 2).contiguous().transpose(1, 2)}
        assert_same_bits(differentiated(x | strided), expected)


def test_strides_of_upstream_gradients_change_no_bit() -> None:
    def strided(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(y.mT.contiguous().mT for y in randomly(found))

    x = draw(SMALL) | {"norm_output": False}
    assert_same_bits(differentiated(x, cotangents=strided), differentiated(x))


def test_one_rate_is_that_rate_for_every_token() -> None:
    x = draw(SMALL)
    whole = differentiated(x | {"eta": torch.full_like(x["eta"], 0.125)})
    one = differentiated(x | {"eta": torch.tensor(0.125, device=DEVICE)})
    assert_same_bits(run(x | {"eta": 0.125}), run(x | {"eta": torch.full_like(x["eta"], 0.125)}))
    assert_same_bits((*one[:8], *one[9:]), (*whole[:8], *whole[9:]))
    torch.testing.assert_close(one[8], whole[8].sum())


@pytest.mark.parametrize("pack", [True, False])
def test_nan_stays_in_its_sequence(pack: bool) -> None:
    case = Case(16, lengths=(17, 20, 3)) if pack else Case(16, batch=3)
    x = draw(case)
    clean = of_tokens_and_states(differentiated(x, cotangents=itself))
    middle = (slice(None), slice(17, 37)) if pack else (1,)
    for name in ("q", "k", "v", "eta"):
        x[name][middle] = torch.nan
    spoilt = of_tokens_and_states(differentiated(x, cotangents=itself))
    for n, (ours, expected) in enumerate(zip(spoilt, clean, strict=True)):
        at = middle if n in (0, 3, 4, 5, 6) else (1,)
        assert ours[at].isnan().all()
        rest = torch.ones_like(expected, dtype=torch.bool)
        rest[at] = False
        assert torch.equal(ours[rest], expected[rest])


def test_no_tokens_leave_the_states_as_they_are() -> None:
    x = draw(Case(16, tokens=0, batch=2))
    found = differentiated(x, cotangents=itself)
    assert found[0].shape == (2, 0, 1, 16)
    states: tuple[Tensor, ...] = tuple(x[name] for name in BY_ENTRY[4:])
    assert_same_bits(found[1:3], states)
    assert_same_bits(found[9:], states)
    assert not any(y.any() for y in found[3:9])
    assert all(y.data_ptr() != z.data_ptr() for y, z in zip(found[1:3], states, strict=True))
