"""Camera branch: ray-relative positions on q, k, v, then the delta rule without a normaliser.

Everything runs its Triton kernels on CUDA tensors where Triton is installed, else the reference; `backend` or the
environment variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from torch import Tensor

from longtake.kernels.backend import Backend, on_device_of, runs_triton
from longtake.kernels.cam import reference

__all__ = ["cam_bidirectional", "cam_discount", "cam_output", "cam_prepare", "cam_scan"]


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
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.cam_prepare`, or the Triton kernel that computes the same; `downscale` always runs the reference.

    Raises:
        ValueError: shapes do not fit.
        BackendError: `backend` can not run.
    """
    positions = (projection, projection_inverse, cos, sin)
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if downscale or not runs_triton(backend, q, k, v, *weights):
        return reference.cam_prepare(
            q,
            k,
            v,
            *positions,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            k_scale=k_scale,
            relu=relu,
            downscale=downscale,
        )
    from longtake.kernels.cam import triton

    with on_device_of(q):
        return triton.cam_prepare(
            q, k, v, *positions, q_weight=q_weight, k_weight=k_weight, eps=eps, k_scale=k_scale, relu=relu
        )


def cam_discount(beta: Tensor, inflation: Tensor, *, backend: Backend | None = None) -> Tensor:
    """`reference.cam_discount`, or the Triton kernel that computes the same.

    Raises:
        ValueError: shapes do not fit.
        BackendError: `backend` can not run.
    """
    if not runs_triton(backend, beta, inflation):
        return reference.cam_discount(beta, inflation)
    from longtake.kernels.cam import triton

    with on_device_of(beta):
        return triton.cam_discount(beta, inflation)


def cam_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`reference.cam_scan`, or the Triton kernels that compute the same.

    Raises:
        ValueError: shapes do not fit, or a state is given in reverse.
        BackendError: `backend` can not run.
    """
    if not runs_triton(backend, q, k, v):
        return reference.cam_scan(q, k, v, beta, decay, initial_state=initial_state, reverse=reverse)
    from longtake.kernels.cam import triton

    with on_device_of(q):
        return triton.cam_scan(q, k, v, beta, decay, initial_state=initial_state, reverse=reverse)


def cam_bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.cam_bidirectional`, or the Triton kernels that compute the same.

    Raises:
        ValueError: shapes do not fit.
        BackendError: `backend` can not run.
    """
    if not runs_triton(backend, q, k, v):
        return reference.cam_bidirectional(q, k, v, beta, decay, initial_state=initial_state)
    from longtake.kernels.cam import triton

    with on_device_of(q):
        return triton.cam_bidirectional(q, k, v, beta, decay, initial_state=initial_state)


def cam_output(out: Tensor, projection: Tensor, cos: Tensor, sin: Tensor, *, backend: Backend | None = None) -> Tensor:
    """`reference.cam_output`, or the Triton kernel that computes the same.

    Raises:
        ValueError: shapes do not fit.
        BackendError: `backend` can not run.
    """
    if not runs_triton(backend, out):
        return reference.cam_output(out, projection, cos, sin)
    from longtake.kernels.cam import triton

    with on_device_of(out):
        return triton.cam_output(out, projection, cos, sin)
