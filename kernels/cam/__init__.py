"""Camera branch: ray-relative positions on q, k, v, then the delta rule without a normaliser.

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from collections.abc import Sequence

from torch import Tensor

from longtake.kernels.backend import Backend, check_backward, check_precision, runs_triton, wants_gradient
from longtake.kernels.cam import reference
from longtake.kernels.cam.geometry import ray_matrices
from longtake.kernels.cam.prepare import cam_discount, cam_output, cam_prepare
from longtake.kernels.cam.prepare_reference import CamTokens, check_prepare
from longtake.kernels.cam.prepare_reference import cam_output as return_tokens
from longtake.kernels.cam.reference import CamOutput, check_cam
from longtake.kernels.checks import check_scan, check_trained, pair, require_tensor, require_tensors, starts
from longtake.kernels.delta import Direction, ReverseInputs, ScanInputs, check_reverse
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Activation, Positions

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
    backward: Backend | None = None,
) -> CamOutput:
    """The delta rule without a normaliser, in one direction or both: `gdn_scan`'s numerator of given queries and keys.

    Args:
        q, k, v: [B,N,H,D] from `cam_prepare`, of any sign. beta: [B,H,F,S] or [B,H,F] from `cam_discount`, not
            negative. decay: [B,H,F] in [0,1].
        direction, slots, chunk_starts: as in `gdn_scan`. reverse: likewise, without inverse RMS.
        initial_state: memory of the frames before, [B,H,D,D] rows = key dim, or a pool [slots,H,D,D]; None: empty.
        out_state: takes the final state; may be `initial_state`, else shares no memory with any argument.
        precision: of the Triton kernels' products; the reference computes in fp32 or better.
        backend: "reference", or "triton" with D % 8 = 0 and D ≤ 128; None: as LONGTAKE_KERNELS or the device says.
        backward: as in `gdn_scan`.
        None of the arguments but `out_state` is changed.

    Returns:
        out [B,N,H,D] and the state: `out_state`, or fresh [B,H,D,D], or None in reverse; contiguous, fp32 (float64 for
        float64 input).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    require_tensors(q=q, k=k, v=v, beta=beta, decay=decay)
    inputs = ScanInputs(q, k, v, beta, decay)
    check_reverse(reverse)
    _require_states(initial_state=initial_state, out_state=out_state)
    others = (None,) * 5 if reverse is None else reverse[:5]
    present = [x for x in (*inputs[:5], initial_state, out_state, *others) if x is not None]
    runs = runs_triton(backend, *present, dim=q.shape[-1], trained=present)
    check_backward(backward, runs=runs)
    differentiated = wants_gradient(*present)
    if differentiated:
        check_trained((), out_state)
    if not runs:
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
    if differentiated:
        from longtake.kernels.cam import training

        walk = training.Walk(direction, initial_state, slots, first, precision, backward)
        return training.cam_scan(inputs, None if reverse is None else inputs.replaced(reverse), walk)
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
    backward: Backend | None = None,
) -> CamOutput:
    """The camera branch from raw q, k, v: `cam_prepare`, `cam_discount`, `cam_scan` and `cam_output` in one call.

    Args:
        q, k, v: [B,N,H,D] raw, D a multiple of 8. beta: [B,H,F,S] or [B,H,F]. decay: [B,H,F].
        projection, projection_inverse, cos, sin, norm … k_scale: as in `cam_prepare`.
        direction, initial_state … chunk_starts: as in `cam_scan`.
        discount: divide β by the growth of the keys. output_transform: return into each token's own ray frame.
        precision: of the Triton kernels' products; the reference computes in fp32 or better.
        backend: "reference", or "triton" with D % 8 = 0 and D ≤ 128; None: as LONGTAKE_KERNELS or the device says.
        backward: as in `gdn_scan`; gradients of the projections come as those of `cos` and `sin` do.
        None of the arguments but `out_state` is changed.

    Returns:
        out [B,N,H,D] in the dtype of v, and the state as in `cam_scan`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    require_tensors(q=q, k=k, v=v, beta=beta, decay=decay)
    positions, weights = (projection, projection_inverse, cos, sin), (q_weight, k_weight)
    _require_states(initial_state=initial_state, out_state=out_state)
    rms = pair("inverse_rms", inverse_rms, "q and k")
    given = (q, k, v, beta, decay, *positions, *weights, *rms, initial_state, out_state)
    present = [x for x in given if x is not None]
    trained = [x for x in present if not any(x is y for y in positions)]
    runs = runs_triton(backend, *present, dim=q.shape[-1], trained=trained)
    check_backward(backward, runs=runs)
    differentiated = wants_gradient(*present)
    if differentiated:
        check_trained((inverse_rms,), out_state)
    if not runs:
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
    tables = check_prepare(q, k, v, *positions, norm, *weights, norm_eps, inverse_rms) or (None, None)
    check_cam(ScanInputs(q, k, v, beta, decay), direction, initial_state, out_state, slots, None)
    first = starts(chunk_starts, decay.shape[2], q.device)
    if differentiated:
        from longtake.kernels.cam import training

        activation = Activation(norm, weights, norm_eps, None, relu=True, k_scale=k_scale)
        placed = Positions(training.camera_tables(tables[0], tables[1], q), (projection, projection_inverse))
        walk = training.Walk(direction, initial_state, slots, first, precision, backward)
        inputs = ScanInputs(q, k, v, beta, decay)
        rounded = not output_transform
        out, state = training.cam_branch(inputs, activation, placed, walk, discount=discount, rounded=rounded)
        return CamOutput(out if rounded else return_tokens(out, projection, cos, sin).to(v.dtype), state)
    from longtake.kernels.cam import ops

    norms = (norm, *weights, norm_eps, *rms, k_scale)
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


def _require_states(**states: Tensor | None) -> None:
    """Raise `ValueError` for a state that is neither a tensor nor None: it has no normaliser beside it."""
    for name, state in states.items():
        if state is not None:
            require_tensor(name, state)


def _state(fresh: Tensor, out_state: Tensor | None, direction: Direction) -> Tensor | None:
    """What a scan returns as its state."""
    if out_state is not None:
        return out_state
    return None if direction == "reverse" else fresh
