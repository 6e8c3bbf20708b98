"""Shape and switches of the SANA-WM transformer (arXiv 2605.15178)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SanaWMConfig:
    """Everything that decides the transformer's arithmetic besides its weights. Names follow the public configuration.

    Attributes:
        softmax_every_n: block i is a softmax block when (i + 1) is a multiple of it, else a gated delta block.
        latent_hw: height and width of a latent frame.
        num_frame_per_block: latent frames of a chunk; the first chunk has one more.
        num_cached_blocks: chunks that softmax blocks see besides their own, the sink being one of them.
        sink_token: chunk 0 stays visible forever.
        denoising_step_list: timesteps of the sampler, the last one 0.
        cache_cam_conv: the short convolution on camera keys sees the last chunk's frames.
        cam_downscale_gdn: camera q, k, v of gated delta blocks are shrunk to their RMS before the ray transform.
        cam_downscale_softmax: the same in softmax blocks.
        softmax_padded_scale: softmax scale of the head dim padded for flash attention instead of its own.
        gdn_norm: over what the main branch of gated delta blocks normalises q and k, all channels or each head's. With
            all of them one head can take the key energy of every head: its transition I − P then has eigenvalues down
            to 1 − H, and a state that is fed long enough overflows. By heads and with weights up to √2 it can not.
        carry_bf16: tokens that are carried from chunk to chunk (tails, keys and values of past chunks) are rounded to
            bf16, whatever the dtype of the weights; scan states stay fp32.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    in_channels: int
    out_channels: int
    caption_channels: int
    model_max_length: int
    latent_hw: tuple[int, int]
    softmax_every_n: int = 4
    mlp_ratio: float = 3.0
    conv_kernel_size: int = 4
    chunk_plucker_channels: int = 48
    frequency_embedding_size: int = 256
    qk_norm_eps: float = 1e-5
    cross_norm_eps: float = 1e-6
    y_norm_eps: float = 1e-5
    layernorm_eps: float = 1e-6
    gdn_eps: float = 1e-8
    rope_theta: float = 10000.0
    num_frame_per_block: int = 3
    num_cached_blocks: int = 2
    sink_token: bool = True
    denoising_step_list: tuple[int, ...] = (1000, 960, 889, 727, 0)
    cache_cam_conv: bool = False
    cam_downscale_gdn: bool = False
    cam_downscale_softmax: bool = False
    softmax_padded_scale: bool = True
    gdn_norm: Literal["full", "head"] = "full"
    carry_bf16: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % (8 * self.num_attention_heads):
            raise ValueError("hidden_size must be a multiple of 8 · num_attention_heads")
        if self.num_cached_blocks < 1:
            raise ValueError("num_cached_blocks must be at least 1")

    @property
    def head_dim(self) -> int:
        """D = hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp_hidden(self) -> int:
        """Width of the FFN after its gate."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def window_chunks(self) -> int:
        """Chunks in the sliding part of the softmax window."""
        return self.num_cached_blocks - int(self.sink_token)

    @property
    def softmax_scale(self) -> float:
        """Factor on q·k. Head dims that flash attention takes as they are (32, 64, 128, 256) are never padded."""
        padded = self.softmax_padded_scale and self.head_dim < 128 and self.head_dim not in (32, 64)
        return float((128 if padded else self.head_dim) ** -0.5)

    def is_softmax(self, block: int) -> bool:
        """Whether block number `block` is a softmax block."""
        return (block + 1) % self.softmax_every_n == 0


SANA_WM_1600M = SanaWMConfig(
    num_layers=20,
    hidden_size=2240,
    num_attention_heads=20,
    in_channels=128,
    out_channels=128,
    caption_channels=2304,
    model_max_length=300,
    latent_hw=(22, 40),
)
"""The public streaming checkpoint, 2.66 G parameters at 704×1280."""

TINY_UNTRAINED = SanaWMConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    in_channels=16,
    out_channels=16,
    caption_channels=32,
    model_max_length=8,
    latent_hw=(6, 10),
)
"""The same architecture at a size that any CPU runs, for weights that were never trained."""

TINY_WORLD = SanaWMConfig(
    num_layers=8,
    hidden_size=192,
    num_attention_heads=6,
    in_channels=24,
    out_channels=24,
    caption_channels=64,
    model_max_length=16,
    latent_hw=(10, 16),
    mlp_ratio=2.0,
    conv_kernel_size=2,
    denoising_step_list=(1000, 727, 0),
    gdn_norm="head",
    carry_bf16=True,
)
"""The trained model that ships: 128×80 pixels, latents of 8×8 pixels and 8 frames, a state below 8 MB."""
