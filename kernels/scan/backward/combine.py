"""Third step of the backward pass: what all directions bring to a frame's tokens, as two squares, and to its decay.

With G the gradient of what absorbing a frame leaves and M the memory before it, which fades to Y = g·M, a token has
u = Gᵀ·k, dv = β·u, dβ = u·(v − Yᵀ·k) and dk = β·(G·(v − Yᵀ·k) − Y·u). Summed over the directions these need of the
squares only ΣG and W = Σ(G·Yᵀ + Y·Gᵀ): dk = β·(ΣG·v − W·k), and dβ = k·(ΣG·v − ½·W·k), as u·v = k·G·v. With P, which
is symmetric, dg = Σ⟨M,(I − P)·G⟩ = Σ⟨M,G⟩ − ½·⟨P,Σ(G·Mᵀ + M·Gᵀ)⟩. Where M tells v well, ΣG·v and ½·W·k cancel: so W is
made of what ΣG is as an operand, not of each G rounded.

With a discount, β = β̂/max(1, γ) with γ the mean growth of the frame's keys, of whose gradient −Σ(β·dβ)/max(1, γ) every
key gets its share; Σ(β·dβ) over the frame is ⟨ΣG,A⟩ − ½·⟨W,P⟩.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.backward.recall import Recalled
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.launch import Saved
from longtake.kernels.scan.remember import Memory, load_transition
from longtake.kernels.triton_tiles import TRITON_TYPES, padded, store_square, to_operand

ROWS = tl.constexpr(16)
"""Values that are multiplied at once: registers spill with 32."""


@triton.jit(do_not_specialize=["frames", "tokens", "has_state"])
def _combine_kernel(
    grads: tl.tensor,
    z_decay: tl.tensor,
    transitions: tl.tensor,
    snapshots: tl.tensor,
    kv: tl.tensor,
    decay: tl.tensor,
    updates: tl.tensor,
    growth: tl.tensor,
    by_value: tl.tensor,
    by_key: tl.tensor,
    read: tl.tensor,
    decay_grad: tl.tensor,
    growth_grad: tl.tensor,
    frames: int,
    tokens: int,
    has_state: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    REVERSE: tl.constexpr,
    NORMALISER: tl.constexpr,
    DISCOUNT: tl.constexpr,
    STAGES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One frame of one head, ROWS values at once."""
    frame = tl.program_id(0).to(tl.int64)
    memory, place = frame // frames, frame % frames
    key = tl.arange(0, SIDE)
    before = tl.where(place > 0, snapshots + (frame - 1) * D * D, kv + memory * D * D)
    by_value += frame * D * D
    read += frame * D * D
    transitions += frame * (2 if NORMALISER else 1) * D * D
    total = tl.zeros((SIDE, SIDE), tl.float32)
    kept, told = tl.zeros((ROWS, SIDE), tl.float32), tl.zeros((ROWS, SIDE), tl.float32)
    for block in tl.range(0, (D + ROWS - 1) // ROWS, num_stages=STAGES):
        value = block * ROWS + tl.arange(0, ROWS)
        slab, valid = value[:, None] * D + key[None, :], (value < D)[:, None] & (key < D)[None, :]
        summed, rounded = tl.zeros((ROWS, SIDE), tl.float32), tl.zeros((ROWS, SIDE), tl.float32)
        seen = tl.zeros((ROWS, SIDE), tl.float32)
        for i in tl.static_range(0, DIRECTIONS):
            this = (i * tl.num_programs(0).to(tl.int64) + frame) * D * D + slab
            grad = tl.load(grads + this, valid, 0.0)
            absorbed = tl.load(snapshots + this, valid, 0.0).to(tl.float32)
            seen += absorbed
            if i == 0 and not REVERSE:  # which is absorbed before it is read
                absorbed = tl.load(before + slab, valid & ((place > 0) | (has_state != 0)), 0.0).to(tl.float32)
            summed += grad
            kept += absorbed * grad
            absorbed = to_operand(absorbed + 0.0, OPERAND, PRECISION)  # in registers: see tests/pipelines.py
            grad = to_operand(summed, OPERAND, PRECISION).to(tl.float32) - rounded
            rounded += grad
            total = tl.dot(tl.trans(to_operand(grad, OPERAND, PRECISION)), absorbed, total, input_precision=PRECISION)
            if i > 0 and (tl.float32 != OPERAND or PRECISION == "tf32"):
                grad -= to_operand(grad, OPERAND, PRECISION).to(tl.float32)
                rest = tl.trans(to_operand(grad, OPERAND, PRECISION))
                total = tl.dot(rest, absorbed, total, input_precision=PRECISION)
        if DISCOUNT:
            told += rounded * tl.load(updates + frame * (D + 1 if NORMALISER else D) * D + slab, valid, 0.0)
        tl.store(by_value + slab, to_operand(rounded, OPERAND, PRECISION), valid)
        tl.store(read + slab, to_operand(seen, OPERAND, PRECISION), valid)
    total += tl.trans(total)
    fade = tl.load(decay + frame).to(tl.float32)
    erased = load_transition(transitions, D, SIDE).to(tl.float32) * total
    erased = 0.5 * tl.sum(tl.sum(erased, axis=1), axis=0)
    found = tl.sum(tl.sum(kept, axis=1), axis=0) - erased
    if NORMALISER:
        for i in tl.static_range(0, DIRECTIONS):
            found += tl.load(z_decay + i * tl.num_programs(0) + frame)
    tl.store(decay_grad + frame, found)
    if DISCOUNT:
        mean = tl.load(growth + frame)
        share = tl.div_rn(fade * erased - tl.sum(tl.sum(told, axis=1), axis=0), mean * tokens)
        tl.store(growth_grad + frame, tl.where(mean >= 1, share, 0.0))
    total *= fade
    store_square(by_key + frame * D * D, to_operand(total, OPERAND, PRECISION), D)


class Combined(NamedTuple):
    """What multiplies the v and the k of a frame's tokens in their dk, [B·H·F,D,D] operands, rows before keys.

    `read`: the memories of all directions that the frame reads, summed, likewise. `decay` [B,H,F] fp32: gradient of the
    decays; `growth` [B,H,F] fp32: of the growth of each of a frame's keys, with a discount.
    """

    by_value: Tensor
    by_key: Tensor
    read: Tensor
    decay: Tensor
    growth: Tensor | None


def combine(scan: Scan, recalled: Recalled, saved: Saved, *, state: Memory | None) -> Combined:
    """Squares, and gradients of the decays, of all frames."""
    config, dim = scan.configuration, scan.dim
    count = scan.memories * scan.frames
    by_value, by_key, read = (scan.q.new_empty((count, dim, dim), dtype=config.operand) for _ in range(3))
    decay = scan.decay.new_empty(scan.decay.shape, dtype=torch.float32)
    growth = torch.empty_like(decay) if scan.discount else None
    Fitted(_combine_kernel, scan.q.device)[(count,)](
        recalled.kv,
        recalled.kv if recalled.z_decay is None else recalled.z_decay,
        saved.transitions,
        saved.snapshots.kv,
        saved.snapshots.kv if state is None else state.kv.mT.to(saved.snapshots.kv.dtype).contiguous(),
        scan.decay,
        decay if saved.updates is None else saved.updates,
        decay if saved.growth is None else saved.growth,
        by_value,
        by_key,
        read,
        decay,
        decay if growth is None else growth,
        scan.frames,
        scan.tokens,
        int(state is not None),
        D=dim,
        SIDE=padded(dim),
        DIRECTIONS=scan.directions,
        REVERSE=scan.direction == "reverse",
        NORMALISER=scan.normaliser,
        DISCOUNT=scan.discount,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=config.combine_warps,
        STAGES=config.combine_stages,
    )
    return Combined(by_value, by_key, read, decay, growth)
