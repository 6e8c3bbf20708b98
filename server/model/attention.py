"""What both kinds of camera attention share, and the cross-attention to the text."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.kernels import gate_merge
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.layers import RMSNorm


class CameraAttention(nn.Module):
    """Projections, norms and output gate of a self-attention with a camera branch."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.heads = (config.num_attention_heads, config.head_dim)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.q_norm = RMSNorm(width, config.qk_norm_eps)
        self.k_norm = RMSNorm(width, config.qk_norm_eps)
        self.q_proj_cam = nn.Linear(width, width)
        self.k_proj_cam = nn.Linear(width, width)
        self.v_proj_cam = nn.Linear(width, width)
        self.out_proj_cam = nn.Linear(width, width)
        self.q_norm_cam = RMSNorm(width, config.qk_norm_eps)
        self.k_norm_cam = RMSNorm(width, config.qk_norm_eps)
        self.output_gate = nn.Linear(width, width)

    def tokens(self, x: Tensor) -> Tensor:
        """[B,F,S,C] → [B,N,H,D]."""
        return torch.unflatten(x.flatten(1, 2), -1, self.heads)

    def merge(self, h: Tensor, main: Tensor, camera: Tensor | None) -> Tensor:
        """Output of the attention: (main + out_proj_cam(camera)) · silu(gate of h), gated in fp32, then projected.

        h [B,F,S,C], main and camera [B,N,H,D] in the dtype of h → [B,F,S,C].
        """
        projected = None if camera is None else self.out_proj_cam(camera.reshape(h.shape))
        gated = gate_merge(main.reshape(h.shape).contiguous(), projected, self.output_gate(h))
        return cast(Tensor, self.proj(gated))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of q [B,N,H,D] over k, v [B,M,H,D] with an additive mask; scale None: D^−½ → [B,N,H,D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class CrossAttention(nn.Module):
    """Attention to the text."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = (config.num_attention_heads, config.head_dim)
        self.q_linear = nn.Linear(width, width)
        self.kv_linear = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.q_norm = RMSNorm(width, config.cross_norm_eps)
        self.k_norm = RMSNorm(width, config.cross_norm_eps)

    def encode_text(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded text [B,L,C] → keys and values [B,L,H,D]."""
        k, v = self.kv_linear(y).chunk(2, dim=-1)
        return self.k_norm(k).unflatten(-1, self.heads), v.unflatten(-1, self.heads)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend from x [B,F,S,C]; keys and values [B,L,H,D], additive mask [B,1,1,L] → [B,F,S,C]."""
        q = self.q_norm(self.q_linear(x)).flatten(1, 2).unflatten(-1, self.heads)
        return cast(Tensor, self.proj(attend(q, keys, values, mask=mask).flatten(2).view(x.shape)))


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Text mask [B,L] of ones and zeros → [B,1,1,L], 0 where text is and −10⁴ where none is."""
    return ((1 - mask.to(dtype)) * -1e4)[:, None, None]
