"""TTT-linear: a linear inner model per head that takes one step of gradient descent a chunk (Sun et al. 2024).

On CUDA tensors the Triton kernels run where Triton is installed, else the reference; `backend` or the environment
variable LONGTAKE_KERNELS chooses (`longtake.kernels.backend`).
"""

from torch import Tensor

from longtake.kernels.backend import Backend, BackendError, check_backward, requested, runs_triton, wants_gradient
from longtake.kernels.checks import require_tensor
from longtake.kernels.ttt.inputs import TttInputs, check_inputs, rates
from longtake.kernels.ttt.reference import TttOutput, output_norm, ttt_scan

__all__ = ["TttOutput", "ttt_linear"]


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    norm_output: bool = True,
    backend: Backend | None = None,
    backward: Backend | None = None,
) -> TttOutput:
    """Queries read an inner model f(x) = LN(x·h + hb) that learns f(k) ≈ v − k as it goes.

    In a chunk of C tokens, all of whose gradients are taken at the state before it:
    u = ∂/∂z ½·‖LN(z) − (v − k)‖² at z = k·h + hb, with LN's weights w and b;
    o_i = s·q_i·h + hb − η_i·Σ_{j≤i} (s·q_i·k_j + 1)·u_j, s being the scale;
    then h ← h − η_L·kᵀ·u and hb ← hb − η_L·Σ_j u_j with the rate η_L of the chunk's last token.

    Args:
        q, k, v: [B,T,H,D] of one dtype, any views with unit stride in D; D a multiple of 8 up to 128.
        w, b: [H,D], weight and bias of the layer norm.
        eta: a number or tensor [] for all tokens, or [B,T,H] or [B,T,H,1].
        scale: of the queries, positive; None: D^−½. eps: added to variances, positive.
        chunk_size: C, a power of two from 16, which is part of the mathematics: a sequence may be cut, and its state
            handed on, at multiples of C only. The kernels take up to 64; in fp32 up to 32, beyond D = 64 up to 16.
        initial_state, initial_state_bias: h [N,H,D,D], rows = key dim, and hb [N,H,1,D], fp32, contiguous; None: zeros.
            N = B, or the number of packed sequences.
        cu_seqlens: int64 or int32 [N + 1], rising from 0 to T: where packed sequences begin and end, with B = 1. They
            may be empty. The kernels do not read it on the host.
        norm_output: return o + LN(o) with the same w, b and eps, not o.
        backend: "reference" or "triton"; None: as LONGTAKE_KERNELS or the device says.
        backward: of the kernels: "reference" differentiates the reference instead, None or "triton" runs kernels.
        No argument is changed. Under autocast all are taken as they are.

    Returns:
        `out` [B,T,H,D] in the dtype of v, `state` and `bias` as the initial ones, fp32 (float64 for float64 input):
        fresh and contiguous. All of them are differentiable once to every tensor but `cu_seqlens`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value, or does not go with another one.
        BackendError: `backend` or `backward` is unknown, or can not run here or on these tensors.
    """
    require_tensor("q", q)
    if q.ndim != 4 or not q.shape[0] or not q.shape[2] or not q.shape[3]:
        raise ValueError(f"q must be [B,T,H,D], none of them 0 but T, got {tuple(q.shape)}")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    states = initial_state, initial_state_bias
    x = TttInputs(q, k, v, w, b, rates(eta, q), *states, cu_seqlens, scale, float(eps), chunk_size)
    check_inputs(x)
    if _runs_kernels(x, backend, backward):
        from longtake.kernels.ttt import ops

        at_once = norm_output and not wants_gradient(*x.differentiable)
        found = TttOutput(*ops.ttt_scan(*x, at_once, backward == "reference"))
        norm_output = norm_output and not at_once
    else:
        found = ttt_scan(x)
    return TttOutput(output_norm(found.out, w, b, eps), *found[1:]) if norm_output else found


def _longest_chunk(q: Tensor) -> int:
    """The longest chunk whose tiles fit into the shared memory of an SM."""
    if q.element_size() == 2:
        return 64
    return 32 if q.shape[3] <= 64 else 16


def _runs_kernels(x: TttInputs, backend: Backend | None, backward: Backend | None) -> bool:
    """Whether the Triton kernels run."""
    floats = [y for y in x.differentiable if y is not None]
    runs = runs_triton(backend, *floats, dim=x.q.shape[3], trained=floats)
    longest = _longest_chunk(x.q)
    if runs and x.chunk_size > longest:
        if requested(backend) == "triton":
            what = f"{x.q.dtype} and D={x.q.shape[3]}"
            raise BackendError(f"the triton kernels take a chunk_size up to {longest} with {what}, got {x.chunk_size}")
        runs = False
    check_backward(backward, runs=runs)
    return runs
