"""Last step of the backward pass: through ReLU and norm, from gradients of activated tokens to those of raw ones."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.heads import (
    NORM_FLOOR,
    activate_heads,
    growth_of,
    inverse_rms,
    load_heads,
    place_heads,
    position_of,
    store_heads,
)
from longtake.kernels.scan.inputs import NORMS, Activation
from longtake.kernels.scan.tokens import CAMERA, FULL_NORM, HEAD_NORM
from longtake.kernels.triton_tiles import octet_strides, padded

HEADS_AT_ONCE = 4
BLOCK_TOKENS, TILE_TOKENS = 256, 32
"""Tokens whose share of a weight's gradient one program sums, and how many at once."""


@triton.jit
def _unplaced(
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, inverse: tl.tensor, ratio_grad: tl.tensor, head: tl.tensor,
    heads: tl.tensor, eps: tl.tensor, scale: tl.tensor, place: tl.tuple, unplace: tl.tuple, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, RELU: tl.constexpr, GROWTH: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradients of some heads in the ray frame → in the camera's, with those that their growth brings."""
    if GROWTH:
        a = activate_heads(x, weight, inverse, head, heads, eps, scale, NORM, WEIGHTED, RELU, D, SIDE)
        y = place_heads(a, place, CAMERA)
        before, after, ratio = growth_of(a, y, tl.float32)
        slope = tl.div_rn(2 * ratio_grad, tl.maximum(before, NORM_FLOOR))
        rise = tl.where(after > NORM_FLOOR, slope, 0.0)[:, None]
        fall = tl.where(before > NORM_FLOOR, slope * ratio, 0.0)[:, None]
        grad = place_heads(grad + rise * y, unplace, CAMERA) - fall * a
    else:
        grad = place_heads(grad, unplace, CAMERA)
    return grad


@triton.jit
def _rectified(
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, head: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    WEIGHTED: tl.constexpr, RELU: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradient of some activated heads → of what the norm makes of raw ones, x, before its weight."""
    grad *= scale
    if WEIGHTED:
        w = load_heads(weight, head, D // 8, heads, D, SIDE)
        x, grad = x * w, grad * w
    if RELU:
        grad = tl.where(x > 0, grad, 0.0)
    return grad


@triton.jit
def _load_gradient(
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, ratio_grad: tl.tensor, inverse: tl.tensor, head: tl.tensor,
    heads: tl.tensor, eps: tl.tensor, scale: tl.tensor, place: tl.tuple, unplace: tl.tuple, NORM: tl.constexpr,
    WEIGHTED: tl.constexpr, RELU: tl.constexpr, POSITIONS: tl.constexpr, GROWTH: tl.constexpr, D: tl.constexpr,
    SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradients of some heads x with ReLU and norm, but without a position."""
    found = load_heads(grad, head, D // 8, heads, D, SIDE)
    if POSITIONS == CAMERA:
        slope = tl.zeros((head.shape[0],), tl.float32)
        if GROWTH:
            slope = tl.load(ratio_grad + head, head < heads, 0.0)
        found = _unplaced(
            x, found, weight, inverse, slope, head, heads, eps, scale, place, unplace, NORM, WEIGHTED, RELU, GROWTH, D,
            SIDE,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["heads", "tokens", "x_batch", "x_token", "x_head", "own_tables", "eps", "scale"])
def _activation_kernel(
    x: tl.tensor,
    grad: tl.tensor,
    weight: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    ratio_grad: tl.tensor,
    out: tl.tensor,
    rms_out: tl.tensor,
    heads: int,
    tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    own_tables: int,
    eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    POSITIONS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GROWTH: tl.constexpr,
) -> None:
    """One token, whose heads are taken in GROUPS groups of HEADS; `grad` is left in the camera's frame for weights."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    x += (batch * x_batch + row * x_token) * 8
    grad += token * heads * D
    out += token * heads * D
    ratio_grad += token * heads
    matrix += token * 16
    inverse = inverse_rms(x, x, x_head, heads, eps, NORM, False, D, SIDE, HEADS, GROUPS)
    turns = (row + batch * own_tables * tokens) * (D // 4)
    place = position_of(matrix, cos + turns, sin + turns, TRANSPOSED, 1.0, POSITIONS, D, SIDE)
    unplace = position_of(matrix, cos + turns, sin + turns, not TRANSPOSED, -1.0, POSITIONS, D, SIDE)
    pull = tl.zeros((HEADS, 1), tl.float32)
    if NORM == FULL_NORM:
        total = tl.zeros((HEADS,), tl.float32)
        for group in range(GROUPS):
            head = group * HEADS + tl.arange(0, HEADS)
            raw = load_heads(x, head, x_head, heads, D, SIDE)
            back = _load_gradient(
                raw, grad, weight, ratio_grad, inverse, head, heads, eps, scale, place, unplace, NORM, WEIGHTED, RELU,
                POSITIONS, GROWTH, D, SIDE,
            )  # fmt: skip
            total += tl.sum(raw * _rectified(raw, back, weight, head, heads, scale, WEIGHTED, RELU, D, SIDE), axis=1)
        pull += inverse * inverse * inverse * tl.div_rn(tl.sum(total, axis=0), heads * D * 1.0)
        tl.store(rms_out + token, inverse)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        raw = load_heads(x, head, x_head, heads, D, SIDE)
        back = _load_gradient(
            raw, grad, weight, ratio_grad, inverse, head, heads, eps, scale, place, unplace, NORM, WEIGHTED, RELU,
            POSITIONS, GROWTH, D, SIDE,
        )  # fmt: skip
        if POSITIONS == CAMERA and WEIGHTED:
            store_heads(grad, back, head, heads, D, D, "ieee")
        back = _rectified(raw, back, weight, head, heads, scale, WEIGHTED, RELU, D, SIDE)
        factor = tl.full((HEADS, 1), 1.0, tl.float32) * inverse
        if NORM == HEAD_NORM:
            factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(raw * raw, axis=1) / D + eps))[:, None]
            pull = factor * factor * factor * (tl.sum(raw * back, axis=1) / D)[:, None]
        store_heads(out, back * factor - raw * pull, head, heads, D, D, "ieee")


@triton.jit(do_not_specialize=["heads", "tokens", "all_tokens", "x_batch", "x_token", "x_head", "eps", "scale"])
def _weight_kernel(
    x: tl.tensor,
    grad: tl.tensor,
    weight: tl.tensor,
    rms: tl.tensor,
    out: tl.tensor,
    heads: int,
    tokens: int,
    all_tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    RELU: tl.constexpr,
) -> None:
    """The share of BLOCK tokens in the gradient of one head's weights: program (block, head)."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, SIDE)
    w = tl.load(weight + head * D + col, col < D, 0.0).to(tl.float32)[None, :]
    total = tl.zeros((TILE, SIDE), tl.float32)
    for tile in range(BLOCK // TILE):
        token = block * BLOCK + tile * TILE + tl.arange(0, TILE)
        inside = token < all_tokens
        valid = inside[:, None] & (col < D)[None, :]
        place = (token // tokens * x_batch + token % tokens * x_token + head * x_head) * 8
        value = tl.load(x + place[:, None] + col[None, :], valid, 0.0).to(tl.float32)
        back = tl.load(grad + ((token * heads + head) * D)[:, None] + col[None, :], valid, 0.0).to(tl.float32) * scale
        if RELU:
            back = tl.where(value * w > 0, back, 0.0)
        if NORM == HEAD_NORM:
            factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, axis=1) / D + eps))
        else:
            factor = tl.load(rms + token, inside, 0.0)
        total += back * value * factor[:, None]
    tl.store(out + (block * heads + head) * D + col, tl.sum(total, axis=0), col < D)


class RawGradients(NamedTuple):
    """Gradients of raw tokens [B,N,H,D] in their dtype, and of the norm's weight [H*D] in its, None without one."""

    x: Tensor
    weight: Tensor | None


class Placement(NamedTuple):
    """Where the camera puts tokens: maps [B,N,4,4], transposed or not, tables of pairs, gradient of growth [B,N,H]."""

    matrix: Tensor
    transposed: bool
    tables: tuple[Tensor, Tensor]
    growth_grad: Tensor | None


def activation_gradients(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    activation: Activation,
    scale: float,
    placement: Placement | None = None,
) -> RawGradients:
    """Through position, scale, ReLU and norm: gradients of raw x [B,N,H,D], aligned, from those of the operand.

    `grad` [B,N,H,D] is overwritten with those of what has no position yet, if there is a placement and a weight.
    """
    batch, tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms = grad.new_empty((batch, tokens), dtype=torch.float32)
    group = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    matrix, transposed, tables, growth_grad = placement or Placement(grad, False, (grad, grad), None)
    Fitted(_activation_kernel, x.device)[(batch * tokens,)](
        x,
        grad,
        grad if weight is None else weight,
        matrix,
        *tables,
        grad if growth_grad is None else growth_grad,
        out,
        rms,
        heads,
        tokens,
        *octet_strides(x),
        int(placement is not None and tables[0].shape[0] > 1),
        activation.eps,
        scale,
        D=dim,
        SIDE=padded(dim),
        HEADS=group,
        GROUPS=triton.cdiv(heads, group),
        NORM=NORMS[activation.norm],
        WEIGHTED=weight is not None,
        RELU=activation.relu,
        POSITIONS=0 if placement is None else 2,
        TRANSPOSED=transposed,
        GROWTH=growth_grad is not None,
        num_warps=1,
    )
    return RawGradients(out, None if weight is None else _weight_gradient(x, grad, weight, rms, activation, scale))


def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, rms: Tensor, activation: Activation, scale: float
) -> Tensor:
    """Of the norm's weight [H*D], summed over blocks of tokens and those in PyTorch's order."""
    batch, tokens, heads, dim = x.shape
    blocks = triton.cdiv(batch * tokens, BLOCK_TOKENS)
    shares = grad.new_empty((blocks, heads * dim), dtype=torch.float32)
    Fitted(_weight_kernel, x.device)[(blocks, heads)](
        x,
        grad,
        weight,
        rms,
        shares,
        heads,
        tokens,
        batch * tokens,
        *octet_strides(x),
        activation.eps,
        scale,
        D=dim,
        SIDE=padded(dim),
        BLOCK=BLOCK_TOKENS,
        TILE=TILE_TOKENS,
        NORM=NORMS[activation.norm],
        RELU=activation.relu,
        num_warps=4,
    )
    return shares.sum(0).to(weight.dtype)
