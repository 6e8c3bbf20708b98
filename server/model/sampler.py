"""Few-step Euler sampling of one chunk, and the pass that makes a clean chunk part of the state."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.state import TransformerState
from longtake.server.model.transformer import SanaWMTransformer

MAX_TIMESTEP = 1000.0
"""Timestep of pure noise: sigma = timestep / MAX_TIMESTEP."""


def euler_steps(
    model: SanaWMTransformer,
    latents: Tensor,
    chunk: ChunkCondition,
    state: TransformerState | None,
    *,
    pinned: int = 0,
    guidance: float = 1.0,
) -> Iterator[Tensor]:
    """Yield the chunk's latents after each Euler step x ← x − (σ_i − σ_{i+1})·v; the last are clean.

    The state is only read, so leaving early costs nothing but the work. No step adds noise.

    Args:
        latents: [B,C,F,h,w] noise on the model's device, in which the first `pinned` frames are clean; not changed.
        chunk: conditions of the chunk. state: after the chunk before.
        pinned: frames that keep their value and run at timestep 0.
        guidance: with another value than 1, `chunk` and `state` have batch 2B, the negative text first, and
            v = v_negative + guidance·(v_positive − v_negative).
    """
    free = torch.ones(latents.shape[2], device=latents.device)
    free[:pinned] = 0
    for timestep, following in pairwise(model.config.denoising_step_list):
        velocity = _velocity(model, latents, timestep * free, chunk, state, guidance)
        step = (timestep - following) / MAX_TIMESTEP
        latents = torch.where(free.bool()[:, None, None], latents - step * velocity, latents)
        yield latents


def denoise_chunk(
    model: SanaWMTransformer,
    latents: Tensor,
    chunk: ChunkCondition,
    state: TransformerState | None,
    *,
    pinned: int = 0,
    guidance: float = 1.0,
) -> Tensor:
    """The clean latents: the last of `euler_steps`, whose arguments it takes."""
    for step in euler_steps(model, latents, chunk, state, pinned=pinned, guidance=guidance):
        latents = step
    return latents


@torch.no_grad()
def absorb_chunk(
    model: SanaWMTransformer, latents: Tensor, chunk: ChunkCondition, state: TransformerState | None
) -> TransformerState:
    """The state after a chunk of clean latents [B,C,F,h,w]: one writing pass at timestep 0.

    With guidance, `chunk` and `state` have batch 2B; the latents are then used twice.
    """
    doubled = _fit_batch(latents, chunk)
    written: TransformerState | None
    _, written = model(doubled, doubled.new_zeros(doubled.shape[0], doubled.shape[2]), chunk, state, write=True)
    assert written is not None
    return written


def _fit_batch(latents: Tensor, chunk: ChunkCondition) -> Tensor:
    copies = chunk.text.mask.shape[0] // latents.shape[0]
    return latents.repeat(copies, 1, 1, 1, 1)


@torch.no_grad()
def _velocity(
    model: SanaWMTransformer,
    latents: Tensor,
    timesteps: Tensor,
    chunk: ChunkCondition,
    state: TransformerState | None,
    guidance: float,
) -> Tensor:
    doubled = _fit_batch(latents, chunk)
    velocity: Tensor
    velocity, _ = model(doubled, timesteps.expand(doubled.shape[0], -1), chunk, state)
    if guidance == 1.0:
        return velocity
    negative, positive = velocity.chunk(2)
    return negative + guidance * (positive - negative)
