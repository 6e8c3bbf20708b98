"""What the two parts of the model learn from a batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.server.camera.rays import LATENTS_PER_CHUNK
from longtake.server.model.conditions import ChunkCondition, TextCondition
from longtake.server.model.rope import RopeTables
from longtake.server.model.sampler import MAX_TIMESTEP, denoise_chunk
from longtake.server.model.state import TransformerState
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.vae import CausalVideoVAE
from longtake.server.model.vae_blocks import Carry
from longtake.training.clips import Tensors, to_pixels

LATENT_NOISE = 0.1
"""Noise on a latent channel, relative to its spread: what the decoder has to bear from the transformer."""
SQUARE_WEIGHT = 50.0
SHIFT = 5.0
"""How far noise levels lean to the high end, where a sampler of few steps is (arXiv 2403.03206, equation 23)."""
HISTORY_NOISE = 0.15
"""Largest part of noise in remembered latents, so that a memory bears what a sampler gets wrong."""


def vae_loss(vae: CausalVideoVAE, batch: Tensors) -> Tensors:
    """Absolute and squared error of frames restored from latents with noise, their gradient added; `mse` too."""
    x = to_pixels(batch["frames"])
    latents = vae.encoder(x.to(vae.decoder.conv_in.conv.weight.dtype), Carry(None))
    spread = latents.float().std(dim=(0, 2, 3, 4), keepdim=True)
    noisy = latents + (LATENT_NOISE * spread * torch.randn_like(latents, dtype=torch.float32)).to(latents.dtype)
    error = vae.decoder(noisy, Carry(None)).float() - x
    mse = error.square().mean()
    loss = error.abs().mean() + SQUARE_WEIGHT * mse
    torch.autograd.backward(loss)
    return {"loss": loss.detach(), "mse": mse.detach()}


def shifted(uniform: Tensor) -> Tensor:
    """Whole timesteps in 1…1000 from uniform numbers."""
    sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
    return (sigma * MAX_TIMESTEP).floor().clamp(1, MAX_TIMESTEP)


class WorldLoss:
    """Flow matching chunk by chunk, as the model is served: each from noise and the memory of those before.

    Args:
        model: in its training dtype. words: [words,E] vectors of the vocabulary.
        own_history: chunks that the model sampled itself are remembered, instead of the true ones.
    """

    def __init__(self, model: SanaWMTransformer, words: nn.Parameter, *, own_history: bool) -> None:
        self.model, self.words, self.own_history = model, words, own_history
        # on the device before a step is captured
        steps = model.config.denoising_step_list
        self.choices = torch.tensor(steps[:-1], device=model.device, dtype=torch.float32)

    def __call__(self, batch: Tensors) -> Tensors:
        """Mean squared error of the velocity over chunks, its gradient added; `chunks` [K] is each chunk's.

        `batch` has latents [B,C,1+3K,h,w], raymap [B,F,20], plucker [B,48,F,h,w], rows and mask [B,L], and the rotary
        tables of all latent frames.
        """
        mask = batch["mask"]
        text = self.model.encode_text(functional.embedding(batch["rows"], self.words) * mask[..., None], mask)
        state: TransformerState | None = None
        losses = []
        starts = range(1, batch["latents"].shape[2], LATENTS_PER_CHUNK)
        for start in starts:
            first = start if start > 1 else 0
            clean = batch["latents"][:, :, first : start + LATENTS_PER_CHUNK].float()
            chunk = self._condition(batch, text, first, clean)
            losses.append(self._chunk_loss(clean, chunk, state, pinned=int(first == 0)))
            if start < starts[-1]:
                state = self._remember(clean, chunk, state, pinned=int(first == 0))
        found = torch.stack(losses)
        torch.autograd.backward(found.mean())
        return {"loss": found.mean().detach(), "chunks": found.detach()}

    def _condition(self, batch: Tensors, text: TextCondition, first: int, clean: Tensor) -> ChunkCondition:
        F, h, w = clean.shape[2:]
        seen = slice(first, first + F)
        raymap, plucker = batch["raymap"][:, seen], batch["plucker"][:, :, seen]
        chunk = self.model.encode_chunk(text, first, (F, h, w), raymap, plucker)
        cos, sin, cam_cos, cam_sin = (batch[name][first * h * w : (first + F) * h * w] for name in RopeTables._fields)
        assert chunk.camera is not None
        return chunk._replace(cos=cos, sin=sin, camera=chunk.camera._replace(cos=cam_cos, sin=cam_sin))

    def _timesteps(self, clean: Tensor) -> Tensor:
        uniform = torch.rand(len(clean), 1, device=clean.device)
        if not self.own_history:
            return shifted(uniform)
        return self.choices[(uniform * len(self.choices)).long()]

    def _chunk_loss(self, clean: Tensor, chunk: ChunkCondition, state: TransformerState | None, pinned: int) -> Tensor:
        free = torch.ones(clean.shape[2], device=clean.device)
        free[:pinned] = 0
        timesteps = self._timesteps(clean) * free
        sigma = (timesteps / MAX_TIMESTEP)[:, None, :, None, None]
        noise = torch.randn_like(clean)
        velocity, _ = self.model(clean + sigma * (noise - clean), timesteps, chunk, state)
        return functional.mse_loss(velocity[:, :, pinned:], (noise - clean)[:, :, pinned:])

    def _remember(
        self, clean: Tensor, chunk: ChunkCondition, state: TransformerState | None, pinned: int
    ) -> TransformerState:
        """The state after a chunk: of true latents with some noise, or of what the model makes there."""
        noise = torch.randn_like(clean)
        noise[:, :, :pinned] = clean[:, :, :pinned]
        if self.own_history:
            known = denoise_chunk(self.model, noise, chunk, state, pinned=pinned)
        else:
            known = clean + HISTORY_NOISE * torch.rand(len(clean), 1, 1, 1, 1, device=clean.device) * (noise - clean)
        after: TransformerState
        _, after = self.model(known, known.new_zeros(len(known), known.shape[2]), chunk, state, write=True)
        return after
