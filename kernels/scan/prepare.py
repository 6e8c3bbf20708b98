"""First step of a scan: every token's k as an operand of the products that follow, all heads of a token at once.

k gets its norm, ReLU, scale, position and √β, so that P = Kᵀ·diag(β)·K stays symmetric when its operands are rounded.
q and v are prepared where the camera maps them. Operands lie head by head, [B,H,N,D]. For a backward pass all of q is
left, and k without √β.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.heads import (
    NORM_FLOOR,
    activate_heads,
    growth_of,
    inverse_rms,
    load_heads,
    place_heads,
    position_of,
    store_heads,
)
from longtake.kernels.scan.inputs import NORMS, Scan
from longtake.kernels.scan.tokens import CAMERA, FULL_NORM, ROTARY, map_quads, transposed
from longtake.kernels.triton_tiles import octet_strides, padded, square_root


@triton.jit
def _growth_slope(x: tl.tensor, y: tl.tensor, position: tl.tuple, before: tl.tensor, after: tl.tensor) -> tl.tuple:
    """Gradient of the growth ‖y‖²/‖x‖² of some heads x, y = M·x, which is 2·(Mᵀ·y − growth·x)/‖x‖², and x times it.

    Both squared norms, `before` and `after`, are at least NORM_FLOOR. Where M only turns, the two terms cancel: they
    are subtracted before anything is rounded.
    """
    least = tl.maximum(before, NORM_FLOOR)
    growth = tl.div_rn(tl.maximum(after, NORM_FLOOR), least)
    rise = tl.where(after > NORM_FLOOR, tl.div_rn(2.0, least), 0.0)
    fall = tl.where(before > NORM_FLOOR, tl.div_rn(2.0, least) * growth, 0.0)
    slope = rise[:, None] * map_quads(y, transposed(position)) - fall[:, None] * x
    return slope, rise * after - fall * before


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
    q_rms_out: tl.tensor,
    k_rms_out: tl.tensor,
    k_out: tl.tensor,
    plain_out: tl.tensor,
    v_out: tl.tensor,
    growth: tl.tensor,
    kept_out: tl.tensor,
    slope_out: tl.tensor,
    along_out: tl.tensor,
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
    SIDE: tl.constexpr,
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
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One token: program (batch, token), which takes its heads in GROUPS groups of HEADS."""
    turns: tl.constexpr = D // 2 if POSITIONS == ROTARY else D // 4
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
    along_out += batch * heads * all_tokens + place
    slope_out += token * heads * D
    if POSITIONS == CAMERA or KEEP or (NORM == FULL_NORM and not GIVEN):
        inverse = inverse_rms(q, q_rms + token, q_head, heads, eps, NORM, GIVEN, D, SIDE, HEADS, GROUPS)
        if NORM == FULL_NORM and not GIVEN:
            tl.store(q_rms_out + token, inverse)
        if POSITIONS == CAMERA or KEEP:
            position = position_of(matrix, cos, sin, True, 1.0, POSITIONS, D, SIDE)
            for group in range(GROUPS):
                head = group * HEADS + tl.arange(0, HEADS)
                x = load_heads(q, head, q_head, heads, D, SIDE)
                x = activate_heads(x, q_weight, inverse, head, heads, eps, 1.0, NORM, Q_WEIGHTED, RELU, D, SIDE)
                store_heads(q_out + out, place_heads(x, position, POSITIONS), head, heads, size, D, PRECISION)
    position = position_of(inverse_matrix, cos, sin, False, 1.0, POSITIONS, D, SIDE)
    inverse = inverse_rms(k, k_rms + token, k_head, heads, eps, NORM, GIVEN, D, SIDE, HEADS, GROUPS)
    if NORM == FULL_NORM and not GIVEN:
        tl.store(k_rms_out + token, inverse)
    for group in range(GROUPS):
        head = group * HEADS + tl.arange(0, HEADS)
        share = tl.load(beta + head * frames * beta_frame, head < heads, 0.0).to(tl.float32)
        root = square_root(share, k_out.dtype.element_ty)[:, None]
        raw = load_heads(k, head, k_head, heads, D, SIDE)
        if KEEP and not DISCOUNT:
            x = activate_heads(raw, k_weight, inverse, head, heads, eps, scale, NORM, K_WEIGHTED, RELU, D, SIDE)
            store_heads(kept_out + out, place_heads(x, position, POSITIONS), head, heads, size, D, PRECISION)
        lift = scale if DISCOUNT else scale * root  # growth is of the keys without β
        x = activate_heads(raw, k_weight, inverse, head, heads, eps, lift, NORM, K_WEIGHTED, RELU, D, SIDE)
        y = place_heads(x, position, POSITIONS)
        if DISCOUNT:
            before, after, ratio = growth_of(x, y, k_out.dtype.element_ty)
            tl.store(growth + head * all_tokens, ratio, head < heads)
            if KEEP:
                slope, along = _growth_slope(x, y, position, before, after)
                store_heads(slope_out, slope, head, heads, D, D, "ieee")
                tl.store(along_out + head * all_tokens, along, head < heads)
                store_heads(kept_out + out, y, head, heads, size, D, PRECISION)
            y *= root
        store_heads(k_out + out, y, head, heads, size, D, PRECISION)
        if NORMALISER and POSITIONS != 0:
            store_heads(plain_out + out, x, head, heads, size, D, PRECISION)
        if POSITIONS == CAMERA:
            x = place_heads(load_heads(v, head, v_head, heads, D, SIDE), position, POSITIONS)
            store_heads(v_out + out, x, head, heads, size, D, PRECISION)


class Placed(NamedTuple):
    """Tokens with their positions as a backward pass takes them: q and k, without √β, [B,H,N,D], v [B,N,H,D].

    `rms` [B,N] is the inverse RMS of q and of k with the full norm. With a discount `slope` [B,N,H,D] is the gradient
    of the growth by each k, in the dtype of operands where k is, else in fp32, and `along` [B,H,N] is k times it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rms: tuple[Tensor, Tensor] | None
    slope: Tensor | None
    along: Tensor | None


class Operands(NamedTuple):
    """k with its position and k without (the same where there is none), each times √β, [B,H,N,D].

    `v` and `q` [B,N,H,D] are with their positions for the camera, else as they were given. `rms` [B,N] is the inverse
    RMS of q and of k with the full norm; `growth` [B,H,N] is ‖k after‖²/‖k before‖² of its position where it is wanted.
    """

    k: Tensor
    plain: Tensor
    v: Tensor
    q: Tensor
    rms: tuple[Tensor, Tensor] | None
    growth: Tensor | None
    placed: Placed | None


def _room(scan: Scan, *, keep: bool) -> Operands:
    """Unwritten operands; what is not prepared is as it was given."""
    batch, count, heads, dim = scan.q.shape
    activation, positions, operand = scan.activation, scan.positions, scan.configuration.operand
    camera = positions is not None and positions.matrices is not None

    def tokens() -> Tensor:
        return scan.q.new_empty((batch, heads, count, dim), dtype=operand)

    def numbers(*shape: int) -> Tensor:
        return scan.q.new_empty(shape, dtype=torch.float32)

    k, v = tokens(), tokens().transpose(1, 2) if camera else scan.v
    q = tokens() if camera or keep else k
    rms, growth, placed = activation.rms, numbers(batch, heads, count) if scan.discount else None, None
    if activation.norm == "full" and rms is None:
        rms = numbers(batch, count), numbers(batch, count)
    if keep:
        slope = torch.empty(scan.k.shape, dtype=scan.between(1), device=scan.k.device) if scan.discount else None
        placed = Placed(q, tokens(), v, rms, slope, numbers(batch, heads, count) if scan.discount else None)
    plain = tokens() if scan.normaliser and positions else k
    return Operands(k, plain, v, q.transpose(1, 2) if camera else scan.q, rms, growth, placed)


def prepare(scan: Scan, *, keep: bool = False) -> Operands:
    """Operands of a scan in the operand dtype of its precision; with `keep` what its backward pass takes, too."""
    batch, count, heads, dim = scan.q.shape
    activation, positions, config = scan.activation, scan.positions, scan.configuration
    found, stand_in = _room(scan, keep=keep), scan.decay
    placed = found.placed or Placed(found.q, found.k, found.v, None, None, None)
    q_weight, k_weight = activation.weights
    tables = positions.tables if positions else None
    matrices = positions.matrices if positions and positions.matrices else (stand_in, stand_in)
    group = min(config.prepare_heads, triton.next_power_of_2(heads))
    _prepare_kernel[(batch * count,)](
        scan.q,
        scan.k,
        scan.v,
        scan.beta,
        *(activation.rms or (stand_in, stand_in)),
        stand_in if q_weight is None else q_weight,
        stand_in if k_weight is None else k_weight,
        *matrices,
        *(tables or (stand_in, stand_in)),
        placed.q,
        *(found.rms or (stand_in, stand_in)),
        found.k,
        found.plain,
        found.v,
        stand_in if found.growth is None else found.growth,
        placed.k,
        stand_in if placed.slope is None else placed.slope,
        stand_in if placed.along is None else placed.along,
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
        SIDE=padded(dim),
        HEADS=group,
        GROUPS=triton.cdiv(heads, group),
        NORM=NORMS[activation.norm],
        GIVEN=activation.rms is not None,
        Q_WEIGHTED=q_weight is not None,
        K_WEIGHTED=k_weight is not None,
        RELU=activation.relu,
        POSITIONS=positions.kind if positions else 0,
        NORMALISER=scan.normaliser,
        DISCOUNT=scan.discount,
        KEEP=keep,
        PRECISION=config.dot,
        num_warps=config.prepare_warps,
    )
    return found
