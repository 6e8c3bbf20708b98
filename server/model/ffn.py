"""Gated convolutional FFN with a temporal convolution that carries one frame from chunk to chunk."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.server.model.config import SanaWMConfig
from longtake.server.model.layers import Pointwise


class ConvHolder(nn.Module):
    """A convolution under the checkpoint's name `conv`."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """As the convolution."""
        return cast(Tensor, self.conv(x))


class MixFFN(nn.Module):
    """Expand, 3×3 depthwise, gate a·silu(b), contract to u, then u + conv over three frames of u."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        width, wide = config.hidden_size, 2 * config.mlp_hidden
        self.inverted_conv = ConvHolder(Pointwise(width, wide, dims=2))
        self.depth_conv = ConvHolder(nn.Conv2d(wide, wide, 3, padding=1, groups=wide))
        self.point_conv = ConvHolder(Pointwise(config.mlp_hidden, width, dims=2, bias=False))
        self.t_conv = nn.Conv2d(width, width, (3, 1), bias=False)

    def forward(self, x: Tensor, grid: tuple[int, int], tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mix pixels and frames.

        Args:
            x: [B,F,S,C]. grid: (h, w) with S = h·w.
            tail: [B,S,C], u of the frame before; None: zeros. The frame after the last counts as zeros.

        Returns:
            out [B,F,S,C] and u of the last frame [B,S,C], a view.
        """
        wide = torch.unflatten(functional.silu(self.inverted_conv(x)), 2, grid)
        wide = self.depth_conv(wide.flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        value, gate = wide.reshape(*x.shape[:3], -1).chunk(2, dim=-1)
        u = self.point_conv(value * functional.silu(gate))
        edge = torch.zeros_like(u[:, :1])
        padded = torch.cat((edge if tail is None else tail[:, None], u, edge), dim=1)
        mixed = self.t_conv(padded.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return u + mixed, u[:, -1]
