"""The models that can be served, by id."""

from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

import torch

from longtake.server.model.bundle import load_bundle
from longtake.server.model.config import TINY_UNTRAINED
from longtake.server.model.familiarity import first_frame_warnings
from longtake.server.model.streaming import StreamingModel
from longtake.server.model.text import embed_words
from longtake.server.model.vae import TINY_VAE, CausalVideoVAE, init_untrained
from longtake.server.model.weights import build_transformer, untrained_weights
from longtake.server.model.world import Frames, ModelSpec, WorldModel


def tiny_world(device: str) -> WorldModel:
    """The trained model that ships."""
    with as_file(files("longtake.server") / "model" / "assets" / "tiny-world") as folder:
        return world_from(folder, device)


def world_from(folder: Path, device: str) -> WorldModel:
    """`tiny-world` with the weights in a folder. Raises `WeightsError`."""
    bundle = load_bundle(folder, device)
    height, width = bundle.transformer.config.latent_hw
    side = bundle.vae.config.space_compression
    spec = ModelSpec(
        id="tiny-world",
        description="SANA-WM's architecture at a small size, trained on scenes that were rendered for it.",
        width=side * width,
        height=side * height,
    )

    def warn(first_frame: Frames | None, prompt: str) -> list[str]:
        seen = [] if first_frame is None else first_frame_warnings(bundle.vae, first_frame, bundle.familiarity)
        return seen + bundle.words.warnings(prompt)

    return StreamingModel(spec, bundle.transformer, bundle.vae, bundle.words, warn)


def tiny_untrained(device: str) -> WorldModel:
    """The whole architecture at a small size with random weights: what it shows is noise, what it keeps is real."""
    config = TINY_UNTRAINED
    transformer = build_transformer(config, untrained_weights(config, seed=0), dtype=torch.float32, device=device)
    vae = CausalVideoVAE(TINY_VAE)
    init_untrained(vae, seed=0)
    spec = ModelSpec(
        id="tiny-untrained",
        description="SANA-WM's architecture at a small size with random weights: it makes noise, not worlds.",
        width=32 * config.latent_hw[1],
        height=32 * config.latent_hw[0],
    )
    return StreamingModel(
        spec,
        transformer,
        vae.requires_grad_(requires_grad=False).eval().to(device),
        lambda prompt: embed_words(prompt, config.model_max_length, config.caption_channels),
    )


MODELS: dict[str, Callable[[str], WorldModel]] = {"tiny-world": tiny_world, "tiny-untrained": tiny_untrained}
"""Every model id with what loads it."""


class UnloadableError(ValueError):
    """No model has this id, or torch finds no such device here."""


def require_loadable(name: str, device: str) -> None:
    """Raises `UnloadableError`, naming the models there are."""
    if name not in MODELS:
        raise UnloadableError(f"there is no model {name!r}; choose one of: {', '.join(sorted(MODELS))}")
    wanted, count = torch.device(device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        raise UnloadableError(f"torch {torch.__version__} finds no device {device!r} here; cpu is always there")


def load_model(name: str, device: str = "cpu") -> WorldModel:
    """Load a model on to a device, which is set to repeat itself to the bit.

    Raises `UnloadableError`; `WeightsError` when its weights can not be had.
    """
    require_loadable(name, device)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    return MODELS[name](device)
