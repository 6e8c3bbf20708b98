"""Fourth step of the backward pass: gradients of tokens; queries have a kernel, keys with values and β another."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.absorb import load_rows, load_tokens
from longtake.kernels.scan.backward.combine import Combined
from longtake.kernels.scan.backward.recall import Recalled
from longtake.kernels.scan.configurations import Reading
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.prepare import Operands
from longtake.kernels.scan.remember import Memory, Snapshots
from longtake.kernels.scan.tokens import CAMERA, ROTARY, unplace
from longtake.kernels.triton_tiles import (
    INTERPRETED,
    TRITON_TYPES,
    as_operand,
    octet_strides,
    padded,
    round_to,
)


@triton.jit
def _load_square(x: tl.tensor, row: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """Some rows of [D,D], [R,SIDE]."""
    col = tl.arange(0, SIDE)
    tile = tl.load(x + row[:, None] * D + col[None, :], (row < D)[:, None] & (col < D)[None, :], 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def _row_sums(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Sums of x·y over every row, the same bits in all threads that add one up.

    A bare product that a thread adds to its neighbour's is fused with the sum, so that each rounds the other's alone.
    """
    return tl.sum(tl.fma(x, y, 0.0), axis=1)


@triton.jit
def _load_columns(
    x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, col: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """Some entries of some tokens of a frame, [R,C]."""
    place = x + (row * stride).to(tl.int64)[:, None] + col[None, :]
    tile = tl.load(place, (row < tokens)[:, None] & (col < D)[None, :], 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def _store_columns(
    out: tl.tensor, x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, col: tl.tensor, D: tl.constexpr
) -> None:
    """Some entries [R,C] of some tokens of a frame."""
    place = out + (row * stride).to(tl.int64)[:, None] + col[None, :]
    tl.store(place, round_to(x, out.dtype.element_ty), (row < tokens)[:, None] & (col < D)[None, :])


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
    return fade * y, tl.load(z_grads + frame * D + key, key < D, 0.0)


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "directions", "g_batch", "g_token", "g_head", "own_tables"])
def _queries_kernel(
    grad: tl.tensor,
    denominator_grad: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    memories: tl.tensor,
    z_snapshots: tl.tensor,
    out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    directions: int,
    g_batch: int,
    g_token: int,
    g_head: int,
    own_tables: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some tokens of one frame of one head: program (frame of a head, part)."""
    frame = tl.program_id(0).to(tl.int64)
    memory, place = frame // frames, frame % frames
    batch, head = memory // heads, memory % heads
    other = tl.num_programs(0).to(tl.int64)
    first = batch * frames + place
    grad += (batch * g_batch + head * g_head + place * tokens * g_token) * 8
    out += (first * tokens * heads + head) * D
    denominator_grad += first * tokens * heads + head
    turns = (place + batch * frames * own_tables) * tokens * (D // 2 if POSITIONS == ROTARY else D // 4)
    matrix += first * tokens * 16
    key = tl.arange(0, SIDE)
    held = _load_square(memories + frame * D * D, key, D, SIDE)
    z = tl.zeros((SIDE,), tl.float32)
    if NORMALISER:
        z = tl.load(z_snapshots + frame * D + key, key < D, 0.0)
        z += tl.load(z_snapshots + (other + frame) * D + key, (key < D) & (directions == 2), 0.0)
    for tile in tl.range(0, TILES, disable_licm=True):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        back = as_operand(load_tokens(grad, row, tokens, g_token, D, SIDE), OPERAND, PRECISION)
        query = tl.dot(back, held, input_precision=PRECISION)
        query = unplace(query, matrix, cos + turns, sin + turns, row, tokens, 0, D, POSITIONS, False)
        if NORMALISER:
            query += tl.load(denominator_grad + row * heads, row < tokens, 0.0)[:, None] * z[None, :]
        _store_columns(out, query, row, tokens, heads * D, key, D)


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "first_direction", "has_state", "v_batch", "v_token", "v_head", "beta_frame",
        "beta_token", "own_tables",
    ]
)  # fmt: skip
def _keys_kernel(
    k: tl.tensor,
    plain: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    by_value: tl.tensor,
    by_key: tl.tensor,
    z: tl.tensor,
    z_snapshots: tl.tensor,
    z_grads: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    beta_out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    first_direction: int,
    has_state: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    beta_frame: int,
    beta_token: int,
    own_tables: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some tokens of one frame of one head: program (frame of a head, part)."""
    frame = tl.program_id(0).to(tl.int64)
    memory, place = frame // frames, frame % frames
    batch, head = memory // heads, memory % heads
    first = batch * frames + place
    k += frame * tokens * D
    plain += frame * tokens * D
    v += (batch * v_batch + head * v_head + place * tokens * v_token) * 8
    k_out += (first * tokens * heads + head) * D
    v_out += (first * tokens * heads + head) * D
    beta_out += frame * tokens
    beta += frame * beta_frame
    turns = (place + batch * frames * own_tables) * tokens * (D // 2 if POSITIONS == ROTARY else D // 4)
    matrix += first * tokens * 16
    by_value += frame * D * D
    by_key += frame * D * D
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = load_rows(k, row, tokens, D, SIDE)
    weight = tl.load(beta + row * beta_token, row < tokens, 0.0).to(tl.float32)[:, None]
    brought, erased = tl.zeros((ROWS, SIDE), tl.float32), tl.zeros((ROWS, SIDE), tl.float32)
    for block in range(SIDE // COLUMNS):
        col = block * COLUMNS + tl.arange(0, COLUMNS)
        value = _load_columns(v, row, tokens, v_token * 8, col, D)
        values, keys = _load_square(by_value, col, D, SIDE), _load_square(by_key, col, D, SIDE)
        told = tl.dot(x, tl.trans(values), input_precision=PRECISION)
        if POSITIONS == CAMERA:  # which moves values, too
            told = unplace(told, matrix, cos + turns, sin + turns, row, tokens, block * COLUMNS, D, POSITIONS, True)
        _store_columns(v_out, weight * told, row, tokens, heads * D, col, D)
        brought = tl.dot(as_operand(value, OPERAND, PRECISION), values, brought, input_precision=PRECISION)
        part = x if COLUMNS == SIDE else _load_columns(k, row, tokens, D, col, D)
        erased = tl.dot(part, keys, erased, input_precision=PRECISION)
    share = _row_sums(x.to(tl.float32), brought - 0.5 * erased)
    back = unplace(brought - erased, matrix, cos + turns, sin + turns, row, tokens, 0, D, POSITIONS, True)
    if NORMALISER:
        plain_key = load_rows(plain, row, tokens, D, SIDE).to(tl.float32)
        fade = tl.load(decay + frame).to(tl.float32)
        for i in tl.static_range(0, DIRECTIONS):
            other = i * tl.num_programs(0).to(tl.int64) * D
            y, zeta = _load_normaliser(
                z, z_snapshots + other, z_grads + other, fade, memory, frame, frames, first_direction + i == 1,
                has_state, D, SIDE,
            )  # fmt: skip
            plain_error = 1.0 - _row_sums(plain_key, y[None, :])
            plain_told = _row_sums(plain_key, zeta[None, :])
            share += plain_told * plain_error
            back += plain_error[:, None] * zeta[None, :] - plain_told[:, None] * y[None, :]
    tl.store(beta_out + row, share, row < tokens)
    _store_columns(k_out, weight * back, row, tokens, heads * D, tl.arange(0, SIDE), D)


def _launch(how: Reading) -> dict[str, Any]:
    """Rows and warps of a kernel."""
    return {"ROWS": how.rows, "num_warps": how.warps, "maxnreg": how.registers, "num_stages": 1}


class TokenGradients(NamedTuple):
    """Gradients of q, k, v [B,N,H,D] before they are placed, `v` in its dtype, and of β [B,H,F,S] fp32.

    `q` and `k` are in the dtype of operands where the tokens are, else in fp32: their norm may take most of them away.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


def _unwritten(x: Tensor, operand: torch.dtype) -> Tensor:
    """Room for the gradients of tokens, contiguous."""
    return x.new_empty(x.shape, dtype=operand if x.dtype == operand else torch.float32)


def token_gradients(
    scan: Scan,
    operands: Operands,
    recalled: Recalled,
    combined: Combined,
    snapshots: Snapshots,
    grad: Tensor,
    denominator_grad: Tensor | None,
    *,
    state: Memory | None,
) -> TokenGradients:
    """Gradients of all tokens; `operands` of a backward pass."""
    batch, heads, frames = scan.decay.shape
    config, positions = scan.configuration, scan.positions
    found = TokenGradients(
        _unwritten(scan.q, config.operand),
        _unwritten(scan.k, config.operand),
        _unwritten(scan.v, scan.v.dtype),
        scan.q.new_empty((batch, heads, frames, scan.tokens), dtype=torch.float32),
    )
    stand_in = scan.decay
    tables = positions.tables if positions else (stand_in, stand_in)
    matrices = (positions and positions.matrices) or (stand_in, stand_in)
    own_tables = int(positions is not None and tables[0].shape[0] > 1)
    common = {
        "heads": heads,
        "frames": frames,
        "tokens": scan.tokens,
        "own_tables": own_tables,
        "D": scan.dim,
        "SIDE": padded(scan.dim),
        "POSITIONS": positions.kind if positions else 0,
        "NORMALISER": scan.normaliser,
        "OPERAND": TRITON_TYPES[config.operand],
        "PRECISION": config.dot,
    }
    z_snapshots = snapshots.kv if snapshots.z is None else snapshots.z
    how, count = config.queries, scan.memories * scan.frames
    tiles = how.tiles_of(scan.tokens)
    Fitted(_queries_kernel, grad.device)[count, triton.cdiv(scan.tokens, how.rows * tiles)](
        grad,
        stand_in if denominator_grad is None else denominator_grad,
        matrices[0],
        *tables,
        combined.read,
        z_snapshots,
        found.q,
        directions=scan.directions,
        **dict(zip(("g_batch", "g_token", "g_head"), octet_strides(grad), strict=True)),
        TILES=tiles,
        **common,
        **_launch(how),
    )
    z = None if state is None else state.z
    Fitted(_keys_kernel, grad.device)[count, triton.cdiv(scan.tokens, config.keys.rows)](
        operands.k,
        operands.plain,
        operands.v,
        scan.beta,
        scan.decay,
        matrices[1],
        *tables,
        combined.by_value,
        combined.by_key,
        z_snapshots if z is None else z,
        z_snapshots,
        z_snapshots if recalled.z is None else recalled.z,
        found.k,
        found.v,
        found.beta,
        first_direction=int(scan.direction == "reverse"),
        has_state=int(z is not None),
        **dict(zip(("v_batch", "v_token", "v_head"), octet_strides(operands.v), strict=True)),
        **dict(zip(("beta_frame", "beta_token"), (1, 0) if scan.beta.ndim == 3 else (scan.tokens, 1), strict=True)),
        COLUMNS=min(config.keys_columns, padded(scan.dim)),
        DIRECTIONS=scan.directions,
        **common,
        **_launch(config.keys),
    )
    return found
