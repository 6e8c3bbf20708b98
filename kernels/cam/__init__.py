"""Camera branch: ray-relative positions on q, k, v, then the delta rule without a normaliser.

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from collections.abc import Sequence

from torch import Tensor

from longtake.kernels.backend import Backend, check_precision, runs_triton
from longtake.kernels.cam import reference
from longtake.kernels.cam.geometry import ray_matrices
from longtake.kernels.cam.prepare import cam_discount, cam_output, cam_prepare
from longtake.kernels.cam.prepare_reference import CamTokens, check_prepare
from longtake.kernels.cam.reference import CamOutput, check_cam
from longtake.kernels.checks import check_scan, starts
from longtake.kernels.delta import Direction, ReverseInputs, ScanInputs
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.scan.configurations import Precision

__all__ = [
    "CamOutput",
    "CamTokens",
    "cam_branch",
    "cam_discount",
    "cam_output",
    "cam_prepare",
    "cam_scan",
    "ray_matrices",
]


def cam_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    direction: Direction = "forward",
    initial_state: Tensor | None = None,
    out_state: Tensor | None = None,
    slots: Tensor | None = None,
    chunk_starts: Tensor | Sequence[int] | None = None,
    reverse: ReverseInputs | None = None,
    precision: Precision = "bf16",
    backend: Backend | None = None,
) -> CamOutput:
    """`reference.cam_scan`, which says what everything means, or the Triton kernels that compute the same.

    Args:
        q … reverse: as in `reference.cam_scan`. The kernels take q, k, v in fp32, bf16 or fp16 with D % 8 = 0, D ≤ 128.
        precision: of the kernels' products; the reference computes in fp32 or better.
        backend: which of the two; None: as the environment or the device says.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or layout, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    inputs = ScanInputs(q, k, v, beta, decay)
    others = (None,) * 5 if reverse is None else reverse[:5]
    if not runs_triton(backend, *(x for x in (*inputs[:5], initial_state, out_state, *others) if x is not None)):
        return reference.cam_scan(
            q,
            k,
            v,
            beta,
            decay,
            direction=direction,
            initial_state=initial_state,
            out_state=out_state,
            slots=slots,
            chunk_starts=chunk_starts,
            reverse=reverse,
        )
    check_scan(q, k, v, beta, decay, frame_beta=True)
    check_cam(inputs, direction, initial_state, out_state, slots, reverse)
    first = starts(chunk_starts, decay.shape[2], q.device)
    from longtake.kernels.cam import ops

    memory, writes = (initial_state, out_state, slots, first), out_state is not None
    out, state = ops.cam_scan(
        q, k, v, beta, decay, *memory, *others, direction, reverse is not None, precision, writes=writes
    )
    return CamOutput(out, _state(state, out_state, direction))


def cam_branch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
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
    direction: Direction = "both",
    discount: bool = True,
    output_transform: bool = True,
    initial_state: Tensor | None = None,
    out_state: Tensor | None = None,
    slots: Tensor | None = None,
    chunk_starts: Tensor | Sequence[int] | None = None,
    precision: Precision = "bf16",
    backend: Backend | None = None,
) -> CamOutput:
    """`reference.cam_branch`, which says what everything means, or Triton kernels that never store prepared tokens.

    Args:
        q … chunk_starts: as in `reference.cam_branch`. The kernels take q, k, v in fp32, bf16 or fp16 with D ≤ 128.
        precision, backend: as in `cam_scan`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or layout, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    positions, weights = (projection, projection_inverse, cos, sin), (q_weight, k_weight)
    given = (q, k, v, beta, decay, *positions, *weights, *(inverse_rms or ()), initial_state, out_state)
    if not runs_triton(backend, *(x for x in given if x is not None)):
        return reference.cam_branch(
            q,
            k,
            v,
            beta,
            decay,
            *positions,
            norm=norm,
            q_weight=q_weight,
            k_weight=k_weight,
            norm_eps=norm_eps,
            inverse_rms=inverse_rms,
            k_scale=k_scale,
            direction=direction,
            discount=discount,
            output_transform=output_transform,
            initial_state=initial_state,
            out_state=out_state,
            slots=slots,
            chunk_starts=chunk_starts,
        )
    check_scan(q, k, v, beta, decay, frame_beta=True)
    tables = check_prepare(q, k, v, *positions, norm, *weights, inverse_rms) or (None, None)
    check_cam(ScanInputs(q, k, v, beta, decay), direction, initial_state, out_state, slots, None)
    first = starts(chunk_starts, decay.shape[2], q.device)
    from longtake.kernels.cam import ops

    norms = (norm, *weights, norm_eps, *(inverse_rms or (None, None)), k_scale)
    memory, writes = (initial_state, out_state, slots, first), out_state is not None
    how = (direction, discount, output_transform, precision)
    out, state = ops.cam_branch(
        q,
        k,
        v,
        beta,
        decay,
        projection,
        projection_inverse,
        *tables,
        *norms,
        *memory,
        *how,
        writes=writes,
    )
    return CamOutput(out, _state(state, out_state, direction))


def _state(fresh: Tensor, out_state: Tensor | None, direction: Direction) -> Tensor | None:
    """What a scan returns as its state."""
    if out_state is not None:
        return out_state
    return None if direction == "reverse" else fresh
