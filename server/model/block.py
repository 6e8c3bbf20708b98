"""One block of the transformer."""

import torch
from torch import Tensor, nn

from longtake.server.model.attention import CrossAttention
from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.ffn import MixFFN
from longtake.server.model.gdn_attention import GdnAttention
from longtake.server.model.layers import modulate
from longtake.server.model.softmax_attention import SoftmaxAttention
from longtake.server.model.state import BlockState, carried


class Block(nn.Module):
    """Self-attention, Plücker rays, cross-attention, FFN; every frame modulated by its own timestep."""

    def __init__(self, config: SanaWMConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.eps = config.layernorm_eps
        self.scale_shift_table = nn.Parameter(torch.zeros(6, config.hidden_size))
        self.attn = SoftmaxAttention(config) if config.is_softmax(index) else GdnAttention(config)
        self.plucker_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.cross_attn = CrossAttention(config)
        self.mlp = MixFFN(config)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        chunk: ChunkCondition,
        text: tuple[Tensor, Tensor],
        state: BlockState | None,
        *,
        write: bool,
    ) -> tuple[Tensor, BlockState | None]:
        """From x [B,F,S,C] and modulation [B,F,6,C] to x and the block's new state when `write`. `state` stays.

        `text`: keys and values of this block.
        """
        shifts = (self.scale_shift_table + modulation)[..., None, :].unbind(2)
        shift_attn, scale_attn, gate_attn, shift_ffn, scale_ffn, gate_ffn = shifts
        h = modulate(x, shift_attn, scale_attn, self.eps)
        attended, memory = self.attn(h, chunk, None if state is None else state.memory, write=write)
        x = x + gate_attn * attended
        if chunk.camera is not None:
            x = x + self.plucker_proj(chunk.camera.plucker)
        x = x + self.cross_attn(x, *text, chunk.text.mask)
        h = modulate(x, shift_ffn, scale_ffn, self.eps)
        mixed, tail = self.mlp(h, chunk.shape[1:], None if state is None else state.ffn_tail.to(h.dtype))
        return x + gate_ffn * mixed, BlockState(memory, carried(tail, self.config)) if write else None
