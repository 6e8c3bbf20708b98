"""The SANA-WM transformer, chunk by chunk or as one clip (arXiv 2605.15178), under the public checkpoint's names."""

from typing import cast

import torch
from torch import Tensor, nn

from longtake.kernels.cam.geometry import ray_matrices
from longtake.server.model.attention import additive_mask
from longtake.server.model.block import Block
from longtake.server.model.conditions import CameraCondition, ChunkCondition, TextCondition
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.layers import FinalLayer, PatchEmbedding, RMSNorm, TextEmbedding, TimestepEmbedding
from longtake.server.model.rope import RopeTables, cached_tables
from longtake.server.model.state import BlockState, TransformerState


class SanaWMTransformer(nn.Module):
    """Predicts the velocity of latent frames from a state that remembers all chunks before.

    `encode_text` once per session, `encode_chunk` once per chunk, then `forward` for every pass. Without a state and
    with all frames in one chunk it is the bidirectional model. Activations have the dtype of the weights.
    """

    def __init__(self, config: SanaWMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.x_embedder = PatchEmbedding(config.in_channels, width)
        self.plucker_embedder = PatchEmbedding(config.chunk_plucker_channels, width)
        self.t_embedder = TimestepEmbedding(config.frequency_embedding_size, width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = TextEmbedding(config)
        self.attention_y_norm = RMSNorm(width, config.y_norm_eps)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.final_layer = FinalLayer(config)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.final_layer.linear.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.final_layer.linear.weight.device

    def encode_text(self, text: Tensor, mask: Tensor) -> TextCondition:
        """Keys and values of the text in every block; they last as long as the prompt.

        Args:
            text: [B,L,E] hidden states of the text encoder. mask: [B,L], 1 where text is.
        """
        y = self.attention_y_norm(self.y_embedder(text.to(self.device, self.dtype)))
        pairs = [cast(Block, block).cross_attn.encode_text(y) for block in self.blocks]
        keys, values = zip(*pairs, strict=True)
        return TextCondition(keys, values, additive_mask(mask.to(self.device), self.dtype))

    def encode_chunk(
        self,
        text: TextCondition,
        start_frame: int,
        shape: tuple[int, int, int],
        raymap: Tensor | None,
        plucker: Tensor | None,
    ) -> ChunkCondition:
        """What the passes of one chunk share.

        Args:
            text: from `encode_text`.
            start_frame: absolute index of the chunk's first latent frame, without a limit.
            shape: (F, h, w) of the chunk's latents.
            raymap: [B,F,20] fp32 c2w (row-major) and intrinsics in latent pixels; geometry is computed in fp32.
            plucker: [B,48,F,h,w]. Both None: no camera (nothing can be written to a state then).

        Raises:
            ValueError: only one of raymap and plucker is given, or one does not fit `shape`.
        """
        tables = cached_tables(start_frame, shape, self.config.head_dim, self.config.rope_theta, self.device)
        camera = self._encode_camera(tables, shape, raymap, plucker)
        return ChunkCondition(text, shape, tables.cos, tables.sin, camera)

    def _encode_camera(
        self, tables: RopeTables, shape: tuple[int, int, int], raymap: Tensor | None, plucker: Tensor | None
    ) -> CameraCondition | None:
        if raymap is None and plucker is None:
            return None
        if raymap is None or plucker is None or raymap.shape[1:] != (shape[0], 20) or plucker.shape[2:] != shape:
            raise ValueError(f"raymap must be [B,F,20] and plucker [B,C,F,h,w] for (F,h,w) = {shape}")
        projection, inverse = ray_matrices(raymap.to(self.device, torch.float32).contiguous(), shape[1], shape[2])
        rays = self.plucker_embedder(plucker.to(self.device, self.dtype))
        return CameraCondition(projection, inverse, tables.cam_cos, tables.cam_sin, rays)

    def forward(
        self,
        latents: Tensor,
        timesteps: Tensor,
        chunk: ChunkCondition,
        state: TransformerState | None = None,
        *,
        write: bool = False,
    ) -> tuple[Tensor, TransformerState | None]:
        """One pass over one chunk.

        Args:
            latents: [B,C,F,h,w] on the model's device, cast to its dtype.
            timesteps: [B,F] in 0…1000, one for each frame, on the same device.
            chunk: from `encode_chunk`, for the same frames.
            state: after the chunk before; None at the start of a take. Never changed.
            write: also return the state after this chunk.

        Returns:
            velocity [B,C,F,h,w] in the dtype of `latents`, contiguous; the new state, or None for a reading pass.

        Raises:
            ValueError: `latents` do not fit `chunk`, or `write` without a camera.
        """
        if latents.shape[2:] != chunk.shape:
            raise ValueError(f"latents {tuple(latents.shape)} do not fit a chunk of {chunk.shape}")
        if write and chunk.camera is None:
            raise ValueError("only a pass with a camera can write a state")
        x = self.x_embedder(latents.to(self.dtype))
        embedding = self.t_embedder(timesteps, self.dtype)
        modulation = self.t_block(embedding).unflatten(-1, (6, -1))
        written: list[BlockState] = []
        for i, block in enumerate(self.blocks):
            text = chunk.text.keys[i], chunk.text.values[i]
            before = None if state is None else state.blocks[i]
            x, block_state = block(x, modulation, chunk, text, before, write=write)
            if block_state is not None:
                written.append(block_state)
        velocity = self.final_layer(x, embedding).permute(0, 3, 1, 2).unflatten(-1, chunk.shape[1:])
        return velocity.to(latents.dtype).contiguous(), TransformerState(tuple(written)) if write else None
