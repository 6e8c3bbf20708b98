"""The reference of TTT-linear: against its definition, differences, and itself in pieces."""

import pytest
import torch
from kernel_checks import DEVICE
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import layer_norm
from ttt_cases import (
    DIFFERENTIABLE,
    PACK,
    Arguments,
    Case,
    after,
    apart,
    between,
    differentiated,
    draw,
    itself,
    joined,
    of_tokens_and_states,
    widened,
)

from longtake.kernels import ttt_linear

TINY = Case(8, torch.float64, tokens=35, heads=2)


def reference(x: Arguments, **how: object) -> tuple[Tensor, ...]:
    return tuple(ttt_linear(**x, **how, backend="reference"))


def inner_loss(h: Tensor, hb: Tensor, x: Arguments, token: int) -> Tensor:
    k, v = x["k"][0, token, 0], x["v"][0, token, 0]
    return (layer_norm(k @ h + hb[0], k.shape, x["w"][0], x["b"][0], eps=1e-6) - (v - k)).square().sum() / 2


def test_every_token_reads_a_model_that_descended_on_its_chunk_so_far() -> None:
    x = widened(draw(Case(8, tokens=19)))
    h, hb = (x[name][0, 0].requires_grad_() for name in DIFFERENTIABLE[6:])
    model, grads, outs = (h, hb), [], []
    for token in range(19):
        if token == 16:
            rate = x["eta"][0, 15, 0]
            model = tuple(y - rate * sum(g[i] for g in grads) for i, y in enumerate(model))
            grads = []
        grads.append(torch.autograd.grad(inner_loss(*model, x, token), model, retain_graph=True))
        mine = [y - x["eta"][0, token, 0] * sum(g[i] for g in grads) for i, y in enumerate(model)]
        outs.append(x["q"][0, token, 0] * 8**-0.5 @ mine[0] + mine[1][0])
    last = [y - x["eta"][0, 18, 0] * sum(g[i] for g in grads) for i, y in enumerate(model)]
    found = reference(x, norm_output=False)
    for ours, expected in zip(found, (torch.stack(outs)[None, :, None], *(y[None, None] for y in last)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_output_norm_is_added_to_the_output() -> None:
    x = draw(Case(16, heads=1))
    plain, normed = (reference(x, norm_output=on)[0] for on in (False, True))
    expected = plain + layer_norm(plain, (16,), x["w"][0], x["b"][0], eps=1e-6)
    torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("case", [TINY, Case(8, torch.float64, lengths=(18, 0, 3))], ids=["batch", "pack"])
@pytest.mark.parametrize("norm_output", [True, False])
def test_it_is_differentiated(case: Case, norm_output: bool) -> None:
    x = widened(draw(case))

    def scan(*values: Tensor) -> tuple[Tensor, ...]:
        return reference(x | dict(zip(DIFFERENTIABLE, values, strict=True)), norm_output=norm_output)

    assert gradcheck(scan, [x[name].requires_grad_() for name in DIFFERENTIABLE], fast_mode=True)


def test_a_cut_between_chunks_changes_nothing() -> None:
    x = draw(Case(16, batch=2, tokens=40))
    first = reference(between(x, 0, 32))
    second = reference(after(between(x, 32, 40), first))
    for ours, whole in zip((torch.cat((first[0], second[0]), 1), *second[1:]), reference(x), strict=True):
        torch.testing.assert_close(ours, whole)


def test_a_cut_within_a_chunk_is_another_model() -> None:
    x = draw(Case(16, tokens=40))
    first = reference(between(x, 0, 24))
    second = reference(after(between(x, 24, 40), first))
    assert not torch.allclose(second[1], reference(x)[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("states", [True, False], ids=["states", "no-states"])
def test_a_pack_is_its_sequences(states: bool) -> None:
    x = draw(PACK, states=states)
    how = {"backend": "reference", "cotangents": itself}
    parts = [differentiated(part, **how) for part in apart(x, PACK.lengths)]
    found = of_tokens_and_states(differentiated(x, **how))
    for ours, expected in zip(found, joined(parts), strict=True):
        torch.testing.assert_close(ours, expected)


def test_one_rate_is_that_rate_for_every_token() -> None:
    x = draw(Case(16))
    each = torch.full_like(x["eta"], 0.125)
    expected = reference(x | {"eta": each})
    for eta in (0.125, torch.tensor(0.125, device=DEVICE), each[..., None]):
        for ours, theirs in zip(reference(x | {"eta": eta}), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_no_states_are_states_of_zeros() -> None:
    x = draw(Case(16))
    zeros = {name: torch.zeros_like(x[name]) for name in DIFFERENTIABLE[6:]}
    for ours, theirs in zip(reference(draw(Case(16), states=False)), reference(x | zeros), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lengths", [[0, 30], [1, 37], [0, 20, 10, 37]], ids=["short", "late", "falling"])
def test_lengths_that_do_not_cover_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 37"):
        reference(draw(Case(16), states=False) | {"cu_seqlens": torch.tensor(lengths, device=DEVICE)})
