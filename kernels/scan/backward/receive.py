"""First step of the backward pass: what the reads of a frame hand back to its memory, B = dNᵀ·Q̃ and b = Qᵀ·dd."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.scan.absorb import load_rows, load_tokens
from longtake.kernels.scan.backward.tokens import load_activated, load_weight, named_strides, raw_arguments
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.prepare import Placed
from longtake.kernels.triton_tiles import as_operand, padded, store_square

SUMMED_ROWS = tl.constexpr(16)
"""Of queries that are summed one by one: a thread's own rows are added before they take registers."""


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "x_batch", "x_token", "x_head", "g_batch", "g_token", "g_head", "norm_eps",
        "scale",
    ]
)  # fmt: skip
def _receive_kernel(
    q: tl.tensor,
    x: tl.tensor,
    rms: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    denominator_grad: tl.tensor,
    received: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    g_batch: int,
    g_token: int,
    g_head: int,
    norm_eps: float,
    scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    NORMALISER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One frame of one head: program (frame of a head; B or b)."""
    frame = tl.program_id(0).to(tl.int64)
    memory = frame // frames
    batch, head, place = memory // heads, memory % heads, frame % frames
    first = frame * tokens * D
    received += frame * (D + 1 if NORMALISER else D) * D
    if tl.program_id(1) == 0:
        grad += (batch * g_batch + head * g_head + place * tokens * g_token) * 8
        total = tl.zeros((SIDE, SIDE), tl.float32)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            row = tile * ROWS + tl.arange(0, ROWS)
            query = load_rows(q + first, row, tokens, D, SIDE)
            back = as_operand(load_tokens(grad, row, tokens, g_token, D, SIDE), q.dtype.element_ty, PRECISION)
            total = tl.dot(tl.trans(back), query, total, input_precision=PRECISION)
        store_square(received, total, D)
    else:
        rms += (batch * frames + place) * tokens
        x += (batch * x_batch + head * x_head + place * tokens * x_token) * 8
        denominator_grad += (batch * frames + place) * tokens * heads + head
        w = load_weight(weight, head, D, SIDE, WEIGHTED)
        sums = tl.zeros((SUMMED_ROWS, SIDE), tl.float32)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            row = tile * ROWS + tl.arange(0, ROWS)
            query = load_activated(x, rms, w, row, tokens, x_token, norm_eps, scale, D, SIDE, NORM, RELU)
            query *= tl.load(denominator_grad + row * heads, row < tokens, 0.0)[:, None]
            sums += tl.sum(tl.reshape(query, (ROWS // SUMMED_ROWS, SUMMED_ROWS, SIDE)), axis=0)
        entry = tl.arange(0, SIDE)
        tl.store(received + D * D + entry, tl.sum(sums, axis=0), entry < D)


def receive(scan: Scan, placed: Placed, grad: Tensor, denominator_grad: Tensor | None) -> Tensor:
    """B and, with a normaliser, b of every frame, [B·H·F,D or D + 1,D] fp32, B with values before keys.

    `grad` [B,N,H,D] of the numerator, aligned; `denominator_grad` [B,N,H] fp32.
    """
    config, dim = scan.configuration, scan.dim
    count = scan.memories * scan.frames
    received = scan.q.new_empty((count, dim + scan.normaliser, dim), dtype=torch.float32)
    Fitted(_receive_kernel, grad.device)[(count, 1 + scan.normaliser)](
        q=placed.q,
        grad=grad,
        denominator_grad=scan.decay if denominator_grad is None else denominator_grad,
        received=received,
        heads=scan.decay.shape[1],
        frames=scan.frames,
        tokens=scan.tokens,
        **raw_arguments(scan, 0, placed.rms),
        **named_strides("g", grad),
        D=dim,
        SIDE=padded(dim),
        ROWS=config.absorb_rows,
        TILES=triton.cdiv(scan.tokens, config.absorb_rows),
        STAGES=config.receive_stages,
        NORMALISER=scan.normaliser,
        PRECISION=config.dot,
        num_warps=config.absorb_warps,
    )
    return received
