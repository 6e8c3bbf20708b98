"""Triton kernels of what surrounds the camera scan; the reference says what they compute."""

import triton
import triton.language as tl

from longtake.kernels.scan.heads import (
    activate_heads,
    growth_of,
    inverse_rms,
    load_heads,
    place_heads,
    position_of,
    store_heads,
)
from longtake.kernels.scan.tokens import CAMERA


@triton.jit(
    do_not_specialize=[
        "heads", "tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "own_tables", "eps", "k_scale",
    ]
)  # fmt: skip
def prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    projection: tl.tensor,
    inverse: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_rms: tl.tensor,
    k_rms: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    norm_before: tl.tensor,
    norm_after: tl.tensor,
    inflation: tl.tensor,
    heads: int,
    tokens: int,
    q_batch: int,
    q_token: int,
    q_head: int,
    k_batch: int,
    k_token: int,
    k_head: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    own_tables: int,
    eps: float,
    k_scale: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    GIVEN: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
) -> None:
    """q, k and v of one token, whose heads are taken in GROUPS groups of HEADS."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    turns = (row + batch * own_tables * tokens) * (D // 4)
    q += (batch * q_batch + row * q_token) * 8
    k += (batch * k_batch + row * k_token) * 8
    v += (batch * v_batch + row * v_token) * 8
    out = token * heads * D
    to_q = position_of(projection + token * 16, cos + turns, sin + turns, True, 1.0, CAMERA, D, SIDE)
    to_k = position_of(inverse + token * 16, cos + turns, sin + turns, False, 1.0, CAMERA, D, SIDE)
    q_inverse = inverse_rms(q, q_rms + token, q_head, heads, eps, NORM, GIVEN, D, SIDE, HEADS, GROUPS)
    k_inverse = inverse_rms(k, k_rms + token, k_head, heads, eps, NORM, GIVEN, D, SIDE, HEADS, GROUPS)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        x = load_heads(q, head, q_head, heads, D, SIDE)
        x = activate_heads(x, q_weight, q_inverse, head, heads, eps, 1.0, NORM, Q_WEIGHTED, RELU, D, SIDE)
        store_heads(q_out + out, place_heads(x, to_q, CAMERA), head, heads, D, D, "ieee")
        x = load_heads(k, head, k_head, heads, D, SIDE)
        x = activate_heads(x, k_weight, k_inverse, head, heads, eps, k_scale, NORM, K_WEIGHTED, RELU, D, SIDE)
        y = place_heads(x, to_k, CAMERA)
        store_heads(k_out + out, y, head, heads, D, D, "ieee")
        before, after, ratio = growth_of(x, y, tl.float32)
        at = token * heads + head
        tl.store(norm_before + at, before, head < heads)
        tl.store(norm_after + at, after, head < heads)
        tl.store(inflation + at, ratio, head < heads)
        x = place_heads(load_heads(v, head, v_head, heads, D, SIDE), to_k, CAMERA)
        store_heads(v_out + out, x, head, heads, D, D, "ieee")


@triton.jit(do_not_specialize=["heads", "frames", "tokens"], do_not_specialize_on_alignment=["beta", "inflation"])
def discount_kernel(
    beta: tl.tensor,
    inflation: tl.tensor,
    out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    BLOCK: tl.constexpr,
    PER_FRAME: tl.constexpr,
) -> None:
    """One frame of one head; the tokens are summed in columns of BLOCK, and those in a tree."""
    frame = tl.program_id(0).to(tl.int64)
    memory = frame // frames
    first = (memory // heads) * frames + frame % frames
    inflation += first * tokens * heads + memory % heads
    total = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < tokens:
        row = start + tl.arange(0, BLOCK)
        total += tl.load(inflation + row * heads, row < tokens, 0.0)
        start += BLOCK
    mean = tl.div_rn(tl.sum(total, axis=0), tokens * 1.0)
    growth = tl.where(mean < 1, 1.0, mean)
    if PER_FRAME:
        tl.store(out + frame, tl.div_rn(tl.load(beta + frame).to(tl.float32), growth))
    else:
        beta += frame * tokens
        out += frame * tokens
        start = 0
        while start < tokens:
            row = start + tl.arange(0, BLOCK)
            x = tl.load(beta + row, row < tokens, 0.0).to(tl.float32)
            tl.store(out + row, tl.div_rn(x, growth), row < tokens)
            start += BLOCK


@triton.jit(do_not_specialize=["heads", "tokens", "x_batch", "x_token", "x_head", "own_tables"])
def output_kernel(
    x: tl.tensor,
    projection: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: int,
    tokens: int,
    x_batch: int,
    x_token: int,
    x_head: int,
    own_tables: int,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One token, whose heads are taken in GROUPS groups of HEADS."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    turns = (row + batch * own_tables * tokens) * (D // 4)
    x += (batch * x_batch + row * x_token) * 8
    back = position_of(projection + token * 16, cos + turns, sin + turns, False, -1.0, CAMERA, D, SIDE)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        y = place_heads(load_heads(x, head, x_head, heads, D, SIDE), back, CAMERA)
        store_heads(out + token * heads * D, y, head, heads, D, D, "ieee")
