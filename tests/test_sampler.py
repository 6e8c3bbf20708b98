"""The few-step sampler against golden latents, and its noise."""

from functools import cache
from itertools import pairwise

import golden
import pytest
import torch
from torch import Tensor

from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.noise import latent_noise
from longtake.server.model.sampler import absorb_chunk, denoise_chunk, euler_steps
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import build_transformer

BOUND = 5e-5
GOLDEN = golden.load("sampler")
SEGMENTS = [0, 4, 7, 10, 13]
DOWNSCALED = {"cam_downscale_gdn": True, "cam_downscale_softmax": True}


@cache
def model(**switches: bool) -> SanaWMTransformer:
    return build_transformer(golden.tiny_config(**switches), golden.load("tiny_weights"), dtype=torch.float32)


def start_latents() -> Tensor:
    latents = GOLDEN["in.noise"].clone()
    latents[:, :, :1] = GOLDEN["in.first_frame_latent"]
    return latents


def encode(net: SanaWMTransformer, start: int, stop: int, *, negative: bool = False) -> ChunkCondition:
    """Conditions of a chunk; with the negative prompt first in a doubled batch."""
    names = ("in.neg_text", "in.text") if negative else ("in.text",)
    text = net.encode_text(*(torch.cat([GOLDEN[f"{name}{part}"] for name in names]) for part in ("", "_mask")))
    raymap = GOLDEN["in.camera_conditions"][:, start:stop].repeat(len(names), 1, 1)
    plucker = GOLDEN["in.chunk_plucker"][:, :, start:stop].repeat(len(names), 1, 1, 1, 1)
    return net.encode_chunk(text, start, (stop - start, 4, 6), raymap, plucker)


def sample(net: SanaWMTransformer, chunks: int, guidance: float = 1.0) -> Tensor:
    """Clean latents of the first chunks."""
    noise, state, clean = start_latents(), None, []
    for start, stop in list(pairwise(SEGMENTS))[:chunks]:
        chunk = encode(net, start, stop, negative=guidance != 1.0)
        part = noise[:, :, start:stop]
        clean.append(denoise_chunk(net, part, chunk, state, pinned=int(start == 0), guidance=guidance))
        state = absorb_chunk(net, clean[-1], chunk, state)
    return torch.cat(clean, dim=2)


def test_every_step_and_the_last_state_match_golden() -> None:
    net, noise, state = model(**DOWNSCALED), start_latents(), None
    for i, (start, stop) in enumerate(pairwise(SEGMENTS)):
        chunk = encode(net, start, stop)
        steps = list(euler_steps(net, noise[:, :, start:stop], chunk, state, pinned=int(i == 0)))
        assert len(steps) == 4
        for j, latents in enumerate(steps):
            assert golden.worst(latents, GOLDEN[f"chunk{i}.step{j}"]) < BOUND
        state = absorb_chunk(net, steps[-1], chunk, state)
    assert state is not None
    for b, block in enumerate(state.blocks[:3]):
        assert golden.worst(block.memory.kv.mT, GOLDEN[f"last_cache.block{b}.slot0"]) < BOUND
        assert golden.worst(block.memory.cam_kv.mT, GOLDEN[f"last_cache.block{b}.slot2"]) < BOUND
    assert golden.worst(state.blocks[3].memory.spans[-1].k, GOLDEN["last_cache.block3.slot0"]) < BOUND


@pytest.mark.parametrize(
    ("output", "switches", "chunks", "guidance"),
    [
        pytest.param("out.latents", DOWNSCALED, 4, 1.0, id="downscaled"),
        pytest.param("out.latents.cam_raw", {}, 4, 1.0, id="raw"),
        pytest.param("out.latents.cfg2", DOWNSCALED, 2, 2.0, id="guidance-2"),
    ],
)
def test_clean_latents_match_golden(output: str, switches: dict[str, bool], chunks: int, guidance: float) -> None:
    assert golden.worst(sample(model(**switches), chunks, guidance), GOLDEN[output]) < BOUND


def test_pinned_frames_keep_their_bits_and_the_noise_its_own() -> None:
    noise = start_latents()[:, :, :4]
    before = noise.clone()
    for latents in euler_steps(model(), noise, encode(model(), 0, 4), None, pinned=1):
        assert torch.equal(latents[:, :, :1], GOLDEN["in.first_frame_latent"])
    assert torch.equal(noise, before)


def test_sampling_takes_no_gradient() -> None:
    net = build_transformer(golden.tiny_config(), golden.load("tiny_weights"), dtype=torch.float32)
    net.requires_grad_(requires_grad=True)
    assert not denoise_chunk(net, start_latents()[:, :, :4], encode(net, 0, 4), None, pinned=1).requires_grad


def test_noise_depends_on_seed_and_frame_alone() -> None:
    shape = (1, 8, 4, 6)
    first = latent_noise(7, 3, shape)
    torch.manual_seed(0)
    torch.randn(5)
    assert torch.equal(latent_noise(7, 3, shape), first)
    assert not torch.equal(latent_noise(7, 4, shape), first)
    assert not torch.equal(latent_noise(8, 3, shape), first)
    assert first.dtype == torch.float32


def test_noise_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    latent_noise(-(2**80), 10**6, (3,))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_noise_is_standard_normal() -> None:
    noise = torch.stack([latent_noise(1, frame, (128, 22, 40)) for frame in range(4)])
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    correlation = (noise[0] * noise[1]).mean()
    assert abs(float(correlation)) < 0.01
