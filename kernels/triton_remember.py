"""Second step of a scan: the memory from frame to frame, M ← g·M − P·(g·M) + A, in fp32."""

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.triton_scan import Scan
from longtake.kernels.triton_tiles import padded

Directions = Literal["forward", "reverse", "both"]


class Memory(NamedTuple):
    """State of a scan: kv [B,H,D,D]; z [B,H,D], or None without a normaliser. Dense fp32."""

    kv: Tensor
    z: Tensor | None


@triton.jit
def _step_values(
    before: tl.tensor,
    after: tl.tensor,
    record: tl.tensor,
    decay: tl.tensor,
    col: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """g·M − P·(g·M) + A for some value columns of M = before; stored to after, and returned."""
    row = tl.arange(0, BLOCK_D)
    slab = row[:, None] * D + col[None, :]
    valid = (row < D)[:, None] & (col < D)[None, :]
    erased = tl.zeros((BLOCK_D, col.shape[0]), tl.float32)
    for depth in range(0, D, DEPTH):
        key = depth + tl.arange(0, DEPTH)
        transition_valid = (row < D)[:, None] & (key < D)[None, :]
        transition = tl.load(record + row[:, None] * D + key[None, :], transition_valid, 0.0)
        memory_valid = (key < D)[:, None] & (col < D)[None, :]
        memory = tl.load(before + key[:, None] * D + col[None, :], memory_valid, 0.0)
        erased = tl.dot(transition, decay * memory, erased, input_precision=PRECISION)
    faded = decay * tl.load(before + slab, valid, 0.0)
    memory = faded - erased + tl.load(record + D * D + slab, valid, 0.0)
    tl.store(after + slab, memory, valid)
    return memory


@triton.jit
def _step_normaliser(
    before: tl.tensor, after: tl.tensor, record: tl.tensor, decay: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """g·z − P_z·(g·z) + A_z for the row z = before; stored to after, and returned."""
    row = tl.arange(0, BLOCK_D)
    valid = (row < D)[:, None] & (row < D)[None, :]
    transition = tl.load(record + row[:, None] * D + row[None, :], valid, 0.0)
    faded = decay * tl.load(before + row, row < D, 0.0)
    erased = tl.sum(transition * faded[None, :], axis=1)
    memory = faded - erased + tl.load(record + D * D + row, row < D, 0.0)
    tl.store(after + row, memory, row < D)
    return memory


@triton.jit
def _remember_values(
    records: tl.tensor,
    decay: tl.tensor,
    state: tl.tensor,
    boundaries: tl.tensor,
    final: tl.tensor,
    seeded: tl.tensor,
    reverse: tl.tensor,
    frames: tl.tensor,
    block: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DEPTH: tl.constexpr,
    RECORD: tl.constexpr,
    HEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Walk from boundary to boundary with BLOCK_E value columns of one memory."""
    row = tl.arange(0, BLOCK_D)
    col = block * BLOCK_E + tl.arange(0, BLOCK_E)
    slab = row[:, None] * D + col[None, :]
    valid = (row < D)[:, None] & (col < D)[None, :]
    memory = tl.load(state + slab, valid & seeded, 0.0)
    boundary = tl.where(reverse, frames, 0).to(tl.int64)
    stride = tl.where(reverse, -1, 1)
    last = tl.where(reverse, 1, frames)
    tl.store(boundaries + boundary * HEIGHT * D + slab, memory, valid)
    while boundary != last:
        tl.debug_barrier()  # the step reads what other threads of this program stored
        frame = boundary - reverse.to(tl.int64)
        before = boundaries + boundary * HEIGHT * D
        memory = _step_values(
            before, before + stride * HEIGHT * D, records + frame * RECORD, tl.load(decay + frame), col,
            D, BLOCK_D, DEPTH, PRECISION,
        )  # fmt: skip
        boundary += stride
    tl.store(final + slab, memory, valid & (not reverse))


@triton.jit
def _remember_normaliser(
    records: tl.tensor,
    decay: tl.tensor,
    state: tl.tensor,
    boundaries: tl.tensor,
    final: tl.tensor,
    seeded: tl.tensor,
    reverse: tl.tensor,
    frames: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RECORD: tl.constexpr,
    HEIGHT: tl.constexpr,
) -> None:
    """Walk from boundary to boundary with the normaliser of one memory."""
    row = tl.arange(0, BLOCK_D)
    memory = tl.load(state + row, (row < D) & seeded, 0.0)
    boundary = tl.where(reverse, frames, 0).to(tl.int64)
    stride = tl.where(reverse, -1, 1)
    last = tl.where(reverse, 1, frames)
    tl.store(boundaries + boundary * HEIGHT * D + row, memory, row < D)
    while boundary != last:
        tl.debug_barrier()  # the step reads what other threads of this program stored
        frame = boundary - reverse.to(tl.int64)
        before = boundaries + boundary * HEIGHT * D
        memory = _step_normaliser(
            before, before + stride * HEIGHT * D, records + frame * RECORD, tl.load(decay + frame), D, BLOCK_D
        )
        boundary += stride
    tl.store(final + row, memory, (row < D) & (not reverse))


@triton.jit(do_not_specialize=["has_state", "first_direction", "frames"])
def _remember_kernel(
    records: tl.tensor,
    decay: tl.tensor,
    kv: tl.tensor,
    z: tl.tensor,
    boundaries: tl.tensor,
    final_kv: tl.tensor,
    final_z: tl.tensor,
    has_state: int,
    first_direction: int,
    frames: int,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DEPTH: tl.constexpr,
    RECORD: tl.constexpr,
    HEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One direction of one memory: program (memory, block of value columns or normaliser, direction)."""
    memory = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    reverse = tl.program_id(2) + first_direction == 1
    seeded = (has_state != 0) & (not reverse)
    records += memory * frames * RECORD
    decay += memory * frames
    boundaries += (tl.program_id(2) * tl.num_programs(0) + memory) * (frames + 1) * HEIGHT * D
    if block * BLOCK_E < D:
        _remember_values(
            records, decay, kv + memory * D * D, boundaries, final_kv + memory * D * D,
            seeded, reverse, frames, block, D, BLOCK_D, BLOCK_E, DEPTH, RECORD, HEIGHT, PRECISION,
        )  # fmt: skip
    else:
        _remember_normaliser(
            records + 2 * D * D, decay, z + memory * D, boundaries + D * D, final_z + memory * D,
            seeded, reverse, frames, D, BLOCK_D, RECORD, HEIGHT,
        )  # fmt: skip


def remember(scan: Scan, records: Tensor, state: Memory | None, directions: Directions) -> tuple[Tensor, Memory | None]:
    """Memory at every boundary between frames, [directions,B·H,F+1,HEIGHT,D], and the state after a forward scan.

    Boundary f is the one before frame f; either direction reads frame f with the memory of boundary f + 1. HEIGHT is D,
    or D + 1 with the normaliser as the last row. The reverse scan never reaches boundary 0, which stays unwritten.
    """
    dim, tiles = scan.q.shape[-1], scan.tiles
    height, count = dim + scan.normaliser, 2 if directions == "both" else 1
    boundaries = scan.beta.new_empty(count, scan.memories, scan.frames + 1, height, dim)
    final = empty_memory(scan) if directions != "reverse" else None
    kv, z = state or (records, None)
    final_kv, final_z = final or (boundaries, None)
    block = min(tiles.value_columns, padded(dim))
    _remember_kernel[(scan.memories, triton.cdiv(dim, block) + scan.normaliser, count)](
        records,
        scan.decay,
        kv,
        kv if z is None else z,
        boundaries,
        final_kv,
        final_kv if final_z is None else final_z,
        int(state is not None),
        int(directions == "reverse"),
        scan.frames,
        D=dim,
        BLOCK_D=padded(dim),
        BLOCK_E=block,
        DEPTH=16,
        RECORD=records.shape[-1],
        HEIGHT=height,
        PRECISION=tiles.precision,
        num_warps=4,
    )
    return boundaries, final


def empty_memory(scan: Scan) -> Memory:
    z = scan.beta.new_empty(scan.kv_shape[:-1]) if scan.normaliser else None
    return Memory(scan.beta.new_empty(scan.kv_shape), z)
