"""Short convolution over time on raw keys (SANA-WM, arXiv 2605.15178)."""

import torch
from torch import Tensor

from longtake.kernels.backend import Backend, runs_triton
from longtake.kernels.checks import FLOATS, require, require_tokens
from longtake.kernels.delta import accumulation_dtype


def short_conv_reference(x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `short_conv`, in PyTorch."""
    batch, frames, tokens, channels = x.shape
    reach = weight.shape[-1] - 1
    nothing = x.new_zeros(batch, reach, tokens, channels)
    before = torch.cat((nothing if tail is None else tail, x), dim=1)
    after = torch.cat((x, nothing), dim=1)
    taps = weight.to(accumulation_dtype(x)).unbind(-1)
    y = taps[reach] * x
    for j in range(reach):
        y = y + taps[j] * before[:, j : j + frames]
        y = y + taps[j] * after[:, reach - j : reach - j + frames]
    return y.to(x.dtype), before[:, frames:].clone(memory_format=torch.contiguous_format)


def short_conv(
    x: Tensor, weight: Tensor, tail: Tensor | None, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Symmetric depthwise convolution over frames, at every pixel and channel by itself.

    y_t = Σ_j w[j]·x_{t−3+j} + Σ_j w[j]·x_{t+3−j} − w[3]·x_t for four taps, the last being the present frame.
    Frames before the chunk come from `tail`; frames after it count as zero.

    Args:
        x: [B,F,S,C], any view with unit stride in C; not changed. The kernel takes C % 8 = 0.
        weight: [C,K] taps, oldest first.
        tail: [B,K−1,S,C] frames before the chunk, oldest first, in the dtype of `x`; None: zeros.

    Returns:
        y [B,F,S,C] in the dtype of `x`, summed in fp32 or better, and the next tail [B,K−1,S,C], contiguous and
        sharing no memory with the arguments.

    Raises:
        ValueError: `weight` or `tail` does not fit `x`, or is not contiguous.
        BackendError: `backend` can not run.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [B,F,S,C], got {tuple(x.shape)}")
    require_tokens("x", x, x)
    batch, _, tokens, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.shape[1]:
        raise ValueError(f"weight must be [{channels},K], got {tuple(weight.shape)}")
    require("weight", weight, weight.shape, FLOATS, like=x)
    if tail is not None:
        require("tail", tail, (batch, weight.shape[1] - 1, tokens, channels), (x.dtype,), like=x)
    if not runs_triton(backend, x, weight, *(() if tail is None else (tail,))):
        return short_conv_reference(x, weight, tail)
    from longtake.kernels.gdn import short_conv_triton

    out: tuple[Tensor, Tensor] = short_conv_triton.short_conv(x, weight, tail)
    return out
