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
    growth_slopes,
    load_weight,
    raw_arguments,
    row_sums,
)
from longtake.kernels.scan.inputs import Scan, Which
from longtake.kernels.scan.prepare import Operands
from longtake.kernels.scan.tokens import FULL_NORM, HEAD_NORM, norm_factor
from longtake.kernels.triton_tiles import padded, round_to

BLOCK_TOKENS, TILE_TOKENS, WARPS = 128, 8, 2
"""Tokens whose share of a weight's gradient one program sums, how many at once, and its warps."""


@triton.jit(
    do_not_specialize=["heads", "frames", "tokens", "all_tokens", "x_batch", "x_token", "x_head", "norm_eps", "scale"]
)
def _activation_kernel(
    x: tl.tensor,
    rms: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    along: tl.tensor,
    before: tl.tensor,
    growth: tl.tensor,
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
        batch, place = (token // tokens).to(tl.int64), token % tokens
        valid = inside[:, None] & (col < D)[None, :]
        raw = x + ((batch * x_batch + place.to(tl.int64) * x_token + head * x_head) * 8)[:, None] + col[None, :]
        raw = tl.load(raw, valid, 0.0).to(tl.float32)
        at = ((token.to(tl.int64) * heads + head) * D)[:, None] + col[None, :]
        back = tl.load(grad + at, valid, 0.0).to(tl.float32)
        inverse = norm_factor(raw, rms, token, inside, norm_eps, NORM, D)
        if GROWTH:
            key = (batch * heads + head) * tokens + place
            frame = (batch * heads + head) * frames + place // (tokens // frames)
            norm, ratio = tl.load(before + key, inside, 1.0), tl.load(growth + key, inside, 1.0)
            _, fall = growth_slopes(norm, ratio, tl.load(growth_grad + frame, inside, 0.0))
            back -= (fall * inverse * scale)[:, None] * raw * w  # where ReLU lets it pass
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
    scan: Scan, which: Which, found: Activated, operands: Operands, growth_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of raw q (`which` 0) or k (1) and, if it has one, of its norm's weight [H*D], each in its dtype.

    `found` may be written over. `operands` of a backward pass; `growth_grad` [B,H,F] fp32: of the growth of each key.
    """
    x, weight, stand_in = scan[which], scan.activation.weights[which], scan.decay
    batch, tokens, heads, dim = x.shape
    blocks = triton.cdiv(batch * tokens, BLOCK_TOKENS)
    out = found.grad if found.grad.dtype == x.dtype else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shares = stand_in.new_empty((blocks, heads * dim), dtype=torch.float32)
    growth = (stand_in, stand_in) if growth_grad is None else (operands.before, operands.growth)
    Fitted(_activation_kernel, x.device)[blocks, heads](
        grad=found.grad,
        along=stand_in if found.along is None else found.along.sum(-1) / (heads * dim),
        before=growth[0],
        growth=growth[1],
        growth_grad=stand_in if growth_grad is None else growth_grad,
        out=out,
        shares=shares,
        heads=heads,
        frames=scan.frames,
        tokens=tokens,
        all_tokens=batch * tokens,
        **raw_arguments(scan, which, operands.rms),
        D=dim,
        SIDE=padded(dim),
        BLOCK=BLOCK_TOKENS,
        TILE=TILE_TOKENS,
        GROWTH=growth_grad is not None,
        num_warps=WARPS,
    )
    return out, None if weight is None else shares.sum(0).to(weight.dtype)
