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
    activate,
    load_half,
    load_matrices,
    load_turn,
    load_weight,
    map_quads,
)
from longtake.kernels.triton_tiles import (
    TRITON_TYPES,
    octet_strides,
    padded,
    rotate_pairs,
    round_to,
    times_sigmoid,
    to_operand,
)


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
def _memory_block(
    snapshots: tl.tensor, reverse: tl.tensor, ROW: tl.constexpr, COL: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, DIRECTIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One of the four blocks of the memory that a frame reads, transposed: [values,keys]."""
    HALF: tl.constexpr = D // 2
    row, col = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    place = (ROW * HALF + row)[None, :] * D + (COL * HALF + col)[:, None]
    valid = (row < HALF)[None, :] & (col < HALF)[:, None]
    return to_operand(_summed(snapshots, reverse, place, valid, DIRECTIONS), OPERAND, PRECISION)


@triton.jit
def _load_tile(
    x: tl.tensor, row: tl.tensor, inside: tl.tensor, stride: tl.tensor, D: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tuple:
    """Both halves of a head of some tokens."""
    HALF: tl.constexpr = D // 2
    return load_half(x, row, inside, stride, 0, HALF, WIDTH), load_half(x, row, inside, stride, HALF, HALF, WIDTH)


@triton.jit
def _gated(y: tl.tensor, gate: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """y·silu(gate); with 16-bit operands to a few fp32 roundings, which is faster."""
    gate = gate.to(tl.float32)
    y *= gate
    if tl.float32 == OPERAND:
        y = times_sigmoid(y, gate)
    else:
        y /= 1.0 + tl.exp(-gate)
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
    DIRECTIONS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
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
    w0 = load_weight(weight + head * D, 0, HALF, WIDTH) if WEIGHTED else 1.0
    w1 = load_weight(weight + head * D, HALF, HALF, WIDTH) if WEIGHTED else 1.0
    first = part * ROWS * TILES
    last = tl.minimum(first + ROWS * TILES, tokens)
    snapshots += index * D * D
    m00 = _memory_block(snapshots, reverse * D * D, 0, 0, D, WIDTH, DIRECTIONS, OPERAND, PRECISION)
    m01 = _memory_block(snapshots, reverse * D * D, 0, 1, D, WIDTH, DIRECTIONS, OPERAND, PRECISION)
    m10 = _memory_block(snapshots, reverse * D * D, 1, 0, D, WIDTH, DIRECTIONS, OPERAND, PRECISION)
    m11 = _memory_block(snapshots, reverse * D * D, 1, 1, D, WIDTH, DIRECTIONS, OPERAND, PRECISION)
    col = tl.arange(0, WIDTH)
    if NORMALISER:
        z_snapshots += index * D
        z0 = _summed(z_snapshots, reverse * D, col, col < HALF, DIRECTIONS)[None, :]
        z1 = _summed(z_snapshots, reverse * D, HALF + col, col < HALF, DIRECTIONS)[None, :]
    for tile in range(TILES):
        place = first + tile * ROWS + tl.arange(0, ROWS)
        inside = place < last
        row = first_token + place
        q0, q1 = _load_tile(q, row, inside, q_token, D, WIDTH)
        if GATED:  # early: the fence before a product waits for every load under way
            g0, g1 = _load_tile(gate, row, inside, gate_token, D, WIDTH)
        q0, q1 = activate(q0, q1, w0, w1, rms, row, inside, norm_eps, 1.0, NORM, WEIGHTED, RELU, D)
        if NORMALISER:
            total = tl.sum(q0 * z0, axis=1) + tl.sum(q1 * z1, axis=1)
        if POSITIONS == ROTARY:
            c, s = load_turn(cos, sin, row, inside, HALF, 0, HALF // 2, WIDTH // 2)
            q0 = rotate_pairs(q0, c, s)
            c, s = load_turn(cos, sin, row, inside, HALF, HALF // 2, HALF // 2, WIDTH // 2)
            q1 = rotate_pairs(q1, c, s)
        q0, q1 = tl.trans(to_operand(q0, OPERAND, PRECISION)), tl.trans(to_operand(q1, OPERAND, PRECISION))
        y0 = tl.dot(m10, q1, tl.dot(m00, q0, input_precision=PRECISION), input_precision=PRECISION)
        y1 = tl.dot(m11, q1, tl.dot(m01, q0, input_precision=PRECISION), input_precision=PRECISION)
        y0, y1 = tl.trans(y0), tl.trans(y1)
        at = ((batch * all_tokens + row) * heads + head)[:, None] * D + col[None, :]
        valid = inside[:, None] & (col < HALF)[None, :]
        if MERGED:
            share = tl.div_rn(1.0, total + eps)[:, None]
            y0, y1 = y0 * share, y1 * share
        elif NORMALISER:
            tl.store(denominator + (batch * all_tokens + row) * heads + head, total, inside)
        if GATED:
            y0, y1 = _gated(y0, g0, OPERAND), _gated(y1, g1, OPERAND)
        if RETURNED:
            y0 = map_quads(y0, load_matrices(matrix, row, inside))
            c, s = load_turn(cos, sin, row, inside, HALF // 2, 0, HALF // 2, WIDTH // 2)
            y1 = rotate_pairs(y1, c, -s)
        tl.store(out + at, round_to(y0, out.dtype.element_ty), valid)
        tl.store(out + at + HALF, round_to(y1, out.dtype.element_ty), valid)


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
    prepared = operands.q is not None
    q = scan.q if operands.q is None else operands.q.transpose(1, 2)
    out = scan.q.new_empty(scan.q.shape, dtype=dtype)
    separate = scan.normaliser and eps is None
    denominator = scan.q.new_empty(scan.q.shape[:-1], dtype=torch.float32) if separate else None
    weight, stand_in = None if prepared else activation.weights[0], scan.decay
    cos, sin = positions.tables if positions else (stand_in, stand_in)
    rows, tiles = config.read if scan.normaliser else config.read_without_normaliser
    parts = triton.cdiv(tokens, rows * tiles)
    _read_kernel[(scan.memories * scan.frames * parts,)](
        q,
        stand_in if operands.q_rms is None else operands.q_rms,
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
        ROWS=rows,
        TILES=tiles,
        DIRECTIONS=scan.directions,
        NORM=0 if prepared else NORMS[activation.norm],
        WEIGHTED=weight is not None,
        RELU=activation.relu and not prepared,
        POSITIONS=positions.kind if positions and not prepared else 0,
        NORMALISER=scan.normaliser,
        MERGED=eps is not None,
        GATED=gate is not None,
        RETURNED=returned,
        OPERAND=TRITON_TYPES[config.operand],
        PRECISION=config.dot,
        num_warps=config.read_warps,
        num_stages=1,
    )
    return out, denominator
