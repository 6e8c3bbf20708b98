"""Plain PyTorch reference of the camera branch (SANA-WM, arXiv 2605.15178; ray-relative UCPE positions).

A head's first half is D/8 groups of four, mapped by the token's 4×4 world → ray matrix; its second half is rotated.
"""

import torch
from torch import Tensor

from longtake.kernels.delta import accumulation_dtype, by_frame, by_token, check_scan, delta_scan, start_state
from longtake.kernels.gdn.reference import full_rms_norm
from longtake.kernels.rope import rotate

DOWNSCALE_EPS = 1e-6
NORM_FLOOR = 1e-12


def _transform(x: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Groups of four of the first half ← matrix·group, pairs of the second half rotated; matrix [B,N,4,4]."""
    groups, pairs = x.chunk(2, dim=-1)
    groups = torch.einsum("bnij,bnhgj->bnhgi", matrix.to(x.dtype), torch.unflatten(groups, -1, (-1, 4)))
    return torch.cat((groups.flatten(-2), rotate(pairs, cos, sin)), dim=-1)


def _downscale(x: Tensor, reference: Tensor) -> Tensor:
    """Shrink each [D] vector to the RMS of its reference, never grow it."""
    ratio = (reference.square().mean(-1, keepdim=True) + DOWNSCALE_EPS) / (
        x.square().mean(-1, keepdim=True) + DOWNSCALE_EPS
    )
    return x * ratio.sqrt().clamp(max=1)


def check_head(x: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise `ValueError` unless x is [B,N,H,D], D a multiple of 8, matrix [B,N,4,4], cos and sin [N,D/4]."""
    batch, tokens, _, dim = x.shape
    if dim % 8:
        raise ValueError(f"the head dim must be a multiple of 8, got {dim}")
    if matrix.shape != (batch, tokens, 4, 4) or cos.shape != (tokens, dim // 4) or sin.shape != cos.shape:
        given = (tuple(y.shape) for y in (matrix, cos, sin))
        raise ValueError("projection {}, cos {} or sin {} does not fit {}".format(*given, tuple(x.shape)))


def check_discount(beta: Tensor, inflation: Tensor) -> None:
    """Raise `ValueError` unless beta is [B,H,F,S] and inflation [B,F*S,H]."""
    batch, heads, frames, per_frame = beta.shape
    if inflation.shape != (batch, frames * per_frame, heads):
        raise ValueError(f"inflation {tuple(inflation.shape)} does not fit beta {tuple(beta.shape)}")


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
    downscale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm, ReLU and key scale, then ray-relative positions: q by Pᵀ, k and v by P⁻¹, so that q'·k' = qᵀ·P_q·P_k⁻¹·k.

    Args:
        q, k, v: [B,N,H,D], D a multiple of 8; not changed.
        projection, projection_inverse: P (world → ray) and P⁻¹, [B,N,4,4].
        cos, sin: [N,D/4] tables for the second half of the head.
        q_weight, k_weight: [H*D] norm weights, or None. eps: added to the mean square.
        k_scale: multiplied onto k before the transform. relu: on q and k (delta-rule blocks); False in softmax blocks.
        downscale: shrink q, k, v after the transform to the RMS they had before it.

    Returns:
        q, k, v [B,N,H,D] and the inflation of k, ‖k after‖²/‖k before‖² [B,N,H]; fp32 (float64 for float64 input).

    Raises:
        ValueError: shapes do not fit.
    """
    for x, matrix in ((q, projection), (k, projection_inverse), (v, projection_inverse)):
        check_head(x, matrix, cos, sin)
    q, k, v = full_rms_norm(q, q_weight, eps), full_rms_norm(k, k_weight, eps), v.to(accumulation_dtype(v))
    if relu:
        q, k = q.relu(), k.relu()
    before = (q, k * k_scale, v)
    matrices = (projection.mT, projection_inverse, projection_inverse)
    after = [_transform(x, matrix, cos, sin) for x, matrix in zip(before, matrices, strict=True)]
    if downscale:
        after = [_downscale(x, reference) for x, reference in zip(after, before, strict=True)]
    inflation = after[1].square().sum(-1).clamp(min=NORM_FLOOR) / before[1].square().sum(-1).clamp(min=NORM_FLOOR)
    return after[0], after[1], after[2], inflation


def cam_discount(beta: Tensor, inflation: Tensor) -> Tensor:
    """β / max(1, mean of the inflation over a frame): keeps I − β·k·kᵀ contractive when far translations grow k.

    beta [B,H,F,S], inflation [B,N,H] → [B,H,F,S].

    Raises:
        ValueError: shapes do not fit.
    """
    check_discount(beta, inflation)
    frame_mean = torch.unflatten(inflation, 1, beta.shape[2:]).mean(2)
    return beta / frame_mean.clamp(min=1).permute(0, 2, 1)[..., None]


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
    """One direction of the delta rule without a normaliser; recurrence as in `longtake.kernels.gdn.gdn_scan`.

    Args:
        q, k, v: [B,N,H,D] from `cam_prepare`. beta: [B,H,F,S] from `cam_discount`. decay: [B,H,F]. None is changed.
        initial_state: [B,H,D,D] rows = key dim; None: empty. reverse: exclusive, local to these frames.

    Returns:
        out [B,N,H,D] and the final state [B,H,D,D] (None in reverse); contiguous, fp32 (float64 for float64 input).

    Raises:
        ValueError: shapes do not fit, or a state is given in reverse.
    """
    check_scan(q, k, v, beta, decay)
    batch, _, heads, dim = q.shape
    state = start_state(initial_state, (batch, heads, dim, dim), q, reverse=reverse)
    dtype = accumulation_dtype(q)
    q, k, v = (by_frame(x.to(dtype), beta.shape[2]) for x in (q, k, v))
    out, state = delta_scan(q, k, v, beta.to(dtype), decay.to(dtype), state, reverse=reverse)
    return by_token(out), None if reverse else state.contiguous()


def cam_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Forward scan from `initial_state` plus the local reverse scan, summed.

    Arguments as in `cam_scan` → out [B,N,H,D] and the forward scan's final state [B,H,D,D].
    """
    forward, final_state = cam_scan(q, k, v, beta, decay, initial_state=initial_state)
    reverse, _ = cam_scan(q, k, v, beta, decay, reverse=True)
    assert final_state is not None
    return forward + reverse, final_state


def cam_output(out: Tensor, projection: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Into the token's own ray frame: groups ← P·group, pairs rotated back, so that a value arrives as P_q·P_k⁻¹·v.

    out [B,N,H,D], projection [B,N,4,4], cos and sin [N,D/4] → [B,N,H,D] in the dtype of `out`, which is not changed.

    Raises:
        ValueError: shapes do not fit.
    """
    check_head(out, projection, cos, sin)
    return _transform(out, projection, cos, -sin)
