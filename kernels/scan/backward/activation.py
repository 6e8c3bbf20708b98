"""Last step of the backward pass: through ReLU and norm, from gradients of activated tokens to those of raw ones."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.heads import NORM_FLOOR, activate_heads, inverse_rms, load_heads, store_heads
from longtake.kernels.scan.inputs import NORMS, Activation
from longtake.kernels.scan.tokens import FULL_NORM, HEAD_NORM, load_matrix, map_quads
from longtake.kernels.triton_tiles import octet_strides, padded

HEADS_AT_ONCE = 4
BLOCK_TOKENS, TILE_TOKENS = 128, 32
"""Tokens whose share of a weight's gradient one program sums, and how many at once."""


@triton.jit
def _squared(matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tuple:
    """How a token's place changes squares: the rows of Mᵀ·M for the first half, for the second cos² + sin² [1,SIDE]."""
    col = tl.arange(0, SIDE)
    inside = (col >= D // 2) & (col < D)
    pair = (col - D // 2) // 2
    c, s = tl.load(cos + pair, inside, 1.0), tl.load(sin + pair, inside, 0.0)
    c0, c1, c2, c3 = load_matrix(matrix, True)
    m00, m01, m02, m03 = _inner(c0, c0), _inner(c0, c1), _inner(c0, c2), _inner(c0, c3)
    m11, m12, m13 = _inner(c1, c1), _inner(c1, c2), _inner(c1, c3)
    m22, m23, m33 = _inner(c2, c2), _inner(c2, c3), _inner(c3, c3)
    return (
        (m00, m01, m02, m03),
        (m01, m11, m12, m13),
        (m02, m12, m22, m23),
        (m03, m13, m23, m33),
        (c * c + s * s)[None, :],
    )


@triton.jit
def _inner(x: tl.tuple, y: tl.tuple) -> tl.tensor:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]


@triton.jit
def _grown(
    a: tl.tensor, square: tl.tuple, ratio: tl.tensor, ratio_grad: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tensor:
    """What the gradient of the growth ‖M·a‖²/‖a‖² of activated heads a brings them: 2·(Mᵀ·M·a − ratio·a)/‖a‖² times it.

    Both norms are at least NORM_FLOOR.
    """
    before = tl.sum(a * a, axis=1)
    least = tl.maximum(before, NORM_FLOOR)
    slope = tl.div_rn(2 * ratio_grad, least)
    rise = tl.where(ratio * least > NORM_FLOOR, slope, 0.0)[:, None]
    fall = tl.where(before > NORM_FLOOR, slope * ratio, 0.0)[:, None]
    return rise * tl.where((tl.arange(0, SIDE) < D // 2)[None, :], map_quads(a, square), a * square[4]) - fall * a


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
    x: tl.tensor, grad: tl.tensor, weight: tl.tensor, square: tl.tuple, ratio: tl.tensor, ratio_grad: tl.tensor,
    inverse: tl.tensor, head: tl.tensor, heads: tl.tensor, tokens: tl.tensor, eps: tl.tensor, scale: tl.tensor,
    NORM: tl.constexpr, WEIGHTED: tl.constexpr, RELU: tl.constexpr, GROWTH: tl.constexpr, D: tl.constexpr,
    SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradients of some heads x with ReLU and norm."""
    found = load_heads(grad, head, D // 8, heads, D, SIDE)
    if GROWTH:
        a = activate_heads(x, weight, inverse, head, heads, eps, scale, NORM, WEIGHTED, RELU, D, SIDE)
        grown = tl.load(ratio + head.to(tl.int64) * tokens, head < heads, 0.0)
        found += _grown(a, square, grown, tl.load(ratio_grad + head, head < heads, 0.0), D, SIDE)
    return found


@triton.jit(do_not_specialize=["heads", "tokens", "x_batch", "x_token", "x_head", "own_tables", "eps", "scale"])
def _activation_kernel(
    x: tl.tensor,
    grad: tl.tensor,
    weight: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    ratio: tl.tensor,
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
    GROWTH: tl.constexpr,
) -> None:
    """One token, whose heads are taken in GROUPS groups of HEADS; what its growth brings is added to `grad`, too."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    x += (batch * x_batch + row * x_token) * 8
    grad += token * heads * D
    out += token * heads * D
    ratio += batch * heads * tokens + row
    ratio_grad += token * heads
    square = ()
    if GROWTH:
        turns = (row + batch * own_tables * tokens) * (D // 4)
        square = _squared(matrix + token * 16, cos + turns, sin + turns, D, SIDE)
    inverse = inverse_rms(x, x, x_head, heads, eps, NORM, False, D, SIDE, HEADS, GROUPS)
    pull = tl.zeros((HEADS, 1), tl.float32)
    if NORM == FULL_NORM:
        total = tl.zeros((HEADS,), tl.float32)
        for group in range(GROUPS):
            head = group * HEADS + tl.arange(0, HEADS)
            raw = load_heads(x, head, x_head, heads, D, SIDE)
            back = _load_gradient(
                raw, grad, weight, square, ratio, ratio_grad, inverse, head, heads, tokens, eps, scale, NORM, WEIGHTED,
                RELU, GROWTH, D, SIDE,
            )  # fmt: skip
            total += tl.sum(raw * _rectified(raw, back, weight, head, heads, scale, WEIGHTED, RELU, D, SIDE), axis=1)
        pull += inverse * inverse * inverse * tl.div_rn(tl.sum(total, axis=0), heads * D * 1.0)
        tl.store(rms_out + token, inverse)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        raw = load_heads(x, head, x_head, heads, D, SIDE)
        back = _load_gradient(
            raw, grad, weight, square, ratio, ratio_grad, inverse, head, heads, tokens, eps, scale, NORM, WEIGHTED,
            RELU, GROWTH, D, SIDE,
        )  # fmt: skip
        if GROWTH and WEIGHTED:
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


class Growth(NamedTuple):
    """Maps [B,N,4,4] of keys into ray frames, tables of the second half, growth [B,H,N], and its gradient [B,N,H]."""

    matrix: Tensor
    cos: Tensor
    sin: Tensor
    ratio: Tensor
    grad: Tensor


def activation_gradients(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    activation: Activation,
    scale: float,
    growth: Growth | None = None,
) -> RawGradients:
    """Through scale, ReLU and norm: gradients of raw x [B,N,H,D], aligned, from those of activated x.

    What growth brings is added to `grad` [B,N,H,D] in place, if there is growth and a weight.
    """
    batch, tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms = grad.new_empty((batch, tokens), dtype=torch.float32)
    group = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    Fitted(_activation_kernel, x.device)[(batch * tokens,)](
        x,
        grad,
        grad if weight is None else weight,
        *(growth or [grad] * len(Growth._fields)),
        out,
        rms,
        heads,
        tokens,
        *octet_strides(x),
        int(growth is not None and growth.cos.shape[0] > 1),
        activation.eps,
        scale,
        D=dim,
        SIDE=padded(dim),
        HEADS=group,
        GROUPS=triton.cdiv(heads, group),
        NORM=NORMS[activation.norm],
        WEIGHTED=weight is not None,
        RELU=activation.relu,
        GROWTH=growth is not None,
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
