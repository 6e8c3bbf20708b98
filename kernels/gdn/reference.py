"""Plain PyTorch reference of the frame-wise gated delta rule (SANA-WM, arXiv 2605.15178)."""

from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.delta import (
    accumulation_dtype,
    by_frame,
    by_token,
    check_scan,
    check_tables,
    delta_scan,
    start_state,
)
from longtake.kernels.rope import rotate


class GdnState(NamedTuple):
    """Memory after the last absorbed frame, before the next one's decay.

    `kv` [B,H,D,D] rows = key dim, columns = value dim; `z` [B,H,D]. Both fp32.
    """

    kv: Tensor
    z: Tensor


def full_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over all heads together: x / √(mean(x²) + eps) · weight.

    x [B,N,H,D], weight [H*D] or None → [B,N,H,D] in fp32 (float64 stays).
    """
    wide = x.to(accumulation_dtype(x))
    wide = wide * torch.rsqrt(wide.square().mean(dim=(-2, -1), keepdim=True) + eps)
    return wide if weight is None else wide * weight.to(wide.dtype).view(x.shape[-2:])


def gdn_prepare(
    q: Tensor, k: Tensor, *, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, k_scale: float
) -> tuple[Tensor, Tensor]:
    """Norm over all heads together, ReLU, and the key scale D^−½·S^−½ that keeps I − P contractive.

    Args:
        q, k: [B,N,H,D], k after its short convolution; not changed.
        q_weight, k_weight: [H*D] learned norm weights, or None.
        eps: added to the mean square. k_scale: multiplied onto k after ReLU.

    Returns:
        q, k [B,N,H,D] fp32 (float64 for float64 input).
    """
    return full_rms_norm(q, q_weight, eps).relu(), full_rms_norm(k, k_weight, eps).relu() * k_scale


def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    initial_state: GdnState | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, GdnState | None]:
    """One direction of the recurrence, numerator and denominator apart.

    M_t = g_t·(I − K̃_tᵀ·diag(β_t)·K̃_t)·M_{t−1} + K̃_tᵀ·diag(β_t)·V_t and z_t likewise from K_t and ones, where K̃ is K
    rotated: only the numerator Q̃_t·M_t sees the rotation, the denominator is Q_t·z_t. Reverse: exclusive and local,
    R_{F−1} = 0, R_t = g_{t+1}·(I − P_{t+1})·R_{t+1} + A_{t+1}.

    Args:
        q, k, v: [B,N,H,D], N = F*S, frames first. beta: [B,H,F,S]. decay: [B,H,F] in (0,1]. None is changed.
        cos, sin: [N,D/2] tables of the interleaved rotation; None: no rotation.
        initial_state: memory of the frames before; None: empty.
        reverse: scan from the last frame back.

    Returns:
        numerator [B,N,H,D], denominator [B,N,H] and the final state (None in reverse); all contiguous, fp32
        (float64 for float64 input).

    Raises:
        ValueError: shapes do not fit, only one of cos and sin is given, or a state is given in reverse.
    """
    check_scan(q, k, v, beta, decay)
    check_tables(cos, sin, q)
    batch, _, heads, dim = q.shape
    dtype = accumulation_dtype(q)
    q, k, v, beta, decay = (x.to(dtype) for x in (q, k, v, beta, decay))
    turned_q, turned_k = (q, k) if cos is None or sin is None else (rotate(q, cos, sin), rotate(k, cos, sin))
    kv, z = (None, None) if initial_state is None else (initial_state.kv, initial_state.z[..., None])
    kv = start_state(kv, (batch, heads, dim, dim), q, reverse=reverse)
    z = start_state(z, (batch, heads, dim, 1), q, reverse=reverse)
    q, k, v, turned_q, turned_k = (by_frame(x, beta.shape[2]) for x in (q, k, v, turned_q, turned_k))
    numerator, kv = delta_scan(turned_q, turned_k, v, beta, decay, kv, reverse=reverse)
    denominator, z = delta_scan(q, k, torch.ones_like(v[..., :1]), beta, decay, z, reverse=reverse)
    final_state = None if reverse else GdnState(kv.contiguous(), z.squeeze(-1).contiguous())
    return by_token(numerator), by_token(denominator).squeeze(-1), final_state


def gdn_merge(forward: tuple[Tensor, Tensor], reverse: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """(num_f + num_r) / (den_f + den_r + eps).

    forward, reverse: numerator [B,N,H,D] and denominator [B,N,H] of each direction → [B,N,H,D].
    """
    return (forward[0] + reverse[0]) / (forward[1] + reverse[1] + eps)[..., None]


def gdn_bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    initial_state: GdnState | None = None,
    eps: float,
) -> tuple[Tensor, GdnState]:
    """Forward scan from `initial_state` plus the local reverse scan, merged.

    Arguments as in `gdn_scan`; `eps` is added to the denominator.

    Returns:
        out [B,N,H,D] and the forward scan's final state; fp32 (float64 for float64 input).
    """
    *forward, final_state = gdn_scan(q, k, v, beta, decay, cos=cos, sin=sin, initial_state=initial_state)
    *reverse, _ = gdn_scan(q, k, v, beta, decay, cos=cos, sin=sin, reverse=True)
    assert final_state is not None
    return gdn_merge((forward[0], forward[1]), (reverse[0], reverse[1]), eps), final_state
