"""Frame-wise gated delta rule with a normaliser, its gates, the short convolution on its keys, and its merges.

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from collections.abc import Sequence

from torch import Tensor

from longtake.kernels.backend import Backend, check_precision, runs_triton
from longtake.kernels.checks import check_scan, starts
from longtake.kernels.delta import Direction, ReverseInputs, ScanInputs, check_direction, check_states
from longtake.kernels.gdn import reference
from longtake.kernels.gdn.gates import frame_gates
from longtake.kernels.gdn.merge import gate_merge, gdn_merge
from longtake.kernels.gdn.reference import GdnOutput, GdnState, Norm, check_gate, check_norm, gdn_prepare
from longtake.kernels.gdn.short_conv import short_conv
from longtake.kernels.rope import pair_tables
from longtake.kernels.scan.configurations import Precision

__all__ = [
    "GdnOutput",
    "GdnState",
    "ReverseInputs",
    "frame_gates",
    "gate_merge",
    "gdn_merge",
    "gdn_prepare",
    "gdn_scan",
    "short_conv",
]


def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    direction: Direction = "forward",
    norm: Norm = "none",
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    inverse_rms: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    initial_state: GdnState | None = None,
    out_state: GdnState | None = None,
    slots: Tensor | None = None,
    chunk_starts: Tensor | Sequence[int] | None = None,
    reverse: ReverseInputs | None = None,
    precision: Precision = "bf16",
    backend: Backend | None = None,
) -> GdnOutput:
    """`reference.gdn_scan`, which says what everything means, or the Triton kernels that compute the same.

    Args:
        q … reverse: as in `reference.gdn_scan`. The kernels take q, k, v in fp32, bf16 or fp16 with D % 8 = 0, D ≤ 128.
        precision: of the kernels' products; the reference computes in fp32 or better.
        backend: which of the two; None: as the environment or the device says.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or layout, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    inputs = ScanInputs(q, k, v, beta, decay, inverse_rms)
    back = inputs.replaced(reverse)
    states = (*(initial_state or (None, None)), *(out_state or (None, None)))
    given = (*inputs[:5], q_weight, k_weight, *(inverse_rms or ()), cos, sin, gate, *states)
    if not runs_triton(backend, *(x for x in (*given, *back[:5], *(back.inverse_rms or ())) if x is not None)):
        return reference.gdn_scan(
            q,
            k,
            v,
            beta,
            decay,
            direction=direction,
            norm=norm,
            q_weight=q_weight,
            k_weight=k_weight,
            norm_eps=norm_eps,
            inverse_rms=inverse_rms,
            k_scale=k_scale,
            cos=cos,
            sin=sin,
            eps=eps,
            gate=gate,
            initial_state=initial_state,
            out_state=out_state,
            slots=slots,
            chunk_starts=chunk_starts,
            reverse=reverse,
        )
    check_scan(q, k, v, beta, decay)
    check_direction(direction, inputs, reverse)
    check_norm(q, norm, q_weight, k_weight, inverse_rms)
    check_norm(q, norm, None, None, back.inverse_rms)
    check_gate(gate, eps, q)
    check_states(q, direction, initial_state, out_state, slots)
    tables = pair_tables(cos, sin, q, q.shape[-1]) or (None, None)
    first = starts(chunk_starts, decay.shape[2], q.device)
    from longtake.kernels.gdn import ops

    norms = (norm, q_weight, k_weight, norm_eps, *(inverse_rms or (None, None)), k_scale)
    others = (None,) * 7 if reverse is None else (*reverse[:5], *(reverse.inverse_rms or (None, None)))
    memory, how = (*states, slots, first), (direction, reverse is not None, precision)
    out, denominator, *made = ops.gdn_scan(
        *inputs[:5], *norms, *tables, eps, gate, *memory, *others, *how, writes=out_state is not None
    )
    state = out_state or (None if direction == "reverse" else GdnState(*made))
    return GdnOutput(out, denominator if eps is None else None, state)
