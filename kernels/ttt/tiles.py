"""What the TTT-linear kernels do with one chunk: load it, take the inner model's step, and differentiate that.

A chunk is [C,SIDE], its head dim padded by zeros, a state [SIDE,SIDE]. Operands of products are rounded to the dtype of
q, and added in fp32; all else is fp32.
"""

import triton
import triton.language as tl

from longtake.kernels.triton_tiles import add_both, as_operand, quotient, square_root


@triton.jit
def span(cu_seqlens: tl.tensor, sequence: tl.tensor, tokens: int, CHUNK: tl.constexpr) -> tl.tuple:
    """Batch entry of a sequence, its first token and the one after its last, and the slot of its first chunk.

    In a pack that slot is the number of whole chunks in all tokens before plus that of the sequences before: each may
    have one ragged chunk besides.
    """
    if cu_seqlens is None:
        batch, first = sequence, sequence * 0
        end = first + tokens
        slot = sequence * tl.cdiv(tokens, CHUNK)
    else:
        batch = sequence * 0
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        slot = first // CHUNK + sequence
    return batch, first, end, slot


@triton.jit
def slot_span(cu_seqlens: tl.tensor, slot: tl.tensor, sequences: int, tokens: int, CHUNK: tl.constexpr) -> tl.tuple:
    """Batch entry of the chunk in a slot, its first token, and the one after the last of its sequence.

    The first is not before the latter in a slot that is left over.
    """
    if cu_seqlens is None:
        chunks = tl.cdiv(tokens, CHUNK)
        batch, first = slot // chunks, slot % chunks * CHUNK
        end = batch * 0 + tokens
    else:
        sequence, after = slot * 0, slot * 0 + sequences
        while after - sequence > 1:
            middle = (sequence + after) // 2
            if tl.load(cu_seqlens + middle).to(tl.int64) // CHUNK + middle <= slot:
                sequence = middle
            else:
                after = middle
        batch, first, end, first_slot = span(cu_seqlens, sequence, tokens, CHUNK)
        first += (slot - first_slot) * CHUNK
    return batch, first, end


@triton.jit
def load_rows(
    x: tl.tensor, row: tl.tensor, end: tl.tensor, stride: int, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tensor:
    """Some tokens of a head, [C,SIDE], zero beyond the last; stride in units of 8 elements."""
    col = tl.arange(0, SIDE)
    at = (row * stride)[:, None] * 8 + col[None, :]
    return tl.load(x + at, (row < end)[:, None] & (col < D)[None, :], 0.0)


@triton.jit
def store_rows(
    out: tl.tensor, x: tl.tensor, row: tl.tensor, end: tl.tensor, stride: tl.tensor, D: tl.constexpr
) -> None:
    """Tokens of a head; stride in elements."""
    col = tl.arange(0, x.shape[1])
    at = (row * stride)[:, None] + col[None, :]
    tl.store(out + at, x, (row < end)[:, None] & (col < D)[None, :])


@triton.jit
def load_vector(x: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """[SIDE] in fp32."""
    col = tl.arange(0, SIDE)
    return tl.load(x + col, col < D, 0.0)


@triton.jit
def store_vector(out: tl.tensor, x: tl.tensor, D: tl.constexpr) -> None:
    col = tl.arange(0, x.shape[0])
    tl.store(out + col, x, col < D)


@triton.jit
def load_square(x: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """A state [SIDE,SIDE], in fp32 or to be multiplied."""
    row = tl.arange(0, SIDE)
    inside = (row < D)[:, None] & (row < D)[None, :]
    return as_operand(tl.load(x + row[:, None] * D + row[None, :], inside, 0.0), DTYPE, "ieee")


@triton.jit
def row_mean(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """[C,1]."""
    return (tl.sum(x, axis=1) * (1.0 / D))[:, None]


@triton.jit
def _row_means(x: tl.tensor, y: tl.tensor, D: tl.constexpr) -> tl.tuple:
    """Of two tiles, [C,1] each."""
    x, y = tl.reduce((x, y), 1, add_both)
    return (x * (1.0 / D))[:, None], (y * (1.0 / D))[:, None]


@triton.jit
def tangent(x: tl.tensor, normal: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """What of x a layer norm passes back: x − mean(x) − x̂·mean(x·x̂)."""
    inside = (tl.arange(0, x.shape[1]) < D)[None, :]
    mean, along = _row_means(x, x * normal, D)
    return tl.where(inside, x - mean - normal * along, 0.0)


@triton.jit
def centred_rows(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Without the mean of each row."""
    inside = (tl.arange(0, x.shape[1]) < D)[None, :]
    return tl.where(inside, x - row_mean(x, D), 0.0)


@triton.jit
def normalise(z: tl.tensor, eps: float, D: tl.constexpr, OPERAND: tl.constexpr) -> tl.tuple:
    """x̂ = (z − mean)/σ and 1/σ, [C,SIDE] and [C,1]."""
    centred = centred_rows(z, D)
    inverse = quotient(1.0, square_root(row_mean(centred * centred, D) + eps, OPERAND), OPERAND)
    return centred * inverse, inverse


@triton.jit
def inner_step(
    key: tl.tensor, value: tl.tensor, state: tl.tensor, bias: tl.tensor, weight: tl.tensor, offset: tl.tensor,
    inside: tl.tensor, eps: float, D: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Gradient of the inner loss at z = k·h + hb, zero beyond the last token; x̂, 1/σ and LN(z) − (v − k)."""
    z = tl.dot(key, state, input_precision="ieee") + bias[None, :]
    normal, inverse = normalise(z, eps, D, key.dtype)
    error = weight[None, :] * normal + offset[None, :] - value.to(tl.float32) + key.to(tl.float32)
    step = inverse * tangent(error * weight[None, :], normal, D)
    return tl.where(inside[:, None], step, 0.0), normal, inverse, error


@triton.jit
def inner_step_backward(
    grad: tl.tensor, step: tl.tensor, normal: tl.tensor, inverse: tl.tensor, error: tl.tensor, weight: tl.tensor,
    D: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """From the gradient of the step those of z and of LN(z) − (v − k), and of the latter's product with w."""
    scaled = inverse * grad
    product = error * weight[None, :]
    d_product = tangent(scaled, normal, D)
    d_error = weight[None, :] * d_product
    d_normal = weight[None, :] * d_error
    d_normal -= scaled * row_mean(product * normal, D) + product * row_mean(scaled * normal, D)
    d_z = inverse * (tangent(d_normal, normal, D) - normal * row_mean(grad * step, D))
    return d_z, d_error, d_product


@triton.jit
def seen_by(query: tl.tensor, key: tl.tensor, scale: float) -> tl.tensor:
    """s·q_i·k_j + 1 of every token i and those j up to it, [C,C]: how much of their steps it reads."""
    place = tl.arange(0, query.shape[0])
    seen = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + 1.0
    return tl.where(place[:, None] >= place[None, :], seen, 0.0)


@triton.jit
def product(x: tl.tensor, y: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """x·y of tiles in fp32 or already rounded."""
    x, y = as_operand(x, OPERAND, "ieee"), as_operand(y, OPERAND, "ieee")
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def load_operand(
    x: tl.tensor, row: tl.tensor, end: tl.tensor, stride: int, D: tl.constexpr, SIDE: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `load_rows`, to be multiplied."""
    return as_operand(load_rows(x, row, end, stride, D, SIDE), OPERAND, "ieee")
