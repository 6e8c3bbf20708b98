"""Frame-wise gated delta rule with a normaliser, and the short convolution on its keys.

The scans run their Triton kernels on CUDA tensors where Triton is installed, else the reference; `backend` or the
environment variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from torch import Tensor

from longtake.kernels.backend import Backend, on_device_of, runs_triton
from longtake.kernels.gdn import reference
from longtake.kernels.gdn.reference import GdnState, gdn_merge, gdn_prepare
from longtake.kernels.gdn.short_conv import short_conv

__all__ = ["GdnState", "gdn_bidirectional", "gdn_merge", "gdn_prepare", "gdn_scan", "short_conv"]


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
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, GdnState | None]:
    """`reference.gdn_scan`, or the Triton kernels that compute the same.

    Raises:
        ValueError: shapes do not fit, only one of cos and sin is given, or a state is given in reverse.
        BackendError: `backend` can not run.
    """
    tables = {"cos": cos, "sin": sin}
    if not runs_triton(backend, q, k, v):
        return reference.gdn_scan(q, k, v, beta, decay, **tables, initial_state=initial_state, reverse=reverse)
    from longtake.kernels.gdn import triton

    with on_device_of(q):
        return triton.gdn_scan(q, k, v, beta, decay, **tables, initial_state=initial_state, reverse=reverse)


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
    backend: Backend | None = None,
) -> tuple[Tensor, GdnState]:
    """`reference.gdn_bidirectional`, or the Triton kernels that compute the same.

    Raises:
        ValueError: shapes do not fit, or only one of cos and sin is given.
        BackendError: `backend` can not run.
    """
    tables = {"cos": cos, "sin": sin}
    if not runs_triton(backend, q, k, v):
        return reference.gdn_bidirectional(q, k, v, beta, decay, **tables, initial_state=initial_state, eps=eps)
    from longtake.kernels.gdn import triton

    with on_device_of(q):
        return triton.gdn_bidirectional(q, k, v, beta, decay, **tables, initial_state=initial_state, eps=eps)
