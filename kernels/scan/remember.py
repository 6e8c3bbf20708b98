"""Third step of a scan: the memory from frame to frame, M ← g·M − P·(g·M) + A, in fp32 registers.

What frame f reads is kept as its snapshot. Memories are held transposed, [values,keys], as updates and snapshots are; P
is symmetric, so that P·M, transposed, is M·P. States are [keys,values].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import triton_interpreted
from longtake.kernels.scan.absorb import Records
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.triton_tiles import INTERPRETED, TRITON_TYPES, padded, round_to, to_operand


@triton.jit
def _latest_start(starts: tl.tensor, chunk: tl.tensor) -> tl.tensor:
    """First frame of a chunk; of chunk −1, frame −1."""
    return tl.load(starts + chunk, chunk >= 0, -1)


@triton.jit
def load_transition(transition: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """P of a frame, [SIDE,SIDE]."""
    key = tl.arange(0, SIDE)
    inside = (key < D)[:, None] & (key < D)[None, :]
    tile = tl.load(transition + key[:, None] * D + key[None, :], inside, 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def erase(memory: tl.tensor, transition: tl.tensor, OPERAND: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """M·P; a 16-bit product takes M as the sum of two operands, so that no bit of the state is lost in it."""
    high = to_operand(memory, OPERAND, PRECISION)
    erased = tl.dot(high, transition, input_precision=PRECISION)
    if tl.float32 != OPERAND:
        low = round_to(memory - high.to(tl.float32), OPERAND)
        erased = tl.dot(low, transition, erased, input_precision=PRECISION)
    return erased


@triton.jit
def _remember_values(
    transitions: tl.tensor, updates: tl.tensor, decay: tl.tensor, starts: tl.tensor, state: tl.tensor,
    snapshots: tl.tensor, final: tl.tensor, seeded: tl.tensor, reverse: tl.tensor, frames: tl.tensor,
    chunks: tl.tensor, block: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, FRAMES: tl.constexpr, NORMALISER: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Walk over the frames with COLUMNS value columns of one memory."""
    P_STRIDE: tl.constexpr = 2 * D * D if NORMALISER else D * D
    A_STRIDE: tl.constexpr = D * D + D if NORMALISER else D * D
    key = tl.arange(0, SIDE)
    col = block * COLUMNS + tl.arange(0, COLUMNS)
    stored, slab = key[None, :] * D + col[:, None], col[:, None] * D + key[None, :]
    valid = (key < D)[None, :] & (col < D)[:, None]
    memory = tl.load(state + stored, valid & seeded, 0.0)
    frame = tl.where(reverse, frames - 1, 0).to(tl.int64)
    step, before = tl.where(reverse, -1, 1), tl.where(reverse, 1, 0)
    chunk = chunks - 1
    start = _latest_start(starts, chunk)
    if reverse:
        tl.store(snapshots + frame * D * D + slab, round_to(memory, snapshots.dtype.element_ty), valid)
    for _ in tl.range(0, FRAMES if INTERPRETED else frames, num_stages=STAGES):
        transition = load_transition(transitions + frame * P_STRIDE, D, SIDE)
        update = tl.load(updates + frame * A_STRIDE + slab, valid, 0.0)
        memory = tl.load(decay + frame).to(tl.float32) * memory
        memory += update - erase(memory, transition, OPERAND, PRECISION)
        fresh = reverse & (start == frame)
        memory = tl.where(fresh, 0.0, memory)
        chunk -= fresh.to(tl.int32)
        start = _latest_start(starts, chunk)
        read = frame - before  # what frame 0 does, no frame reads in reverse
        at = snapshots + read * D * D + slab
        tl.store(at, round_to(memory, snapshots.dtype.element_ty), valid & (read >= 0))
        frame += step
    tl.store(final + stored, memory, valid & (not reverse))


@triton.jit
def _remember_normaliser(
    transitions: tl.tensor, updates: tl.tensor, decay: tl.tensor, starts: tl.tensor, state: tl.tensor,
    snapshots: tl.tensor, final: tl.tensor, seeded: tl.tensor, reverse: tl.tensor, frames: tl.tensor, chunks: tl.tensor,
    D: tl.constexpr, SIDE: tl.constexpr, STAGES: tl.constexpr, FRAMES: tl.constexpr,
) -> None:  # fmt: skip
    """Walk over the frames with the normaliser of one memory."""
    key = tl.arange(0, SIDE)
    z = tl.load(state + key, (key < D) & seeded, 0.0)
    frame = tl.where(reverse, frames - 1, 0).to(tl.int64)
    step, before = tl.where(reverse, -1, 1), tl.where(reverse, 1, 0)
    chunk = chunks - 1
    start = _latest_start(starts, chunk)
    if reverse:
        tl.store(snapshots + frame * D + key, z, key < D)
    for _ in tl.range(0, FRAMES if INTERPRETED else frames, num_stages=STAGES):
        transition = load_transition(transitions + frame * 2 * D * D, D, SIDE).to(tl.float32)
        update = tl.load(updates + frame * (D + 1) * D + key, key < D, 0.0)
        z = tl.load(decay + frame).to(tl.float32) * z
        z += update - tl.sum(transition * z[:, None], axis=0)
        fresh = reverse & (start == frame)
        z = tl.where(fresh, 0.0, z)
        chunk -= fresh.to(tl.int32)
        start = _latest_start(starts, chunk)
        read = frame - before
        tl.store(snapshots + read * D + key, z, (key < D) & (read >= 0))
        frame += step
    tl.store(final + key, z, (key < D) & (not reverse))


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "chunks", "first_direction", "has_state", "has_slots", "into_slots",
    ]
)  # fmt: skip
def _remember_kernel(
    transitions: tl.tensor,
    updates: tl.tensor,
    decay: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    kv: tl.tensor,
    z: tl.tensor,
    snapshots: tl.tensor,
    z_snapshots: tl.tensor,
    final_kv: tl.tensor,
    final_z: tl.tensor,
    heads: int,
    frames: int,
    chunks: int,
    first_direction: int,
    has_state: int,
    has_slots: int,
    into_slots: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    FRAMES: tl.constexpr,
    NORMALISER: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One direction of one memory: program (memory, block of value columns or normaliser, direction)."""
    memory = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    reverse = tl.program_id(2) + first_direction == 1
    seeded = (has_state != 0) & (not reverse)
    slot = tl.load(slots + memory // heads, has_slots != 0, 0).to(tl.int64)
    source = tl.where(has_slots != 0, slot * heads + memory % heads, memory)
    target = tl.where(into_slots != 0, source, memory)
    transitions += memory * frames * (2 if NORMALISER else 1) * D * D
    updates += memory * frames * (D + 1 if NORMALISER else D) * D
    decay += memory * frames
    which = (tl.program_id(2) * tl.num_programs(0) + memory) * frames
    if block * COLUMNS < D:
        _remember_values(
            transitions, updates, decay, starts, kv + source * D * D, snapshots + which * D * D,
            final_kv + target * D * D, seeded, reverse, frames, chunks, block,
            D, SIDE, COLUMNS, STAGES, FRAMES, NORMALISER, OPERAND, PRECISION,
        )  # fmt: skip
    else:
        _remember_normaliser(
            transitions + D * D, updates + D * D, decay, starts, z + source * D, z_snapshots + which * D,
            final_z + target * D, seeded, reverse, frames, chunks, D, SIDE, STAGES, FRAMES,
        )  # fmt: skip


class Memory(NamedTuple):
    """State of a scan: kv [B,H,D,D]; z [B,H,D], or None without a normaliser; with `slots` [B], pools [slots,…]."""

    kv: Tensor
    z: Tensor | None


class Snapshots(NamedTuple):
    """What each frame reads: kv [directions,B·H,F,D,D], values before keys; z [directions,B·H,F,D] fp32, or None."""

    kv: Tensor
    z: Tensor | None


def remember(
    scan: Scan,
    records: Records,
    *,
    state: Memory | None,
    final: Memory | None,
    slots: Tensor | None,
    into_slots: bool,
    starts: Tensor | None,
) -> Snapshots:
    """Snapshots of all frames; the forward direction starts from `state` and leaves its last memory in `final`."""
    config, dim, frames = scan.configuration, scan.dim, scan.frames
    dtype = torch.bfloat16 if config.bf16_snapshots else torch.float32
    kv = scan.q.new_empty((scan.directions, scan.memories, frames, dim, dim), dtype=dtype)
    z = scan.q.new_empty(kv.shape[:-1], dtype=torch.float32) if scan.normaliser else None
    columns = min(config.value_columns, padded(dim))
    kv_in, z_in = state or (records.updates, None)
    kv_out, z_out = final or (records.updates, None)
    _remember_kernel[(scan.memories, triton.cdiv(dim, columns) + scan.normaliser, scan.directions)](
        records.transitions,
        records.updates,
        scan.decay,
        scan.decay if starts is None else starts,
        scan.decay if slots is None else slots,
        kv_in,
        kv_in if z_in is None else z_in,
        kv,
        kv if z is None else z,
        kv_out,
        kv_out if z_out is None else z_out,
        scan.decay.shape[1],
        frames,
        0 if starts is None else starts.shape[0],
        int(scan.direction == "reverse"),
        int(state is not None),
        int(slots is not None),
        int(into_slots),
        D=dim,
        SIDE=padded(dim),
        COLUMNS=columns,
        STAGES=config.remember_stages,
        FRAMES=frames if triton_interpreted() else 0,  # the interpreter walks over nothing that a launch brings
        NORMALISER=scan.normaliser,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=config.remember_warps,
    )
    return Snapshots(kv, z)
