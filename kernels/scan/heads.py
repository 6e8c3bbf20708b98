"""Some heads of one token on their way: loaded, normed, rectified, given their position, stored; [H,WIDTH] a half."""

import triton
import triton.language as tl

from longtake.kernels.scan.tokens import CAMERA, FULL_NORM, HEAD_NORM, ROTARY, load_matrix, map_quads
from longtake.kernels.triton_tiles import rotate_pairs, to_operand

NORM_FLOOR = tl.constexpr(1e-12)


@triton.jit
def load_heads(
    x: tl.tensor, head: tl.tensor, stride: tl.tensor, heads: tl.tensor, FIRST: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One half of some heads of a token, [H,WIDTH] fp32."""
    col = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (col < HALF)[None, :]
    at = (head * stride).to(tl.int64)[:, None] * 8 + (FIRST + col)[None, :]
    return tl.load(x + at, inside, 0.0).to(tl.float32)


@triton.jit
def square_sum(x0: tl.tensor, x1: tl.tensor) -> tl.tensor:
    """Σ x² of each head, [H]."""
    return tl.sum(x0 * x0 + x1 * x1, axis=1)


@triton.jit
def inverse_rms(
    x: tl.tensor, rms: tl.tensor, stride: tl.tensor, heads: tl.tensor, eps: tl.tensor, NORM: tl.constexpr,
    GIVEN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """1 / √(mean x² + eps) over all heads of a token, or as it is given; 1 without the full norm."""
    HALF: tl.constexpr = D // 2
    inverse = tl.full((), 1.0, tl.float32)
    if NORM == FULL_NORM and GIVEN:
        inverse = tl.load(rms)
    elif NORM == FULL_NORM:
        total = tl.zeros((HEADS,), tl.float32)
        for group in tl.static_range(0, GROUPS):
            head = group * HEADS + tl.arange(0, HEADS)
            total += square_sum(
                load_heads(x, head, stride, heads, 0, HALF, WIDTH),
                load_heads(x, head, stride, heads, HALF, HALF, WIDTH),
            )
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(total, axis=0), heads * D * 1.0) + eps))
    return inverse


@triton.jit
def activate_heads(
    x0: tl.tensor, x1: tl.tensor, weight: tl.tensor, inverse: tl.tensor, head: tl.tensor, heads: tl.tensor,
    eps: tl.tensor, scale: tl.tensor, NORM: tl.constexpr, WEIGHTED: tl.constexpr, RELU: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Norm, weight, ReLU and scale of some heads of a token."""
    HALF: tl.constexpr = D // 2
    factor = inverse * scale
    if NORM == HEAD_NORM:
        factor *= tl.div_rn(1.0, tl.sqrt_rn(square_sum(x0, x1) / D + eps))[:, None]
    if WEIGHTED:
        x0 *= load_heads(weight, head, D // 8, heads, 0, HALF, WIDTH)
        x1 *= load_heads(weight, head, D // 8, heads, HALF, HALF, WIDTH)
    if RELU:
        x0 = tl.maximum(x0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x1 = tl.maximum(x1, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x0 * factor, x1 * factor


@triton.jit
def turn_of(cos: tl.tensor, sin: tl.tensor, FIRST: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """Cosines and sines of PAIRS pairs of a token, [1,WIDTH] each."""
    pair = tl.arange(0, WIDTH)
    c = tl.load(cos + FIRST + pair, pair < PAIRS, 0.0)
    s = tl.load(sin + FIRST + pair, pair < PAIRS, 0.0)
    return c[None, :], s[None, :]


@triton.jit
def position_of(
    matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, TRANSPOSED: tl.constexpr, POSITIONS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What places either half of every head of a token: two turns, or for the camera its matrix and a turn."""
    PAIRS: tl.constexpr = HALF // 2
    first = ()
    second = ()
    if POSITIONS == ROTARY:
        first = turn_of(cos, sin, 0, PAIRS, WIDTH // 2)
        second = turn_of(cos, sin, PAIRS, PAIRS, WIDTH // 2)
    elif POSITIONS == CAMERA:
        first = load_matrix(matrix, TRANSPOSED)
        second = turn_of(cos, sin, 0, PAIRS, WIDTH // 2)
    return first, second


@triton.jit
def place_heads(x0: tl.tensor, x1: tl.tensor, position: tl.tuple, POSITIONS: tl.constexpr) -> tl.tuple:
    """Halves of some heads with the token's position."""
    if POSITIONS == ROTARY:
        x0 = rotate_pairs(x0, position[0][0], position[0][1])
        x1 = rotate_pairs(x1, position[1][0], position[1][1])
    elif POSITIONS == CAMERA:
        x0 = map_quads(x0, position[0])
        x1 = rotate_pairs(x1, position[1][0], position[1][1])
    return x0, x1


@triton.jit
def store_heads(
    out: tl.tensor, x0: tl.tensor, x1: tl.tensor, head: tl.tensor, heads: tl.tensor, size: tl.tensor,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Both halves of some heads of a token to [H,N,D], `size` = N·D, as operands of the dtype of `out`."""
    col = tl.arange(0, x0.shape[1])
    place = head.to(tl.int64)[:, None] * size + col[None, :]
    inside = (head < heads)[:, None] & (col < HALF)[None, :]
    tl.store(out + place, to_operand(x0, out.dtype.element_ty, PRECISION), inside)
    tl.store(out + place + HALF, to_operand(x1, out.dtype.element_ty, PRECISION), inside)


@triton.jit
def growth_of(x0: tl.tensor, x1: tl.tensor, y0: tl.tensor, y1: tl.tensor) -> tl.tuple:
    """Squared norms of heads x and of what became of them, y, and the ratio of the two, each at least NORM_FLOOR."""
    before, after = square_sum(x0, x1), square_sum(y0, y1)
    lower = tl.maximum(before, NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    upper = tl.maximum(after, NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return before, after, tl.div_rn(upper, lower)
