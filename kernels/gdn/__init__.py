"""Frame-wise gated delta rule with a normaliser, its gates, the short convolution on its keys, and its merges.

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from collections.abc import Sequence

from torch import Tensor

from longtake.kernels.backend import Backend, check_backward, check_precision, runs_triton, wants_gradient
from longtake.kernels.checks import check_scan, check_trained, pair, require_tensors, starts
from longtake.kernels.delta import Direction, ReverseInputs, ScanInputs, check_direction, check_reverse, check_states
from longtake.kernels.gdn import reference
from longtake.kernels.gdn.gates import frame_gates
from longtake.kernels.gdn.merge import gate_merge, gdn_merge
from longtake.kernels.gdn.reference import GdnOutput, GdnState, Norm, check_norm, check_quotient, gdn_prepare
from longtake.kernels.gdn.short_conv import short_conv
from longtake.kernels.rope import pair_tables
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Activation, Positions

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
    backward: Backend | None = None,
) -> GdnOutput:
    """The recurrence in one direction or both: numerator and denominator, or their quotient.

    Q = relu(norm(q)), K = relu(norm(k))·k_scale, and Q̃, K̃ are Q, K rotated. Forward, inclusive:
    M_t = g_t·(I − K̃_tᵀ·diag(β_t)·K̃_t)·M_{t−1} + K̃_tᵀ·diag(β_t)·V_t, and z_t likewise from K_t and ones; the numerator
    is Q̃_t·M_t, the denominator Q_t·z_t: only the numerator sees the rotation. Reverse, exclusive:
    R_{F−1} = 0, R_t = g_{t+1}·(I − P_{t+1})·R_{t+1} + A_{t+1} with P, A the products above. Both: the sums of the two.

    Args:
        q, k, v: [B,N,H,D], N = F*S, frames first. beta: [B,H,F,S], not negative. decay: [B,H,F] in [0,1].
        norm: RMS norm of q and k: "none", "head" (over D) or "full" (over H*D). q_weight, k_weight: its weights [H*D];
            None: ones. norm_eps: added to the mean square. inverse_rms: of q and k, [B,N] fp32 each, with norm "full".
        k_scale: multiplied onto k after ReLU.
        cos, sin: tables of the interleaved rotation: [N,D/2], or every second entry of [N,D], or [B,N,·]; None: none.
        eps: added once to the summed denominator of a quotient; None: numerator and denominator apart.
        gate: [B,N,H,D]; the quotient is multiplied by silu(gate).
        initial_state: memory of the frames before; None: empty. With `slots` int64 [B] states are pools
            [slots,H,D,D] and [slots,H,D], and batch entry b uses row slots[b].
        out_state: takes the final state; may be `initial_state`, else shares no memory with any argument. No two of
            its slots may be the same.
        chunk_starts: first frames of the chunks, ascending from 0, int64 [C] or numbers: the reverse scan begins anew
            in each, so that no frame reads a later chunk. They mean nothing to a forward scan.
        reverse: other inputs of the reverse scan, with direction "both". With `chunk_starts` those at the first frame
            of every chunk but the first are never absorbed, whatever they hold.
        precision: of the Triton kernels' products; the reference computes in fp32 or better.
        backend: "reference", or "triton" with D % 8 = 0 and D ≤ 128; None: as LONGTAKE_KERNELS or the device says.
        backward: of the backward pass of the Triton kernels, "triton" or "reference"; None: "triton". Both give every
            gradient but that of `cos` and `sin`, which a call gives that runs the reference forward too. `inverse_rms`
            and `out_state` are refused where a gradient is wanted. Autocast changes nothing: products are of the
            `precision`.
        None of the arguments but `out_state` is changed.

    Returns:
        Without `eps`: numerator [B,N,H,D] and denominator [B,N,H], fp32 (float64 for float64 input). With `eps`: the
        quotient [B,N,H,D] in the dtype of v. The state is `out_state`, or fresh [B,H,D,D] and [B,H,D], or None in
        reverse. All contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value, or does not go with another one.
        BackendError: `backend` or `precision` is unknown, or can not run here or on these tensors.
    """
    check_precision(precision)
    require_tensors(q=q, k=k, v=v, beta=beta, decay=decay)
    inputs = ScanInputs(q, k, v, beta, decay, inverse_rms)
    check_reverse(reverse)
    back = inputs.replaced(reverse)
    states = (*pair("initial_state", initial_state, "kv and z"), *pair("out_state", out_state, "kv and z"))
    rms = pair("inverse_rms", inverse_rms, "q and k")
    back_rms = pair("reverse inverse_rms", back.inverse_rms, "q and k")
    given = (*inputs[:5], q_weight, k_weight, *rms, cos, sin, gate, *states, *back[:5], *back_rms)
    present = [x for x in given if x is not None]
    trained = [x for x in present if x is not cos and x is not sin]
    runs = runs_triton(backend, *present, dim=q.shape[-1], trained=trained)
    check_backward(backward, runs=runs)
    differentiated = wants_gradient(*present)
    if differentiated:
        check_trained((inverse_rms, back.inverse_rms), out_state)
    if not runs:
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
    check_norm(q, norm, q_weight, k_weight, norm_eps, inverse_rms)
    check_norm(q, norm, None, None, norm_eps, back.inverse_rms)
    check_quotient(gate, eps, q)
    check_states(q, direction, initial_state, out_state, slots)
    tables = pair_tables(cos, sin, q, q.shape[-1])
    first = starts(chunk_starts, decay.shape[2], q.device)
    if differentiated:
        from longtake.kernels.gdn import training

        activation = Activation(norm, (q_weight, k_weight), norm_eps, None, relu=True, k_scale=k_scale)
        positions = None if tables is None else Positions(tables, None)
        shared = training.How(activation, positions, first, precision, backward)
        found = training.gdn_scan(inputs, None if reverse is None else back, shared, direction, initial_state, slots)
        return training.finished(found, eps, gate, v.dtype)
    from longtake.kernels.gdn import ops

    norms = (norm, q_weight, k_weight, norm_eps, *rms, k_scale)
    others = (None,) * 7 if reverse is None else (*reverse[:5], *(reverse.inverse_rms or (None, None)))
    memory, how = (*states, slots, first), (direction, reverse is not None, precision)
    out, denominator, *made = ops.gdn_scan(
        *inputs[:5], *norms, *(tables or (None, None)), eps, gate, *memory, *others, *how, writes=out_state is not None
    )
    state = GdnState(*states[2:]) if out_state else (None if direction == "reverse" else GdnState(*made))
    return GdnOutput(out, denominator if eps is None else None, state)
