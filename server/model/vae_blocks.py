"""Building blocks of the causal video VAE: convolutions that carry frames between calls, and space-time shuffles.

Shapes are [B, C, T, H, W] throughout. Module names are those of the public LTX-2 checkpoints.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

SpatialPadding = Literal["zeros", "reflect"]
Stride = tuple[int, int, int]

KERNEL = 3
CARRIED_FRAMES = KERNEL - 1


class Carry:
    """Input frames that causal convolutions hand from one call to the next, by name.

    Args:
        before: what the previous call left, or None at the start of a stream. Only read.

    Attributes:
        after: what this call leaves, in the order in which the convolutions ran; fresh contiguous tensors.
    """

    def __init__(self, before: Mapping[str, Tensor] | None) -> None:
        self.before = before
        self.after: dict[str, Tensor] = {}

    @property
    def starts(self) -> bool:
        """True in the first call of a stream."""
        return self.before is None

    def extend(self, name: str, x: Tensor) -> Tensor:
        """`x` [B, C, T, H, W] behind its two carried frames (at the start: behind its first frame, twice)."""
        first = x[:, :, :1]
        past = [first, first] if self.before is None else [self.before[name]]
        extended = torch.cat([*past, x], dim=2)
        self.after[name] = extended[:, :, -CARRIED_FRAMES:].clone(memory_format=torch.contiguous_format)
        return extended


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide every position of `x` by the root mean square of its channels; no weights."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)


def depth_to_space(x: Tensor, stride: Stride) -> Tensor:
    """Channels (c, t, h, w), w fastest, become neighbours: [B, c·t·h·w, T, H, W] -> [B, c, T·t, H·h, W·w]."""
    t, h, w = stride
    B, _, T, H, W = x.shape
    x = x.reshape(B, -1, t, h, w, T, H, W).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(B, -1, T * t, H * h, W * w)


def space_to_depth(x: Tensor, stride: Stride) -> Tensor:
    """Inverse of `depth_to_space`."""
    t, h, w = stride
    B, C, T, H, W = x.shape
    x = x.reshape(B, C, T // t, t, H // h, h, W // w, w).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(B, C * t * h * w, T // t, H // h, W // w)


def patchify(x: Tensor, size: int) -> Tensor:
    """Pixels to channels, [B, 3, T, H, W] -> [B, 3·size², T, H/size, W/size]; columns are the slower channel index."""
    return space_to_depth(x.transpose(3, 4), (1, size, size)).transpose(3, 4)


def unpatchify(x: Tensor, size: int) -> Tensor:
    """Inverse of `patchify`."""
    return depth_to_space(x.transpose(3, 4), (1, size, size)).transpose(3, 4)


class CausalConv3d(nn.Module):
    """A 3×3×3 convolution that sees the present and two past frames.

    Args:
        spread: how many consecutive output channels a later shuffle makes neighbours of each other; only the
            untrained initialisation looks at it.
    """

    def __init__(self, in_channels: int, out_channels: int, padding: SpatialPadding, spread: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, KERNEL, padding=(0, 1, 1), padding_mode=padding)
        self.spread = spread
        self.name = ""

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C_in, T, H, W] -> [B, C_out, T, H, W]."""
        extended = carry.extend(self.name, x)
        if extended.is_cpu:
            return convolve_by_frame(extended, self.conv)
        y: Tensor = self.conv(extended)
        return y


def convolve_by_frame(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """`conv` (kernel 3, no temporal padding) of `x` [B, C, T+2, H, W] as a 2-d convolution over 3·C channels.

    The same sums as the 3-d one, three to five times as fast on a CPU: PyTorch hands 3-d convolutions of few channels
    to a loop of its own, 2-d ones to oneDNN.
    """
    B, C, _, H, W = x.shape
    mode = "reflect" if conv.padding_mode == "reflect" else "constant"
    padded = functional.pad(x.flatten(0, 1), (1, 1, 1, 1), mode=mode).view(B, C, -1, H + 2, W + 2)
    taps = padded.unfold(2, KERNEL, 1).permute(0, 2, 1, 5, 3, 4)
    frames = taps.reshape(-1, C * KERNEL, H + 2, W + 2)
    y = functional.conv2d(frames, conv.weight.flatten(1, 2), conv.bias)
    return y.view(B, -1, conv.out_channels, H, W).transpose(1, 2)


class ResnetBlock(nn.Module):
    """Two rounds of norm, SiLU and causal convolution, added to the input; keeps the width."""

    def __init__(self, channels: int, padding: SpatialPadding, eps: float) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, channels, padding)
        self.conv2 = CausalConv3d(channels, channels, padding)
        self.eps = eps

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, T, H, W] -> the same shape."""
        y = self.conv1(functional.silu(rms_norm(x, self.eps)), carry)
        y = self.conv2(functional.silu(rms_norm(y, self.eps)), carry)
        return torch.add(x, y)


class Downsampler(nn.Module):
    """Convolution, then space and time to channels, plus the same of the input averaged in groups of channels."""

    def __init__(self, in_channels: int, out_channels: int, stride: Stride, padding: SpatialPadding) -> None:
        super().__init__()
        folded = stride[0] * stride[1] * stride[2]
        self.stride = stride
        self.out_channels = out_channels
        self.conv = CausalConv3d(in_channels, out_channels // folded, padding)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C_in, T, H, W] -> [B, C_out, T/t, H/h, W/w]; a stream's first frame stands for t frames."""
        if carry.starts:
            x = torch.cat([x[:, :, :1]] * (self.stride[0] - 1) + [x], dim=2)
        folded = space_to_depth(x, self.stride)
        shortcut = folded.view(len(x), self.out_channels, -1, *folded.shape[2:]).mean(dim=2)
        return space_to_depth(self.conv(x, carry), self.stride) + shortcut


class Upsampler(nn.Module):
    """Convolution, then channels to space and time, plus the same of the input with channels repeated."""

    def __init__(self, in_channels: int, out_channels: int, stride: Stride, padding: SpatialPadding) -> None:
        super().__init__()
        unfolded = stride[0] * stride[1] * stride[2]
        self.stride = stride
        self.repeats = unfolded * out_channels // in_channels
        self.conv = CausalConv3d(in_channels, unfolded * out_channels, padding, spread=unfolded)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C_in, T, H, W] -> [B, C_out, T·t, H·h, W·w]; a stream's first frame gives one frame, not t."""
        shortcut = depth_to_space(x, self.stride).repeat(1, self.repeats, 1, 1, 1)
        y = depth_to_space(self.conv(x, carry), self.stride) + shortcut
        return y[:, :, self.stride[0] - 1 :] if carry.starts else y
