"""Triton kernels of the camera branch; the reference says what they compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.cam.reference import NORM_FLOOR, check_discount, check_head
from longtake.kernels.delta import check_scan, start_state
from longtake.kernels.triton_absorb import absorb
from longtake.kernels.triton_read import read
from longtake.kernels.triton_remember import Memory, remember
from longtake.kernels.triton_scan import TILES, Scan, prepare
from longtake.kernels.triton_tiles import aligned, check_operands, dense, octet_strides, padded, round_to

FLOOR = tl.constexpr(NORM_FLOOR)
DISCOUNT_BLOCK = 256


@triton.jit
def _row(matrix: tl.tensor, ROW: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tuple:
    """Row ROW of a 4×4 matrix, or its column."""
    first = matrix + (ROW if TRANSPOSED else 4 * ROW)
    step: tl.constexpr = 4 if TRANSPOSED else 1
    return tl.load(first), tl.load(first + step), tl.load(first + 2 * step), tl.load(first + 3 * step)


@triton.jit
def _transform(
    x: tl.tensor,
    matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    SIGN: tl.constexpr,
    D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Heads x [H,W] of one token: groups of four of the first half ← matrix·group, pairs of the second half rotated.

    Either half is a run of D/8 quads, and a quad of the second half is two pairs.
    """
    quads: tl.constexpr = x.shape[1] // 4
    evens, odds = tl.split(tl.reshape(x, (x.shape[0], quads, 2, 2)))
    x0, x2 = tl.split(evens)
    x1, x3 = tl.split(odds)
    quad = tl.arange(0, quads)
    pair = 2 * quad - D // 4
    paired = (quad >= D // 8) & (quad < D // 4)
    cos0, cos1 = tl.load(cos + pair, paired, 0.0)[None, :], tl.load(cos + pair + 1, paired, 0.0)[None, :]
    sin0, sin1 = tl.load(sin + pair, paired, 0.0)[None, :] * SIGN, tl.load(sin + pair + 1, paired, 0.0)[None, :] * SIGN
    grouped = (quad < D // 8)[None, :]
    a, b, c, d = _row(matrix, 0, TRANSPOSED)
    y0 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, x0 * cos0 - x1 * sin0)
    a, b, c, d = _row(matrix, 1, TRANSPOSED)
    y1 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, x0 * sin0 + x1 * cos0)
    a, b, c, d = _row(matrix, 2, TRANSPOSED)
    y2 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, x2 * cos1 - x3 * sin1)
    a, b, c, d = _row(matrix, 3, TRANSPOSED)
    y3 = tl.where(grouped, a * x0 + b * x1 + c * x2 + d * x3, x2 * sin1 + x3 * cos1)
    return tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), x.shape)


@triton.jit
def _normed(
    x: tl.tensor,
    weight: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
) -> tl.tensor:
    """RMS norm over all heads of one token, and ReLU, which lets NaN through."""
    mean = tl.div_rn(tl.sum(tl.sum(x * x, axis=1), axis=0), width)
    x *= tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if WEIGHTED:
        x *= tl.load(weight + place, inside, 0.0).to(tl.float32)
    return tl.where(x < 0, 0.0, x) if RELU else x


@triton.jit
def _energy(x: tl.tensor) -> tl.tensor:
    """Squared norm of every head, at least FLOOR; NaN stays."""
    energy = tl.sum(x * x, axis=1)
    return tl.where(energy < FLOOR, FLOOR, energy)


@triton.jit(do_not_specialize=["heads", "tokens", "q_strides", "k_strides", "v_strides", "eps", "k_scale"])
def _prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    projection: tl.tensor,
    inverse: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    inflation: tl.tensor,
    heads: int,
    tokens: int,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    eps: float,
    k_scale: float,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
) -> None:
    """All heads of q, k and v of one token."""
    token = tl.program_id(0).to(tl.int64)
    batch, place_in_batch = token // tokens, token % tokens
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (col < D)[None, :]
    place = head[:, None] * D + col[None, :]
    width = heads * D * 1.0
    projection += token * 16
    inverse += token * 16
    cos += place_in_batch * (D // 4)
    sin += place_in_batch * (D // 4)
    out = token * heads * D + place

    at = batch * q_strides[0] + place_in_batch * q_strides[1]
    x = tl.load(q + (at + head * q_strides[2])[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
    x = _normed(x, q_weight, width, eps, place, inside, Q_WEIGHTED, RELU)
    tl.store(q_out + out, _transform(x, projection, cos, sin, 1.0, D, True), inside)

    at = batch * k_strides[0] + place_in_batch * k_strides[1]
    x = tl.load(k + (at + head * k_strides[2])[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
    x = _normed(x, k_weight, width, eps, place, inside, K_WEIGHTED, RELU) * k_scale
    y = _transform(x, inverse, cos, sin, 1.0, D, False)
    tl.store(k_out + out, y, inside)
    tl.store(inflation + token * heads + head, tl.div_rn(_energy(y), _energy(x)), head < heads)

    at = batch * v_strides[0] + place_in_batch * v_strides[1]
    x = tl.load(v + (at + head * v_strides[2])[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
    tl.store(v_out + out, _transform(x, inverse, cos, sin, 1.0, D, False), inside)


@triton.jit(do_not_specialize=["heads", "frames", "tokens"])
def _discount_kernel(
    beta: tl.tensor,
    inflation: tl.tensor,
    out: tl.tensor,
    heads: int,
    frames: int,
    tokens: int,
    BLOCK: tl.constexpr,
) -> None:
    """One frame of one head."""
    frame = tl.program_id(0).to(tl.int64)
    memory = frame // frames
    first = (memory // heads) * frames + frame % frames
    inflation += first * tokens * heads + memory % heads
    beta += frame * tokens
    out += frame * tokens
    total = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < tokens:
        row = start + tl.arange(0, BLOCK)
        total += tl.load(inflation + row * heads, row < tokens, 0.0)
        start += BLOCK
    mean = tl.div_rn(tl.sum(total, axis=0), tokens * 1.0)
    growth = tl.where(mean < 1, 1.0, mean)
    start = 0
    while start < tokens:
        row = start + tl.arange(0, BLOCK)
        tl.store(out + row, tl.div_rn(tl.load(beta + row, row < tokens, 0.0), growth), row < tokens)
        start += BLOCK


@triton.jit(do_not_specialize=["heads", "tokens", "strides"])
def _output_kernel(
    x: tl.tensor,
    projection: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: int,
    tokens: int,
    strides: tl.tuple,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    batch, place_in_batch = token // tokens, token % tokens
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (col < D)[None, :]
    at = batch * strides[0] + place_in_batch * strides[1]
    y = tl.load(x + (at + head * strides[2])[:, None] * 8 + col[None, :], inside, 0.0).to(tl.float32)
    cos += place_in_batch * (D // 4)
    sin += place_in_batch * (D // 4)
    y = _transform(y, projection + token * 16, cos, sin, -1.0, D, False)
    tl.store(out + token * heads * D + head[:, None] * D + col[None, :], round_to(y, DTYPE), inside)


def cam_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    projection_inverse: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_scale: float,
    relu: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.cam_prepare` without `downscale`; q, k, v in fp32, bf16 or fp16, results in fp32."""
    for x, matrix in ((q, projection), (k, projection_inverse), (v, projection_inverse)):
        check_head(x, matrix, cos, sin)
    check_operands(q, k, v)
    q, k, v = aligned(q), aligned(k), aligned(v)
    batch, tokens, heads, dim = q.shape
    q_out, k_out, v_out = (q.new_empty(q.shape, dtype=torch.float32) for _ in range(3))
    inflation = q.new_empty(q.shape[:-1], dtype=torch.float32)
    _prepare_kernel[(batch * tokens,)](
        q,
        k,
        v,
        dense(projection),
        dense(projection_inverse),
        dense(cos),
        dense(sin),
        q if q_weight is None else dense(q_weight),
        k if k_weight is None else dense(k_weight),
        q_out,
        k_out,
        v_out,
        inflation,
        heads,
        tokens,
        octet_strides(q),
        octet_strides(k),
        octet_strides(v),
        eps,
        k_scale,
        D=dim,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=padded(dim),
        Q_WEIGHTED=q_weight is not None,
        K_WEIGHTED=k_weight is not None,
        RELU=relu,
        num_warps=4,
    )
    return q_out, k_out, v_out, inflation


def cam_discount(beta: Tensor, inflation: Tensor) -> Tensor:
    """As `reference.cam_discount`, in fp32."""
    check_discount(beta, inflation)
    beta, inflation = dense(beta), dense(inflation)
    batch, heads, frames, tokens = beta.shape
    out = torch.empty_like(beta)
    _discount_kernel[(batch * heads * frames,)](
        beta, inflation, out, heads, frames, tokens, BLOCK=DISCOUNT_BLOCK, num_warps=4
    )
    return out


def _prepare(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Scan:
    check_scan(q, k, v, beta, decay)
    check_operands(q, k, v)
    return prepare(q, k, v, beta, decay, None, normaliser=False)


def _state(state: Tensor | None, scan: Scan, *, reverse: bool) -> Memory | None:
    return None if state is None else Memory(dense(start_state(state, scan.kv_shape, scan.beta, reverse=reverse)), None)


def cam_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `reference.cam_scan`; q, k, v in fp32, bf16 or fp16, everything else and all results in fp32."""
    scan = _prepare(q, k, v, beta, decay)
    state = _state(initial_state, scan, reverse=reverse)
    boundaries, final = remember(scan, absorb(scan), state, "reverse" if reverse else "forward")
    out, _ = read(scan, boundaries)
    return out, None if final is None else final.kv


def cam_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.cam_bidirectional`, from one record of each frame and one read of q."""
    scan = _prepare(q, k, v, beta, decay)
    state = _state(initial_state, scan, reverse=False)
    boundaries, final = remember(scan, absorb(scan), state, "both")
    out, _ = read(scan, boundaries)
    assert final is not None
    return out, final.kv


def cam_output(out: Tensor, projection: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `reference.cam_output`, computed in fp32 and rounded once to the dtype of `out`."""
    check_head(out, projection, cos, sin)
    check_operands(out)
    out = aligned(out)
    batch, tokens, heads, dim = out.shape
    result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _output_kernel[(batch * tokens,)](
        out,
        dense(projection),
        dense(cos),
        dense(sin),
        result,
        heads,
        tokens,
        octet_strides(out),
        D=dim,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=padded(dim),
        DTYPE=TILES[out.dtype].operand,
        num_warps=4,
    )
    return result
