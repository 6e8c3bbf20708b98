"""Triton kernels of what surrounds the camera scan; the reference says what they compute."""

import triton
import triton.language as tl

from longtake.kernels.cam.prepare_reference import NORM_FLOOR
from longtake.kernels.triton_tiles import round_to

FLOOR = tl.constexpr(NORM_FLOOR)


@triton.jit
def _row(matrix: tl.tensor, ROW: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tuple:
    """Row ROW of a 4×4 matrix, or its column."""
    first = matrix + (ROW if TRANSPOSED else 4 * ROW)
    step: tl.constexpr = 4 if TRANSPOSED else 1
    return tl.load(first), tl.load(first + step), tl.load(first + 2 * step), tl.load(first + 3 * step)


@triton.jit
def _turns(table: tl.tensor, step: tl.tensor, quad: tl.tensor, D: tl.constexpr) -> tl.tuple:
    """Table entries [1,QUADS] of the first and the second pair of every quad of the second half."""
    pair = 2 * quad - D // 4
    inside = (quad >= D // 8) & (quad < D // 4)
    first = tl.load(table + pair * step, inside, 0.0)
    second = tl.load(table + (pair + 1) * step, inside, 0.0)
    return first[None, :], second[None, :]


@triton.jit
def _transform(
    x: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    steps: tl.tuple,
    SIGN: tl.constexpr,
    D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROTATED: tl.constexpr,
) -> tl.tensor:
    """Heads x [H,W] of one token: groups of four of the first half ← matrix·group, pairs of the second half rotated.

    Either half is a run of D/8 quads, and a quad of the second half is two pairs; `steps` lead from pair to pair in
    the tables.
    """
    quads: tl.constexpr = x.shape[1] // 4
    evens, odds = tl.split(tl.reshape(x, (x.shape[0], quads, 2, 2)))
    x0, x2 = tl.split(evens)
    x1, x3 = tl.split(odds)
    quad = tl.arange(0, quads)
    r0, r1, r2, r3 = x0, x1, x2, x3
    if ROTATED:
        cos0, cos1 = _turns(cos, steps[0], quad, D)
        sin0, sin1 = _turns(sin, steps[1], quad, D)
        sin0, sin1 = sin0 * SIGN, sin1 * SIGN
        r0, r1 = x0 * cos0 - x1 * sin0, x0 * sin0 + x1 * cos0
        r2, r3 = x2 * cos1 - x3 * sin1, x2 * sin1 + x3 * cos1
    grouped = (quad < D // 8)[None, :]
    a, b, c, d = _row(matrix, 0, TRANSPOSED)
    y0 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, r0)
    a, b, c, d = _row(matrix, 1, TRANSPOSED)
    y1 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, r1)
    a, b, c, d = _row(matrix, 2, TRANSPOSED)
    y2 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, r2)
    a, b, c, d = _row(matrix, 3, TRANSPOSED)
    y3 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, r3)
    return tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), x.shape)


@triton.jit
def _normed(
    x: tl.tensor,
    inverse: tl.tensor,
    weight: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
) -> tl.tensor:
    """Heads x [H,W] of one token over their RMS, times the weight, and ReLU, which lets NaN through."""
    if NORM == "given":
        x *= tl.load(inverse)
    elif NORM != "none":
        energy = tl.sum(x * x, axis=1)
        mean = tl.div_rn(energy, D * 1.0) if NORM == "head" else tl.div_rn(tl.sum(energy, axis=0), width)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        x *= scale[:, None] if NORM == "head" else scale
    if WEIGHTED:
        x *= tl.load(weight + place, inside, 0.0).to(tl.float32)
    return tl.where(x < 0, 0.0, x) if RELU else x


@triton.jit
def _load_heads(x: tl.tensor, at: tl.tensor, stride: tl.tensor, inside: tl.tensor, col: tl.tensor) -> tl.tensor:
    """Heads [H,W] of one token in fp32; `at` and `stride` from head to head are in units of 8 elements."""
    head = tl.arange(0, inside.shape[0])
    return tl.load(x + (at + head * stride)[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _floored(energy: tl.tensor) -> tl.tensor:
    """At least FLOOR; NaN stays."""
    return tl.where(energy < FLOOR, FLOOR, energy)


@triton.jit(
    do_not_specialize=[
        "heads", "tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "cos_batch", "cos_token", "cos_step", "sin_batch", "sin_token", "sin_step", "eps", "k_scale",
    ],
    do_not_specialize_on_alignment=["projection", "inverse", "cos", "sin", "q_inverse", "k_inverse"],
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
    q_inverse: tl.tensor,
    k_inverse: tl.tensor,
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
    cos_batch: int,
    cos_token: int,
    cos_step: int,
    sin_batch: int,
    sin_token: int,
    sin_step: int,
    eps: float,
    k_scale: float,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    ROTATED: tl.constexpr,
) -> None:
    """All heads of q, k and v of one token."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (col < D)[None, :]
    place = head[:, None] * D + col[None, :]
    width = heads * D * 1.0
    projection += token * 16
    inverse += token * 16
    cos += batch * cos_batch + row * cos_token
    sin += batch * sin_batch + row * sin_token
    steps = (cos_step, sin_step)
    out = token * heads * D + place

    x = _load_heads(q, batch * q_batch + row * q_token, q_head, inside, col)
    x = _normed(x, q_inverse + token, q_weight, width, eps, place, inside, D, NORM, Q_WEIGHTED, RELU)
    tl.store(q_out + out, _transform(x, projection, cos, sin, steps, 1.0, D, True, ROTATED), inside)

    x = _load_heads(k, batch * k_batch + row * k_token, k_head, inside, col)
    x = _normed(x, k_inverse + token, k_weight, width, eps, place, inside, D, NORM, K_WEIGHTED, RELU) * k_scale
    y = _transform(x, inverse, cos, sin, steps, 1.0, D, False, ROTATED)
    tl.store(k_out + out, y, inside)
    before, after = tl.sum(x * x, axis=1), tl.sum(y * y, axis=1)
    at = token * heads + head
    tl.store(norm_before + at, before, head < heads)
    tl.store(norm_after + at, after, head < heads)
    tl.store(inflation + at, tl.div_rn(_floored(after), _floored(before)), head < heads)

    x = _load_heads(v, batch * v_batch + row * v_token, v_head, inside, col)
    tl.store(v_out + out, _transform(x, inverse, cos, sin, steps, 1.0, D, False, ROTATED), inside)


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


@triton.jit(
    do_not_specialize=[
        "heads", "tokens", "x_batch", "x_token", "x_head",
        "cos_batch", "cos_token", "cos_step", "sin_batch", "sin_token", "sin_step",
    ],
    do_not_specialize_on_alignment=["projection", "cos", "sin"],
)  # fmt: skip
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
    cos_batch: int,
    cos_token: int,
    cos_step: int,
    sin_batch: int,
    sin_token: int,
    sin_step: int,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // tokens, token % tokens
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (col < D)[None, :]
    cos += batch * cos_batch + row * cos_token
    sin += batch * sin_batch + row * sin_token
    steps = (cos_step, sin_step)
    y = _load_heads(x, batch * x_batch + row * x_token, x_head, inside, col)
    y = _transform(y, projection + token * 16, cos, sin, steps, -1.0, D, False, ROTATED)
    tl.store(out + token * heads * D + head[:, None] * D + col[None, :], round_to(y, DTYPE), inside)
