"""What the transformer is trained on: noised true chunks, or its own sampler's steps."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.config import TINY_WORLD
from longtake.server.model.sampler import MAX_TIMESTEP, euler_steps
from longtake.server.model.weights import build_transformer, untrained_weights
from longtake.training.clips import WORDS
from longtake.training.losses import HISTORY_NOISE, WorldLoss, _noised

CONFIG = replace(TINY_WORLD, num_layers=4, hidden_size=32, num_attention_heads=2)
CLIPS = 16


def small_chunk(loss: WorldLoss) -> tuple[Tensor, ChunkCondition]:
    """Clean latents of the first chunk of some clips, and its conditions."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(CLIPS, CONFIG.in_channels, 4, 2, 3, generator=generator)
    raymap = torch.eye(4).flatten().repeat(CLIPS, 4, 1)
    raymap = torch.cat([raymap, torch.tensor([1.0, 1.0, 1.5, 1.0]).expand(CLIPS, 4, 4)], dim=-1)
    rays = torch.randn(CLIPS, 48, 4, 2, 3, generator=generator)
    rows, mask = WORDS.read([""] * CLIPS)
    text = loss.model.encode_text(loss.words[rows], mask)
    return clean, loss.model.encode_chunk(text, 0, (4, 2, 3), raymap, rays)


def small_loss(*, own_history: bool) -> WorldLoss:
    model = build_transformer(CONFIG, untrained_weights(CONFIG, 0), dtype=torch.float32)
    words = nn.Parameter(torch.randn(len(WORDS.words), CONFIG.caption_channels))
    return WorldLoss(model, words, own_history=own_history)


@torch.no_grad()
def test_steps_of_an_own_history_are_those_of_the_sampler() -> None:
    loss = small_loss(own_history=True)
    clean, chunk = small_chunk(loss)
    torch.manual_seed(1)
    noisy, known = loss._sampled(clean, chunk, None, pinned=1)
    torch.manual_seed(1)
    noise = torch.randn_like(clean)
    noise[:, :, :1] = clean[:, :, :1]
    *steps, last = (noise, *euler_steps(loss.model, noise, chunk, None, pinned=1))
    assert torch.equal(known, last)
    assert set(noisy.timesteps.flatten().tolist()) == set(loss.choices.tolist())
    for i, timestep in enumerate(noisy.timesteps.flatten().tolist()):
        assert torch.equal(noisy.latents[i], steps[loss.choices.tolist().index(timestep)][i])


def test_true_chunks_are_noised_by_their_timestep_and_remembered_nearly_clean() -> None:
    torch.manual_seed(0)
    clean = torch.zeros(512, 4, 3, 5, 5)
    noisy, known = _noised(clean, pinned=1)
    sigma = noisy.timesteps.flatten() / MAX_TIMESTEP
    torch.testing.assert_close(noisy.latents[:, :, 1:].flatten(1).std(1), sigma, rtol=0.2, atol=0.0)
    assert torch.equal(noisy.latents[:, :, :1], clean[:, :, :1])
    assert torch.equal(known[:, :, :1], clean[:, :, :1])
    assert 0.1 < float(known[:, :, 1:].flatten(1).std(1).max()) < 1.2 * HISTORY_NOISE
