"""Self-attention of gated delta blocks: main branch with a normaliser, camera branch without."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.kernels.cam import cam_bidirectional, cam_discount, cam_output, cam_prepare
from longtake.kernels.gdn import GdnState, gdn_bidirectional, gdn_prepare, short_conv
from longtake.server.model.attention import CameraAttention
from longtake.server.model.conditions import CameraCondition, ChunkCondition
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.state import GdnMemory, owned


class ShortConv(nn.Module):
    """Taps of the short convolution over frames, in the checkpoint's shape [C,1,K]."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size, 1, config.conv_kernel_size))

    def forward(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve x [B,F,S,C], given the frames before it → x, next tail."""
        return short_conv(x, self.weight.squeeze(1), tail)


class GdnAttention(CameraAttention):
    """Frame-wise gated delta rule, causal over chunks and bidirectional within one (SANA-WM, arXiv 2605.15178)."""

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, config.num_attention_heads
        self.beta_proj = nn.Linear(width, heads)
        self.gate_proj = nn.Linear(width, heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.conv_k = ShortConv(config)
        self.conv_k_cam = ShortConv(config)

    def gates(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Beta [B,H,F,S] = σ(W_β·h) and decay [B,H,F] = exp(−exp(A_log)·softplus(W_g·mean(h) + dt_bias))."""
        beta = self.beta_proj(h).float().sigmoid().permute(0, 3, 1, 2)
        gate = self.gate_proj(h.float().mean(dim=2).to(h.dtype)).float()
        decay = torch.exp(-self.A_log.float().exp() * functional.softplus(gate + self.dt_bias.float()))
        return beta, decay.transpose(1, 2)

    def forward(
        self, h: Tensor, chunk: ChunkCondition, memory: GdnMemory | None, *, write: bool
    ) -> tuple[Tensor, GdnMemory | None]:
        """From h [B,F,S,C] to out [B,F,S,C], and the memory after these frames when `write`. `memory` stays."""
        beta, decay = self.gates(h)
        main, state, k_tail = self.main(h, beta, decay, chunk, memory)
        if chunk.camera is None:
            return self.merge(h, main, None), None
        camera, cam_kv, cam_k_tail = self.camera(h, beta, decay, chunk.camera, memory)
        out = self.merge(h, main, camera)
        if not write:
            return out, None
        tail = owned(cam_k_tail) if self.config.cache_cam_conv else None
        return out, GdnMemory(owned(state.kv), owned(state.z), owned(cam_kv), owned(k_tail), tail)

    def k_scale(self, h: Tensor) -> float:
        """D^−½·S^−½, which keeps the transition contractive at any resolution."""
        return float((self.config.head_dim * h.shape[2]) ** -0.5)

    def main(
        self, h: Tensor, beta: Tensor, decay: Tensor, chunk: ChunkCondition, memory: GdnMemory | None
    ) -> tuple[Tensor, GdnState, Tensor]:
        """Main branch [B,N,H,D], its state and the tail of raw keys."""
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        k, k_tail = self.conv_k(k, None if memory is None else memory.k_tail)
        q, k = gdn_prepare(
            self.tokens(q),
            self.tokens(k),
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            eps=self.config.qk_norm_eps,
            k_scale=self.k_scale(h),
        )
        state = None if memory is None else GdnState(memory.kv, memory.z)
        out, state = gdn_bidirectional(
            q.to(h.dtype),
            k.to(h.dtype),
            self.tokens(v),
            beta,
            decay,
            cos=chunk.cos,
            sin=chunk.sin,
            initial_state=state,
            eps=self.config.gdn_eps,
        )
        return out, state, k_tail

    def camera(
        self, h: Tensor, beta: Tensor, decay: Tensor, camera: CameraCondition, memory: GdnMemory | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Camera branch [B,N,H,D], its state and the tail of raw keys."""
        tail = None if memory is None else memory.cam_k_tail
        k, k_tail = self.conv_k_cam(self.k_proj_cam(h), tail)
        q, k, v, inflation = cam_prepare(
            self.tokens(self.q_proj_cam(h)),
            self.tokens(k),
            self.tokens(self.v_proj_cam(h)),
            camera.projection,
            camera.projection_inverse,
            camera.cos,
            camera.sin,
            q_weight=self.q_norm_cam.weight,
            k_weight=self.k_norm_cam.weight,
            eps=self.config.qk_norm_eps,
            k_scale=self.k_scale(h),
            downscale=self.config.cam_downscale_gdn,
        )
        state = None if memory is None else memory.cam_kv
        out, state = cam_bidirectional(q, k, v, cam_discount(beta, inflation), decay, initial_state=state)
        return cam_output(out, camera.projection, camera.cos, camera.sin), state, k_tail
