"""Training: batches, losses, optimiser, stages; generation as the server does it."""

import csv
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from longtake.server.camera.rays import chunk_geometry
from longtake.server.model.bundle import Bundle, build_vae, load_bundle, load_vae, save_bundle
from longtake.server.model.config import TINY_WORLD, SanaWMConfig
from longtake.server.model.familiarity import Familiarity
from longtake.server.model.registry import world_from
from longtake.server.model.rope import RopeTables, rope_tables
from longtake.server.model.vae import TINY_WORLD_VAE, CausalVideoVAE, VAEConfig, init_untrained
from longtake.server.model.vae_blocks import Carry
from longtake.server.model.vocabulary import WordEmbedder
from longtake.server.model.weights import WeightsError, build_transformer, untrained_weights
from longtake.server.model.world import ChunkCamera
from longtake.training import clips as training_clips
from longtake.training import vae_stage, world_stage
from longtake.training.clips import WORDS, ClipPool, clip_geometry, draw_clips, late_tables, to_pixels
from longtake.training.fusion import fuse
from longtake.training.generation import CameraPath, Forget, takes
from longtake.training.losses import WorldLoss, shifted, vae_loss
from longtake.training.optimiser import BETAS, MasterWeights
from longtake.training.stage import Stage, all_stages
from longtake.training.train import learning_rate, main, progress_of, run
from longtake.training.vae_stage import VaeStage

CPU = torch.device("cpu")
SMALL_WORLD = replace(TINY_WORLD, num_layers=4, hidden_size=64, num_attention_heads=2, latent_hw=(2, 3))
SMALL_VAE = replace(TINY_WORLD_VAE, encoder_widths=(16, 16, 16, 32), decoder_widths=(32, 16, 16, 16))
"""As those that ship, with fewer blocks, heads and channels, and smaller frames."""


def new_vae(config: VAEConfig) -> CausalVideoVAE:
    vae = CausalVideoVAE(config)
    init_untrained(vae, seed=0)
    return build_vae(config, vae.state_dict())


@pytest.fixture(scope="module")
def untrained_vae() -> CausalVideoVAE:
    return new_vae(TINY_WORLD_VAE)


@pytest.fixture(scope="module")
def small_bundle() -> Bundle:
    transformer = build_transformer(SMALL_WORLD, untrained_weights(SMALL_WORLD, 0), dtype=torch.float32)
    words = WordEmbedder(WORDS, torch.randn(len(WORDS.words), SMALL_WORLD.caption_channels))
    return Bundle(transformer, new_vae(SMALL_VAE), words, Familiarity(30.0, 20.0))


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages train the small models on small clips."""
    height, width = (SMALL_VAE.space_compression * side for side in SMALL_WORLD.latent_hw)
    changes = [
        (training_clips, {"HEIGHT": height, "WIDTH": width}),
        (vae_stage, {"TINY_WORLD_VAE": SMALL_VAE, "load_vae": partial(load_vae, config=SMALL_VAE)}),
        (world_stage, {"TINY_WORLD": SMALL_WORLD, "load_vae": partial(load_vae, config=SMALL_VAE)}),
        (world_stage, {"load_bundle": partial(load_bundle, config=SMALL_WORLD, vae_config=SMALL_VAE)}),
    ]
    for module, names in changes:
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


def test_geometry_of_a_clip_is_that_of_its_chunks() -> None:
    clips = draw_clips(2, 0, 49, CPU, "wander", shown=[0])
    raymap, plucker = clip_geometry(clips.poses, clips.intrinsics, 10, 16, 8)
    assert raymap.shape == (2, 7, 20)
    assert plucker.shape == (2, 48, 7, 10, 16)
    for line in range(2):
        lens = clips.intrinsics[line].numpy()
        for index, (first, frames) in enumerate(((0, 4), (4, 3))):
            seen = slice(1 + 24 * index, 25 + 24 * index)
            poses = clips.poses[line, seen].numpy()
            chunk = chunk_geometry(index, poses, np.tile(lens, (24, 1)), lens, 10, 16, 8)
            torch.testing.assert_close(raymap[line, first : first + frames], chunk.raymap)
            torch.testing.assert_close(plucker[line, :, first : first + frames], chunk.plucker)


def test_the_encoder_gives_the_same_latents_for_a_clip_at_once(untrained_vae: CausalVideoVAE) -> None:
    pixels = to_pixels(draw_clips(1, 3, 17, CPU).frames)
    with torch.no_grad():
        torch.testing.assert_close(untrained_vae.encoder(pixels, Carry(None)), untrained_vae.encode(pixels))


def test_tables_begin_late_behind_the_first_chunk() -> None:
    late = late_tables(10, (7, 2, 3), TINY_WORLD)
    for start, rows, frames in ((0, slice(0, 24), 4), (14, slice(24, 42), 3)):
        expected = rope_tables(start, (frames, 2, 3), TINY_WORLD.head_dim, TINY_WORLD.rope_theta)
        for name in RopeTables._fields:
            assert torch.equal(late[name][rows], getattr(expected, name).float())


def test_captions_are_read_as_prompts_are() -> None:
    captions = ["", "red columns", "no word of these"]
    rows, mask = WORDS.read(captions)
    embedder = WordEmbedder(WORDS, torch.randn(len(WORDS.words), 4))
    text, expected = embedder.embed(captions)
    assert torch.equal(mask, expected)
    assert torch.equal(embedder.weight[rows] * mask[..., None], text)


def test_a_pool_gives_each_clip_as_often_as_it_is_told() -> None:
    pool = ClipPool(lambda seed: {"seed": torch.arange(seed, seed + 4)}, count=8, batch=4, reuse=2, seed=100)
    given = torch.cat([pool.batch()["seed"] for _ in range(40)])
    assert given.min() >= 100
    assert given.max() == 100 + 8 + 4 * 20 - 1
    assert len(given.unique()) > 40


def test_a_pool_has_whole_batches() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        ClipPool(lambda seed: {"seed": torch.zeros(2)}, count=3, batch=2, reuse=1, seed=0)


def test_masters_step_as_adamw_does_and_keep_what_16_bits_lose() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).bfloat16()
    plain = [p.detach().float().clone().requires_grad_() for p in layer.parameters()]
    decay = [{"params": plain[:1], "weight_decay": 0.01}, {"params": plain[1:], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(decay, lr=1e-4, betas=BETAS)
    masters = MasterWeights(layer.parameters())
    for step in range(5):
        layer(torch.full((1, 8), float(step), dtype=torch.bfloat16)).square().sum().backward()
        for p, ours in zip(plain, layer.parameters(), strict=True):
            assert ours.grad is not None
            p.grad = ours.grad.float().clone()
        nn.utils.clip_grad_norm_(plain, 1.0)
        optimiser.step()
        masters.step(1e-4)
        assert not masters.buffer.any()
    for p, master, ours in zip(plain, masters.masters, layer.parameters(), strict=True):
        torch.testing.assert_close(master, p.detach())
        assert torch.equal(ours, master.bfloat16())


def test_timesteps_lean_to_the_noisy_end() -> None:
    found = shifted(torch.linspace(0, 1, 101))
    assert found.min() == 1
    assert found.max() == 1000
    assert torch.equal(found, found.floor())
    assert found.median() > 800


def test_the_vae_learns_a_clip(untrained_vae: CausalVideoVAE) -> None:
    vae = build_vae(TINY_WORLD_VAE, untrained_vae.state_dict()).requires_grad_()
    masters = MasterWeights(vae.parameters())
    batch = {"frames": draw_clips(1, 5, 9, CPU).frames}
    losses = []
    for _ in range(6):
        losses.append(float(vae_loss(vae, batch)["loss"]))
        masters.step(2e-3)
    assert losses[-1] < 0.8 * losses[0]


def small_batch(chunks: int, config: SanaWMConfig = TINY_WORLD) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    clips = draw_clips(1, 5, 1 + 24 * chunks, CPU, shown=[0])
    raymap, plucker = clip_geometry(clips.poses, clips.intrinsics, 2, 3, 40)
    latents = torch.randn(1, config.in_channels, 1 + 3 * chunks, 2, 3, generator=generator)
    rows, mask = WORDS.read(clips.captions)
    tables = late_tables(5, (1 + 3 * chunks, 2, 3), config)
    return {"latents": latents, "raymap": raymap, "plucker": plucker, "rows": rows, "mask": mask, **tables}


@pytest.mark.parametrize("own_history", [False, True])
def test_every_weight_learns_and_the_past_reaches_what_was_remembered(own_history: bool) -> None:
    config = replace(TINY_WORLD, num_layers=4, hidden_size=32, num_attention_heads=2)
    model = build_transformer(config, untrained_weights(config, 0), dtype=torch.float32).requires_grad_()
    words = nn.Parameter(torch.randn(len(WORDS.words), config.caption_channels))
    torch.manual_seed(0)
    found = WorldLoss(model, words, own_history=own_history)(small_batch(2, config))
    assert found["chunks"].shape == (2,)
    assert found["loss"].isfinite()
    assert words.grad is not None
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor's
def test_fused_blocks_compute_the_same() -> None:
    config = replace(TINY_WORLD, num_layers=2, hidden_size=32, num_attention_heads=2, softmax_every_n=2)
    words = nn.Parameter(torch.randn(len(WORDS.words), config.caption_channels))
    gradients = []
    for fused in (False, True):
        model = build_transformer(config, untrained_weights(config, 0), dtype=torch.float32).requires_grad_()
        if fused:
            fuse(model, backend="eager")
        torch.manual_seed(0)
        WorldLoss(model, words, own_history=False)(small_batch(3, config))
        gradients.append([p.grad for p in model.parameters()])
    for eager, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-5)


def test_takes_are_what_the_server_makes(untrained_vae: CausalVideoVAE, tmp_path: Path) -> None:
    weights = untrained_weights(TINY_WORLD, 0)
    words = torch.randn(len(WORDS.words), TINY_WORLD.caption_channels)
    save_bundle(tmp_path, weights, untrained_vae.state_dict(), words, WORDS.words, Familiarity(30.0, 20.0))
    clips = draw_clips(1, 3, 49, CPU, "walk", shown=[0])
    served = world_from(tmp_path, "cpu")
    frame, lens = clips.frames[0, 0].numpy(), clips.intrinsics[0].numpy()
    conditions, state = served.condition(frame, clips.captions[0]), {}
    model = load_bundle(tmp_path)
    path = CameraPath(clips.poses, clips.intrinsics)
    for index, made in enumerate(takes(model, clips.frames[:, 0], path, clips.captions, seed=7)):
        camera = ChunkCamera(clips.poses[0, 1 + 24 * index : 25 + 24 * index].numpy(), np.tile(lens, (24, 1)), lens)
        out = served.generate(conditions, state, index, camera, seed=7)
        state = out.state
        assert np.abs(out.frames.astype(int) - made[0].numpy()).max() <= 1


@pytest.mark.parametrize("forget", ["scans", "everything"])
@pytest.mark.usefixtures("small_world")
def test_what_is_forgotten_changes_the_chunks_after_the_first(forget: Forget, small_bundle: Bundle) -> None:
    clips = draw_clips(1, 3, 49, CPU, "walk", shown=[0])
    path = CameraPath(clips.poses, clips.intrinsics)
    whole, less = (
        list(takes(small_bundle, clips.frames[:, 0], path, clips.captions, 0, forget=what)) for what in (None, forget)
    )
    assert [torch.equal(a, b) for a, b in zip(whole, less, strict=True)] == [True, False]


def test_training_goes_on_with_the_same_words_only(untrained_vae: CausalVideoVAE, tmp_path: Path) -> None:
    words = ("", *reversed(WORDS.words[1:]))
    vectors = torch.randn(len(words), TINY_WORLD.caption_channels)
    weights = untrained_weights(TINY_WORLD, 0)
    save_bundle(tmp_path, weights, untrained_vae.state_dict(), vectors, words, Familiarity(30.0, 20.0))
    stage = Stage(part="world", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1)
    with pytest.raises(WeightsError, match="another vocabulary"):
        run("x", stage, tmp_path, 1, lambda _: None)


def test_weights_that_are_missing_leave_no_folder(tmp_path: Path) -> None:
    stage = Stage(part="world", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1)
    with pytest.raises(WeightsError, match="there is no"):
        run("x", stage, tmp_path / "nowhere", 1, lambda _: None)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("small_world")
def test_weights_that_went_astray_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_vae: CausalVideoVAE, _batch: object) -> dict[str, Tensor]:
        return {"loss": torch.tensor(float("nan")), "mse": torch.tensor(float("nan"))}

    monkeypatch.setattr("longtake.training.vae_stage.vae_loss", lost)
    with pytest.raises(SystemExit, match="astray"):
        run("x", Stage(part="vae", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1), tmp_path, 1, lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [{"rate": float("inf")}, {"minutes": -1}, {"minutes": 10}, {"part": "other"}, {"new": 1}]
)
def test_a_stage_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    right = {"part": "vae", "minutes": 1, "batch": 1, "chunks": 1, "rate": 1e-3}
    with pytest.raises(ValidationError):
        Stage.model_validate(right | wrong)


@pytest.mark.parametrize("text", ["part = ", 'part = "other"', None])
def test_the_command_names_a_configuration_that_is_none(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stage.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["train", "--config", str(file), "--weights", str(tmp_path / "weights")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "stage.toml" in capsys.readouterr().err
    assert not (tmp_path / "weights").exists()


def test_rates_rise_and_fall() -> None:
    stage = all_stages()["2-flow"]
    rates = [learning_rate(stage, x / 100) for x in range(101)]
    assert max(rates) <= stage.rate
    assert rates[0] < 0.1 * stage.rate
    assert rates[-1] == pytest.approx(0.05 * stage.rate, rel=1e-3)
    assert list(progress_of(stage, 4)) == [0, 0.25, 0.5, 0.75]


def test_the_recipe_has_stages_of_nine_minutes_with_scenes_of_their_own() -> None:
    stages = all_stages()
    assert next(stage.part for stage in stages.values()) == "vae"
    assert all(stage.minutes <= 9 for stage in stages.values())
    assert len({stage.seed for stage in stages.values()}) == len(stages)


@pytest.mark.usefixtures("small_world")
def test_a_stage_that_is_told_to_stop_saves_what_it_has(tmp_path: Path) -> None:
    stage = Stage(part="vae", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1)
    run("a", stage, tmp_path, 1000, lambda line: "step" in line and os.kill(os.getpid(), signal.SIGTERM))
    assert (tmp_path / "vae.safetensors").exists()
    assert [row["step"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == ["0"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("small_world")
def test_a_second_signal_does_not_cut_weights_in_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_twice_told(stage: VaeStage, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(stage, folder)

    save = VaeStage.save
    monkeypatch.setattr(VaeStage, "save", save_twice_told)
    run("a", Stage(part="vae", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1), tmp_path, 1, lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"vae.safetensors", "a.csv", "a.png"}


@pytest.mark.usefixtures("small_world")
def test_stages_leave_weights_that_they_go_on_from(tmp_path: Path) -> None:
    lines: list[str] = []
    vae = Stage(part="vae", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1)
    world = Stage(part="world", minutes=1, batch=1, chunks=1, rate=1e-3, clips=1)
    for name, stage in (("a", vae), ("b", vae), ("c", world), ("d", world)):
        run(name, stage, tmp_path, 1, lines.append)
    assert [" ".join(line.split()[:2]) for line in lines[::2]] == ["a draws", "b draws", "c draws", "d draws"]
    assert len(lines) == 8
    names = {path.name for path in tmp_path.iterdir()}
    assert {"vae.safetensors", "transformer.safetensors", "a.csv", "d.csv", "a.png", "d.png"} <= names
