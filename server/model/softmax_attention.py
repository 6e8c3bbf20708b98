"""Self-attention of softmax blocks: all of the chunk, the sink chunk and a window of past chunks."""

import torch
from torch import Tensor

from longtake.kernels import cam_output, cam_prepare
from longtake.kernels.rope import rotate
from longtake.server.model.attention import CameraAttention, attend
from longtake.server.model.conditions import CameraCondition, ChunkCondition
from longtake.server.model.state import SoftmaxMemory, Span, carried, remember


class SoftmaxAttention(CameraAttention):
    """Softmax attention with rotary positions, and a camera branch with ray-relative positions."""

    def forward(
        self, h: Tensor, chunk: ChunkCondition, memory: SoftmaxMemory | None, *, write: bool
    ) -> tuple[Tensor, SoftmaxMemory | None]:
        """From h [B,F,S,C] to out [B,F,S,C], and the memory with this chunk when `write`. `memory` stays."""
        past = () if memory is None else memory.spans
        q, k, v = self.main(h, chunk)
        main = self.attend([span.k for span in past], [span.v for span in past], q, k, v)
        if chunk.camera is None:
            return self.merge(h, main, None), None
        cam_q, cam_k, cam_v = self.camera(h, chunk.camera)
        camera = self.attend([span.cam_k for span in past], [span.cam_v for span in past], cam_q, cam_k, cam_v)
        camera = cam_output(camera, chunk.camera.projection, chunk.camera.cos, chunk.camera.sin)
        span = Span(*(carried(x, self.config) for x in (k, v, cam_k, cam_v))) if write else None
        return self.merge(h, main, camera), None if span is None else remember(memory, span, self.config)

    def attend(self, past_k: list[Tensor], past_v: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q [B,N,H,D] over the past chunks and its own → [B,N,H,D]."""
        keys, values = (
            torch.cat((*(x.to(q.dtype) for x in past), own), dim=1) for past, own in ((past_k, k), (past_v, v))
        )
        return attend(q, keys, values, self.config.softmax_scale)

    def main(self, h: Tensor, chunk: ChunkCondition) -> tuple[Tensor, Tensor, Tensor]:
        """q, k with norm and rotary positions, and v; each [B,N,H,D]."""
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        q, k = (self.tokens(norm(x)).float() for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = (rotate(x, chunk.cos, chunk.sin).to(h.dtype) for x in (q, k))
        return q, k, self.tokens(v)

    def camera(self, h: Tensor, camera: CameraCondition) -> tuple[Tensor, Tensor, Tensor]:
        """Camera q, k, v with ray-relative positions, each [B,N,H,D]."""
        tokens = cam_prepare(
            self.tokens(self.q_proj_cam(h)),
            self.tokens(self.k_proj_cam(h)),
            self.tokens(self.v_proj_cam(h)),
            camera.projection,
            camera.projection_inverse,
            camera.cos,
            camera.sin,
            q_weight=self.q_norm_cam.weight,
            k_weight=self.k_norm_cam.weight,
            norm_eps=self.config.qk_norm_eps,
            relu=False,
            downscale=self.config.cam_downscale_softmax,
        )
        return tokens.q.to(h.dtype), tokens.k.to(h.dtype), tokens.v.to(h.dtype)
