"""Plain PyTorch reference of the camera scan, and of the whole camera branch (SANA-WM, arXiv 2605.15178)."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longtake.kernels.cam.prepare_reference import cam_discount, cam_output, cam_prepare
from longtake.kernels.checks import check_memory, check_scan
from longtake.kernels.delta import (
    Direction,
    ReverseInputs,
    ScanInputs,
    by_token,
    check_direction,
    check_states,
    delta_scan,
    frames_of,
    load_state,
    restart_mask,
    store_state,
)
from longtake.kernels.gdn.reference import Norm


class CamOutput(NamedTuple):
    """`out` [B,N,H,D] and the memory after the last frame, [B,H,D,D] rows = key dim; None in reverse."""

    out: Tensor
    state: Tensor | None


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
) -> CamOutput:
    """The specification of `longtake.kernels.cam_scan`: a loop over frames; arguments and results as there."""
    check_scan(q, k, v, beta, decay, frame_beta=True)
    inputs = ScanInputs(q, k, v, beta, decay)
    check_cam(inputs, direction, initial_state, out_state, slots, reverse)
    check_memory((initial_state,), (out_state,))
    restarts = restart_mask(chunk_starts, decay.shape[2], q.device)
    batch, _, heads, dim = q.shape
    memory = load_state(initial_state, slots, (batch, heads, dim, dim), q)
    ahead, back = (frames_of(*x[:5]) for x in (inputs, inputs.replaced(reverse)))
    reads, last = delta_scan(ahead, back, memory, direction, restarts)
    return CamOutput(by_token(reads), None if last is None else store_state(last, out_state, slots))


def check_cam(
    x: ScanInputs,
    direction: Direction,
    initial_state: Tensor | None,
    out_state: Tensor | None,
    slots: Tensor | None,
    reverse: ReverseInputs | None,
) -> None:
    """Raise `ValueError` unless direction, states and reverse inputs fit a scan of x and each other."""
    check_direction(direction, x, reverse)
    if reverse is not None and reverse.inverse_rms is not None:
        raise ValueError("reverse inverse_rms has no use: a camera scan takes prepared q and k")
    initial, out = (None if state is None else (state,) for state in (initial_state, out_state))
    check_states(x.q, direction, initial, out, slots)


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
) -> CamOutput:
    """The specification of `longtake.kernels.cam_branch`, in its four steps; arguments and results as there."""
    tokens = cam_prepare(
        q,
        k,
        v,
        projection,
        projection_inverse,
        cos,
        sin,
        norm=norm,
        q_weight=q_weight,
        k_weight=k_weight,
        norm_eps=norm_eps,
        inverse_rms=inverse_rms,
        k_scale=k_scale,
    )
    out, state = cam_scan(
        tokens.q,
        tokens.k,
        tokens.v,
        cam_discount(beta, tokens.inflation) if discount else beta,
        decay,
        direction=direction,
        initial_state=initial_state,
        out_state=out_state,
        slots=slots,
        chunk_starts=chunk_starts,
    )
    if output_transform:
        out = cam_output(out, projection, cos, sin)
    return CamOutput(out.to(v.dtype), state)
