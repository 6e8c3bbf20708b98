"""Triton kernel of TTT-linear: what the tokens of each chunk read, once the state before it is known."""

import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.triton_tiles import round_to
from longtake.kernels.ttt.tiles import (
    centred_rows,
    inner_step,
    load_operand,
    load_rows,
    load_square,
    load_vector,
    normalise,
    product,
    seen_by,
    slot_span,
    store_rows,
)
from longtake.kernels.ttt.walk import SIZES, Operands


@triton.jit(do_not_specialize=[*SIZES, "sequences"])
def _read_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    eta: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    biases: tl.tensor,
    out: tl.tensor,
    sequences: int,
    heads: int,
    tokens: int,
    q_batch: int,
    q_token: int,
    q_head: int,
    k_batch: int,
    k_token: int,
    k_head: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    eta_batch: int,
    eta_token: int,
    eta_head: int,
    scale: float,
    eps: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Outputs of one chunk of a head; strides of q, k, v in units of 8 entries."""
    place = tl.program_id(0).to(tl.int64)
    slot, head = place // heads, place % heads
    batch, token, end = slot_span(cu_seqlens, slot, sequences, tokens, CHUNK)
    if token >= end:
        return
    row = token + tl.arange(0, CHUNK)
    key = load_operand(k + (batch * k_batch + head * k_head) * 8, row, end, k_token, D, SIDE, OPERAND)
    query = load_operand(q + (batch * q_batch + head * q_head) * 8, row, end, q_token, D, SIDE, OPERAND)
    value = load_rows(v + (batch * v_batch + head * v_head) * 8, row, end, v_token, D, SIDE)
    rate = tl.load(eta + batch * eta_batch + head * eta_head + row * eta_token, row < end, 0.0).to(tl.float32)
    weight, offset = load_vector(w + head * D, D, SIDE), load_vector(b + head * D, D, SIDE)
    model = load_square(states + place * D * D, D, SIDE, OPERAND)
    bias = load_vector(biases + place * D, D, SIDE)
    step, _, _, _ = inner_step(key, value, model, bias, weight, offset, row < end, eps, D)
    read = tl.dot(query, model, input_precision="ieee") * scale + bias[None, :]
    read -= rate[:, None] * product(seen_by(query, key, scale), step, OPERAND)
    read = round_to(read, out.dtype.element_ty)
    if NORM:
        read = read.to(tl.float32)
        normal, _ = normalise(centred_rows(read, D), eps, D, key.dtype)  # twice: a row of equal numbers has no variance
        read = round_to(read + normal * weight[None, :] + offset[None, :], out.dtype.element_ty)
    store_rows(out + (batch * tokens * heads + head) * D, read, row, end, heads * D, D)


def read(x: Operands, states: Tensor, biases: Tensor, *, norm_output: bool) -> Tensor:
    """Outputs o or o + LN(o), from the states before every chunk; o is rounded either way."""
    out = x.v.new_empty(x.v.shape)
    arguments = (*x[:6], x.cu_seqlens, states, biases, out, x.sequences, *x.sizes)
    Fitted(_read_kernel, x.q.device)[(x.slots * x.q.shape[2],)](*arguments, **x.modes, NORM=norm_output)
    return out
