"""Third step of the backward pass: gradients of tokens; queries have a kernel, keys with values and β another."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.absorb import load_rows, load_tokens
from longtake.kernels.scan.backward.recall import Recalled
from longtake.kernels.scan.configurations import Reading
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.prepare import Operands
from longtake.kernels.scan.remember import Memory, Snapshots
from longtake.kernels.scan.tokens import ROTARY, load_turn
from longtake.kernels.triton_tiles import TRITON_TYPES, octet_strides, padded, rotate_pairs, to_operand


@triton.jit
def _load_square(x: tl.tensor, row: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """Some rows of [D,D], [R,SIDE] fp32."""
    col = tl.arange(0, SIDE)
    return tl.load(x + row[:, None] * D + col[None, :], (row < D)[:, None] & (col < D)[None, :], 0.0).to(tl.float32)


@triton.jit
def _load_faded(
    fade: tl.tensor, snapshot: tl.tensor, state: tl.tensor, held: tl.tensor, has_state: tl.tensor, value: tl.tensor,
    D: tl.constexpr, SIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some values of what a frame was absorbed into, [V,SIDE] fp32: of a snapshot, else of the state, else nothing."""
    key = tl.arange(0, SIDE)
    valid = (value < D)[:, None] & (key < D)[None, :]
    memory = tl.load(snapshot + value[:, None] * D + key[None, :], valid & (held >= 0), 0.0).to(tl.float32)
    memory += tl.load(state + key[None, :] * D + value[:, None], valid & (held < 0) & (has_state != 0), 0.0)
    return fade * memory


@triton.jit
def _turned_back(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, row: tl.tensor, tokens: tl.tensor, D: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Gradients [R,SIDE] of rotated tokens → those of the tokens."""
    if POSITIONS == ROTARY:
        c, s = load_turn(cos, sin, row, row < tokens, D // 2, 0, D // 2, x.shape[1] // 2)
        x = rotate_pairs(x, c, -s)
    return x


@triton.jit
def _load_columns(
    x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, col: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """Some entries of some tokens of a frame, [R,C] fp32."""
    place = x + (row * stride).to(tl.int64)[:, None] + col[None, :]
    return tl.load(place, (row < tokens)[:, None] & (col < D)[None, :], 0.0).to(tl.float32)


@triton.jit
def _store_columns(
    out: tl.tensor, x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, added: tl.tensor,
    col: tl.tensor, D: tl.constexpr,
) -> None:  # fmt: skip
    """Some entries [R,C] of some tokens of a frame, added to what is there if so wished."""
    place = out + (row * stride).to(tl.int64)[:, None] + col[None, :]
    valid = (row < tokens)[:, None] & (col < D)[None, :]
    tl.store(place, x + tl.load(place, valid & (added != 0), 0.0), valid)


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "directions", "g_batch", "g_token", "g_head", "own_tables"])
def _queries_kernel(
    grad: tl.tensor,
    denominator_grad: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    snapshots: tl.tensor,
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
    turns = (place + batch * frames * own_tables) * tokens * (D // 2)
    key = tl.arange(0, SIDE)
    held = _load_square(snapshots + frame * D * D, key, D, SIDE)
    if directions == 2:
        held += _load_square(snapshots + (other + frame) * D * D, key, D, SIDE)
    held = to_operand(held, OPERAND, PRECISION)
    z = tl.zeros((SIDE,), tl.float32)
    if NORMALISER:
        z = tl.load(z_snapshots + frame * D + key, key < D, 0.0)
        z += tl.load(z_snapshots + (other + frame) * D + key, (key < D) & (directions == 2), 0.0)
    for tile in range(TILES):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        back = to_operand(load_tokens(grad, row, tokens, g_token, D, SIDE).to(tl.float32), OPERAND, PRECISION)
        query = _turned_back(
            tl.dot(back, held, input_precision=PRECISION), cos + turns, sin + turns, row, tokens, D, POSITIONS
        )
        if NORMALISER:
            query += tl.load(denominator_grad + row * heads, row < tokens, 0.0)[:, None] * z[None, :]
        _store_columns(out, query, row, tokens, heads * D, 0, key, D)


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "added", "reverse", "has_state", "v_batch", "v_token", "v_head",
        "beta_frame", "beta_token", "own_tables",
    ]
)  # fmt: skip
def _keys_kernel(
    k: tl.tensor,
    plain: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    kv: tl.tensor,
    z: tl.tensor,
    snapshots: tl.tensor,
    z_snapshots: tl.tensor,
    grads: tl.tensor,
    z_grads: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    beta_out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    added: int,
    reverse: int,
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
    TILES: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some tokens of one frame of one head, for one direction: program (frame of a head, part)."""
    frame = tl.program_id(0).to(tl.int64)
    memory, place = frame // frames, frame % frames
    batch, head = memory // heads, memory % heads
    first = batch * frames + place
    v += (batch * v_batch + head * v_head + place * tokens * v_token) * 8
    k_out += (first * tokens * heads + head) * D
    v_out += (first * tokens * heads + head) * D
    beta_out += frame * tokens
    beta += frame * beta_frame
    turns = (place + batch * frames * own_tables) * tokens * (D // 2)
    key = tl.arange(0, SIDE)
    held = place - tl.where(reverse != 0, 0, 1)  # the snapshot of what this frame was absorbed into
    fade = tl.load(decay + frame).to(tl.float32)
    grads += frame * D * D
    kv += memory * D * D
    snapshots += (memory * frames + held) * D * D
    HELD: tl.constexpr = COLUMNS == SIDE
    if HELD:
        grad = to_operand(_load_square(grads, key, D, SIDE), OPERAND, PRECISION)
        faded = to_operand(_load_faded(fade, snapshots, kv, held, has_state, key, D, SIDE), OPERAND, PRECISION)
    if NORMALISER:
        y = fade * tl.load(z_snapshots + (memory * frames + held) * D + key, (key < D) & (held >= 0), 0.0)
        y += fade * tl.load(z + memory * D + key, (key < D) & (held < 0) & (has_state != 0), 0.0)
        zeta = tl.load(z_grads + frame * D + key, key < D, 0.0)
    for tile in range(TILES):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        x = load_rows(k + frame * tokens * D, row, tokens, D, SIDE)
        weight = tl.load(beta + row * beta_token, row < tokens, 0.0).to(tl.float32)
        back = tl.zeros((ROWS, SIDE), tl.float32)
        share = tl.zeros((ROWS,), tl.float32)
        for block in range(SIDE // COLUMNS):
            value = block * COLUMNS + tl.arange(0, COLUMNS)
            if not HELD:
                grad = to_operand(_load_square(grads, value, D, SIDE), OPERAND, PRECISION)
                some = _load_faded(fade, snapshots, kv, held, has_state, value, D, SIDE)
                faded = to_operand(some, OPERAND, PRECISION)
            told = tl.dot(x, tl.trans(grad), input_precision=PRECISION)
            error = _load_columns(v, row, tokens, v_token * 8, value, D)
            error -= tl.dot(x, tl.trans(faded), input_precision=PRECISION)
            share += tl.sum(told * error, axis=1)
            back = tl.dot(to_operand(error, OPERAND, PRECISION), grad, back, input_precision=PRECISION)
            back = tl.dot(to_operand(-told, OPERAND, PRECISION), faded, back, input_precision=PRECISION)
            _store_columns(v_out, weight[:, None] * told, row, tokens, heads * D, added, value, D)
        back = _turned_back(back, cos + turns, sin + turns, row, tokens, D, POSITIONS)
        if NORMALISER:
            plain_key = load_rows(plain + frame * tokens * D, row, tokens, D, SIDE).to(tl.float32)
            plain_error = 1.0 - tl.sum(plain_key * y[None, :], axis=1)
            plain_told = tl.sum(plain_key * zeta[None, :], axis=1)
            share += plain_told * plain_error
            back += plain_error[:, None] * zeta[None, :] - plain_told[:, None] * y[None, :]
        _store_columns(k_out, weight[:, None] * back, row, tokens, heads * D, added, key, D)
        before = tl.load(beta_out + row, (row < tokens) & (added != 0), 0.0)
        tl.store(beta_out + row, share + before, row < tokens)


def _tiling(scan: Scan, how: Reading) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile sizes of a kernel."""
    tiles = how.tiles_of(scan.tokens)
    grid = (scan.memories * scan.frames, triton.cdiv(scan.tokens, how.rows * tiles))
    return grid, {"ROWS": how.rows, "TILES": tiles, "num_warps": how.warps, "num_stages": 1}


class TokenGradients(NamedTuple):
    """Gradients of q, k, v [B,N,H,D] as operands, but before a rotary position, and of β [B,H,F,S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


def token_gradients(
    scan: Scan,
    operands: Operands,
    recalled: Recalled,
    snapshots: Snapshots,
    grad: Tensor,
    denominator_grad: Tensor | None,
    *,
    state: Memory | None,
) -> TokenGradients:
    """Gradients of all tokens, fp32; `operands` of a backward pass."""
    batch, heads, frames = scan.decay.shape
    q, k, v = (scan.q.new_empty(scan.q.shape, dtype=torch.float32) for _ in range(3))
    found = TokenGradients(q, k, v, scan.q.new_empty((batch, heads, frames, scan.tokens), dtype=torch.float32))
    config, stand_in = scan.configuration, scan.decay
    rotated = scan.positions is not None and scan.positions.matrices is None
    tables = scan.positions.tables if rotated and scan.positions else None
    turned = tables or (stand_in, stand_in)
    own_tables = int(tables is not None and tables[0].shape[0] > 1)
    common = {
        "heads": heads,
        "frames": frames,
        "tokens": scan.tokens,
        "own_tables": own_tables,
        "D": scan.dim,
        "SIDE": padded(scan.dim),
        "POSITIONS": 1 if rotated else 0,
        "NORMALISER": scan.normaliser,
        "OPERAND": TRITON_TYPES[config.operand],
        "PRECISION": config.dot,
    }
    z_snapshots = snapshots.kv if snapshots.z is None else snapshots.z
    grid, tiling = _tiling(scan, config.read_without_normaliser)
    _queries_kernel[grid](
        grad,
        stand_in if denominator_grad is None else denominator_grad,
        *turned,
        snapshots.kv,
        z_snapshots,
        found.q,
        directions=scan.directions,
        **dict(zip(("g_batch", "g_token", "g_head"), octet_strides(grad), strict=True)),
        **common,
        **tiling,
    )
    kv, z = state or (snapshots.kv, None)
    grid, tiling = _tiling(scan, config.keys)
    for i in range(scan.directions):
        reverse = scan.direction == "reverse" or i == 1
        _keys_kernel[grid](
            operands.k,
            operands.plain,
            operands.v,
            scan.beta,
            scan.decay,
            *turned,
            kv,
            kv if z is None else z,
            snapshots.kv[i],
            z_snapshots[i],
            recalled.kv[i],
            recalled.kv if recalled.z is None else recalled.z[i],
            found.k,
            found.v,
            found.beta,
            added=i,
            reverse=int(reverse),
            has_state=int(state is not None and not reverse),
            **dict(zip(("v_batch", "v_token", "v_head"), octet_strides(operands.v), strict=True)),
            **dict(zip(("beta_frame", "beta_token"), (1, 0) if scan.beta.ndim == 3 else (scan.tokens, 1), strict=True)),
            COLUMNS=min(config.keys_columns, padded(scan.dim)),
            **common,
            **tiling,
        )
    return found
