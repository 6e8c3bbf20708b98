"""Gradients of activated queries, which need nothing of the walk back: what a frame's tokens read is known."""

import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.backward.tokens import (
    Activated,
    launch_options,
    load_columns,
    named_strides,
    row_sums,
    store_columns,
    token_arguments,
    unwritten,
)
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.launch import Saved
from longtake.kernels.scan.tokens import ROTARY, unplace
from longtake.kernels.triton_tiles import as_operand


@triton.jit(do_not_specialize=["heads", "frames", "tokens", "directions", "g_batch", "g_token", "g_head", "own_tables"])
def _queries_kernel(
    q: tl.tensor,
    grad: tl.tensor,
    denominator: tl.tensor,
    denominator_grad: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    memories: tl.tensor,
    z_snapshots: tl.tensor,
    out: tl.tensor,
    along_out: tl.tensor,
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
    ALONG: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some tokens of one frame of one head: program (frame of a head, part)."""
    frame = tl.program_id(0).to(tl.int64)
    memory, at = frame // frames, frame % frames
    batch, head = memory // heads, memory % heads
    other = tl.num_programs(0).to(tl.int64)
    first = (batch * frames + at) * tokens
    grad += (batch * g_batch + head * g_head + at * tokens * g_token) * 8
    out += (first * heads + head) * D
    q += frame * tokens * D
    along_out += first * heads + head
    denominator += first * heads + head
    denominator_grad += first * heads + head
    turns = (at + batch * frames * own_tables) * tokens * (D // 2 if POSITIONS == ROTARY else D // 4)
    cos += turns
    sin += turns
    matrix += first * 16
    col = tl.arange(0, SIDE)
    held = load_columns(memories + frame * D * D, col, D, D // 8, col, D)
    z = tl.zeros((SIDE,), tl.float32)
    if NORMALISER:
        z = tl.load(z_snapshots + frame * D + col, col < D, 0.0)
        z += tl.load(z_snapshots + (other + frame) * D + col, (col < D) & (directions == 2), 0.0)
    for tile in tl.range(0, TILES, disable_licm=True):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        back = as_operand(load_columns(grad, row, tokens, g_token, col, D), OPERAND, PRECISION)
        if ALONG:  # early: the fence before a product waits for every load under way
            asking = load_columns(q, row, tokens, D // 8, col, D)
        query = tl.dot(back, held, input_precision=PRECISION)
        if ALONG:
            along = row_sums(query, asking.to(tl.float32))
        query = unplace(query, matrix, cos, sin, row, tokens, 0, D, POSITIONS, False)
        if NORMALISER:
            asked = tl.load(denominator_grad + row * heads, row < tokens, 0.0)
            query += asked[:, None] * z[None, :]
        if ALONG:
            if NORMALISER:
                along += asked * tl.load(denominator + row * heads, row < tokens, 0.0)
            tl.store(along_out + row * heads, along, row < tokens)
        store_columns(out, query, row, tokens, heads * D, col, D)


def query_gradients(scan: Scan, saved: Saved, read: Tensor, grad: Tensor, denominator_grad: Tensor | None) -> Activated:
    """Of all queries.

    `read` [B·H·F,D,D]: the memories of all directions that each frame reads, summed, values before keys, operands;
    `grad` [B,N,H,D] of the numerator, aligned; `denominator_grad` [B,N,H] fp32.
    """
    how, stand_in = scan.configuration.queries, scan.decay
    tiles = how.tiles_of(scan.tokens)
    found = unwritten(scan, 0)
    Fitted(_queries_kernel, grad.device)[scan.memories * scan.frames, triton.cdiv(scan.tokens, how.rows * tiles)](
        q=saved.placed.q,
        grad=grad,
        denominator=stand_in if saved.denominator is None else saved.denominator,
        denominator_grad=stand_in if denominator_grad is None else denominator_grad,
        memories=read,
        z_snapshots=stand_in if saved.snapshots.z is None else saved.snapshots.z,
        out=found.grad,
        along_out=stand_in if found.along is None else found.along,
        directions=scan.directions,
        **named_strides("g", grad),
        **token_arguments(scan, 0),
        ALONG=found.along is not None,
        TILES=tiles,
        **launch_options(how),
    )
    return found
