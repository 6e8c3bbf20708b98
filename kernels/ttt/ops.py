"""TTT-linear as custom operators that launch Triton kernels, and its gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.operators import reference_gradients, refuse_second_gradient
from longtake.kernels.ttt import backward as kernels_backward
from longtake.kernels.ttt import reference
from longtake.kernels.ttt.inputs import TttInputs
from longtake.kernels.ttt.read import read
from longtake.kernels.ttt.walk import operands, walk

DIFFERENTIABLE, TENSORS = 8, 9
"""How many of the first fields of `TttInputs` may want a gradient, and how many are tensors."""


@torch.library.custom_op("longtake::ttt_scan", mutates_args=())
def ttt_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    initial_state_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    eps: float,
    chunk_size: int,
    norm_output: bool,
    reference_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.ttt_scan`, of the fields of `TttInputs`; `reference_backward`: which gradient to take.

    `norm_output`: as `reference.output_norm` of that, with the gradient of the reference.
    """
    states = initial_state, initial_state_bias
    x = TttInputs(q, k, v, w, b, eta, *states, cu_seqlens, scale, eps, chunk_size)
    with on_device_of(q):
        taken = operands(x)
        walked = walk(taken)
        out = read(taken, walked.states, walked.biases, norm_output=norm_output)
        return out, walked.last_state, walked.last_bias


@ttt_scan.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    x = TttInputs(*arguments[:-2])
    heads, dim = x.q.shape[2:]
    state = x.q.new_empty((x.sequences, heads, dim, dim), dtype=torch.float32)
    return x.v.new_empty(x.v.shape), state, state.new_empty((x.sequences, heads, 1, dim))


@torch.library.custom_op("longtake::ttt_scan_backward", mutates_args=())
def ttt_scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    initial_state_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    eps: float,
    chunk_size: int,
    d_out: Tensor | None,
    d_state: Tensor | None,
    d_bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments, each empty unless it is wanted."""
    states = initial_state, initial_state_bias
    x = TttInputs(q, k, v, w, b, eta, *states, cu_seqlens, scale, eps, chunk_size)
    with on_device_of(q):
        found = kernels_backward.differentiate(operands(x), d_out, d_state, d_bias, wanted)
    return tuple(  # type: ignore[return-value]
        g.to(y.dtype) if want and y is not None and g is not None else q.new_empty(0)
        for y, g, want in zip(x.differentiable, found, wanted, strict=True)
    )


@ttt_scan_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    wanted = arguments[-1]
    return tuple(
        y.new_empty(y.shape) if want else arguments[0].new_empty(0)
        for y, want in zip(arguments[:DIFFERENTIABLE], wanted, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs[:TENSORS])
    *ctx.numbers, ctx.normed, ctx.reference = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _reference(x: TttInputs, normed: bool, *differentiable: Any) -> reference.TttOutput:  # noqa: ANN401
    """The results of the reference on other differentiable arguments."""
    x = TttInputs(*differentiable, *x[DIFFERENTIABLE:])
    found = reference.ttt_scan(x)
    return found._replace(out=reference.output_norm(found.out, x.w, x.b, x.eps)) if normed else found


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    x = TttInputs(*ctx.saved_tensors, *ctx.numbers)
    wanted = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    if ctx.reference or ctx.normed:
        found = reference_gradients(partial(_reference, x, ctx.normed), x.differentiable, grads, wanted)
    else:
        found = ttt_scan_backward(*x, *grads, wanted)
    rest = len(ctx.needs_input_grad) - len(wanted)
    return *(g if want else None for g, want in zip(found, wanted, strict=True)), *[None] * rest


ttt_scan.register_autograd(_differentiate, setup_context=_save)
refuse_second_gradient(ttt_scan_backward)
