"""Positions of tokens, in registers."""

import triton
import triton.language as tl

from longtake.kernels.triton_tiles import rotate_pairs

HEAD_NORM = tl.constexpr(1)
"""Over the D entries of each head; 0: no norm."""
FULL_NORM = tl.constexpr(2)
"""Over all heads, its inverse RMS given for each token."""
ROTARY = tl.constexpr(1)
"""All pairs are rotated; 0: no positions."""
CAMERA = tl.constexpr(2)
"""The first half is mapped by a 4×4 matrix, pairs of the second are rotated."""


@triton.jit
def load_turn(
    cos: tl.tensor, sin: tl.tensor, row: tl.tensor, inside: tl.tensor, STRIDE: tl.constexpr,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Cosines and sines of PAIRS pairs of some rows, [R,WIDTH] each."""
    pair = tl.arange(0, WIDTH)
    place = (row * STRIDE)[:, None] + (FIRST + pair)[None, :]
    within = inside[:, None] & (pair < PAIRS)[None, :]
    return tl.load(cos + place, within, 0.0), tl.load(sin + place, within, 0.0)


@triton.jit
def _load_row(row: tl.tensor, STEP: tl.constexpr) -> tl.tuple:
    return tl.load(row), tl.load(row + STEP), tl.load(row + 2 * STEP), tl.load(row + 3 * STEP)


@triton.jit
def load_matrix(matrix: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tuple:
    """The four rows of a 4×4 matrix, or its columns, of four entries each."""
    row: tl.constexpr = 1 if TRANSPOSED else 4
    col: tl.constexpr = 4 if TRANSPOSED else 1
    return (
        _load_row(matrix, col),
        _load_row(matrix + row, col),
        _load_row(matrix + 2 * row, col),
        _load_row(matrix + 3 * row, col),
    )


@triton.jit
def _split_quads(x: tl.tensor) -> tl.tuple:
    """First, second, third and fourth entries of every group of four of x [R,W], [R,W/4] each."""
    evens, odds = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(evens)
    x1, x3 = tl.split(odds)
    return x0, x1, x2, x3


@triton.jit
def _join_quads(x: tl.tuple) -> tl.tensor:
    whole = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    return tl.reshape(whole, (x[0].shape[0], x[0].shape[1] * 4))


@triton.jit
def _mapped(x: tl.tuple, row: tl.tuple) -> tl.tensor:
    """One entry of matrix·group of every group."""
    return row[0] * x[0] + row[1] * x[1] + row[2] * x[2] + row[3] * x[3]


@triton.jit
def map_quads(x: tl.tensor, m: tl.tuple) -> tl.tensor:
    """Every group of four of x [R,W] ← matrix·group; the entries of its rows m are shaped to fit [R,W/4]."""
    x = _split_quads(x)
    return _join_quads((_mapped(x, m[0]), _mapped(x, m[1]), _mapped(x, m[2]), _mapped(x, m[3])))


@triton.jit
def transposed(m: tl.tuple) -> tl.tuple:
    """The columns of a 4×4 matrix, from its rows."""
    return (
        (m[0][0], m[1][0], m[2][0], m[3][0]),
        (m[0][1], m[1][1], m[2][1], m[3][1]),
        (m[0][2], m[1][2], m[2][2], m[3][2]),
        (m[0][3], m[1][3], m[2][3], m[3][3]),
    )


@triton.jit
def _load_rows(row: tl.tensor, inside: tl.tensor, STEP: tl.constexpr) -> tl.tuple:
    return (
        tl.load(row, inside, 0.0)[:, None],
        tl.load(row + STEP, inside, 0.0)[:, None],
        tl.load(row + 2 * STEP, inside, 0.0)[:, None],
        tl.load(row + 3 * STEP, inside, 0.0)[:, None],
    )


@triton.jit
def load_matrices(matrix: tl.tensor, token: tl.tensor, inside: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tuple:
    """The four rows of the matrices of some tokens, or their columns, of four entries [R,1] each."""
    row: tl.constexpr = 1 if TRANSPOSED else 4
    col: tl.constexpr = 4 if TRANSPOSED else 1
    first = matrix + token * 16
    return (
        _load_rows(first, inside, col),
        _load_rows(first + row, inside, col),
        _load_rows(first + 2 * row, inside, col),
        _load_rows(first + 3 * row, inside, col),
    )


@triton.jit
def map_tokens(
    x: tl.tensor, matrix: tl.tensor, token: tl.tensor, inside: tl.tensor, TRANSPOSED: tl.constexpr
) -> tl.tensor:
    """`map_quads` with the matrices of some tokens, of which one row after the other takes registers."""
    row: tl.constexpr = 1 if TRANSPOSED else 4
    col: tl.constexpr = 4 if TRANSPOSED else 1
    x, first = _split_quads(x), matrix + token * 16
    y0 = _mapped(x, _load_rows(first, inside, col))
    y1 = _mapped(x, _load_rows(first + row, inside, col))
    y2 = _mapped(x, _load_rows(first + 2 * row, inside, col))
    y3 = _mapped(x, _load_rows(first + 3 * row, inside, col))
    return _join_quads((y0, y1, y2, y3))


@triton.jit
def norm_factor(
    x: tl.tensor, rms: tl.tensor, row: tl.tensor, inside: tl.tensor, eps: tl.tensor, NORM: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the norm multiplies some tokens x by, [R]; it commutes with all that follows. Finite beyond the last one."""
    factor = tl.full((x.shape[0],), 1.0, tl.float32)
    if NORM == HEAD_NORM:
        factor = tl.div_rn(1.0, tl.sqrt_rn(tl.where(inside, tl.sum(x * x, axis=1) / D + eps, 1.0)))
    elif NORM == FULL_NORM:
        factor = tl.load(rms + row, inside, 0.0)
    return factor


@triton.jit
def unplace(
    x: tl.tensor, matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, row: tl.tensor, tokens: tl.tensor,
    first: tl.tensor, D: tl.constexpr, POSITIONS: tl.constexpr, TRANSPOSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradients [R,C] of entries from `first` on of placed tokens → those of the tokens.

    TRANSPOSED: the columns of their matrices are those that map back.
    """
    if POSITIONS != 0:
        PAIRS: tl.constexpr = D // 2 if POSITIONS == ROTARY else D // 4
        pair = first // 2 + tl.arange(0, x.shape[1] // 2) - (D // 2 - PAIRS)
        place = (row * PAIRS)[:, None] + pair[None, :]
        within = (row < tokens)[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
        x = rotate_pairs(x, tl.load(cos + place, within, 1.0), -tl.load(sin + place, within, 0.0))
        if POSITIONS == CAMERA:
            mapped = map_tokens(x, matrix, row, row < tokens, TRANSPOSED)
            x = tl.where((first + tl.arange(0, x.shape[1]) < D // 2)[None, :], mapped, x)
    return x
