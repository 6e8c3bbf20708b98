"""Second step of a scan: what each frame does to a memory, whatever the memory is.

A frame's transition is P = Kᵀ·diag(β)·K and its update A = Vᵀ·diag(β)·K, each [D,D]; with a normaliser also P_z [D,D]
and A_z [D] of the keys without position, whose values are all one. Each is a product over the frame's tokens in a fixed
order. Transitions are kept in the operand dtype, as they are only multiplied; I − P is never formed. With a discount, P
and A are divided by max(1, mean growth of the frame's keys), as if every β of the frame had been.

No product has a right operand out of registers: in 16 bits that would cost a fence, which waits for every load. So √β
goes to the keys on the left of A, and values are multiplied as they lie in memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.prepare import Operands
from longtake.kernels.triton_tiles import (
    INTERPRETED,
    TRITON_TYPES,
    as_operand,
    octet_strides,
    padded,
    round_to,
    square_root,
    store_square,
    to_operand,
)

SUM_WIDTH = tl.constexpr(16)
"""Columns of ones that sum 16-bit keys, the fewest that a product takes."""
GROWTH_BLOCK = tl.constexpr(1024)


@triton.jit
def load_rows(x: tl.tensor, row: tl.tensor, tokens: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """Some tokens of a frame, [R,SIDE]."""
    col = tl.arange(0, SIDE)
    tile = tl.load(x + row[:, None] * D + col[None, :], (row < tokens)[:, None] & (col < D)[None, :], 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def load_tokens(
    v: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tensor:
    """Values of some tokens of a frame, [R,SIDE]; stride in units of 8 elements."""
    col = tl.arange(0, SIDE)
    at = (row * stride).to(tl.int64)[:, None] * 8 + col[None, :]
    return tl.load(v + at, (row < tokens)[:, None] & (col < D)[None, :], 0.0)


@triton.jit
def _rooted(
    key: tl.tensor, beta: tl.tensor, row: tl.tensor, tokens: tl.tensor, step: tl.tensor, OPERAND: tl.constexpr
) -> tl.tensor:
    """√β times the keys of some tokens of a frame, [R,SIDE] fp32."""
    share = tl.load(beta + row * step, row < tokens, 0.0).to(tl.float32)
    return key.to(tl.float32) * square_root(share, OPERAND)[:, None]


@triton.jit
def _add_rows(x: tl.tensor, sums: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """Of keys [R,SIDE] what `_sum` sums up: in fp32 [R,SIDE], a sum for every row of a tile.

    In 16 bits [SIDE,SUM_WIDTH], in every column all rows, which are two operands.
    """
    if tl.float32 == OPERAND:
        sums += x
    else:
        high = round_to(x, OPERAND)
        low = round_to(x - high.to(tl.float32), OPERAND)
        ones = tl.full((x.shape[0], SUM_WIDTH), 1.0, high.dtype)
        sums = tl.dot(tl.trans(low), ones, tl.dot(tl.trans(high), ones, sums))
    return sums


@triton.jit
def _sum(sums: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """All rows that were added, [SIDE]."""
    return tl.sum(sums, axis=0) if tl.float32 == OPERAND else tl.sum(sums, axis=1) / SUM_WIDTH


@triton.jit
def _mean(growth: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Of a frame's keys."""
    total = tl.zeros((GROWTH_BLOCK,), tl.float32)
    start = 0
    while start < tokens:
        place = start + tl.arange(0, GROWTH_BLOCK)
        total += tl.load(growth + place, place < tokens, 0.0)
        start += GROWTH_BLOCK
    return tl.div_rn(tl.sum(total, axis=0), tokens * 1.0)


@triton.jit
def discount(mean: tl.tensor) -> tl.tensor:
    """1 / max(1, mean growth of a frame's keys); NaN stays."""
    return tl.div_rn(1.0, tl.maximum(mean, 1.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "v_batch", "v_token", "v_head", "beta_frame", "beta_token"])
def _absorb_kernel(
    k: tl.tensor,
    plain: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    growth: tl.tensor,
    transitions: tl.tensor,
    updates: tl.tensor,
    growth_out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    beta_frame: int,
    beta_token: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORMALISER: tl.constexpr,
    DISCOUNT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One frame of one head: program (frame of a head, P with A or P_z with A_z)."""
    frame = tl.program_id(0).to(tl.int64)
    first = frame * tokens * D
    transitions += frame * (2 if NORMALISER else 1) * D * D
    updates += frame * (D + 1 if NORMALISER else D) * D
    beta += frame * beta_frame
    total = tl.zeros((SIDE, SIDE), tl.float32)
    if tl.program_id(1) == 0:
        update = tl.zeros((SIDE, SIDE), tl.float32)
        memory = frame // frames
        v += (memory // heads * v_batch + memory % heads * v_head + frame % frames * tokens * v_token) * 8
        for tile in tl.range(0, TILES, num_stages=STAGES):
            row = tile * ROWS + tl.arange(0, ROWS)
            key = load_rows(k + first, row, tokens, D, SIDE)
            value = as_operand(load_tokens(v, row, tokens, v_token, D, SIDE), OPERAND, PRECISION)
            total = tl.dot(tl.trans(key), key, total, input_precision=PRECISION)
            rooted = to_operand(_rooted(key, beta, row, tokens, beta_token, OPERAND), OPERAND, PRECISION)
            update = tl.dot(tl.trans(rooted), value, update, input_precision=PRECISION)
        if DISCOUNT:
            mean = _mean(growth + frame * tokens, tokens)
            tl.store(growth_out + frame, mean)
            weight = discount(mean)
            total *= weight
            update *= weight
        store_square(transitions, to_operand(total, OPERAND, PRECISION), D)
        store_square(updates, tl.trans(update), D)
    else:
        sums = tl.zeros((ROWS, SIDE) if tl.float32 == OPERAND else (SIDE, SUM_WIDTH), tl.float32)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            row = tile * ROWS + tl.arange(0, ROWS)
            key = load_rows(plain + first, row, tokens, D, SIDE)
            total = tl.dot(tl.trans(key), key, total, input_precision=PRECISION)
            sums = _add_rows(_rooted(key, beta, row, tokens, beta_token, OPERAND), sums, OPERAND)
        store_square(transitions + D * D, to_operand(total, OPERAND, PRECISION), D)
        entry = tl.arange(0, SIDE)
        tl.store(updates + D * D + entry, _sum(sums, OPERAND), entry < D)


class Records(NamedTuple):
    """What each frame does.

    `transitions` [B·H·F,1 or 2,D,D]: P and, with a normaliser, P_z. `updates` [B·H·F,D or D + 1,D] fp32: A and A_z.
    `growth` [B,H,F] fp32: mean growth of the keys, where it discounts.
    """

    transitions: Tensor
    updates: Tensor
    growth: Tensor | None


def absorb(scan: Scan, operands: Operands) -> Records:
    """Records of all frames."""
    config, tokens, dim = scan.configuration, scan.tokens, scan.dim
    count, heads = scan.memories * scan.frames, scan.decay.shape[1]
    transitions = scan.q.new_empty((count, 1 + scan.normaliser, dim, dim), dtype=config.operand)
    updates = scan.q.new_empty((count, dim + scan.normaliser, dim), dtype=torch.float32)
    growth = scan.q.new_empty(scan.decay.shape, dtype=torch.float32) if scan.discount else None
    _absorb_kernel[(count, 1 + scan.normaliser)](
        operands.k,
        operands.plain,
        operands.v,
        scan.beta,
        scan.beta if operands.growth is None else operands.growth,
        transitions,
        updates,
        updates if growth is None else growth,
        heads,
        scan.frames,
        tokens,
        *octet_strides(operands.v),
        *((1, 0) if scan.beta.ndim == 3 else (tokens, 1)),
        D=dim,
        SIDE=padded(dim),
        ROWS=config.absorb_rows,
        TILES=triton.cdiv(tokens, config.absorb_rows),
        STAGES=config.absorb_stages,
        NORMALISER=scan.normaliser,
        DISCOUNT=scan.discount,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=config.absorb_warps,
    )
    return Records(transitions, updates, growth)
