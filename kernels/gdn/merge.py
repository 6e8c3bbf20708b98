"""Merging what was read in both directions and from both branches (SANA-WM, arXiv 2605.15178)."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from longtake.kernels.backend import Backend, runs_triton
from longtake.kernels.checks import FLOATS, FP32, require, require_eps, require_pair
from longtake.kernels.delta import accumulation_dtype

Reads = tuple[Tensor, Tensor]
"""Numerator [B,N,H,D] and denominator [B,N,H]."""


def gdn_merge_reference(
    forward: Reads,
    reverse: Reads | None = None,
    *,
    eps: float,
    gate: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `gdn_merge`, in PyTorch."""
    numerator, denominator = forward
    if reverse is not None:
        numerator, denominator = numerator + reverse[0], denominator + reverse[1]
    out = numerator / (denominator + eps)[..., None]
    if gate is not None:
        out = out * silu(gate.to(out.dtype))
    return out.to(dtype or out.dtype)


def gdn_merge(
    forward: Reads,
    reverse: Reads | None = None,
    *,
    eps: float,
    gate: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """(num_f + num_r) / (den_f + den_r + eps), times silu(gate) if there is one.

    Args:
        forward, reverse: numerator [B,N,H,D] and denominator [B,N,H] of each direction, fp32; reverse None: the
            directions are already summed. Not changed. The kernel takes D % 8 = 0.
        eps: added once, to the sum of the denominators.
        gate: [B,N,H,D], any float dtype.
        dtype: of the result; None: that of the numerator.

    Returns:
        [B,N,H,D], contiguous; float64 is computed by the reference only.

    Raises:
        ValueError: a tensor has another shape, dtype or device than the numerator says, or is not contiguous, or eps
            is negative or not finite.
        BackendError: `backend` can not run.
    """
    numerator, _ = require_pair("forward", forward, "numerator and denominator")
    if numerator.ndim != 4:
        raise ValueError(f"the forward numerator must be [B,N,H,D], got {tuple(numerator.shape)}")
    require_eps("eps", eps)
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {FLOATS}, got {dtype}")
    reads = {"forward": forward} if reverse is None else {"forward": forward, "reverse": reverse}
    for name, given in reads.items():
        num, den = require_pair(name, given, "numerator and denominator")
        require(f"the {name} numerator", num, numerator.shape, FP32, like=numerator)
        require(f"the {name} denominator", den, numerator.shape[:3], (numerator.dtype,), like=numerator)
    if gate is not None:
        require("gate", gate, numerator.shape, FLOATS, like=numerator)
    others = [x for pair in reads.values() for x in pair] + ([] if gate is None else [gate])
    if not runs_triton(backend, *others):
        return gdn_merge_reference(forward, reverse, eps=eps, gate=gate, dtype=dtype)
    from longtake.kernels.gdn import merge_triton

    directions = (*forward, *(reverse or (None, None)))
    out: Tensor = merge_triton.gdn_merge(*directions, gate, eps, dtype or numerator.dtype)
    return out


def gate_merge_reference(main: Tensor, camera: Tensor | None, gate: Tensor) -> Tensor:
    """As `gate_merge`, in PyTorch."""
    wide = accumulation_dtype(main)
    total = main.to(wide) if camera is None else main.to(wide) + camera.to(wide)
    return (total * silu(gate.to(wide))).to(main.dtype)


def gate_merge(main: Tensor, camera: Tensor | None, gate: Tensor, *, backend: Backend | None = None) -> Tensor:
    """(main + camera)·silu(gate) in fp32.

    Args:
        main, gate, camera: any one shape, contiguous, any float dtypes; camera None: zeros. Not changed.

    Returns:
        The shape and dtype of `main`, contiguous; float64 is computed by the reference only.

    Raises:
        ValueError: the tensors differ in shape or device, or one is not contiguous.
        BackendError: `backend` can not run.
    """
    tensors = {"main": main, "gate": gate} | ({} if camera is None else {"camera": camera})
    for name, x in tensors.items():
        require(name, x, main.shape, FLOATS, like=main)
    if not runs_triton(backend, *tensors.values()):
        return gate_merge_reference(main, camera, gate)
    from longtake.kernels.gdn import merge_triton

    out: Tensor = merge_triton.gate_merge(main, camera, gate)
    return out
