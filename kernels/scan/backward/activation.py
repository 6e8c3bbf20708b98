"""Last step of the backward pass: through ReLU and norm, from gradients of activated tokens to those of raw ones.

The full norm takes away x·mean(x·g), the mean over all heads. Raw and activated tokens have the same x·g but for the
factor of the norm, so that the kernels which make the gradients of activated tokens leave it (`Activated.along`), and
here no head waits for another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.backward.tokens import (
    Activated,
    load_columns,
    load_weight,
    raw_arguments,
    row_sums,
    store_columns,
)
from longtake.kernels.scan.inputs import Scan, Which
from longtake.kernels.scan.prepare import Placed
from longtake.kernels.scan.tokens import FULL_NORM, HEAD_NORM, norm_factor
from longtake.kernels.triton_tiles import padded

ROWS, TILES, STAGES, WARPS = 8, 16, 6, 2
"""Tokens of a tile, most tiles of a program, which sums their share of a weight's gradient, tiles in flight, warps."""


@triton.jit(do_not_specialize=["heads", "all_tokens"])
def _mean_kernel(
    along: tl.tensor,
    out: tl.tensor,
    heads: int,
    all_tokens: int,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
) -> None:
    """Of ROWS tokens, over all entries of their heads, at most ALL; in an order that no other token changes."""
    token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, ALL)
    at = token.to(tl.int64)[:, None] * heads + head[None, :]
    found = tl.load(along + at, (token < all_tokens)[:, None] & (head < heads)[None, :], 0.0)
    tl.store(out + token, tl.div_rn(tl.sum(found, axis=1), heads * D * 1.0), token < all_tokens)


def _mean(along: Tensor, dim: int) -> Tensor:
    """Sums over D [B,N,H] → means over all heads [B,N]."""
    heads = along.shape[-1]
    out = along.new_empty(along.shape[:-1])
    sizes = {"D": dim, "ROWS": ROWS * WARPS, "ALL": triton.next_power_of_2(heads)}
    grid = (triton.cdiv(out.numel(), sizes["ROWS"]),)
    Fitted(_mean_kernel, along.device)[grid](along, out, heads, out.numel(), **sizes, num_warps=WARPS)
    return out


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "x_batch", "x_token", "x_head", "norm_eps", "scale"])
def _activation_kernel(
    x: tl.tensor,
    rms: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    along: tl.tensor,
    slope: tl.tensor,
    growth_grad: tl.tensor,
    out: tl.tensor,
    shares: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    norm_eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    GROWTH: tl.constexpr,
) -> None:
    """Some tokens of one head of one frame: program (head of a frame, part), as rows of all heads lie side by side."""
    frame, head, part = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    batch, at = frame // frames, frame % frames
    first = frame.to(tl.int64) * tokens
    x += (batch.to(tl.int64) * x_batch + at.to(tl.int64) * tokens * x_token + head * x_head) * 8
    grad += (first * heads + head) * D
    slope += (first * heads + head) * D
    out += (first * heads + head) * D
    rms += first
    along += first
    col = tl.arange(0, SIDE)
    w = load_weight(weight, head, D, SIDE, WEIGHTED)
    rise = tl.full((), 0.0, tl.float32)
    if GROWTH:
        rise = tl.load(growth_grad + (batch * heads + head) * frames + at)
    total = tl.zeros((ROWS, SIDE), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = row < tokens
        raw = load_columns(x, row, tokens, x_token, col, D).to(tl.float32)
        back = load_columns(grad, row, tokens, heads * (D // 8), col, D).to(tl.float32)
        inverse = norm_factor(raw, rms, row, inside, norm_eps, NORM, D)
        if GROWTH:
            back += rise * load_columns(slope, row, tokens, heads * (D // 8), col, D).to(tl.float32)
        back *= scale
        if RELU:
            back = tl.where(raw * w > 0, back, 0.0)
        if WEIGHTED:
            total += tl.fma(back * raw, inverse[:, None], 0.0)
        back *= w
        pull = tl.zeros((ROWS,), tl.float32)
        if NORM == HEAD_NORM:
            pull = inverse * inverse * inverse * (row_sums(raw, back) / D)
        elif NORM == FULL_NORM:
            pull = inverse * inverse * tl.load(along + row, inside, 0.0)
        store_columns(out, back * inverse[:, None] - raw * pull[:, None], row, tokens, heads * D, col, D)
    if WEIGHTED:
        place = (head * D + col).to(tl.int64) * (tl.num_programs(0) // heads) + frame
        tl.store(shares + place * tl.num_programs(1) + part, tl.sum(total, axis=0), col < D)


def raw_gradients(
    scan: Scan,
    which: Which,
    found: Activated,
    placed: Placed,
    growth_grad: Tensor | None = None,
    unabsorbed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of raw q (`which` 0) or k (1) and, if it has one, of its norm's weight [H*D], each in its dtype.

    `found` may be written over. `growth_grad` [B,H,F] fp32: of the growth of each key. `unabsorbed`: frames that get
    zeros, and bring nothing to the weight's, whatever they hold.
    """
    x, weight, stand_in = scan[which], scan.activation.weights[which], scan.decay
    heads, dim = x.shape[-2:]
    tiles = min(TILES, triton.cdiv(scan.tokens, ROWS))
    grid = scan.memories * scan.frames, triton.cdiv(scan.tokens, ROWS * tiles)
    out = found.grad if found.grad.dtype == x.dtype else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shares = stand_in.new_empty((heads * dim, grid[0] // heads * grid[1]), dtype=torch.float32)
    Fitted(_activation_kernel, x.device)[grid](
        grad=found.grad,
        along=stand_in if found.along is None else _mean(found.along, dim),
        slope=stand_in if growth_grad is None else placed.slope,
        growth_grad=stand_in if growth_grad is None else growth_grad,
        out=out,
        shares=shares,
        heads=heads,
        frames=scan.frames,
        tokens=scan.tokens,
        **raw_arguments(scan, which, placed.rms),
        D=dim,
        SIDE=padded(dim),
        ROWS=ROWS,
        TILES=tiles,
        STAGES=STAGES,
        GROWTH=growth_grad is not None,
        num_warps=WARPS,
    )
    if unabsorbed is not None:
        out.view(-1, scan.frames, scan.tokens, heads, dim).index_fill_(1, unabsorbed, 0)
        shares.view(heads * dim, -1, scan.frames, grid[1]).index_fill_(2, unabsorbed, 0)
    return out, None if weight is None else shares.sum(1).to(weight.dtype)
