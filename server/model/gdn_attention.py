"""Self-attention of gated delta blocks: main branch with a normaliser, camera branch without."""

from typing import Any

import torch
from torch import Tensor, nn

from longtake.kernels import (
    CamOutput,
    GdnState,
    cam_branch,
    cam_discount,
    cam_output,
    cam_prepare,
    cam_scan,
    frame_gates,
    gdn_scan,
    short_conv,
)
from longtake.server.model.attention import CameraAttention
from longtake.server.model.conditions import CameraCondition, ChunkCondition
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.precision import scan_precision
from longtake.server.model.state import GdnMemory, carried

Tokens = tuple[Tensor, Tensor, Tensor]
Gates = tuple[Tensor, Tensor]


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
        decay_logits = self.gate_proj(h.float().mean(dim=2).to(h.dtype))
        return frame_gates(self.beta_proj(h), decay_logits, self.A_log, self.dt_bias)

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
        tails = [carried(tail, self.config) for tail in (k_tail, cam_k_tail)[: 1 + self.config.cache_cam_conv]]
        return out, GdnMemory(state.kv, state.z, cam_kv, *tails)

    def k_scale(self, h: Tensor) -> float:
        """D^−½·S^−½, which keeps the transition contractive at any resolution."""
        return float((self.config.head_dim * h.shape[2]) ** -0.5)

    def main(
        self, h: Tensor, beta: Tensor, decay: Tensor, chunk: ChunkCondition, memory: GdnMemory | None
    ) -> tuple[Tensor, GdnState, Tensor]:
        """Main branch [B,N,H,D], its state and the tail of raw keys."""
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        k, k_tail = self.conv_k(k, None if memory is None else memory.k_tail.to(h.dtype))
        found = gdn_scan(
            self.tokens(q),
            self.tokens(k),
            self.tokens(v),
            beta,
            decay,
            direction="both",
            norm=self.config.gdn_norm,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            norm_eps=self.config.qk_norm_eps,
            k_scale=self.k_scale(h),
            cos=chunk.cos,
            sin=chunk.sin,
            eps=self.config.gdn_eps,
            initial_state=None if memory is None else GdnState(memory.kv, memory.z),
            precision=scan_precision(h.dtype),
        )
        assert found.state is not None
        return found.out, found.state, k_tail

    def camera(
        self, h: Tensor, beta: Tensor, decay: Tensor, camera: CameraCondition, memory: GdnMemory | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Camera branch [B,N,H,D], its state and the tail of raw keys."""
        tail = None if memory is None or memory.cam_k_tail is None else memory.cam_k_tail.to(h.dtype)
        k, k_tail = self.conv_k_cam(self.k_proj_cam(h), tail)
        tokens = (self.tokens(self.q_proj_cam(h)), self.tokens(k), self.tokens(self.v_proj_cam(h)))
        run = self.downscaled if self.config.cam_downscale_gdn else self.branch
        norms = {
            "q_weight": self.q_norm_cam.weight,
            "k_weight": self.k_norm_cam.weight,
            "norm_eps": self.config.qk_norm_eps,
            "k_scale": self.k_scale(h),
        }
        found = run(tokens, (beta, decay), camera, norms, None if memory is None else memory.cam_kv)
        assert found.state is not None
        return found.out, found.state, k_tail

    def branch(
        self, tokens: Tokens, gates: Gates, camera: CameraCondition, norms: dict[str, Any], state: Tensor | None
    ) -> CamOutput:
        """From raw camera tokens to the output, in one call."""
        precision = scan_precision(tokens[0].dtype)
        return cam_branch(*tokens, *gates, *camera[:4], **norms, initial_state=state, precision=precision)

    def downscaled(
        self, tokens: Tokens, gates: Gates, camera: CameraCondition, norms: dict[str, Any], state: Tensor | None
    ) -> CamOutput:
        """The same part by part, the prepared tokens shrunk to the RMS that they had before the ray transform."""
        q, k, v, *_, inflation = cam_prepare(*tokens, *camera[:4], **norms, downscale=True)
        beta, decay = gates
        precision = scan_precision(tokens[0].dtype)
        found = cam_scan(
            q, k, v, cam_discount(beta, inflation), decay, direction="both", initial_state=state, precision=precision
        )
        out = cam_output(found.out, camera.projection, camera.cos, camera.sin, dtype=tokens[0].dtype)
        return found._replace(out=out)
