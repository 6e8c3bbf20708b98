"""The causal video VAE of SANA-WM, in the topology of LTX-2, streamed latent by latent: 8 × 32 × 32 compression there.

Parameter names are those of the public LTX-2 checkpoints. The decoder's memory is an explicit `dict[str, Tensor]`: two
input frames of every causal convolution. Nothing is kept in the modules.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.server.model.vae_blocks import (
    CARRIED_FRAMES,
    Carry,
    CausalConv3d,
    Downsampler,
    ResnetBlock,
    SpatialPadding,
    Stride,
    Upsampler,
    patchify,
    rms_norm,
    unpatchify,
)

TIME_COMPRESSION = 8
CHUNK_LATENTS = 3
UNTRAINED_CONTRAST = 0.6


@dataclass(frozen=True)
class VAEConfig:
    """Shape of a VAE.

    Attributes:
        latent_channels: channels of a latent.
        encoder_widths: channels before the first downsampler and behind each.
        encoder_layers: residual blocks at each of these widths.
        decoder_widths: channels before the first upsampler and behind each.
        decoder_layers: residual blocks at each of these widths.
        encoder_strides: by how much each downsampler shrinks (time, height, width); time by 8 in all.
        decoder_strides: by how much each upsampler grows them.
        patch: side of the pixel patches that become channels.
        eps: of the RMS norms.
        scaling_factor: applied to normalised latents.
    """

    latent_channels: int
    encoder_widths: tuple[int, ...]
    encoder_layers: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    encoder_strides: tuple[Stride, ...] = ((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2))
    decoder_strides: tuple[Stride, ...] = ((2, 2, 2), (2, 2, 2), (2, 2, 2))
    encoder_padding: SpatialPadding = "zeros"
    decoder_padding: SpatialPadding = "reflect"
    patch: int = 4
    eps: float = 1e-8
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        for strides in (self.encoder_strides, self.decoder_strides):
            time, height, width = (math.prod(axis) for axis in zip(*strides, strict=True))
            if (time, height * self.patch, width * self.patch) != (TIME_COMPRESSION, *[self.space_compression] * 2):
                raise ValueError(f"strides must compress time by {TIME_COMPRESSION} and space alike, not {strides}")

    @property
    def space_compression(self) -> int:
        """Pixels along a side of a latent pixel."""
        return self.patch * math.prod(stride[1] for stride in self.encoder_strides)


LTX2_CAUSAL_VAE = VAEConfig(
    latent_channels=128,
    encoder_widths=(128, 256, 512, 1024, 2048),
    encoder_layers=(4, 6, 6, 2, 2),
    decoder_widths=(1024, 512, 256, 128),
    decoder_layers=(5, 5, 5, 5),
)
TINY_VAE = VAEConfig(
    latent_channels=16,
    encoder_widths=(16, 16, 16, 32, 32),
    encoder_layers=(1, 1, 1, 1, 1),
    decoder_widths=(32, 32, 16, 16),
    decoder_layers=(1, 1, 1, 1),
)
TINY_WORLD_VAE = VAEConfig(
    latent_channels=24,
    encoder_widths=(64, 64, 64, 128),
    encoder_layers=(1, 1, 1, 0),
    decoder_widths=(128, 64, 64, 64),
    decoder_layers=(1, 1, 0, 1),
    encoder_strides=((2, 1, 1), (2, 1, 1), (2, 2, 2)),
    decoder_strides=((2, 2, 2), (2, 1, 1), (2, 1, 1)),
    decoder_padding="zeros",
)
"""8 × 8 × 8 compression of 128×80 pixels. Reflected edges cost more than half of a convolution's time on a CPU."""


class MidBlock(nn.Module):
    """Residual blocks in a row."""

    def __init__(self, channels: int, layers: int, padding: SpatialPadding, eps: float) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(channels, padding, eps) for _ in range(layers))

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, T, H, W] -> the same shape."""
        for resnet in self.resnets:
            x = resnet(x, carry)
        return x


class DownBlock(MidBlock):
    """Residual blocks, then a downsampler."""

    def __init__(
        self, channels: int, out_channels: int, layers: int, stride: Stride, padding: SpatialPadding, eps: float
    ) -> None:
        super().__init__(channels, layers, padding, eps)
        self.downsamplers = nn.ModuleList([Downsampler(channels, out_channels, stride, padding)])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, T, H, W] -> [B, C_out, T/t, H/h, W/w]."""
        y: Tensor = self.downsamplers[0](super().forward(x, carry), carry)
        return y


class UpBlock(MidBlock):
    """An upsampler, then residual blocks."""

    def __init__(
        self, channels: int, out_channels: int, layers: int, stride: Stride, padding: SpatialPadding, eps: float
    ) -> None:
        super().__init__(out_channels, layers, padding, eps)
        self.upsamplers = nn.ModuleList([Upsampler(channels, out_channels, stride, padding)])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, T, H, W] -> [B, C_out, T·t, H·h, W·w], t − 1 frames fewer at the start of a stream."""
        return super().forward(self.upsamplers[0](x, carry), carry)


class Encoder(nn.Module):
    """Pixels to the mode of the latents' posterior."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        padding, eps = config.encoder_padding, config.eps
        widths = config.encoder_widths
        levels = zip(pairwise(widths), config.encoder_layers[:-1], config.encoder_strides, strict=True)
        self.patch, self.eps = config.patch, eps
        self.conv_in = CausalConv3d(3 * config.patch**2, widths[0], padding)
        self.down_blocks = nn.ModuleList(
            DownBlock(wide, wider, layers, stride, padding, eps) for (wide, wider), layers, stride in levels
        )
        self.mid_block = MidBlock(widths[-1], config.encoder_layers[-1], padding, eps)
        self.conv_out = CausalConv3d(widths[-1], config.latent_channels + 1, padding)

    def forward(self, frames: Tensor, carry: Carry) -> Tensor:
        """[B, 3, 8n, H, W] -> [B, C, n, h, w], from 1+8n frames n+1 at the start of a stream."""
        x = self.conv_in(patchify(frames, self.patch), carry)
        for block in self.down_blocks:
            x = block(x, carry)
        x = self.mid_block(x, carry)
        moments: Tensor = self.conv_out(functional.silu(rms_norm(x, self.eps)), carry)
        # the last channel is one log-variance for all: the mode does not need it
        return moments[:, :-1]


class Decoder(nn.Module):
    """Latents to pixels."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        padding, eps = config.decoder_padding, config.eps
        widths, layers = config.decoder_widths, config.decoder_layers
        self.patch, self.eps = config.patch, eps
        self.conv_in = CausalConv3d(config.latent_channels, widths[0], padding)
        self.mid_block = MidBlock(widths[0], layers[0], padding, eps)
        self.up_blocks = nn.ModuleList(
            UpBlock(wide, narrow, count, stride, padding, eps)
            for (wide, narrow), count, stride in zip(pairwise(widths), layers[1:], config.decoder_strides, strict=True)
        )
        self.conv_out = CausalConv3d(widths[-1], 3 * config.patch**2, padding, spread=config.patch**2)

    def forward(self, latents: Tensor, carry: Carry) -> Tensor:
        """[B, C, n, h, w] -> [B, 3, 8n, H, W], at the start of a stream 7 frames fewer."""
        x = self.mid_block(self.conv_in(latents, carry), carry)
        for block in self.up_blocks:
            x = block(x, carry)
        x = self.conv_out(functional.silu(rms_norm(x, self.eps)), carry)
        return unpatchify(x, self.patch)


class CausalVideoVAE(nn.Module):
    """Encoder and decoder with the normalisation of the latents.

    Both run one latent frame at a time, so that the bits of a result do not depend on how a stream was cut into calls.
    """

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.register_buffer("latents_mean", torch.zeros(config.latent_channels))
        self.register_buffer("latents_std", torch.ones(config.latent_channels))
        for half in (self.encoder, self.decoder):
            for name, conv in causal_convs(half):
                conv.name = name
        self._cache_names = {name for name, _ in causal_convs(self.decoder)}

    def encode(self, frames: Tensor) -> Tensor:
        """Encode a clip from empty caches.

        Args:
            frames: [B, 3, 1+8n, H, W] in [-1, 1], H and W multiples of `space_compression`. Not mutated.

        Returns:
            Posterior mode, normalised as (z − mean) · scaling_factor / std: [B, C, 1+n, h, w].

        Raises:
            ValueError: a size that the compression does not divide.
        """
        T, H, W = frames.shape[2:]
        side = self.config.space_compression
        if (T - 1) % TIME_COMPRESSION or H % side or W % side:
            raise ValueError(f"can not encode {T} frames of {W}x{H}: 1+8n frames, sides multiples of {side}")
        mean, std = self._statistics()
        cache: Mapping[str, Tensor] | None = None
        latents = []
        for group in frames.to(mean.dtype).tensor_split(tuple(range(1, T, TIME_COMPRESSION)), dim=2):
            carry = Carry(cache)
            latents.append(self.encoder(group, carry))
            cache = carry.after
        return (torch.cat(latents, dim=2) - mean) * (self.config.scaling_factor / std)

    def decode(self, latents: Tensor, cache: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Decode the next latent frames of a stream.

        Args:
            latents: [B, C, F, h, w], normalised, F ≥ 1, h and w ≥ 2. Not mutated.
            cache: what the previous call returned, or None at the start of a stream. Not mutated.

        Returns:
            Frames [B, 3, 8F, H, W] (1+8(F−1) at the start of a stream), not clamped; and the new cache: fresh
            contiguous tensors [B, C_in, 2, H, W], one a convolution, always in the order in which these run.

        Raises:
            ValueError: the cache is not one of this decoder.
        """
        if cache is not None and cache.keys() != self._cache_names:
            raise ValueError("the cache has other entries than this decoder")
        mean, std = self._statistics()
        frames = []
        raw = (latents * (std / self.config.scaling_factor) + mean).to(mean.dtype)
        for latent in torch.split(raw, 1, dim=2):
            carry = Carry(cache)
            frames.append(self.decoder(latent, carry))
            cache = carry.after
        return torch.cat(frames, dim=2), carry.after

    def unknown_cache(self, latents: Tensor) -> dict[str, Tensor]:
        """Cache of a running stream whose past is unknown, to join it in the middle: all zeros.

        Frames decoded from it are wrong until `decoder_history` latent frames have passed, then right to the bit.

        Args:
            latents: [B, C, F, h, w] of the stream, for shape, dtype and device.
        """
        _, cache = self.decode(torch.zeros_like(latents[:, :, :1]), None)
        return {name: torch.zeros_like(frames) for name, frames in cache.items()}

    def _statistics(self) -> tuple[Tensor, Tensor]:
        return self.latents_mean.view(1, -1, 1, 1, 1), self.latents_std.view(1, -1, 1, 1, 1)


def causal_convs(module: nn.Module) -> Iterator[tuple[str, CausalConv3d]]:
    """The causal convolutions inside `module`, with their qualified names."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, CausalConv3d))


def decoder_history(config: VAEConfig) -> int:
    """How many latent frames before its own a decoded frame can still see.

    Latent frame j decodes to frames 8j−7 … 8j. Going from pixels to latents, a convolution reaches two frames further
    back at its frame rate, and frame i behind an upsampler of t comes from frame ⌈i/t⌉ before it, since the very first
    t − 1 frames were dropped; every frame rate has the residual blocks' convolutions and one more, the latents' has two
    more. The oldest of the eight frames sees furthest.
    """
    convs = [2 * layers + 1 for layers in config.decoder_layers]
    convs[0] += 1
    oldest = 1 - TIME_COMPRESSION
    for count, stride in zip(reversed(convs[1:]), reversed(config.decoder_strides), strict=True):
        oldest = math.ceil((oldest - CARRIED_FRAMES * count) / stride[0])
    return CARRIED_FRAMES * convs[0] - oldest


def decoder_history_chunks(config: VAEConfig) -> int:
    """How many chunks (three latent frames) to decode from `unknown_cache` before frames and cache are exact."""
    return math.ceil(decoder_history(config) / CHUNK_LATENTS)


def to_uint8(frames: Tensor) -> Tensor:
    """Frames [3, T, H, W] in [-1, 1] to bytes [T, H, W, 3]: (x+1)·127.5, clamped, truncated (not rounded)."""
    levels = ((frames + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    return levels.permute(1, 2, 3, 0).contiguous()


@torch.no_grad()
def init_untrained(module: nn.Module, seed: int) -> None:
    """Set every causal convolution in `module` to seeded noise, in place; drawn on the CPU whatever its device.

    Weights are normal with variance 1/fan-in, biases zero. Channels that a shuffle will make neighbours share their
    weights (ICNR, Aitken et al. 2017, arXiv:1707.02937). The decoder's output is scaled to visible contrast.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, conv in causal_convs(module):
        weight = conv.conv.weight
        shape = (weight.shape[0] // conv.spread, *weight.shape[1:])
        noise = torch.randn(shape, generator=generator) / math.sqrt(weight[0].numel())
        if name.endswith("decoder.conv_out"):
            noise *= UNTRAINED_CONTRAST
        weight.copy_(noise.repeat_interleave(conv.spread, dim=0))
        if conv.conv.bias is not None:
            conv.conv.bias.zero_()
