"""Second step of the backward pass: the gradient of the memory from frame to frame.

Gradients of memories are held transposed, [values,keys], as the memories are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import triton_interpreted
from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.remember import Memory, Snapshots, erase, load_transition
from longtake.kernels.triton_tiles import INTERPRETED, TRITON_TYPES, padded


@triton.jit
def _first_of_chunk(starts: tl.tensor, chunk: tl.tensor, chunks: tl.tensor) -> tl.tensor:
    """First frame of a chunk; beyond the last one −1."""
    return tl.load(starts + chunk, chunk < chunks, -1)


@triton.jit
def _recall_values(
    transitions: tl.tensor, received: tl.tensor, decay: tl.tensor, starts: tl.tensor, final_grad: tl.tensor,
    grads: tl.tensor, state_grad: tl.tensor, finished: tl.tensor, reverse: tl.tensor, frames: tl.tensor,
    chunks: tl.tensor, block: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, FRAMES: tl.constexpr, NORMALISER: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Walk over the frames with COLUMNS value columns of the gradient of one memory."""
    P_STRIDE: tl.constexpr = 2 * D * D if NORMALISER else D * D
    B_STRIDE: tl.constexpr = D * D + D if NORMALISER else D * D
    key = tl.arange(0, SIDE)
    col = block * COLUMNS + tl.arange(0, COLUMNS)
    stored, slab = key[None, :] * D + col[:, None], col[:, None] * D + key[None, :]
    valid = (key < D)[None, :] & (col < D)[:, None]
    grad = tl.load(final_grad + stored, valid & finished, 0.0)
    frame = tl.where(reverse, 0, frames - 1).to(tl.int64)
    step = tl.where(reverse, 1, -1)
    chunk = tl.zeros_like(chunks)
    start = _first_of_chunk(starts, chunk, chunks)
    for _ in tl.range(0, FRAMES if INTERPRETED else frames, num_stages=STAGES):
        transition = load_transition(transitions + frame * P_STRIDE, D, SIDE)
        back = tl.load(received + frame * B_STRIDE + slab, valid, 0.0)
        fresh = reverse & ((start == frame) | (frame == 0))
        chunk += (reverse & (start == frame)).to(tl.int32)
        start = _first_of_chunk(starts, chunk, chunks)
        grad = tl.where(fresh, 0.0, grad) + tl.where(reverse, 0.0, back)
        tl.store(grads + frame * D * D + slab, grad, valid)
        through = tl.where(fresh, 0.0, grad - erase(grad, transition, OPERAND, PRECISION))
        grad = tl.load(decay + frame).to(tl.float32) * through + tl.where(reverse, back, 0.0)
        frame += step
    tl.store(state_grad + stored, grad, valid & (not reverse))


@triton.jit
def _recall_normaliser(
    transitions: tl.tensor, received: tl.tensor, decay: tl.tensor, starts: tl.tensor, state: tl.tensor,
    snapshots: tl.tensor, final_grad: tl.tensor, grads: tl.tensor, decay_grad: tl.tensor, state_grad: tl.tensor,
    seeded: tl.tensor, finished: tl.tensor, reverse: tl.tensor, frames: tl.tensor, chunks: tl.tensor,
    D: tl.constexpr, SIDE: tl.constexpr, STAGES: tl.constexpr, FRAMES: tl.constexpr,
) -> None:  # fmt: skip
    """Walk over the frames with the gradient of the normaliser of one memory."""
    key = tl.arange(0, SIDE)
    grad = tl.load(final_grad + key, (key < D) & finished, 0.0)
    frame = tl.where(reverse, 0, frames - 1).to(tl.int64)
    step, before = tl.where(reverse, 1, -1), tl.where(reverse, 0, 1)
    chunk = tl.zeros_like(chunks)
    start = _first_of_chunk(starts, chunk, chunks)
    for _ in tl.range(0, FRAMES if INTERPRETED else frames, num_stages=STAGES):
        transition = load_transition(transitions + frame * 2 * D * D, D, SIDE).to(tl.float32)
        back = tl.load(received + frame * (D + 1) * D + key, key < D, 0.0)
        held = frame - before
        memory = tl.load(snapshots + held * D + key, (key < D) & (held >= 0), 0.0)
        memory += tl.load(state + key, (key < D) & seeded & (held < 0), 0.0)
        fresh = reverse & ((start == frame) | (frame == 0))
        chunk += (reverse & (start == frame)).to(tl.int32)
        start = _first_of_chunk(starts, chunk, chunks)
        grad = tl.where(fresh, 0.0, grad) + tl.where(reverse, 0.0, back)
        tl.store(grads + frame * D + key, grad, key < D)
        through = tl.where(fresh, 0.0, grad - tl.sum(transition * grad[:, None], axis=0))
        tl.store(decay_grad + frame, tl.sum(tl.fma(memory, through, 0.0), axis=0))
        grad = tl.load(decay + frame).to(tl.float32) * through + tl.where(reverse, back, 0.0)
        frame += step
    tl.store(state_grad + key, grad, (key < D) & (not reverse))


@triton.jit(
    do_not_specialize=["heads", "frames", "chunks", "first_direction", "has_state", "has_final"],
)
def _recall_kernel(
    transitions: tl.tensor,
    received: tl.tensor,
    decay: tl.tensor,
    starts: tl.tensor,
    z: tl.tensor,
    z_snapshots: tl.tensor,
    final_kv_grad: tl.tensor,
    final_z_grad: tl.tensor,
    grads: tl.tensor,
    z_grads: tl.tensor,
    decay_grad: tl.tensor,
    kv_grad: tl.tensor,
    z_grad: tl.tensor,
    heads: int,
    frames: int,
    chunks: int,
    first_direction: int,
    has_state: int,
    has_final: int,
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
    finished = (has_final != 0) & (not reverse)
    transitions += memory * frames * (2 if NORMALISER else 1) * D * D
    received += memory * frames * (D + 1 if NORMALISER else D) * D
    decay += memory * frames
    which = (tl.program_id(2) * tl.num_programs(0) + memory) * frames
    if block * COLUMNS < D:
        _recall_values(
            transitions, received, decay, starts, final_kv_grad + memory * D * D, grads + which * D * D,
            kv_grad + memory * D * D, finished, reverse, frames, chunks, block,
            D, SIDE, COLUMNS, STAGES, FRAMES, NORMALISER, OPERAND, PRECISION,
        )  # fmt: skip
    else:
        _recall_normaliser(
            transitions + D * D, received + D * D, decay, starts, z + memory * D, z_snapshots + which * D,
            final_z_grad + memory * D, z_grads + which * D, decay_grad + which, z_grad + memory * D,
            seeded, finished, reverse, frames, chunks, D, SIDE, STAGES, FRAMES,
        )  # fmt: skip


class Recalled(NamedTuple):
    """Gradients of what absorbing each frame leaves: kv [directions,B·H,F,D,D], values before keys, and z, fp32.

    `z_decay` [directions,B·H,F]: of the decays, from z; `state`: of the first memory, [keys,values], None in reverse.
    """

    kv: Tensor
    z: Tensor | None
    z_decay: Tensor | None
    state: Memory | None


def recall(
    scan: Scan,
    transitions: Tensor,
    received: Tensor,
    snapshots: Snapshots,
    *,
    state: Memory | None,
    final_grad: Memory | None,
    starts: Tensor | None,
) -> Recalled:
    """Gradients of every frame's memory and of the `state` that the forward direction started from."""
    config, dim, frames = scan.configuration, scan.dim, scan.frames
    batch, heads, _ = scan.decay.shape
    grads = scan.q.new_empty((scan.directions, scan.memories, frames, dim, dim), dtype=torch.float32)
    z_grads = scan.q.new_empty(grads.shape[:-1], dtype=torch.float32) if scan.normaliser else None
    columns = min(config.value_columns, padded(dim))
    blocks = triton.cdiv(dim, columns) + scan.normaliser
    z_decay = grads.new_empty(grads.shape[:3]) if scan.normaliser else None
    kv_grad = scan.q.new_empty((batch, heads, dim, dim), dtype=torch.float32)
    z_grad = kv_grad.new_empty(kv_grad.shape[:-1]) if scan.normaliser else None
    z = None if state is None else state.z
    final_kv, final_z = final_grad or (received, None)
    Fitted(_recall_kernel, received.device)[(scan.memories, blocks, scan.directions)](
        transitions,
        received,
        scan.decay,
        scan.decay if starts is None else starts,
        received if z is None else z,
        received if snapshots.z is None else snapshots.z,
        final_kv,
        final_kv if final_z is None else final_z,
        grads,
        received if z_grads is None else z_grads,
        received if z_decay is None else z_decay,
        kv_grad,
        kv_grad if z_grad is None else z_grad,
        heads,
        frames,
        0 if starts is None else starts.shape[0],
        int(scan.direction == "reverse"),
        int(state is not None),
        int(final_grad is not None),
        D=dim,
        SIDE=padded(dim),
        COLUMNS=columns,
        STAGES=config.remember_stages,
        FRAMES=frames if triton_interpreted() else 0,
        NORMALISER=scan.normaliser,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=config.remember_warps,
    )
    state_grad = None if scan.direction == "reverse" else Memory(kv_grad, z_grad)
    return Recalled(grads, z_grads, z_decay, state_grad)
