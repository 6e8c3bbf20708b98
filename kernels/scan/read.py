"""Last step of a scan: what each token's q finds in the memory of its frame."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.inputs import NORMS, Scan
from longtake.kernels.scan.prepare import Operands
from longtake.kernels.scan.remember import Snapshots
from longtake.kernels.scan.tokens import (
    ROTARY,
    load_matrices,
    load_turn,
    map_quads,
    norm_factor,
)
from longtake.kernels.triton_tiles import (
    TRITON_TYPES,
    as_operand,
    octet_strides,
    padded,
    quotient,
    rotate_pairs,
    round_to,
    times_sigmoid,
    to_operand,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _summed(
    snapshots: tl.tensor, reverse: tl.tensor, place: tl.tensor, valid: tl.tensor, DIRECTIONS: tl.constexpr
) -> tl.tensor:
    """A part of the memory of one direction, or of both added."""
    memory = tl.load(snapshots + place, valid, 0.0).to(tl.float32)
    if DIRECTIONS == 2:
        memory += tl.load(snapshots + reverse + place, valid, 0.0).to(tl.float32)
    return memory


@triton.jit
def _load_memory(
    snapshots: tl.tensor, reverse: tl.tensor, value: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr,
    DIRECTIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The memory that a frame reads as an operand, [keys,values], with the values in the given order."""
    key = tl.arange(0, SIDE)
    place, valid = value[:, None] * D + key[None, :], (value < D)[:, None] & (key < D)[None, :]
    return tl.trans(to_operand(_summed(snapshots, reverse, place, valid, DIRECTIONS), OPERAND, PRECISION))


@triton.jit
def _load_tile(
    x: tl.tensor, row: tl.tensor, inside: tl.tensor, stride: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr
) -> tl.tensor:
    """A head of some tokens, [R,SIDE]; stride in units of 8 elements."""
    col = tl.arange(0, SIDE)
    return tl.load(x + (row * stride)[:, None] * 8 + col[None, :], inside[:, None] & (col < D)[None, :], 0.0)


@triton.jit
def _halves(y: tl.tensor) -> tl.tuple:
    """[R,2W] → its left and right half."""
    return tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, y.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _gated(y: tl.tensor, gate: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """y·silu(gate); with 16-bit operands to a few fp32 roundings, which is faster."""
    y *= gate
    if tl.float32 == OPERAND:
        y = times_sigmoid(y, gate)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * gate))
        y *= root * root
    return y


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "parts", "q_batch", "q_token", "q_head", "gate_batch", "gate_token", "gate_head",
        "own_tables", "norm_eps", "eps",
    ]
)  # fmt: skip
def _read_kernel(
    q: tl.tensor,
    rms: tl.tensor,
    weight: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    snapshots: tl.tensor,
    z_snapshots: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    denominator: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    parts: int,
    q_batch: int,
    q_token: int,
    q_head: int,
    gate_batch: int,
    gate_token: int,
    gate_head: int,
    own_tables: int,
    norm_eps: float,
    eps: float,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TURNED: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    PREPARED: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    MERGED: tl.constexpr,
    GATED: tl.constexpr,
    RETURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Read the tokens of one part of one frame: program (batch, frame, part, head), heads fastest."""
    HALF: tl.constexpr = D // 2
    SIDE: tl.constexpr = 2 * WIDTH
    head = tl.program_id(0) % heads
    rest = tl.program_id(0) // heads
    part = rest % parts
    rest //= parts
    frame = rest % frames
    batch = (rest // frames).to(tl.int64)
    index = (batch * heads + head) * frames + frame
    reverse = (tl.num_programs(0) // parts).to(tl.int64)
    first_token = frame.to(tl.int64) * tokens
    all_tokens = tl.cast(frames, tl.int64) * tokens
    q += (batch * q_batch + head * q_head) * 8
    gate += (batch * gate_batch + head * gate_head) * 8
    rms += batch * all_tokens
    matrix += batch * all_tokens * 16
    turns: tl.constexpr = HALF if POSITIONS == ROTARY else HALF // 2
    cos += batch * own_tables * all_tokens * turns
    sin += batch * own_tables * all_tokens * turns
    col = tl.arange(0, SIDE)
    value = col
    if RETURNED:  # halves of their own, each padded
        value = tl.where(col % WIDTH < HALF, col // WIDTH * HALF + col % WIDTH, D)
    memory = _load_memory(snapshots + index * D * D, reverse * D * D, value, D, SIDE, DIRECTIONS, OPERAND, PRECISION)
    if TURNED:
        memory = tl.trans(memory)
    if WEIGHTED:
        w = tl.load(weight + head * D + col, col < D, 0.0).to(tl.float32)[None, :]
    if NORMALISER:
        z = _summed(z_snapshots + index * D, reverse * D, col, col < D, DIRECTIONS)[None, :]
    first = part * ROWS * TILES
    last = tl.minimum(first + ROWS * TILES, tokens)
    for tile in range(TILES):
        place = first + tile * ROWS + tl.arange(0, ROWS)
        inside = place < last
        row = first_token + place
        x = _load_tile(q, row, inside, q_token, D, SIDE)
        if GATED:  # early: the fence before a product waits for every load under way
            g = _load_tile(gate, row, inside, gate_token, D, SIDE).to(tl.float32)
        if PREPARED:
            x = as_operand(x, OPERAND, PRECISION)
        else:
            x = x.to(tl.float32)
            factor = norm_factor(x, rms, row, inside, norm_eps, NORM, D)
            if WEIGHTED:
                x *= w
            if RELU:
                x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if NORMALISER:
                total = factor * tl.sum(x * z, axis=1)
            if POSITIONS == ROTARY:
                c, s = load_turn(cos, sin, row, inside, HALF, 0, HALF, WIDTH)
                x = rotate_pairs(x, c, s)
            x = to_operand(x, OPERAND, PRECISION)
        if TURNED:
            y = tl.trans(tl.dot(memory, tl.trans(x), input_precision=PRECISION))
        else:
            y = tl.dot(x, memory, input_precision=PRECISION)
        if MERGED:
            factor = quotient(factor, total + eps, OPERAND)
        elif NORMALISER:
            tl.store(denominator + (batch * all_tokens + row) * heads + head, total, inside)
        if not PREPARED:
            y *= factor[:, None]
        if GATED:
            y = _gated(y, g, OPERAND)
        at = out + ((batch * all_tokens + row) * heads + head)[:, None] * D
        if RETURNED:
            y0, y1 = _halves(y)
            y0 = map_quads(y0, load_matrices(matrix, row, inside, False))
            c, s = load_turn(cos, sin, row, inside, HALF // 2, 0, HALF // 2, WIDTH // 2)
            y1 = rotate_pairs(y1, c, -s)
            half = tl.arange(0, WIDTH)[None, :]
            valid = inside[:, None] & (half < HALF)
            tl.store(at + half, round_to(y0, out.dtype.element_ty), valid)
            tl.store(at + HALF + half, round_to(y1, out.dtype.element_ty), valid)
        else:
            tl.store(at + col[None, :], round_to(y, out.dtype.element_ty), inside[:, None] & (col < D)[None, :])


def read(
    scan: Scan,
    operands: Operands,
    snapshots: Snapshots,
    *,
    eps: float | None,
    gate: Tensor | None,
    returned: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Reads [B,N,H,D] of every token, and the denominator [B,N,H] unless `eps` merges the two.

    `gate`: the quotient is multiplied by its silu. `returned`: reads are mapped back into the token's own ray frame.
    """
    config, tokens, activation, positions = scan.configuration, scan.tokens, scan.activation, scan.positions
    q, prepared = operands.q, operands.q is not scan.q
    out = scan.q.new_empty(scan.q.shape, dtype=dtype)
    separate = scan.normaliser and eps is None
    denominator = scan.q.new_empty(scan.q.shape[:-1], dtype=torch.float32) if separate else None
    weight, stand_in = None if prepared else activation.weights[0], scan.decay
    cos, sin = positions.tables if positions else (stand_in, stand_in)
    how = config.read if scan.normaliser else config.read_without_normaliser
    tiles = how.tiles_of(tokens)
    parts = triton.cdiv(tokens, how.rows * tiles)
    _read_kernel[(scan.memories * scan.frames * parts,)](
        q,
        stand_in if operands.rms is None else operands.rms[0],
        stand_in if weight is None else weight,
        positions.matrices[0] if positions and positions.matrices else stand_in,
        cos,
        sin,
        snapshots.kv,
        snapshots.kv if snapshots.z is None else snapshots.z,
        q if gate is None else gate,
        out,
        out if denominator is None else denominator,
        scan.decay.shape[1],
        scan.frames,
        tokens,
        parts,
        *octet_strides(q),
        *octet_strides(q if gate is None else gate),
        int(positions is not None and cos.shape[0] > 1),
        activation.eps,
        eps or 0.0,
        D=scan.dim,
        WIDTH=padded(scan.dim // 2),
        ROWS=how.rows,
        TILES=tiles,
        DIRECTIONS=scan.directions,
        TURNED=how.turned,
        NORM=NORMS[activation.norm],
        WEIGHTED=weight is not None,
        RELU=activation.relu,
        PREPARED=prepared,
        POSITIONS=positions.kind if positions and not prepared else 0,
        NORMALISER=scan.normaliser,
        MERGED=eps is not None,
        GATED=gate is not None,
        RETURNED=returned,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=how.warps,
        maxnreg=how.registers,
        num_stages=1,
    )
    return out, denominator
