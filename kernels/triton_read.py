"""Last step of a scan: what each token's q finds in the memory of its frame."""

import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.triton_scan import Scan
from longtake.kernels.triton_tiles import octet_strides, padded, rotate_pairs, round_to


@triton.jit
def _summed(
    forward: tl.tensor, reverse: tl.tensor, place: tl.tensor, valid: tl.tensor, DIRECTIONS: tl.constexpr
) -> tl.tensor:
    """A part of the memory of one direction, or of both."""
    memory = tl.load(forward + place, valid, 0.0)
    if DIRECTIONS == 2:
        memory += tl.load(reverse + place, valid, 0.0)
    return memory


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "q_strides", "eps"])
def _read_kernel(
    q: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    boundaries: tl.tensor,
    out: tl.tensor,
    denominator: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    q_strides: tl.tuple,
    eps: float,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMALISER: tl.constexpr,
    MERGED: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Read some tokens of one frame: program (frame of a head, tile of tokens)."""
    frame = tl.program_id(0).to(tl.int64)
    memory_index = frame // frames
    head = memory_index % heads
    batch = memory_index // heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = (frame % frames) * tokens + row
    col = tl.arange(0, BLOCK_D)
    q += (batch * q_strides[0] + head * q_strides[2]) * 8
    forward = boundaries + (memory_index * (frames + 1) + frame % frames + 1) * HEIGHT * D
    reverse = forward + (tl.num_programs(0) // frames).to(tl.int64) * (frames + 1) * HEIGHT * D
    numerator = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for depth in range(0, D, DEPTH):
        key = depth + tl.arange(0, DEPTH)
        inside = (row < tokens)[:, None] & (key < D)[None, :]
        query = tl.load(q + (token * q_strides[1])[:, None] * 8 + key[None, :], inside, 0.0).to(tl.float32)
        slab = key[:, None] * D + col[None, :]
        valid = (key < D)[:, None] & (col < D)[None, :]
        memory = _summed(forward, reverse, slab, valid, DIRECTIONS)
        if NORMALISER:
            z = _summed(forward, reverse, D * D + key, key < D, DIRECTIONS)
            total += tl.sum(query * z[None, :], axis=1)
        if ROTATED:
            pair = depth // 2 + tl.arange(0, DEPTH // 2)
            within = (row < tokens)[:, None] & (pair < D // 2)[None, :]
            turn = token[:, None] * (D // 2) + pair[None, :]
            query = rotate_pairs(query, tl.load(cos + turn, within, 0.0), tl.load(sin + turn, within, 0.0))
        numerator = tl.dot(round_to(query, OPERAND), round_to(memory, OPERAND), numerator, input_precision="ieee")
    place = ((batch * frames * tokens + token) * heads + head).to(tl.int64)
    if MERGED:
        numerator *= tl.div_rn(1.0, total + eps)[:, None]
    elif NORMALISER:
        tl.store(denominator + place, total, row < tokens)
    tl.store(out + place[:, None] * D + col[None, :], numerator, (row < tokens)[:, None] & (col < D)[None, :])


def read(scan: Scan, boundaries: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Reads [B,N,H,D] of every token, divided by the denominator + eps if given, else the denominator [B,N,H] apart."""
    dim, tokens, tiles = scan.q.shape[-1], scan.beta.shape[-1], scan.tiles
    out = scan.beta.new_empty(scan.q.shape)
    denominator = scan.beta.new_empty(scan.q.shape[:-1]) if scan.normaliser and eps is None else None
    _read_kernel[(scan.memories * scan.frames, triton.cdiv(tokens, tiles.read_rows))](
        scan.q,
        *scan.rotation,
        boundaries,
        out,
        out if denominator is None else denominator,
        scan.q.shape[2],
        scan.frames,
        tokens,
        octet_strides(scan.q),
        eps or 0.0,
        D=dim,
        BLOCK_D=padded(dim),
        ROWS=tiles.read_rows,
        DEPTH=min(tiles.read_depth, padded(dim)),
        HEIGHT=boundaries.shape[-2],
        DIRECTIONS=boundaries.shape[0],
        ROTATED=scan.tables is not None,
        NORMALISER=scan.normaliser,
        MERGED=eps is not None,
        OPERAND=tiles.operand,
        num_warps=tiles.read_warps,
        num_stages=1,
    )
    return out, denominator
