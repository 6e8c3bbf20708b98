"""What the two parts of the model learn from a batch."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longtake.server.camera.rays import LATENTS_PER_CHUNK
from longtake.server.model.conditions import ChunkCondition, TextCondition
from longtake.server.model.rope import RopeTables
from longtake.server.model.sampler import MAX_TIMESTEP, euler_steps
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


class Noisy(NamedTuple):
    """A chunk on its way from noise: latents [B,C,F,h,w] and timesteps [B,1]."""

    latents: Tensor
    timesteps: Tensor


class WorldLoss:
    """Flow matching chunk by chunk, as the model is served: each from noise and the memory of those before.

    Args:
        model: in its training dtype. words: [words,E] vectors of the vocabulary.
        own_history: chunks that the model sampled itself are remembered, instead of the true ones, and its steps are
            those of the sampler, each from where the one before led.
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
            pinned = int(start == 1)
            clean = batch["latents"][:, :, start - pinned : start + LATENTS_PER_CHUNK].float()
            chunk = self._condition(batch, text, start - pinned, clean)
            noisy, known = self._sampled(clean, chunk, state, pinned) if self.own_history else _noised(clean, pinned)
            losses.append(self._velocity_error(noisy, clean, chunk, state, pinned))
            if start < starts[-1]:
                _, state = self.model(known, known.new_zeros(len(known), known.shape[2]), chunk, state, write=True)
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

    def _sampled(
        self, clean: Tensor, chunk: ChunkCondition, state: TransformerState | None, pinned: int
    ) -> tuple[Noisy, Tensor]:
        """Any step of the sampler for each clip, and what the model makes of the chunk."""
        noise = _noise(clean, pinned)
        *steps, known = (noise, *euler_steps(self.model, noise, chunk, state, pinned=pinned))
        choice = torch.randint(len(steps), (len(clean),), device=clean.device)
        latents = torch.stack(steps)[choice, torch.arange(len(clean), device=clean.device)]
        return Noisy(latents, self.choices[choice, None]), known

    def _velocity_error(
        self, noisy: Noisy, clean: Tensor, chunk: ChunkCondition, state: TransformerState | None, pinned: int
    ) -> Tensor:
        """Mean square of it, beside the velocity that leads straight to the clean chunk."""
        free = torch.ones(clean.shape[2], device=clean.device)
        free[:pinned] = 0
        sigma = (noisy.timesteps / MAX_TIMESTEP)[:, None, :, None, None]
        velocity, _ = self.model(noisy.latents, noisy.timesteps * free, chunk, state)
        return functional.mse_loss(velocity[:, :, pinned:], ((noisy.latents - clean) / sigma)[:, :, pinned:])


def _noised(clean: Tensor, pinned: int) -> tuple[Noisy, Tensor]:
    """A chunk with noise of any level, and with some noise as it is remembered."""
    timesteps = shifted(torch.rand(len(clean), 1, device=clean.device))
    sigma = (timesteps / MAX_TIMESTEP)[:, None, :, None, None]
    part = HISTORY_NOISE * torch.rand(len(clean), 1, 1, 1, 1, device=clean.device)
    noisy, known = (clean + size * (_noise(clean, pinned) - clean) for size in (sigma, part))
    return Noisy(noisy, timesteps), known


def _noise(clean: Tensor, pinned: int) -> Tensor:
    """Noise in the shape of a chunk, whose first `pinned` frames it leaves as they are."""
    noise = torch.randn_like(clean)
    noise[:, :, :pinned] = clean[:, :, :pinned]
    return noise
