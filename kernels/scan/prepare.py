"""First step of a scan: every token's k and v as operands of the products that follow, all heads of a token at once.

k gets its norm, ReLU, scale and position, and √β goes to k and v alike, so that P = Kᵀ·diag(β)·K stays symmetric when
its operands are rounded. Operands lie head by head, [B,H,N,D].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.inputs import NORMS, Scan
from longtake.kernels.scan.tokens import CAMERA, FULL_NORM, HEAD_NORM, ROTARY, load_matrix, map_quads
from longtake.kernels.triton_tiles import octet_strides, padded, rotate_pairs, to_operand

NORM_FLOOR = tl.constexpr(1e-12)


@triton.jit
def _load(
    x: tl.tensor, head: tl.tensor, stride: tl.tensor, heads: tl.tensor, FIRST: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One half of some heads of a token, [H,WIDTH] fp32."""
    col = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (col < HALF)[None, :]
    at = (head * stride).to(tl.int64)[:, None] * 8 + (FIRST + col)[None, :]
    return tl.load(x + at, inside, 0.0).to(tl.float32)


@triton.jit
def _square_sum(x0: tl.tensor, x1: tl.tensor) -> tl.tensor:
    """Σ x² of each head, [H]."""
    return tl.sum(x0 * x0 + x1 * x1, axis=1)


@triton.jit
def _inverse_rms(
    x: tl.tensor, rms: tl.tensor, stride: tl.tensor, heads: tl.tensor, eps: tl.tensor, NORM: tl.constexpr,
    GIVEN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """1 / √(mean x² + eps) over all heads of a token, or as it is given; 1 without the full norm."""
    HALF: tl.constexpr = D // 2
    inverse = tl.full((), 1.0, tl.float32)
    if NORM == FULL_NORM and GIVEN:
        inverse = tl.load(rms)
    elif NORM == FULL_NORM:
        total = tl.zeros((HEADS,), tl.float32)
        for group in tl.static_range(0, GROUPS):
            head = group * HEADS + tl.arange(0, HEADS)
            total += _square_sum(
                _load(x, head, stride, heads, 0, HALF, WIDTH), _load(x, head, stride, heads, HALF, HALF, WIDTH)
            )
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(total, axis=0), heads * D * 1.0) + eps))
    return inverse


@triton.jit
def _active(
    x0: tl.tensor, x1: tl.tensor, weight: tl.tensor, inverse: tl.tensor, head: tl.tensor, heads: tl.tensor,
    eps: tl.tensor, scale: tl.tensor, NORM: tl.constexpr, WEIGHTED: tl.constexpr, RELU: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Norm, weight, ReLU and scale of some heads of a token."""
    HALF: tl.constexpr = D // 2
    factor = inverse * scale
    if NORM == HEAD_NORM:
        factor *= tl.div_rn(1.0, tl.sqrt_rn(_square_sum(x0, x1) / D + eps))[:, None]
    if WEIGHTED:
        x0 *= _load(weight, head, D // 8, heads, 0, HALF, WIDTH)
        x1 *= _load(weight, head, D // 8, heads, HALF, HALF, WIDTH)
    if RELU:
        x0 = tl.maximum(x0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x1 = tl.maximum(x1, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x0 * factor, x1 * factor


@triton.jit
def _turn(cos: tl.tensor, sin: tl.tensor, FIRST: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """Cosines and sines of PAIRS pairs of a token, [1,WIDTH] each."""
    pair = tl.arange(0, WIDTH)
    c = tl.load(cos + FIRST + pair, pair < PAIRS, 0.0)
    s = tl.load(sin + FIRST + pair, pair < PAIRS, 0.0)
    return c[None, :], s[None, :]


@triton.jit
def _position(
    matrix: tl.tensor, cos: tl.tensor, sin: tl.tensor, TRANSPOSED: tl.constexpr, POSITIONS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What places either half of every head of a token: two turns, or for the camera its matrix and a turn."""
    PAIRS: tl.constexpr = HALF // 2
    first = ()
    second = ()
    if POSITIONS == ROTARY:
        first = _turn(cos, sin, 0, PAIRS, WIDTH // 2)
        second = _turn(cos, sin, PAIRS, PAIRS, WIDTH // 2)
    elif POSITIONS == CAMERA:
        first = load_matrix(matrix, TRANSPOSED)
        second = _turn(cos, sin, 0, PAIRS, WIDTH // 2)
    return first, second


@triton.jit
def _placed(x0: tl.tensor, x1: tl.tensor, position: tl.tuple, POSITIONS: tl.constexpr) -> tl.tuple:
    """Halves of some heads with the token's position."""
    if POSITIONS == ROTARY:
        x0 = rotate_pairs(x0, position[0][0], position[0][1])
        x1 = rotate_pairs(x1, position[1][0], position[1][1])
    elif POSITIONS == CAMERA:
        x0 = map_quads(x0, position[0])
        x1 = rotate_pairs(x1, position[1][0], position[1][1])
    return x0, x1


@triton.jit
def _store(
    out: tl.tensor, x0: tl.tensor, x1: tl.tensor, head: tl.tensor, heads: tl.tensor, size: tl.tensor,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Both halves of some heads of a token to [H,N,D], `size` = N·D, as operands of the dtype of `out`."""
    col = tl.arange(0, x0.shape[1])
    place = head.to(tl.int64)[:, None] * size + col[None, :]
    inside = (head < heads)[:, None] & (col < HALF)[None, :]
    tl.store(out + place, to_operand(x0, out.dtype.element_ty, PRECISION), inside)
    tl.store(out + place + HALF, to_operand(x1, out.dtype.element_ty, PRECISION), inside)


@triton.jit(
    do_not_specialize=[
        "heads", "frames", "tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head",
        "v_batch", "v_token", "v_head", "beta_frame", "beta_token", "own_tables", "eps", "scale",
    ]
)  # fmt: skip
def _prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    q_rms: tl.tensor,
    k_rms: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    matrix: tl.tensor,
    inverse_matrix: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    rms_out: tl.tensor,
    k_out: tl.tensor,
    plain_out: tl.tensor,
    v_out: tl.tensor,
    growth: tl.tensor,
    heads: int,
    frames: int,
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
    beta_frame: int,
    beta_token: int,
    own_tables: int,
    eps: float,
    scale: float,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    GIVEN: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    RELU: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORMALISER: tl.constexpr,
    DISCOUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One token: program (batch, token), which takes its heads in GROUPS groups of HEADS."""
    HALF: tl.constexpr = D // 2
    turns: tl.constexpr = HALF if POSITIONS == ROTARY else HALF // 2
    token = tl.program_id(0).to(tl.int64)
    all_tokens = tl.cast(frames, tl.int64) * tokens
    batch, place = token // all_tokens, token % all_tokens
    table = (place + batch * own_tables * all_tokens) * turns
    cos += table
    sin += table
    matrix += token * 16
    inverse_matrix += token * 16
    out = batch * heads * all_tokens * D + place * D
    size = all_tokens * D
    q += (batch * q_batch + place * q_token) * 8
    k += (batch * k_batch + place * k_token) * 8
    v += (batch * v_batch + place * v_token) * 8
    beta += (batch * heads * frames + place // tokens) * beta_frame + place % tokens * beta_token
    growth += batch * heads * all_tokens + place
    if POSITIONS == CAMERA or (NORM == FULL_NORM and not GIVEN):
        inverse = _inverse_rms(q, q_rms + token, q_head, heads, eps, NORM, GIVEN, D, WIDTH, HEADS, GROUPS)
        if POSITIONS == CAMERA:
            position = _position(matrix, cos, sin, True, POSITIONS, HALF, WIDTH)
            for group in range(GROUPS):
                head = group * HEADS + tl.arange(0, HEADS)
                x0 = _load(q, head, q_head, heads, 0, HALF, WIDTH)
                x1 = _load(q, head, q_head, heads, HALF, HALF, WIDTH)
                x0, x1 = _active(x0, x1, q_weight, inverse, head, heads, eps, 1.0, NORM, Q_WEIGHTED, RELU, D, WIDTH)
                x0, x1 = _placed(x0, x1, position, POSITIONS)
                _store(q_out + out, x0, x1, head, heads, size, HALF, PRECISION)
        else:
            tl.store(rms_out + token, inverse)
    position = _position(inverse_matrix, cos, sin, False, POSITIONS, HALF, WIDTH)
    head = tl.arange(0, HEADS)
    next_v0 = _load(v, head, v_head, heads, 0, HALF, WIDTH)
    next_v1 = _load(v, head, v_head, heads, HALF, HALF, WIDTH)
    inverse = _inverse_rms(k, k_rms + token, k_head, heads, eps, NORM, GIVEN, D, WIDTH, HEADS, GROUPS)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        root = tl.sqrt_rn(tl.load(beta + head * frames * beta_frame, head < heads, 0.0).to(tl.float32))[:, None]
        v0, v1 = next_v0, next_v1
        next_v0 = _load(v, head + HEADS, v_head, heads, 0, HALF, WIDTH)
        next_v1 = _load(v, head + HEADS, v_head, heads, HALF, HALF, WIDTH)
        x0 = _load(k, head, k_head, heads, 0, HALF, WIDTH)
        x1 = _load(k, head, k_head, heads, HALF, HALF, WIDTH)
        lift = scale if DISCOUNT else scale * root  # growth is of the keys without β
        x0, x1 = _active(x0, x1, k_weight, inverse, head, heads, eps, lift, NORM, K_WEIGHTED, RELU, D, WIDTH)
        y0, y1 = _placed(x0, x1, position, POSITIONS)
        if DISCOUNT:
            after = tl.maximum(_square_sum(y0, y1), NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
            before = tl.maximum(_square_sum(x0, x1), NORM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
            tl.store(growth + head * all_tokens, tl.div_rn(after, before), head < heads)
            y0, y1 = y0 * root, y1 * root
        _store(k_out + out, y0, y1, head, heads, size, HALF, PRECISION)
        if NORMALISER and POSITIONS != 0:
            _store(plain_out + out, x0, x1, head, heads, size, HALF, PRECISION)
        if POSITIONS == CAMERA:
            v0, v1 = _placed(v0, v1, position, POSITIONS)
        _store(v_out + out, v0 * root, v1 * root, head, heads, size, HALF, PRECISION)


class Operands(NamedTuple):
    """k with its position, k without (the same where there is none), and v, each times √β, [B,H,N,D].

    `q` [B,H,N,D] is prepared for the camera alone, else None; `q_rms` [B,N] is the inverse RMS of q with the full norm;
    `growth` [B,H,N] is ‖k after‖²/‖k before‖² of its position where it is wanted.
    """

    k: Tensor
    plain: Tensor
    v: Tensor
    q: Tensor | None
    q_rms: Tensor | None
    growth: Tensor | None


def prepare(scan: Scan) -> Operands:
    """Operands of a scan, in the operand dtype of its precision."""
    batch, count, heads, dim = scan.q.shape
    activation, positions, config = scan.activation, scan.positions, scan.configuration
    camera = positions is not None and positions.matrices is not None

    def empty() -> Tensor:
        return scan.q.new_empty((batch, heads, count, dim), dtype=config.operand)

    k, v = empty(), empty()
    plain = empty() if scan.normaliser and positions else k
    q = empty() if camera else None
    growth = scan.q.new_empty((batch, heads, count), dtype=torch.float32) if scan.discount else None
    given = activation.rms
    computed = activation.norm == "full" and given is None and not camera
    q_rms = scan.q.new_empty((batch, count), dtype=torch.float32) if computed else (given[0] if given else None)
    q_weight, k_weight = activation.weights
    tables, stand_in = positions.tables if positions else None, scan.decay
    matrices = positions.matrices if positions and positions.matrices else (stand_in, stand_in)
    group = min(config.prepare_heads, triton.next_power_of_2(heads))
    _prepare_kernel[(batch * count,)](
        scan.q,
        scan.k,
        scan.v,
        scan.beta,
        *(given or (stand_in, stand_in)),
        stand_in if q_weight is None else q_weight,
        stand_in if k_weight is None else k_weight,
        *matrices,
        *(tables or (stand_in, stand_in)),
        k if q is None else q,
        stand_in if q_rms is None else q_rms,
        k,
        plain,
        v,
        stand_in if growth is None else growth,
        heads,
        scan.frames,
        scan.tokens,
        *octet_strides(scan.q),
        *octet_strides(scan.k),
        *octet_strides(scan.v),
        *((1, 0) if scan.beta.ndim == 3 else (scan.tokens, 1)),
        int(tables is not None and tables[0].shape[0] > 1),
        activation.eps,
        activation.k_scale,
        D=dim,
        WIDTH=padded(dim // 2),
        HEADS=group,
        GROUPS=triton.cdiv(heads, group),
        NORM=NORMS[activation.norm],
        GIVEN=given is not None,
        Q_WEIGHTED=q_weight is not None,
        K_WEIGHTED=k_weight is not None,
        RELU=activation.relu,
        POSITIONS=positions.kind if positions else 0,
        NORMALISER=scan.normaliser,
        DISCOUNT=scan.discount,
        PRECISION=config.dot,
        num_warps=config.prepare_warps,
    )
    return Operands(k, plain, v, q, q_rms, growth)
