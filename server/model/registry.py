"""The models that can be served, by id."""

from collections.abc import Callable

import torch

from longtake.server.model.config import TINY_UNTRAINED
from longtake.server.model.streaming import StreamingModel
from longtake.server.model.text import embed_words
from longtake.server.model.vae import TINY_VAE, CausalVideoVAE, init_untrained
from longtake.server.model.weights import build_transformer, untrained_weights
from longtake.server.model.world import ModelSpec, WorldModel


def tiny_untrained() -> WorldModel:
    """The whole architecture at a small size with random weights: what it shows is noise, what it keeps is real."""
    config = TINY_UNTRAINED
    transformer = build_transformer(config, untrained_weights(config, seed=0), dtype=torch.float32)
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
        vae.requires_grad_(requires_grad=False).eval(),
        lambda prompt: embed_words(prompt, config.model_max_length, config.caption_channels),
    )


MODELS: dict[str, Callable[[], WorldModel]] = {"tiny-untrained": tiny_untrained}
"""Every model id with what loads it."""


class UnknownModelError(ValueError):
    """No model has this id."""


def load_model(name: str) -> WorldModel:
    """Load a model. Raises `UnknownModelError`, naming those there are."""
    if name not in MODELS:
        raise UnknownModelError(f"there is no model {name!r}; choose one of: {', '.join(sorted(MODELS))}")
    return MODELS[name]()
