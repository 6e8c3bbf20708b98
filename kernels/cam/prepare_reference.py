"""Plain PyTorch reference of what surrounds the camera scan (SANA-WM, arXiv 2605.15178; ray-relative UCPE positions).

A head's first half is D/8 groups of four, mapped by the token's 4×4 world → ray matrix; its second half is rotated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.checks import FLOATS, require, require_tokens
from longtake.kernels.delta import accumulation_dtype
from longtake.kernels.gdn.reference import Norm, check_norm, rms_norm
from longtake.kernels.rope import pair_tables, rotate

Tables = tuple[Tensor, Tensor] | None
DOWNSCALE_EPS = 1e-6
NORM_FLOOR = 1e-12


class CamTokens(NamedTuple):
    """Prepared q, k, v [B,N,H,D], and of every key its squared norm before and after the transform and their ratio.

    `norm_before`, `norm_after` and `inflation` (after / before, each at least 1e-12) are [B,N,H]. All contiguous and
    fp32 (float64 for float64 input).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norm_before: Tensor
    norm_after: Tensor
    inflation: Tensor


def _check_head(name: str, x: Tensor, cos: Tensor | None, sin: Tensor | None, **matrices: Tensor) -> Tables:
    if x.ndim != 4 or not x.shape[-1] or x.shape[-1] % 8:
        raise ValueError(f"{name} must be [B,N,H,D] with D a multiple of 8, got {tuple(x.shape)}")
    require_tokens(name, x, x)
    for matrix_name, matrix in matrices.items():
        require(matrix_name, matrix, (*x.shape[:2], 4, 4), like=x)
    return pair_tables(cos, sin, x, x.shape[-1] // 2)


def check_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    projection_inverse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: str,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    norm_eps: float,
    inverse_rms: tuple[Tensor, Tensor] | None,
) -> Tables:
    """Raise `ValueError` unless the arguments of `cam_prepare` fit; the tables as `pair_tables` gives them."""
    tables = _check_head("q", q, cos, sin, projection=projection, projection_inverse=projection_inverse)
    require_tokens("k", k, q)
    require_tokens("v", v, q)
    check_norm(q, norm, q_weight, k_weight, norm_eps, inverse_rms)
    return tables


def check_discount(beta: Tensor, inflation: Tensor) -> None:
    """Raise `ValueError` unless inflation is [B,F*S,H] and beta [B,H,F,S] or [B,H,F]."""
    if inflation.ndim != 3 or beta.ndim not in (3, 4):
        shapes = tuple(inflation.shape), tuple(beta.shape)
        raise ValueError("inflation must be [B,N,H] and beta [B,H,F,S] or [B,H,F], got {} and {}".format(*shapes))
    batch, tokens, heads = inflation.shape
    frames = beta.shape[2]
    if not frames or not tokens or tokens % frames:
        raise ValueError(f"beta {tuple(beta.shape)} does not fit the {tokens} tokens of inflation")
    require("inflation", inflation, inflation.shape)
    require("beta", beta, (batch, heads, frames, tokens // frames)[: beta.ndim], FLOATS, like=inflation)


def check_output(
    out: Tensor, projection: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype | None
) -> Tables:
    """Raise `ValueError` unless the arguments of `cam_output` fit; the tables as `pair_tables` gives them."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype is one of {FLOATS}, got {dtype}")
    return _check_head("out", out, cos, sin, projection=projection)


def _transform(x: Tensor, matrix: Tensor, tables: Tables) -> Tensor:
    """Groups of four of the first half ← matrix·group, pairs of the second half rotated; matrix [B,N,4,4].

    The product is written out: as a matrix product it would fall below fp32 under autocast or with TF32.
    """
    groups, pairs = x.chunk(2, dim=-1)
    columns = matrix.to(x.dtype)[:, :, None, None].unbind(-1)
    entries = torch.unflatten(groups, -1, (-1, 4)).unsqueeze(-1).unbind(-2)
    terms = [column * entry for column, entry in zip(columns, entries, strict=True)]
    groups = sum(terms[1:], start=terms[0])
    return torch.cat((groups.flatten(-2), pairs if tables is None else rotate(pairs, *tables)), dim=-1)


def _downscale(x: Tensor, reference: Tensor) -> Tensor:
    """Shrink each [D] vector to the RMS of its reference, never grow it."""
    ratio = (reference.square().mean(-1, keepdim=True) + DOWNSCALE_EPS) / (
        x.square().mean(-1, keepdim=True) + DOWNSCALE_EPS
    )
    return x * ratio.sqrt().clamp(max=1)


def cam_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    projection_inverse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    norm: Norm = "full",
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    inverse_rms: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    relu: bool = True,
    downscale: bool = False,
) -> CamTokens:
    """As `prepare.cam_prepare`, in PyTorch."""
    positions = (projection, projection_inverse, cos, sin)
    tables = check_prepare(q, k, v, *positions, norm, q_weight, k_weight, norm_eps, inverse_rms)
    q_inverse, k_inverse = inverse_rms or (None, None)
    q = rms_norm(q, q_weight, norm=norm, eps=norm_eps, inverse_rms=q_inverse)
    k = rms_norm(k, k_weight, norm=norm, eps=norm_eps, inverse_rms=k_inverse)
    if relu:
        q, k = q.relu(), k.relu()
    before = (q, k * k_scale, v.to(accumulation_dtype(v)))
    matrices = (projection.mT, projection_inverse, projection_inverse)
    after = [_transform(x, matrix, tables) for x, matrix in zip(before, matrices, strict=True)]
    if downscale:
        after = [_downscale(x, reference) for x, reference in zip(after, before, strict=True)]
    norm_before, norm_after = (x[1].square().sum(-1).contiguous() for x in (before, after))
    inflation = norm_after.clamp(min=NORM_FLOOR) / norm_before.clamp(min=NORM_FLOOR)
    return CamTokens(after[0], after[1], after[2], norm_before, norm_after, inflation)


def cam_discount(beta: Tensor, inflation: Tensor) -> Tensor:
    """As `prepare.cam_discount`, in PyTorch."""
    check_discount(beta, inflation)
    frame_mean = torch.unflatten(inflation, 1, (beta.shape[2], -1)).mean(2).clamp(min=1).transpose(1, 2).contiguous()
    return beta.to(accumulation_dtype(beta)) / (frame_mean if beta.ndim == 3 else frame_mean[..., None])


def cam_output(
    out: Tensor,
    projection: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `prepare.cam_output`, in PyTorch."""
    tables = check_output(out, projection, cos, sin, dtype)
    back = None if tables is None else (tables[0], -tables[1])
    return _transform(out.to(accumulation_dtype(out)), projection, back).to(dtype or out.dtype)
