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
    load_weight,
    raw_arguments,
    row_sums,
)
from longtake.kernels.scan.inputs import Scan, Which
from longtake.kernels.scan.prepare import Placed
from longtake.kernels.scan.tokens import FULL_NORM, HEAD_NORM, norm_factor
from longtake.kernels.triton_tiles import padded, round_to

BLOCK_TOKENS, TILE_TOKENS, WARPS = 128, 8, 2
"""Tokens whose share of a weight's gradient one program sums, how many at once, and its warps."""


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
    sizes = {"D": dim, "ROWS": TILE_TOKENS * WARPS, "ALL": triton.next_power_of_2(heads)}
    grid = (triton.cdiv(out.numel(), sizes["ROWS"]),)
    Fitted(_mean_kernel, along.device)[grid](along, out, heads, out.numel(), **sizes, num_warps=WARPS)
    return out


@triton.jit(
    do_not_specialize=["heads", "frames", "tokens", "all_tokens", "x_batch", "x_token", "x_head", "norm_eps", "scale"]
)
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
    all_tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    norm_eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    GROWTH: tl.constexpr,
) -> None:
    """BLOCK tokens of one head: program (block, head)."""
    block, head = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, SIDE)
    w = load_weight(weight, head, D, SIDE, WEIGHTED)
    total = tl.zeros((TILE, SIDE), tl.float32)
    for tile in range(BLOCK // TILE):
        token = block * BLOCK + tile * TILE + tl.arange(0, TILE)
        inside = token < all_tokens
        batch, place = token // tokens, token % tokens
        valid = inside[:, None] & (col < D)[None, :]
        raw = batch.to(tl.int64) * x_batch + place.to(tl.int64) * x_token + head * x_head
        raw = tl.load(x + (raw * 8)[:, None] + col[None, :], valid, 0.0).to(tl.float32)
        at = ((token.to(tl.int64) * heads + head) * D)[:, None] + col[None, :]
        back = tl.load(grad + at, valid, 0.0).to(tl.float32)
        inverse = norm_factor(raw, rms, token, inside, norm_eps, NORM, D)
        if GROWTH:
            frame = (batch * heads + head) * frames + place // (tokens // frames)
            back += tl.load(growth_grad + frame, inside, 0.0)[:, None] * tl.load(slope + at, valid, 0.0).to(tl.float32)
        back *= scale
        if RELU:
            back = tl.where(raw * w > 0, back, 0.0)
        if WEIGHTED:
            total += tl.fma(back * raw, inverse[:, None], 0.0)
        back *= w
        pull = tl.zeros((TILE,), tl.float32)
        if NORM == HEAD_NORM:
            pull = inverse * inverse * inverse * (row_sums(raw, back) / D)
        elif NORM == FULL_NORM:
            pull = inverse * inverse * tl.load(along + token, inside, 0.0)
        tl.store(out + at, round_to(back * inverse[:, None] - raw * pull[:, None], out.dtype.element_ty), valid)
    if WEIGHTED:
        tl.store(shares + (block.to(tl.int64) * heads + head) * D + col, tl.sum(total, axis=0), col < D)


def raw_gradients(
    scan: Scan, which: Which, found: Activated, placed: Placed, growth_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of raw q (`which` 0) or k (1) and, if it has one, of its norm's weight [H*D], each in its dtype.

    `found` may be written over. `growth_grad` [B,H,F] fp32: of the growth of each key.
    """
    x, weight, stand_in = scan[which], scan.activation.weights[which], scan.decay
    batch, tokens, heads, dim = x.shape
    blocks = triton.cdiv(batch * tokens, BLOCK_TOKENS)
    out = found.grad if found.grad.dtype == x.dtype else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shares = stand_in.new_empty((blocks, heads * dim), dtype=torch.float32)
    Fitted(_activation_kernel, x.device)[blocks, heads](
        grad=found.grad,
        along=stand_in if found.along is None else _mean(found.along, dim),
        slope=stand_in if growth_grad is None else placed.slope,
        growth_grad=stand_in if growth_grad is None else growth_grad,
        out=out,
        shares=shares,
        heads=heads,
        frames=scan.frames,
        tokens=tokens,
        all_tokens=batch * tokens,
        **raw_arguments(scan, which, placed.rms),
        D=dim,
        SIDE=padded(dim),
        BLOCK=BLOCK_TOKENS,
        TILE=TILE_TOKENS,
        GROWTH=growth_grad is not None,
        num_warps=WARPS,
    )
    return out, None if weight is None else shares.sum(0).to(weight.dtype)
