"""The causal video VAE: streaming, how far the decoder sees back, and the untrained initialisation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtake.server.model.vae import (
    LTX2_CAUSAL_VAE,
    TINY_VAE,
    CausalVideoVAE,
    VAEConfig,
    causal_convs,
    decoder_history,
    decoder_history_chunks,
    init_untrained,
    to_uint8,
)
from longtake.server.model.vae_blocks import (
    Carry,
    CausalConv3d,
    SpatialPadding,
    convolve_by_frame,
    depth_to_space,
    patchify,
    space_to_depth,
    unpatchify,
)

Cache = dict[str, Tensor]

SHALLOW = replace(TINY_VAE, decoder_layers=(0, 0, 0, 0))
LOPSIDED = replace(TINY_VAE, decoder_widths=(64, 32, 32, 16), decoder_layers=(0, 2, 0, 1))
DEEP_START = replace(TINY_VAE, decoder_layers=(2, 0, 1, 0))
CONFIGS = [
    pytest.param(TINY_VAE, id="tiny"),
    pytest.param(SHALLOW, id="no-resnets"),
    pytest.param(LOPSIDED, id="lopsided"),
    pytest.param(DEEP_START, id="deep-start"),
]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def untrained(config: VAEConfig = TINY_VAE, dtype: torch.dtype = torch.float32) -> CausalVideoVAE:
    vae = CausalVideoVAE(config).to(dtype)
    init_untrained(vae, seed=7)
    return vae


@pytest.fixture(scope="module")
def vae() -> CausalVideoVAE:
    return untrained()


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decode_chunks(
    vae: CausalVideoVAE, chunks: Sequence[Tensor], cache: Cache | None
) -> tuple[list[Tensor], Cache | None]:
    frames = []
    for chunk in chunks:
        decoded, cache = vae.decode(chunk, cache)
        frames.append(decoded)
    return frames, cache


def chunked(latents: Tensor) -> list[Tensor]:
    """Four latent frames, then three a chunk."""
    return list(latents.tensor_split(tuple(range(4, latents.shape[2], 3)), dim=2))


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("latents", "frames"), [(1, 1), (2, 9), (4, 25), (7, 49)])
def test_a_stream_of_n_latents_has_one_and_eight_a_further_latent(
    vae: CausalVideoVAE, latents: int, frames: int
) -> None:
    decoded, _ = vae.decode(noise(1, 16, latents, 2, 3), None)
    assert decoded.shape == (1, 3, frames, 64, 96)


def test_a_continued_stream_has_eight_frames_a_latent(vae: CausalVideoVAE) -> None:
    _, cache = vae.decode(noise(2, 16, 1, 2, 2), None)
    assert vae.decode(noise(2, 16, 3, 2, 2), cache)[0].shape == (2, 3, 24, 64, 64)


@pytest.mark.parametrize("config", CONFIGS)
def test_streamed_decode_equals_one_pass_over_all_latents(config: VAEConfig) -> None:
    vae, latents = untrained(config), noise(2, 16, 7, 3, 2)
    frames, _ = decode_chunks(vae, chunked(latents), None)
    whole = vae.decoder(latents, Carry(None))
    torch.testing.assert_close(torch.cat(frames, dim=2), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(4, 3, 3), (1, 9), (2, 5, 1, 2), (1,) * 10], ids=str)
def test_the_cut_of_a_stream_changes_no_bit(vae: CausalVideoVAE, sizes: tuple[int, ...]) -> None:
    latents = noise(1, 16, 10, 2, 3)
    whole, whole_cache = vae.decode(latents, None)
    frames, cache = decode_chunks(vae, latents.split(sizes, dim=2), None)
    assert torch.equal(torch.cat(frames, dim=2), whole)
    assert same_bits(cache, whole_cache)


@pytest.mark.parametrize("frames", [1, 9, 25])
def test_streamed_encode_equals_one_pass_over_all_frames(vae: CausalVideoVAE, frames: int) -> None:
    clip = noise(2, 3, frames, 32, 64).clamp(-1, 1)
    latents = vae.encode(clip)
    assert latents.shape == (2, 16, 1 + (frames - 1) // 8, 1, 2)
    torch.testing.assert_close(latents, vae.encoder(clip, Carry(None)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 32, 32), (25, 48, 32), (25, 32, 40)], ids=str)
def test_encode_refuses_sizes_it_can_not_compress(vae: CausalVideoVAE, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        vae.encode(torch.zeros(1, 3, *shape))


def test_encoder_is_causal(vae: CausalVideoVAE) -> None:
    clip = noise(1, 3, 17, 32, 32).clamp(-1, 1)
    changed = clip.clone()
    changed[:, :, 9] += 1
    before, after = vae.encode(clip), vae.encode(changed)
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.equal(before[:, :, 2], after[:, :, 2])


def test_latents_are_normalised_on_the_way_out_and_back() -> None:
    vae, clip = untrained(replace(TINY_VAE, scaling_factor=0.5)), noise(1, 3, 9, 64, 64).clamp(-1, 1)
    plain = untrained()
    raw, frames = plain.encode(clip), plain.decode(noise(1, 16, 2, 2, 2), None)[0]
    vae.latents_mean.copy_(torch.linspace(-2, 2, 16))
    vae.latents_std.copy_(torch.linspace(0.5, 3, 16))
    mean, std = vae.latents_mean.view(1, -1, 1, 1, 1), vae.latents_std.view(1, -1, 1, 1, 1)
    torch.testing.assert_close(vae.encode(clip), (raw - mean) * 0.5 / std)
    normalised = (noise(1, 16, 2, 2, 2) - mean) * 0.5 / std
    torch.testing.assert_close(vae.decode(normalised, None)[0], frames, rtol=0, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_latent_is_seen_as_far_as_decoder_history_says(config: VAEConfig) -> None:
    # in float64 the last trace of the latent is still above rounding
    vae, history, start = untrained(config, torch.float64), decoder_history(config), 2
    latents = noise(1, 16, start + history + 3, 2, 2, dtype=torch.float64)
    changed = latents.clone()
    changed[:, :, start] *= -3
    before, after = vae.decode(latents, None)[0], vae.decode(changed, None)[0]
    differs = (before != after).flatten(3).any(dim=3).any(dim=1)[0].nonzero()[:, 0]
    last_latent = (int(differs.max()) + 7) // 8
    assert int(differs.min()) == 8 * start - 7
    assert last_latent == start + history


@pytest.mark.parametrize("config", CONFIGS)
def test_joining_that_many_chunks_back_gives_the_same_bits(config: VAEConfig) -> None:
    vae, back = untrained(config), decoder_history_chunks(config)
    chunks = chunked(noise(1, 16, 4 + 3 * (back + 2), 2, 2))
    frames, caches = [], []
    cache = None
    for chunk in chunks:
        decoded, cache = vae.decode(chunk, cache)
        frames.append(decoded)
        caches.append(cache)
    wanted = len(chunks) - 1
    start = wanted - back
    _, joined = decode_chunks(vae, chunks[start:wanted], vae.unknown_cache(chunks[start]))
    assert same_bits(joined, caches[wanted - 1])
    decoded, joined = vae.decode(chunks[wanted], joined)
    assert torch.equal(decoded, frames[wanted])
    assert same_bits(joined, caches[wanted])


def test_joining_one_chunk_less_back_is_not_enough() -> None:
    # 6 = 2 chunks exactly, so that the first latent of the wanted chunk sees the oldest one decoded
    vae, config = untrained(SHALLOW, torch.float64), SHALLOW
    assert decoder_history(config) == 6
    chunks = chunked(noise(1, 16, 16, 2, 2, dtype=torch.float64))
    frames, _ = decode_chunks(vae, chunks, None)
    joined, _ = decode_chunks(vae, chunks[3:], vae.unknown_cache(chunks[3]))
    assert not torch.equal(joined[-1], frames[-1])


def test_history_of_the_public_decoder_is_fifteen_chunks() -> None:
    assert (decoder_history(LTX2_CAUSAL_VAE), decoder_history_chunks(LTX2_CAUSAL_VAE)) == (44, 15)
    assert (decoder_history(TINY_VAE), decoder_history_chunks(TINY_VAE)) == (14, 5)


def test_decode_leaves_its_cache_alone_and_shares_nothing_with_it(vae: CausalVideoVAE) -> None:
    _, cache = vae.decode(noise(1, 16, 4, 2, 2), None)
    kept = {name: frames.clone() for name, frames in cache.items()}
    frames, after = vae.decode(noise(1, 16, 3, 2, 2, seed=1), cache)
    assert same_bits(cache, kept)
    again, after_again = vae.decode(noise(1, 16, 3, 2, 2, seed=1), kept)
    assert torch.equal(frames, again)
    assert same_bits(after, after_again)
    for name, tensor in after.items():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() != cache[name].data_ptr()


def test_bits_do_not_depend_on_where_a_cache_lies(vae: CausalVideoVAE) -> None:
    _, cache = vae.decode(noise(1, 16, 4, 2, 3), None)
    moved = {}
    for name, tensor in cache.items():
        buffer = torch.empty(tensor.numel() + 1)
        moved[name] = buffer[1:].view_as(tensor).copy_(tensor)
    latents = noise(1, 16, 3, 2, 3, seed=1)
    (frames, after), (frames_moved, after_moved) = vae.decode(latents, cache), vae.decode(latents, moved)
    assert torch.equal(frames, frames_moved)
    assert same_bits(after, after_moved)


def test_cache_has_one_entry_a_convolution_in_running_order(vae: CausalVideoVAE) -> None:
    _, first = vae.decode(noise(1, 16, 1, 2, 2), None)
    _, second = vae.decode(noise(1, 16, 3, 2, 2), dict(reversed(first.items())))
    assert list(first) == list(second)
    assert set(first) == {name for name, _ in causal_convs(vae.decoder)}
    assert list(first)[:3] == ["conv_in", "mid_block.resnets.0.conv1", "mid_block.resnets.0.conv2"]
    assert list(first)[3:5] == ["up_blocks.0.upsamplers.0.conv", "up_blocks.0.resnets.0.conv1"]
    assert first["conv_out"].shape == (1, 16, 2, 16, 16)


def test_decode_refuses_a_cache_of_another_decoder(vae: CausalVideoVAE) -> None:
    _, cache = vae.decode(noise(1, 16, 1, 2, 2), None)
    del cache["conv_out"]
    with pytest.raises(ValueError, match="other entries"):
        vae.decode(noise(1, 16, 1, 2, 2), cache)


def test_the_public_decoder_carries_595_megabytes() -> None:
    with torch.device("meta"):
        vae = CausalVideoVAE(LTX2_CAUSAL_VAE).to(torch.bfloat16)
        _, cache = vae.decode(torch.empty(1, 128, 1, 22, 40, dtype=torch.bfloat16), None)
        frames, after = vae.decode(torch.empty(1, 128, 3, 22, 40, dtype=torch.bfloat16), cache)
    assert round(sum(tensor.nbytes for tensor in cache.values()) / 1e6) == 595
    assert frames.shape == (1, 3, 24, 704, 1280)
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in cache.items()}


@pytest.mark.filterwarnings("ignore")
def test_public_names_and_values() -> None:
    autoencoders = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_ltx2")
    config = replace(TINY_VAE, decoder_widths=(128, 64, 32, 16), decoder_layers=(1, 2, 1, 2))
    oracle = autoencoders.AutoencoderKLLTX2Video(
        latent_channels=config.latent_channels,
        block_out_channels=config.encoder_widths,
        layers_per_block=config.encoder_layers,
        decoder_block_out_channels=(32, 64, 128),
        decoder_layers_per_block=(2, 1, 2, 1),
        encoder_causal=True,
        decoder_causal=True,
    )
    vae = CausalVideoVAE(config)
    vae.load_state_dict(oracle.state_dict())
    clip, latents = noise(2, 3, 17, 64, 96).clamp(-1, 1), noise(2, 16, 5, 2, 3)
    torch.testing.assert_close(vae.encode(clip), oracle.encode(clip).latent_dist.mode(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vae.decode(latents, None)[0], oracle.decode(latents).sample, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["zeros", "reflect"])
@pytest.mark.parametrize("shape", [(1, 5, 3, 2, 2), (2, 4, 6, 5, 3)], ids=str)
def test_convolving_by_frame_is_the_3d_convolution(padding: SpatialPadding, shape: tuple[int, ...]) -> None:
    conv = CausalConv3d(shape[1], 7, padding).double().conv
    x = noise(*shape, dtype=torch.float64)
    torch.testing.assert_close(convolve_by_frame(x, conv), conv(x))


def test_shuffles_invert_each_other_and_put_channels_where_they_belong() -> None:
    x = torch.arange(2 * 16 * 3 * 2 * 3.0).view(2, 16, 3, 2, 3)
    spread = depth_to_space(x, (2, 2, 2))
    assert spread.shape == (2, 2, 6, 4, 6)
    assert torch.equal(spread[:, 1, 1::2, 0::2, 1::2], x[:, 8 + 0b101])
    assert torch.equal(space_to_depth(spread, (2, 2, 2)), x)
    pixels = torch.arange(3 * 2 * 8 * 12.0).view(1, 3, 2, 8, 12)
    patches = patchify(pixels, 4)
    assert patches.shape == (1, 48, 2, 2, 3)
    assert torch.equal(patches[:, 16 + 4 * 3 + 1], pixels[:, 1, :, 1::4, 3::4])
    assert torch.equal(unpatchify(patches, 4), pixels)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_untrained_frames_have_visible_bounded_contrast(seed: int) -> None:
    vae = CausalVideoVAE(TINY_VAE)
    init_untrained(vae, seed)
    frames, _ = vae.decode(noise(1, 16, 4, 3, 5, seed=seed), None)
    assert 0.2 < frames.std(dim=(3, 4)).mean() < 0.6
    assert frames.mean(dim=(2, 3, 4)).abs().max() < 0.5
    assert (frames.abs() > 1).float().mean() < 0.03
    assert (frames[:, :, 1:] - frames[:, :, :-1]).abs().mean(dim=(1, 3, 4)).min() > 0.05
    assert torch.equal(frames[..., ::4, ::4], frames[..., 3::4, 3::4])


def test_untrained_latents_are_of_the_order_of_one(vae: CausalVideoVAE) -> None:
    latents = vae.encode(noise(1, 3, 9, 64, 96).clamp(-1, 1))
    assert 0.2 < latents.std() < 2


def test_untrained_weights_are_their_seed_and_nothing_else() -> None:
    vaes = [CausalVideoVAE(TINY_VAE) for _ in range(3)]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for vae, seed in zip(vaes, (5, 5, 6), strict=True):
        init_untrained(vae, seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (vae.state_dict() for vae in vaes)
    assert same_bits(first, same)
    assert not torch.equal(first["decoder.conv_in.conv.weight"], other["decoder.conv_in.conv.weight"])


def test_uint8_truncates_and_clamps() -> None:
    levels = torch.tensor([-1.5, -1.0, -0.999, 0.0, 0.99999, 1.0, 1.5])
    frames = torch.stack([levels, levels.flip(0), torch.zeros(7)]).view(3, 1, 1, 7)
    pixels = to_uint8(frames)
    assert pixels.shape == (1, 1, 7, 3)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert pixels[0, 0, :, 0].tolist() == [0, 0, 0, 127, 254, 255, 255]
    assert pixels[0, 0, :, 2].tolist() == [127] * 7
