"""Some tokens of a head on their way back, [R,SIDE], or some of their columns [R,C]; what their kernels are given."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.scan.configurations import Reading
from longtake.kernels.scan.inputs import NORMS, Scan, Which
from longtake.kernels.scan.tokens import norm_factor
from longtake.kernels.triton_tiles import INTERPRETED, TRITON_TYPES, octet_strides, padded, round_to


@triton.jit
def load_columns(
    x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, col: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """Some entries of some tokens of a frame, [R,C]; stride in units of 8 elements."""
    at = x + (row * stride).to(tl.int64)[:, None] * 8 + col[None, :]
    tile = tl.load(at, (row < tokens)[:, None] & (col < D)[None, :], 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def store_columns(
    out: tl.tensor, x: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, col: tl.tensor, D: tl.constexpr
) -> None:
    """Some entries [R,C] of some tokens of a frame."""
    at = out + (row * stride).to(tl.int64)[:, None] + col[None, :]
    tl.store(at, round_to(x, out.dtype.element_ty), (row < tokens)[:, None] & (col < D)[None, :])


@triton.jit
def row_sums(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Sums of x·y over every row, the same bits in all threads that add one up.

    A bare product that a thread adds to its neighbour's is fused with the sum, so that each rounds the other's alone.
    """
    return tl.sum(tl.fma(x, y, 0.0), axis=1)


@triton.jit
def load_weight(
    weight: tl.tensor, head: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, WEIGHTED: tl.constexpr
) -> tl.tensor:
    """Of a head's norm, [1,SIDE]; ones without."""
    col = tl.arange(0, SIDE)
    w = tl.full((SIDE,), 1.0, tl.float32)
    if WEIGHTED:
        w = tl.load(weight + head * D + col, col < D, 0.0).to(tl.float32)
    return w[None, :]


@triton.jit
def load_activated(
    x: tl.tensor, rms: tl.tensor, w: tl.tensor, row: tl.tensor, tokens: tl.tensor, stride: tl.tensor, eps: tl.tensor,
    scale: tl.tensor, D: tl.constexpr, SIDE: tl.constexpr, NORM: tl.constexpr, RELU: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some raw tokens with norm, weight, ReLU and scale, [R,SIDE] fp32; zeros beyond the last one."""
    raw = load_columns(x, row, tokens, stride, tl.arange(0, SIDE), D).to(tl.float32)
    factor = norm_factor(raw, rms, row, row < tokens, eps, NORM, D) * scale
    raw *= w
    if RELU:
        raw = tl.maximum(raw, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return raw * factor[:, None]


def token_arguments(scan: Scan, which: Which) -> dict[str, Any]:
    """What a kernel is given of the positions of queries (`which` 0) or keys (1), and of the scan."""
    positions, stand_in = scan.positions, scan.decay
    tables = positions.tables if positions else (stand_in, stand_in)
    matrices = (positions and positions.matrices) or (stand_in, stand_in)
    return {
        "matrix": matrices[which],
        "cos": tables[0],
        "sin": tables[1],
        "heads": scan.decay.shape[1],
        "frames": scan.frames,
        "tokens": scan.tokens,
        "own_tables": int(positions is not None and tables[0].shape[0] > 1),
        "D": scan.dim,
        "SIDE": padded(scan.dim),
        "POSITIONS": positions.kind if positions else 0,
        "NORMALISER": scan.normaliser,
        "OPERAND": TRITON_TYPES[scan.configuration.operand],
        "PRECISION": scan.configuration.dot,
    }


def raw_arguments(scan: Scan, which: Which, rms: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """What a kernel is given of raw queries (`which` 0) or keys (1) and their norm."""
    x, activation, stand_in = scan[which], scan.activation, scan.decay
    weight = activation.weights[which]
    return {
        "x": x,
        "rms": stand_in if rms is None else rms[which],
        "weight": stand_in if weight is None else weight,
        "norm_eps": activation.eps,
        "scale": activation.k_scale if which else 1.0,
        **named_strides("x", x),
        "NORM": NORMS[activation.norm],
        "WEIGHTED": weight is not None,
        "RELU": activation.relu,
    }


def named_strides(name: str, x: Tensor) -> dict[str, int]:
    """Of batch, token and head of an aligned tensor in units of 8 elements, as kernels name them."""
    return dict(zip((f"{name}_batch", f"{name}_token", f"{name}_head"), octet_strides(x), strict=True))


class Activated(NamedTuple):
    """Gradients of activated tokens [B,N,H,D], contiguous, in the dtype of operands where the tokens are, else in fp32.

    `along` [B,N,H] fp32: tokens times them; None without the full norm, which takes most of them away.
    """

    grad: Tensor
    along: Tensor | None


def unwritten(scan: Scan, which: Which) -> Activated:
    """Room for gradients of activated queries (`which` 0) or keys (1)."""
    x, full = scan[which], scan.activation.norm == "full"
    return Activated(
        torch.empty(x.shape, dtype=scan.between(which), device=x.device),
        x.new_empty(x.shape[:-1], dtype=torch.float32) if full else None,
    )


def launch_options(how: Reading) -> dict[str, Any]:
    """Rows and warps of a kernel."""
    return {"ROWS": how.rows, "num_warps": how.warps, "maxnreg": how.registers, "num_stages": 1}
