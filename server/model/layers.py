"""Small parts of the transformer, named as in the public checkpoint. Activations keep their channels last."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.server.model.config import SanaWMConfig


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dim, in fp32, cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…,C] → […,C]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Pointwise(nn.Module):
    """A 1×1 convolution of `dims` dims on channels-last input; its weight keeps the checkpoint's shape [out,in,1,…]."""

    def __init__(self, inputs: int, outputs: int, dims: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, *(1,) * dims))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[…,in] → […,out]."""
        return functional.linear(x, self.weight.flatten(1), self.bias)


class PatchEmbedding(nn.Module):
    """One token per latent pixel."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = Pointwise(channels, width, dims=3)

    def forward(self, x: Tensor) -> Tensor:
        """[B,C,F,h,w] → [B,F,S,width]."""
        # one layout whatever the input's strides: a replay must multiply in the same order
        return cast(Tensor, self.proj(x.flatten(3).permute(0, 2, 3, 1).contiguous()))


class TimestepEmbedding(nn.Module):
    """Sinusoids (cosines, then sines) of whole timesteps, then an MLP."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """Timesteps [B,F] in 0…1000, cut to whole numbers → [B,F,width]."""
        half = self.frequencies // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half)
        angles = timesteps.long().float()[..., None] * rates
        return cast(Tensor, self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)))


class TextProjection(nn.Module):
    """Two layers with a tanh GELU between."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, text: Tensor) -> Tensor:
        """[B,L,inputs] → [B,L,width]."""
        return cast(Tensor, self.fc2(functional.gelu(self.fc1(text), approximate="tanh")))


class TextEmbedding(nn.Module):
    """Holds the projection under the checkpoint's name."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        self.y_proj = TextProjection(config.caption_channels, config.hidden_size)

    def forward(self, text: Tensor) -> Tensor:
        """[B,L,E] → [B,L,C]."""
        return cast(Tensor, self.y_proj(text))


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm without weights, then x·(1 + scale) + shift; x [B,F,S,C], shift and scale [B,F,1,C]."""
    return functional.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


class FinalLayer(nn.Module):
    """Tokens to velocities."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, config.hidden_size))
        self.eps = config.layernorm_eps

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Tokens x [B,F,S,C], time embedding [B,F,C] → [B,F,S,out]."""
        shift, scale = (self.scale_shift_table + embedding[:, :, None])[..., None, :].unbind(2)
        return cast(Tensor, self.linear(modulate(x, shift, scale, self.eps)))
