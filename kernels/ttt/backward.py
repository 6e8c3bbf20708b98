"""Triton kernels of TTT-linear backward: a walk from the last chunk to the first, then every chunk by itself.

The walk carries the gradients of the state and leaves those after every chunk; with them and the states before it, a
chunk knows all it needs for the gradients of its own tokens.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.triton_tiles import aligned, dense, padded, round_to, store_square, to_operand
from longtake.kernels.ttt.tiles import (
    inner_step,
    inner_step_backward,
    load_operand,
    load_rows,
    load_square,
    load_vector,
    product,
    seen_by,
    slot_span,
    span,
    store_rows,
    store_vector,
)
from longtake.kernels.ttt.walk import SIZES, Operands, walk


@triton.jit
def _load_tokens(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, d_out: tl.tensor, token: tl.tensor, end: tl.tensor, q_token: int,
    k_token: int, v_token: int, heads: int, D: tl.constexpr, SIDE: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """k, q, v and the gradient of the outputs of a chunk of a head, [CHUNK,SIDE]."""
    row = token + tl.arange(0, CHUNK)
    key = load_operand(k, row, end, k_token, D, SIDE, OPERAND)
    query = load_operand(q, row, end, q_token, D, SIDE, OPERAND)
    value = load_rows(v, row, end, v_token, D, SIDE)
    grad = load_rows(d_out, row, end, heads * D // 8, D, SIDE).to(tl.float32)
    return key, query, value, grad


@triton.jit
def _load_rates(eta: tl.tensor, token: tl.tensor, end: tl.tensor, stride: int, CHUNK: tl.constexpr) -> tl.tuple:
    """Rates of a chunk's tokens [CHUNK], and of the last of them."""
    row = token + tl.arange(0, CHUNK)
    last = tl.minimum(token + CHUNK, end) - 1
    return tl.load(eta + row * stride, row < end, 0.0).to(tl.float32), tl.load(eta + last * stride).to(tl.float32)


@triton.jit
def _load_model(
    states: tl.tensor, biases: tl.tensor, place: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, OPERAND: tl.constexpr
) -> tl.tuple:
    """State before a chunk and its bias."""
    return load_square(states + place * D * D, D, SIDE, OPERAND), load_vector(biases + place * D, D, SIDE)


@triton.jit(do_not_specialize=SIZES)
def _reverse_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    eta: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    biases: tl.tensor,
    d_out: tl.tensor,
    d_last_state: tl.tensor,
    d_last_bias: tl.tensor,
    d_states: tl.tensor,
    d_biases: tl.tensor,
    d_initial_state: tl.tensor,
    d_initial_bias: tl.tensor,
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
    EARLY: tl.constexpr,
) -> None:
    """Gradients of the states after every chunk of a head of a sequence, and of its initial state.

    EARLY: what a chunk needs besides is loaded while the one after it is worked on.
    """
    memory = tl.program_id(0).to(tl.int64)
    sequence, head = memory // heads, memory % heads
    batch, first, end, slot = span(cu_seqlens, sequence, tokens, CHUNK)
    q += (batch * q_batch + head * q_head) * 8
    k += (batch * k_batch + head * k_head) * 8
    v += (batch * v_batch + head * v_head) * 8
    eta += batch * eta_batch + head * eta_head
    d_out += (batch * tokens * heads + head) * D
    weight, offset = load_vector(w + head * D, D, SIDE), load_vector(b + head * D, D, SIDE)
    d_state = load_square(d_last_state + memory * D * D, D, SIDE, tl.float32)
    d_bias = load_vector(d_last_bias + memory * D, D, SIDE)
    if first >= end:
        store_square(d_initial_state + memory * D * D, d_state, D)
        store_vector(d_initial_bias + memory * D, d_bias, D)
        return
    begun = tl.cdiv(end - first, CHUNK) - 1
    token = first + begun * CHUNK
    place, first_place = (slot + begun) * heads + head, slot * heads + head
    key, query, value, grad = _load_tokens(
        q, k, v, d_out, token, end, q_token, k_token, v_token, heads, D, SIDE, CHUNK, OPERAND
    )
    rate, last_rate = _load_rates(eta, token, end, eta_token, CHUNK)
    model, bias = _load_model(states, biases, place, D, SIDE, OPERAND)
    while token >= first:
        ahead = tl.maximum(token - CHUNK, first)  # of the first chunk it is once more the first, which nobody uses
        next_place = tl.maximum(place - heads, first_place)
        if EARLY:
            next_key, next_query, next_value, next_grad = _load_tokens(
                q, k, v, d_out, ahead, end, q_token, k_token, v_token, heads, D, SIDE, CHUNK, OPERAND
            )
            next_rate, next_last_rate = _load_rates(eta, ahead, end, eta_token, CHUNK)
            next_model, next_bias = _load_model(states, biases, next_place, D, SIDE, OPERAND)
        d_model = to_operand(d_state, OPERAND, "ieee")
        store_square(d_states + place * D * D, d_model, D)
        store_vector(d_biases + place * D, d_bias, D)
        row = token + tl.arange(0, CHUNK)
        step, normal, inverse, error = inner_step(key, value, model, bias, weight, offset, row < end, eps, D)
        d_step = -last_rate * (tl.dot(key, d_model, input_precision="ieee") + d_bias[None, :])
        d_step -= product(tl.trans(seen_by(query, key, scale)), rate[:, None] * grad, OPERAND)
        d_step = tl.where((row < end)[:, None], d_step, 0.0)
        d_z, _, _ = inner_step_backward(d_step, step, normal, inverse, error, weight, D)
        d_state += product(tl.trans(query), grad, OPERAND) * scale + product(tl.trans(key), d_z, OPERAND)
        d_bias += tl.sum(grad, axis=0) + tl.sum(d_z, axis=0)
        token -= CHUNK
        place -= heads
        if EARLY:
            key, query, value, grad = next_key, next_query, next_value, next_grad
            rate, last_rate, model, bias = next_rate, next_last_rate, next_model, next_bias
        else:
            key, query, value, grad = _load_tokens(
                q, k, v, d_out, ahead, end, q_token, k_token, v_token, heads, D, SIDE, CHUNK, OPERAND
            )
            rate, last_rate = _load_rates(eta, ahead, end, eta_token, CHUNK)
            model, bias = _load_model(states, biases, next_place, D, SIDE, OPERAND)
    store_square(d_initial_state + memory * D * D, d_state, D)
    store_vector(d_initial_bias + memory * D, d_bias, D)


@triton.jit(do_not_specialize=[*SIZES, "sequences"])
def _tokens_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    eta: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    biases: tl.tensor,
    d_out: tl.tensor,
    d_states: tl.tensor,
    d_biases: tl.tensor,
    d_q: tl.tensor,
    d_k: tl.tensor,
    d_v: tl.tensor,
    d_eta: tl.tensor,
    d_w: tl.tensor,
    d_b: tl.tensor,
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
) -> None:
    """Gradients of the tokens of one chunk, and its share of those of w and b, which is zero for a slot left over."""
    place = tl.program_id(0).to(tl.int64)
    slot, head = place // heads, place % heads
    batch, token, end = slot_span(cu_seqlens, slot, sequences, tokens, CHUNK)
    if token >= end:
        store_vector(d_w + place * D, tl.zeros((SIDE,), tl.float32), D)
        store_vector(d_b + place * D, tl.zeros((SIDE,), tl.float32), D)
        return
    row, last = token + tl.arange(0, CHUNK), tl.minimum(token + CHUNK, end) - 1
    q += (batch * q_batch + head * q_head) * 8
    k += (batch * k_batch + head * k_head) * 8
    v += (batch * v_batch + head * v_head) * 8
    eta += batch * eta_batch + head * eta_head
    first_entry = (batch * tokens * heads + head) * D
    key, query, value, grad = _load_tokens(
        q, k, v, d_out + first_entry, token, end, q_token, k_token, v_token, heads, D, SIDE, CHUNK, OPERAND
    )
    rate, last_rate = _load_rates(eta, token, end, eta_token, CHUNK)
    weight, offset = load_vector(w + head * D, D, SIDE), load_vector(b + head * D, D, SIDE)
    model, bias = _load_model(states, biases, place, D, SIDE, OPERAND)
    d_model, d_bias = _load_model(d_states, d_biases, place, D, SIDE, OPERAND)

    step, normal, inverse, error = inner_step(key, value, model, bias, weight, offset, row < end, eps, D)
    taught = tl.dot(key, d_model, input_precision="ieee") + d_bias[None, :]
    seen = seen_by(query, key, scale)
    d_step = -last_rate * taught - product(tl.trans(seen), rate[:, None] * grad, OPERAND)
    d_step = tl.where((row < end)[:, None], d_step, 0.0)
    d_z, d_error, d_product = inner_step_backward(d_step, step, normal, inverse, error, weight, D)
    lag = tl.arange(0, CHUNK)[:, None] - tl.arange(0, CHUNK)[None, :]
    d_seen = tl.where(lag >= 0, -product(rate[:, None] * grad, tl.trans(step), OPERAND), 0.0)

    if d_q is not None:
        d_query = (product(grad, tl.trans(model), OPERAND) + product(d_seen, key, OPERAND)) * scale
        store_rows(d_q + first_entry, round_to(d_query, d_q.dtype.element_ty), row, end, heads * D, D)
    if d_k is not None:
        d_key = product(tl.trans(d_seen), query, OPERAND) * scale + product(d_z, tl.trans(model), OPERAND)
        d_key += d_error - last_rate * product(step, tl.trans(d_model), OPERAND)
        store_rows(d_k + first_entry, round_to(d_key, d_k.dtype.element_ty), row, end, heads * D, D)
    if d_v is not None:
        store_rows(d_v + first_entry, round_to(-d_error, d_v.dtype.element_ty), row, end, heads * D, D)
    if d_eta is not None:
        d_rate = -tl.sum(grad * product(seen, step, OPERAND), axis=1)
        d_rate -= tl.where(row == last, tl.sum(tl.sum(taught * step, axis=1), axis=0), 0.0)
        tl.store(d_eta + (batch * tokens + row) * heads + head, d_rate, row < end)
    store_vector(d_w + place * D, tl.sum(d_product * error + d_error * normal, axis=0), D)
    store_vector(d_b + place * D, tl.sum(d_error, axis=0), D)


def differentiate(
    x: Operands,
    d_out: Tensor | None,
    d_state: Tensor | None,
    d_bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, w, b, eta and both initial states, from those of the outputs; None counts as zeros.

    A gradient that is not wanted may be None. Those of q, k and v have their dtype, the others are fp32.
    """
    shape = x.v.shape
    d_out = x.v.new_zeros(shape) if d_out is None else d_out.contiguous()
    last = [y.zero_() if g is None else dense(g) for y, g in zip(x.states(x.sequences), (d_state, d_bias), strict=True)]
    walked, d_states, initial = walk(x), x.states(x.slots, x.q.dtype), x.states(x.sequences)
    inputs = (*x[:6], x.cu_seqlens, walked.states, walked.biases, aligned(d_out))
    reverse, tokens = (Fitted(kernel, x.q.device) for kernel in (_reverse_kernel, _tokens_kernel))
    early = padded(shape[3]) <= 64  # a larger state leaves no registers for it
    reverse[(x.sequences * shape[2],)](*inputs, *last, *d_states, *initial, *x.sizes, **x.modes, EARLY=early)
    if not any(wanted[:6]):
        return *[None] * 6, *initial
    d_tokens = [x.v.new_empty(shape) if want else None for want in wanted[:3]]
    d_eta = x.q.new_empty(shape[:3], dtype=torch.float32) if wanted[5] else None
    shares = [x.q.new_empty((x.slots, *shape[2:]), dtype=torch.float32) for _ in range(2)]
    results = (*d_tokens, d_eta, *shares)
    tokens[(x.slots * shape[2],)](*inputs, *d_states, *results, x.sequences, *x.sizes, **x.modes)
    d_w, d_b = (share.sum(0) for share in shares)
    return *d_tokens, d_w, d_b, d_eta, *initial
