"""Fourth step of the backward pass: gradients of activated keys, of values and β, from the squares of their frame."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.absorb import discount
from longtake.kernels.scan.backward.combine import Combined
from longtake.kernels.scan.backward.recall import Recalled
from longtake.kernels.scan.backward.tokens import (
    Activated,
    launch_options,
    load_activated,
    load_columns,
    load_weight,
    named_strides,
    raw_arguments,
    row_sums,
    store_columns,
    token_arguments,
    unwritten,
)
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.launch import Saved
from longtake.kernels.scan.remember import Memory
from longtake.kernels.scan.tokens import CAMERA, ROTARY, unplace
from longtake.kernels.triton_tiles import INTERPRETED, add_both, as_operand, padded


def _by_rows(squares: Tensor, rows: int) -> TensorDescriptor:
    """Squares [M,D,D] of which some rows at once are loaded past all registers, where a GPU can."""
    return TensorDescriptor.from_tensor(squares, [1, rows, padded(squares.shape[-1])])


@triton.jit
def _load_rows(squares: tl.tensor_descriptor, which: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Rows of one square from `first` on, [R,SIDE], zeros beyond the last."""
    tile = tl.reshape(squares.load([which, first, 0]), squares.block_shape[1:])
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def _load_normaliser(
    z: tl.tensor, z_snapshots: tl.tensor, z_grads: tl.tensor, fade: tl.tensor, memory: tl.tensor, frame: tl.tensor,
    frames: tl.tensor, reverse: tl.tensor, has_state: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Of one direction: the normaliser that a frame was absorbed into, faded, and the gradient of what that left."""
    key = tl.arange(0, SIDE)
    held = frame - memory * frames - tl.where(reverse, 0, 1)
    y = tl.load(z_snapshots + (memory * frames + held) * D + key, (key < D) & (held >= 0), 0.0)
    y += tl.load(z + memory * D + key, (key < D) & (held < 0) & (has_state != 0) & (not reverse), 0.0)
    return (fade * y)[None, :], tl.load(z_grads + frame * D + key, key < D, 0.0)[None, :]


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "first_direction", "has_state", "x_batch", "x_token", "x_head", "v_batch",
        "v_token", "v_head", "beta_frame", "beta_token", "own_tables", "norm_eps", "scale",
    ]
)  # fmt: skip
def _keys_kernel(
    k: tl.tensor,
    x: tl.tensor,
    rms: tl.tensor,
    weight: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    growth_along: tl.tensor,
    mean_growth: tl.tensor,
    growth_grad: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    by_value: tl.tensor_descriptor,
    by_key: tl.tensor_descriptor,
    z: tl.tensor,
    z_snapshots: tl.tensor,
    z_grads: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    beta_out: tl.tensor,
    along_out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    first_direction: int,
    has_state: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    beta_frame: int,
    beta_token: int,
    own_tables: int,
    norm_eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    DISCOUNT: tl.constexpr,
    ALONG: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some tokens of one frame of one head: program (frame of a head, part)."""
    frame = tl.program_id(0).to(tl.int64)
    memory, at = frame // frames, frame % frames
    batch, head = memory // heads, memory % heads
    first = (batch * frames + at) * tokens
    k += frame * tokens * D
    x += (batch * x_batch + head * x_head + at * tokens * x_token) * 8
    v += (batch * v_batch + head * v_head + at * tokens * v_token) * 8
    along_out += first * heads + head
    k_out += (first * heads + head) * D
    v_out += (first * heads + head) * D
    beta_out += frame * tokens
    beta += frame * beta_frame
    turns = (at + batch * frames * own_tables) * tokens * (D // 2 if POSITIONS == ROTARY else D // 4)
    cos += turns
    sin += turns
    matrix += first * 16
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    placed = load_columns(k, row, tokens, D // 8, tl.arange(0, SIDE), D)
    strength = tl.load(beta + row * beta_token, row < tokens, 0.0).to(tl.float32)
    damping = tl.full((), 1.0, tl.float32)
    if DISCOUNT:
        damping = discount(tl.load(mean_growth + frame))
        strength *= damping
    brought, erased = tl.zeros((ROWS, SIDE), tl.float32), tl.zeros((ROWS, SIDE), tl.float32)
    for block in range(SIDE // COLUMNS):
        start = block * COLUMNS
        col = start + tl.arange(0, COLUMNS)
        value = load_columns(v, row, tokens, v_token, col, D)
        values, keys = _load_rows(by_value, tl.program_id(0), start), _load_rows(by_key, tl.program_id(0), start)
        told = tl.dot(placed, tl.trans(values), input_precision=PRECISION)
        if POSITIONS == CAMERA:  # which moves values, too
            told = unplace(told, matrix, cos, sin, row, tokens, start, D, POSITIONS, True)
        store_columns(v_out, strength[:, None] * told, row, tokens, heads * D, col, D)
        brought = tl.dot(as_operand(value, OPERAND, PRECISION), values, brought, input_precision=PRECISION)
        part = placed if COLUMNS == SIDE else load_columns(k, row, tokens, D // 8, col, D)
        erased = tl.dot(part, keys, erased, input_precision=PRECISION)
    key = placed.to(tl.float32)
    gain, loss = tl.reduce((tl.fma(key, brought, 0.0), tl.fma(key, erased, 0.0)), 1, add_both)
    back = strength[:, None] * (brought - erased)
    share, along = gain - 0.5 * loss, strength * (gain - loss)
    if DISCOUNT:
        along += tl.load(growth_grad + frame) * tl.load(growth_along + frame * tokens + row, row < tokens, 0.0)
    back = unplace(back, matrix, cos, sin, row, tokens, 0, D, POSITIONS, True)
    if NORMALISER:
        w = load_weight(weight, head, D, SIDE, WEIGHTED)
        plain_key = load_activated(x, rms + first, w, row, tokens, x_token, norm_eps, scale, D, SIDE, NORM, RELU)
        fade = tl.load(decay + frame).to(tl.float32)
        for i in tl.static_range(0, DIRECTIONS):
            other = i * tl.num_programs(0).to(tl.int64) * D
            y, zeta = _load_normaliser(
                z, z_snapshots + other, z_grads + other, fade, memory, frame, frames, first_direction + i == 1,
                has_state, D, SIDE,
            )  # fmt: skip
            plain_error, plain_told = 1.0 - row_sums(plain_key, y), row_sums(plain_key, zeta)
            share += plain_told * plain_error
            along += strength * plain_told * (2 * plain_error - 1)
            back += (strength * plain_error)[:, None] * zeta - (strength * plain_told)[:, None] * y
    tl.store(beta_out + row, damping * share, row < tokens)
    if ALONG:
        tl.store(along_out + row * heads, along, row < tokens)
    store_columns(k_out, back, row, tokens, heads * D, tl.arange(0, SIDE), D)


class KeyGradients(NamedTuple):
    """Gradients of keys, of v [B,N,H,D] in its dtype and of β [B,H,F,S] fp32.

    With a discount, those of keys are without what comes through the growth, `along` is with it.
    """

    k: Activated
    v: Tensor
    beta: Tensor


def key_gradients(
    scan: Scan, saved: Saved, recalled: Recalled, combined: Combined, *, state: Memory | None
) -> KeyGradients:
    """Of keys, values and β of all tokens."""
    config, stand_in, placed = scan.configuration, scan.decay, saved.placed
    found = KeyGradients(
        unwritten(scan, 1),
        torch.empty(scan.v.shape, dtype=scan.v.dtype, device=scan.v.device),
        stand_in.new_empty((*stand_in.shape, scan.tokens), dtype=torch.float32),
    )
    z, columns = None if state is None else state.z, min(config.keys_columns, padded(scan.dim))
    Fitted(_keys_kernel, scan.k.device)[scan.memories * scan.frames, triton.cdiv(scan.tokens, config.keys.rows)](
        k=placed.k,
        v=placed.v,
        beta=scan.beta,
        decay=scan.decay,
        growth_along=stand_in if placed.along is None else placed.along,
        mean_growth=stand_in if saved.growth is None else saved.growth,
        growth_grad=stand_in if combined.growth is None else combined.growth,
        by_value=_by_rows(combined.by_value, columns),
        by_key=_by_rows(combined.by_key, columns),
        z=stand_in if z is None else z,
        z_snapshots=stand_in if saved.snapshots.z is None else saved.snapshots.z,
        z_grads=stand_in if recalled.z is None else recalled.z,
        k_out=found.k.grad,
        v_out=found.v,
        beta_out=found.beta,
        along_out=stand_in if found.k.along is None else found.k.along,
        first_direction=int(scan.direction == "reverse"),
        has_state=int(z is not None),
        **raw_arguments(scan, 1, placed.rms),
        **named_strides("v", placed.v),
        **dict(zip(("beta_frame", "beta_token"), (1, 0) if scan.beta.ndim == 3 else (scan.tokens, 1), strict=True)),
        **token_arguments(scan, 1),
        COLUMNS=columns,
        DIRECTIONS=scan.directions,
        DISCOUNT=scan.discount,
        ALONG=found.k.along is not None,
        **launch_options(config.keys),
    )
    return found
