"""First step of a scan: what each frame does to a memory, whatever the memory is.

A record of D×D blocks holds P = Kᵀ·diag(β)·K and A = Kᵀ·diag(β)·V, and with a normaliser P_z and A_z of the keys
before rotation; its values are all one, so that A_z is one row. The tokens of a frame are summed in fixed segments, by
programs of their own, and the segments in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.triton_scan import Scan
from longtake.kernels.triton_tiles import octet_strides, padded, rotate_pairs, round_to

SEGMENTS = 4
COMBINE_BLOCK = 1024


@triton.jit
def _absorb_tokens(
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first_token: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUES: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Write P, then A [D,D] (or the row A_z [D] without VALUES), of LENGTH tokens of one frame, from `first`."""
    col = tl.arange(0, BLOCK_D)
    pair = tl.arange(0, BLOCK_D // 2)
    transition = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    update = tl.zeros((BLOCK_D, BLOCK_D) if VALUES else (BLOCK_D,), tl.float32)
    for start in range(0, LENGTH, ROWS):
        row = first + start + tl.arange(0, ROWS)
        token = first_token + row
        inside = (row < tokens)[:, None] & (col < D)[None, :]
        key = tl.load(k + (token * k_stride)[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
        if ROTATED:
            within = (row < tokens)[:, None] & (pair < D // 2)[None, :]
            turn = token[:, None] * (D // 2) + pair[None, :]
            key = rotate_pairs(key, tl.load(cos + turn, within, 0.0), tl.load(sin + turn, within, 0.0))
        weighted = round_to(key * tl.load(beta + row, row < tokens, 0.0)[:, None], OPERAND)
        left = tl.trans(weighted)
        transition = tl.dot(left, round_to(key, OPERAND), transition, input_precision="ieee")
        if VALUES:
            value = tl.load(v + (token * v_stride)[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
            update = tl.dot(left, round_to(value, OPERAND), update, input_precision="ieee")
        else:
            update += tl.sum(weighted.to(tl.float32), axis=0)  # rounded as in P_z, so that errors cancel
    square = col[:, None] * D + col[None, :]
    valid = (col < D)[:, None] & (col < D)[None, :]
    tl.store(out + square, transition, valid)
    if VALUES:
        tl.store(out + D * D + square, update, valid)
    else:
        tl.store(out + D * D + col, update, col < D)


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "k_strides", "v_strides"])
def _absorb_kernel(
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    partials: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    RECORD: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMALISER: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Partial record of one segment of one frame: program (frame of a head, segment, values or normaliser)."""
    frame = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    head = (frame // frames) % heads
    batch = frame // frames // heads
    first = segment * LENGTH
    first_token = (frame % frames) * tokens
    k += (batch * k_strides[0] + head * k_strides[2]) * 8
    v += (batch * v_strides[0] + head * v_strides[2]) * 8
    beta += frame * tokens
    out = partials + (frame * tl.num_programs(1) + segment) * RECORD
    if tl.program_id(2) == 0:
        _absorb_tokens(
            k, v, beta, cos, sin, first_token, first, tokens, k_strides[1], v_strides[1], out,
            D, BLOCK_D, ROWS, LENGTH, ROTATED, True, OPERAND,
        )  # fmt: skip
    elif NORMALISER:
        _absorb_tokens(
            k, v, beta, cos, sin, first_token, first, tokens, k_strides[1], v_strides[1], out + 2 * D * D,
            D, BLOCK_D, ROWS, LENGTH, False, False, OPERAND,
        )  # fmt: skip


@triton.jit
def _combine_kernel(
    partials: tl.tensor, records: tl.tensor, SEGMENTS: tl.constexpr, RECORD: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add the segments of one frame, first to last: program (frame of a head, part of the record)."""
    frame = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    partials += frame * SEGMENTS * RECORD
    total = tl.load(partials + entry, entry < RECORD, 0.0)
    for segment in range(1, SEGMENTS):
        total += tl.load(partials + segment * RECORD + entry, entry < RECORD, 0.0)
    tl.store(records + frame * RECORD + entry, total, entry < RECORD)


def absorb(scan: Scan) -> Tensor:
    """Records of all frames, [B·H·F, RECORD] fp32."""
    dim, tokens = scan.q.shape[-1], scan.beta.shape[-1]
    tiles = scan.tiles
    length = triton.cdiv(triton.cdiv(tokens, SEGMENTS), tiles.absorb_rows) * tiles.absorb_rows
    segments, count = triton.cdiv(tokens, length), scan.memories * scan.frames
    size = (3 * dim + 1) * dim if scan.normaliser else 2 * dim * dim
    partials = scan.beta.new_empty(count, segments, size)
    _absorb_kernel[(count, segments, 1 + scan.normaliser)](
        scan.k,
        scan.v,
        scan.beta,
        *scan.rotation,
        partials,
        scan.q.shape[2],
        scan.frames,
        tokens,
        octet_strides(scan.k),
        octet_strides(scan.v),
        D=dim,
        BLOCK_D=padded(dim),
        ROWS=tiles.absorb_rows,
        LENGTH=length,
        RECORD=size,
        ROTATED=scan.tables is not None,
        NORMALISER=scan.normaliser,
        OPERAND=tiles.operand,
        num_warps=tiles.absorb_warps,
        num_stages=tiles.absorb_stages,
    )
    records = scan.beta.new_empty(count, size)
    parts = triton.cdiv(size, COMBINE_BLOCK)
    _combine_kernel[(count, parts)](partials, records, SEGMENTS=segments, RECORD=size, BLOCK=COMBINE_BLOCK, num_warps=4)
    return records
