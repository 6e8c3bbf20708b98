"""Short convolution over time on raw keys (SANA-WM, arXiv 2605.15178)."""

import torch
from torch import Tensor

from longtake.kernels.delta import accumulation_dtype


def short_conv(x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Symmetric depthwise convolution over frames, at every pixel and channel by itself.

    y_t = Σ_j w[j]·x_{t−3+j} + Σ_j w[j]·x_{t+3−j} − w[3]·x_t for four taps, the last being the present frame.
    Frames before the chunk come from `tail`; frames after it count as zero.

    Args:
        x: [B,F,S,C]; not changed.
        weight: [C,K] taps, oldest first.
        tail: [B,K−1,S,C] frames before the chunk, oldest first; None: zeros.

    Returns:
        y [B,F,S,C] in the dtype of `x`, summed in fp32 or better, and the next tail [B,K−1,S,C], contiguous and
        sharing no memory with the arguments.

    Raises:
        ValueError: `weight` or `tail` does not fit `x`.
    """
    batch, frames, tokens, channels = x.shape
    reach = weight.shape[-1] - 1
    if weight.shape[0] != channels or weight.ndim != 2:
        raise ValueError(f"weight must be [{channels},K], got {tuple(weight.shape)}")
    shape = (batch, reach, tokens, channels)
    if tail is not None and tail.shape != shape:
        raise ValueError(f"tail must be {shape}, got {tuple(tail.shape)}")
    before = torch.cat((x.new_zeros(shape) if tail is None else tail.to(x.dtype), x), dim=1)
    after = torch.cat((x, x.new_zeros(shape)), dim=1)
    taps = weight.to(accumulation_dtype(x)).unbind(-1)
    y = taps[reach] * x
    for j in range(reach):
        y = y + taps[j] * before[:, j : j + frames]
        y = y + taps[j] * after[:, reach - j : reach - j + frames]
    return y.to(x.dtype), before[:, frames:].clone(memory_format=torch.contiguous_format)
