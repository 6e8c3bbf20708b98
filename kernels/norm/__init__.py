"""RMS norms over all heads of a token."""

from torch import Tensor

from longtake.kernels.backend import Backend, runs_triton
from longtake.kernels.checks import require_eps, require_tokens
from longtake.kernels.norm import reference

__all__ = ["inverse_rms"]


def inverse_rms(q: Tensor, k: Tensor, *, eps: float, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """1 / √(mean(x²) + eps) over all H*D entries of a token, for x = q and x = k, in one pass.

    Args:
        q, k: [B,N,H,D], any views with unit stride in D; not changed. The kernel takes D % 8 = 0, D ≤ 128.
        eps: added to the mean square.

    Returns:
        One scale a token for q and one for k, [B,N] each, fp32 (float64 for float64 input, reference only).

    Raises:
        ValueError: q or k is no such tensor, they differ in shape or device, or eps is negative or not finite.
        BackendError: `backend` can not run.
    """
    if q.ndim != 4:
        raise ValueError(f"q must be [B,N,H,D], got {tuple(q.shape)}")
    require_tokens("q", q, q)
    require_tokens("k", k, q)
    require_eps("eps", eps)
    if not runs_triton(backend, q, k, dim=q.shape[-1]):
        return reference.inverse_rms(q, k, eps=eps)
    from longtake.kernels.norm import triton

    scales: tuple[Tensor, Tensor] = triton.inverse_rms(q, k, eps)
    return scales
