"""Some heads of one token on their way: loaded, normed, rectified, given their position, stored; [H,SIDE].

A row is one tile, not two halves: half a row of 112 begins and ends in the middle of a sector of 32 bytes.
"""

import triton
import triton.language as tl

from longtake.kernels.scan.tokens import CAMERA, FULL_NORM, HEAD_NORM, ROTARY, load_matrix, map_quads
from longtake.kernels.triton_tiles import quotient, rotate_pairs, to_operand

NORM_FLOOR = tl.constexpr(1e-12)


@triton.jit
def load_heads(
    x: tl.tensor, head: tl.tensor, stride: tl.tensor, heads: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tensor:
    """Some heads of a token, [H,SIDE] fp32; stride in units of 8 elements."""
    col = tl.arange(0, SIDE)
    inside = (head < heads)[:, None] & (col < D)[None, :]
    at = (head * stride).to(tl.int64)[:, None] * 8 + col[None, :]
    return tl.load(x + at, inside, 0.0).to(tl.float32)


@triton.jit
def inverse_rms(
    x: tl.tensor, rms: tl.tensor, stride: tl.tensor, heads: tl.tensor, eps: tl.tensor, NORM: tl.constexpr,
    GIVEN: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """1 / √(mean x² + eps) over all heads of a token, or as it is given; 1 without the full norm."""
    inverse = tl.full((), 1.0, tl.float32)
    if NORM == FULL_NORM and GIVEN:
        inverse = tl.load(rms)
    elif NORM == FULL_NORM:
        total = tl.zeros((HEADS,), tl.float32)
        for group in tl.static_range(0, GROUPS):
            tile = load_heads(x, group * HEADS + tl.arange(0, HEADS), stride, heads, D, SIDE)
            total += tl.sum(tile * tile, axis=1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(total, axis=0), heads * D * 1.0) + eps))
    return inverse


@triton.jit
def activate_heads(
    x: tl.tensor, weight: tl.tensor, inverse: tl.tensor, head: tl.tensor, heads: tl.tensor, eps: tl.tensor,
    scale: tl.tensor, NORM: tl.constexpr, WEIGHTED: tl.constexpr, RELU: tl.constexpr, D: tl.constexpr,
    SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Norm, weight, ReLU and scale of some heads of a token."""
    factor = inverse * scale
    if NORM == HEAD_NORM:
        factor *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps))[:, None]
    if WEIGHTED:
        x *= load_heads(weight, head, D // 8, heads, D, SIDE)
    if RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x * factor


@triton.jit
def _rotary_position(
    cos: tl.tensor, sin: tl.tensor, TURN: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tuple:
    """Cosines and sines of all pairs, [1,W/2] each."""
    pair = tl.arange(0, SIDE // 2)
    c, s = tl.load(cos + pair, pair < D // 2, 0.0), tl.load(sin + pair, pair < D // 2, 0.0)
    return c[None, :], TURN * s[None, :]


@triton.jit
def _chosen(turned: tl.tensor, turn: tl.tuple, row: tl.tuple) -> tl.tuple:
    """A row of the turn where groups are turned, elsewhere of the matrix, [1,W/4] each."""
    return (
        tl.where(turned, turn[0], row[0])[None, :],
        tl.where(turned, turn[1], row[1])[None, :],
        tl.where(turned, turn[2], row[2])[None, :],
        tl.where(turned, turn[3], row[3])[None, :],
    )


@triton.jit
def _camera_position(
    matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, TRANSPOSED: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr,
    SIDE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What maps every group of four: the matrix in the first half, the turns of two pairs in the second."""
    quad = tl.arange(0, SIDE // 4)
    turned = quad >= D // 8
    pair = 2 * quad - D // 4
    inside = turned & (quad < D // 4)
    c0, c1 = tl.load(cos + pair, inside, 0.0), tl.load(cos + pair + 1, inside, 0.0)
    s0, s1 = TURN * tl.load(sin + pair, inside, 0.0), TURN * tl.load(sin + pair + 1, inside, 0.0)
    m = load_matrix(matrix, TRANSPOSED)
    return (
        _chosen(turned, (c0, -s0, 0.0, 0.0), m[0]),
        _chosen(turned, (s0, c0, 0.0, 0.0), m[1]),
        _chosen(turned, (0.0, 0.0, c1, -s1), m[2]),
        _chosen(turned, (0.0, 0.0, s1, c1), m[3]),
    )


@triton.jit
def position_of(
    matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, TRANSPOSED: tl.constexpr, TURN: tl.constexpr,
    POSITIONS: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What places every head of a token: turns of its pairs, for the camera a 4×4 matrix of every four entries.

    TRANSPOSED: columns of the matrix for its rows. TURN: 1, or −1 to turn back.
    """
    position = ()
    if POSITIONS == ROTARY:
        position = _rotary_position(cos, sin, TURN, D, SIDE)
    elif POSITIONS == CAMERA:
        position = _camera_position(matrix, cos, sin, TRANSPOSED, TURN, D, SIDE)
    return position


@triton.jit
def place_heads(x: tl.tensor, position: tl.tuple, POSITIONS: tl.constexpr) -> tl.tensor:
    """Some heads of a token with its position."""
    if POSITIONS == ROTARY:
        x = rotate_pairs(x, position[0], position[1])
    elif POSITIONS == CAMERA:
        x = map_quads(x, position)
    return x


@triton.jit
def store_heads(
    out: tl.tensor, x: tl.tensor, head: tl.tensor, heads: tl.tensor, size: tl.tensor, D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Some heads of a token to [H,N,D], `size` = N·D, as operands of the dtype of `out`."""
    col = tl.arange(0, x.shape[1])
    at = head.to(tl.int64)[:, None] * size + col[None, :]
    inside = (head < heads)[:, None] & (col < D)[None, :]
    tl.store(out + at, to_operand(x, out.dtype.element_ty, PRECISION), inside)


@triton.jit
def growth_of(x: tl.tensor, y: tl.tensor, OPERAND: tl.constexpr) -> tl.tuple:
    """Squared norms of heads x and of what became of them, y, and the ratio of the two, each at least NORM_FLOOR."""
    before, after = tl.sum(x * x, axis=1), tl.sum(y * y, axis=1)
    lower = tl.maximum(before, NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    upper = tl.maximum(after, NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return before, after, quotient(upper, lower, OPERAND)
