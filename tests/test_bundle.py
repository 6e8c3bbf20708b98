"""A trained model's folder: what is written is what is read, and what does not fit is refused by name."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.server.model.bundle import TRANSFORMER_FILE, VAE_FILE, load_bundle, save_bundle
from longtake.server.model.config import TINY_WORLD
from longtake.server.model.familiarity import Familiarity
from longtake.server.model.registry import MODELS, world_from
from longtake.server.model.vae import TINY_WORLD_VAE, CausalVideoVAE, init_untrained
from longtake.server.model.weights import WeightsError, untrained_weights
from longtake.server.model.world import ChunkCamera
from longtake.server.settings import Settings

WORDS = ("", "a", "red", "room")
KNOWN = Familiarity(scenes_db=27.5, limit_db=99.0)


def vae_tensors() -> dict[str, Tensor]:
    vae = CausalVideoVAE(TINY_WORLD_VAE)
    init_untrained(vae, seed=0)
    vae.latents_mean += 0.1234
    return vae.state_dict()


def word_vectors(seed: int = 0) -> Tensor:
    return torch.randn(len(WORDS), TINY_WORLD.caption_channels, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-world"
    save_bundle(folder, untrained_weights(TINY_WORLD, 0), vae_tensors(), word_vectors(), WORDS, KNOWN)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_what_was_saved_is_loaded_in_fp32_after_bf16(written: Path) -> None:
    bundle = load_bundle(written)
    saved = {"transformer": untrained_weights(TINY_WORLD, 0), "vae": vae_tensors()}
    for part, module in (("transformer", bundle.transformer), ("vae", bundle.vae)):
        loaded = module.state_dict()
        assert loaded.keys() == saved[part].keys()
        for name, tensor in saved[part].items():
            kept = tensor if tensor.ndim < 2 else tensor.bfloat16().float()
            assert loaded[name].dtype == torch.float32
            assert loaded[name].equal(kept), name
    assert bundle.words.config.words == WORDS
    assert bundle.words.weight.equal(word_vectors().bfloat16().float())
    assert bundle.familiarity == KNOWN
    assert not any(
        x.requires_grad for module in (bundle.transformer, bundle.vae, bundle.words) for x in module.parameters()
    )


def test_the_files_are_small_enough_to_commit(written: Path) -> None:
    assert max(file.stat().st_size for file in written.iterdir()) <= 16 * 2**20


def rewrite(
    folder: Path,
    name: str,
    tensors: Callable[[dict[str, Tensor]], object] = lambda _: None,
    metadata: Callable[[dict[str, str]], object] = lambda _: None,
) -> None:
    """Change a file's tensors or metadata in place."""
    with safe_open(folder / name, "pt") as file:
        words = file.metadata()
    content = load_file(folder / name)
    tensors(content)
    metadata(words)
    save_file(content, folder / name, words)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / VAE_FILE).unlink(), "missing: there is no .*vae.safetensors"),
    "cut": (lambda folder: (folder / VAE_FILE).write_bytes(b"\0" * 9), "can not be read"),
    "no key": (lambda folder: rewrite(folder, VAE_FILE, lambda x: x.pop("latents_std")), "first is latents_std"),
    "odd key": (lambda folder: rewrite(folder, VAE_FILE, lambda x: x.update(y=torch.ones(3))), "unknown.* is y"),
    "odd shape": (
        lambda folder: rewrite(folder, VAE_FILE, lambda x: x.update(latents_std=torch.ones(3))),
        r"latents_std has shape \(3,\)",
    ),
    "no number": (
        lambda folder: rewrite(folder, VAE_FILE, lambda x: x["latents_mean"].fill_(float("nan"))),
        "latents_mean must be finite",
    ),
    "whole numbers": (
        lambda folder: rewrite(
            folder, TRANSFORMER_FILE, lambda x: x.update({name: y.to(torch.int8) for name, y in x.items()})
        ),
        "must be finite.* is of torch.int8",
    ),
    "no words": (lambda folder: rewrite(folder, TRANSFORMER_FILE, metadata=dict.clear), "no vocabulary"),
    "fewer words": (
        lambda folder: rewrite(folder, TRANSFORMER_FILE, metadata=lambda x: x.update(vocabulary=" a red")),
        "3 words",
    ),
    "no vectors": (
        lambda folder: rewrite(folder, TRANSFORMER_FILE, lambda x: x.pop("text_embedding.weight")),
        "no vocabulary",
    ),
    "narrow vectors": (
        lambda folder: rewrite(
            folder, TRANSFORMER_FILE, lambda x: x.update({"text_embedding.weight": torch.ones(4, 3)})
        ),
        r"not \[words, 64\]",
    ),
    "no numbers": (lambda folder: rewrite(folder, VAE_FILE, metadata=dict.clear), "how well"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGES.values(), ids=DAMAGES.keys())
def test_what_does_not_fit_is_refused(copied: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(copied)
    with pytest.raises(WeightsError) as error:
        load_bundle(copied)
    assert re.search(expected, str(error.value)), error.value


def test_the_default_is_the_trained_model() -> None:
    assert Settings.model_construct().model == "tiny-world"
    assert {"tiny-world", "tiny-untrained"} <= MODELS.keys()


def test_a_world_is_served_from_its_folder(written: Path) -> None:
    world = world_from(written, "cpu")
    assert (world.spec.id, world.spec.width, world.spec.height, world.spec.fps) == ("tiny-world", 128, 80, 16)
    frame = np.full((80, 128, 3), 90, np.uint8)
    conditions = world.condition(frame, "a red castle")
    assert conditions.text[0, :2].equal(load_bundle(written).words.weight[1:3])
    poses, intrinsics = np.tile(np.eye(4), (24, 1, 1)), np.tile([110.0, 110, 64, 40], (24, 1))
    made = world.generate(
        conditions, world.initial_state(conditions), 0, ChunkCamera(poses, intrinsics, intrinsics[0]), 1
    )
    assert made.frames.shape == (24, 80, 128, 3)


def test_a_world_says_what_is_new_to_it(written: Path) -> None:
    world = world_from(written, "cpu")
    frame = np.full((80, 128, 3), 90, np.uint8)
    unlike, castle = world.warnings(frame, "a red castle")
    assert "its own scenes reach 28" in unlike
    assert '"castle" is not known' in castle
    assert world.warnings(None, "a red castle") == [castle]
    assert world.warnings(None, "a red room") == []


def test_the_fingerprint_covers_the_words(written: Path, tmp_path: Path) -> None:
    tensors, vae = untrained_weights(TINY_WORLD, 0), vae_tensors()
    found = {world_from(written, "cpu").weights_fingerprint}
    for seed, words in ((1, WORDS), (0, ("", "a", "red", "hall"))):
        save_bundle(tmp_path, tensors, vae, word_vectors(seed), words, KNOWN)
        found.add(world_from(tmp_path, "cpu").weights_fingerprint)
    assert len(found) == 3
