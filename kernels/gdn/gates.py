"""Gates of the gated delta rule from their logits (SANA-WM, arXiv 2605.15178)."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from longtake.kernels.backend import Backend, runs_triton
from longtake.kernels.checks import FLOATS, require
from longtake.kernels.delta import accumulation_dtype


def frame_gates_reference(
    beta_logits: Tensor, decay_logits: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """As `frame_gates`, in PyTorch."""
    dtype = accumulation_dtype(beta_logits)
    decay_logits, a_log, dt_bias = (x.to(dtype) for x in (decay_logits, a_log, dt_bias))
    beta = beta_logits.to(dtype).sigmoid().permute(0, 3, 1, 2)
    decay = torch.exp(-a_log.exp() * softplus(decay_logits + dt_bias)).transpose(1, 2)
    return beta.contiguous(), decay.contiguous()


def frame_gates(
    beta_logits: Tensor, decay_logits: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Gates beta = σ(beta_logits) and decay = exp(−exp(a_log)·softplus(decay_logits + dt_bias)), heads first.

    Args:
        beta_logits: [B,F,S,H]; decay_logits: [B,F,H]; a_log, dt_bias: [H]. Any float dtypes, contiguous; not changed.

    Returns:
        beta [B,H,F,S] and decay [B,H,F], contiguous, fp32 (float64 for float64 beta_logits, reference only).

    Raises:
        ValueError: an argument has another shape or device than the logits of beta say, or is not contiguous.
        BackendError: `backend` can not run.
    """
    if beta_logits.ndim != 4:
        raise ValueError(f"beta_logits must be [B,F,S,H], got {tuple(beta_logits.shape)}")
    batch, frames, _, heads = beta_logits.shape
    require("beta_logits", beta_logits, beta_logits.shape, FLOATS)
    require("decay_logits", decay_logits, (batch, frames, heads), FLOATS, like=beta_logits)
    require("a_log", a_log, (heads,), FLOATS, like=beta_logits)
    require("dt_bias", dt_bias, (heads,), FLOATS, like=beta_logits)
    if not runs_triton(backend, beta_logits, decay_logits, a_log, dt_bias):
        return frame_gates_reference(beta_logits, decay_logits, a_log, dt_bias)
    from longtake.kernels.gdn import gates_triton

    gates: tuple[Tensor, Tensor] = gates_triton.frame_gates(beta_logits, decay_logits, a_log, dt_bias)
    return gates
