"""What surrounds the camera scan: ray-relative positions on q, k and v, the discount of β, the transform of the output.

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

import torch
from torch import Tensor

from longtake.kernels.backend import Backend, requested, runs_triton
from longtake.kernels.cam import prepare_reference as reference
from longtake.kernels.cam.prepare_reference import CamTokens, check_discount, check_output, check_prepare
from longtake.kernels.gdn.reference import Norm


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
    backend: Backend | None = None,
) -> CamTokens:
    """Norm, ReLU and key scale, then ray-relative positions: q by Pᵀ, k and v by P⁻¹, so that q'·k' = qᵀ·P_q·P_k⁻¹·k.

    Args:
        q, k, v: [B,N,H,D], D a multiple of 8, any view with unit stride in D; not changed.
        projection, projection_inverse: P (world → ray) and P⁻¹, [B,N,4,4] fp32.
        cos, sin: fp32 tables for the second half of the head: [N,D/4], or [N,D/2] whose every second entry counts, or
            either with a batch in front. Both None: no rotation.
        norm: RMS norm of q and k over each head, over all heads of a token together (`full`), or none.
        q_weight, k_weight: [H*D] norm weights, fp32 or bf16, or None. norm_eps: added to the mean square.
        inverse_rms: 1/RMS of q and of k, [B,N] fp32 each, instead of computing them; with `norm="full"` only.
        k_scale: multiplied onto k before the transform. relu: on q and k (delta-rule blocks); False in softmax blocks.
        downscale: shrink q, k, v after the transform to the RMS they had before it, in the reference whatever
            `backend` says; norms of k count after that.

    Raises:
        ValueError: an argument does not fit; it is named.
        BackendError: `backend` can not run.
    """
    positions = (projection, projection_inverse, cos, sin)
    tables = check_prepare(q, k, v, *positions, norm, q_weight, k_weight, norm_eps, inverse_rms) or (None, None)
    given = (q, k, v, *positions, q_weight, k_weight, *(inverse_rms or ()))
    requested(backend)
    if downscale or not runs_triton(backend, *(x for x in given if x is not None), dim=q.shape[-1]):
        return reference.cam_prepare(
            q,
            k,
            v,
            *positions,
            norm=norm,
            q_weight=q_weight,
            k_weight=k_weight,
            norm_eps=norm_eps,
            inverse_rms=inverse_rms,
            k_scale=k_scale,
            relu=relu,
            downscale=downscale,
        )
    from longtake.kernels.cam import prepare_ops as ops

    norms = (q_weight, k_weight, *(inverse_rms or (None, None)), norm, norm_eps)
    return CamTokens(*ops.cam_prepare(q, k, v, projection, projection_inverse, *tables, *norms, k_scale, relu))


def cam_discount(beta: Tensor, inflation: Tensor, *, backend: Backend | None = None) -> Tensor:
    """β / max(1, mean of the inflation over a frame): keeps I − β·k·kᵀ contractive when far translations grow k.

    Args:
        beta: [B,H,F,S] or [B,H,F]; not changed.
        inflation: [B,F*S,H] of `cam_prepare`: the ratios of the tokens, of which the mean is taken.

    Returns:
        The shape of `beta`, fp32 (float64 for float64 input).

    Raises:
        ValueError: an argument does not fit; it is named.
        BackendError: `backend` can not run.
    """
    check_discount(beta, inflation)
    if not runs_triton(backend, beta, inflation):
        return reference.cam_discount(beta, inflation)
    from longtake.kernels.cam import prepare_ops as ops

    discounted: Tensor = ops.cam_discount(beta, inflation)
    return discounted


def cam_output(
    out: Tensor,
    projection: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Into the token's own ray frame: groups ← P·group, pairs rotated back, so that a value arrives as P_q·P_k⁻¹·v.

    Args:
        out: [B,N,H,D], any view with unit stride in D; not changed.
        projection: P, [B,N,4,4] fp32. cos, sin: as in `cam_prepare`.
        dtype: of the result; None: that of `out`. The products are fp32 (float64 for float64 input) either way.

    Returns:
        [B,N,H,D] contiguous.

    Raises:
        ValueError: an argument does not fit; it is named.
        BackendError: `backend` can not run.
    """
    tables = check_output(out, projection, cos, sin, dtype) or (None, None)
    if not runs_triton(backend, *(x for x in (out, projection, cos, sin) if x is not None), dim=out.shape[-1]):
        return reference.cam_output(out, projection, cos, sin, dtype=dtype)
    from longtake.kernels.cam import prepare_ops as ops

    transformed: Tensor = ops.cam_output(out, projection, *tables, dtype or out.dtype)
    return transformed
