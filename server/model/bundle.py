"""A trained model in a folder: transformer with word vectors, VAE, and what it takes to know its own scenes.

`transformer.safetensors` has the transformer's tensors and `text_embedding.weight` [words,E]; its metadata name the
`vocabulary`, words with a space between, the empty one first. `vae.safetensors` has the VAE's; its metadata are the
numbers of `Familiarity`. Matrices lie there in bf16, vectors in fp32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longtake.server.model.config import TINY_WORLD, SanaWMConfig
from longtake.server.model.familiarity import Familiarity
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.vae import TINY_WORLD_VAE, CausalVideoVAE, VAEConfig
from longtake.server.model.vocabulary import Vocabulary, WordEmbedder
from longtake.server.model.weights import WeightsError, build_transformer, check_tensors

TRANSFORMER_FILE = "transformer.safetensors"
VAE_FILE = "vae.safetensors"
_WORDS = "text_embedding.weight"
_VOCABULARY = "vocabulary"
STORED = (torch.float32, torch.bfloat16)
"""Dtypes of what lies in the files."""


@dataclass(frozen=True)
class Bundle:
    """A loaded model: fp32, in eval mode, without gradients. The words stay on the CPU."""

    transformer: SanaWMTransformer
    vae: CausalVideoVAE
    words: WordEmbedder
    familiarity: Familiarity


def save_bundle(
    folder: Path,
    transformer: Mapping[str, Tensor],
    vae: Mapping[str, Tensor],
    word_embedding: Tensor,
    vocabulary: Sequence[str],
    familiarity: Familiarity,
) -> None:
    """Write a model's two files; what is there already is replaced.

    Args:
        folder: where to, made if it is not there.
        transformer: tensors by name, as of `state_dict`.
        vae: the same, with the statistics of its latents.
        word_embedding: [words,E].
        vocabulary: the words, the empty one first.
        familiarity: how well the VAE restores scenes like those of the training.
    """
    save_vae(folder, vae, familiarity)
    words = {_WORDS: word_embedding}
    _save(_stored({**transformer, **words}), folder / TRANSFORMER_FILE, {_VOCABULARY: " ".join(vocabulary)})


def save_vae(folder: Path, vae: Mapping[str, Tensor], familiarity: Familiarity) -> None:
    """Write the VAE's file alone, as `save_bundle` does."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: repr(value) for name, value in asdict(familiarity).items()}
    _save(_stored(vae), folder / VAE_FILE, numbers)


def load_bundle(
    folder: Path,
    device: torch.device | str = "cpu",
    config: SanaWMConfig = TINY_WORLD,
    vae_config: VAEConfig = TINY_WORLD_VAE,
) -> Bundle:
    """Read what `save_bundle` wrote, on to a device.

    Raises:
        WeightsError: a file is missing or damaged, or does not fit the configurations.
    """
    tensors, metadata = _read(folder / TRANSFORMER_FILE)
    words = _words(tensors.pop(_WORDS, None), metadata, config)
    transformer = build_transformer(config, tensors, dtype=torch.float32, device=device)
    vae, familiarity = load_vae(folder, device, vae_config)
    return Bundle(transformer, vae, words, familiarity)


def load_vae(
    folder: Path, device: torch.device | str = "cpu", config: VAEConfig = TINY_WORLD_VAE
) -> tuple[CausalVideoVAE, Familiarity]:
    """Read the VAE's file alone. Raises `WeightsError` as `load_bundle` does."""
    tensors, metadata = _read(folder / VAE_FILE)
    vae = build_vae(config, tensors, device)
    if not (vae.latents_std.isfinite() & (vae.latents_std > 0)).all():
        raise WeightsError(f"{VAE_FILE} has latents without a spread")
    return vae, _familiarity(metadata)


def build_vae(config: VAEConfig, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> CausalVideoVAE:
    """A VAE in eval mode with these weights, in fp32 on `device`; no gradients.

    Raises:
        WeightsError: a key is missing or unknown, or a tensor has another shape than the configuration asks for.
    """
    with torch.device("meta"):
        vae = CausalVideoVAE(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    check_tensors(shapes, tensors)
    weights = {name: tensors[name].to(device, torch.float32).contiguous() for name in shapes}
    vae.load_state_dict(weights, assign=True)
    return vae.requires_grad_(requires_grad=False).eval()


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """A whole file or none, that others may read, too: safetensors makes it its owner's alone."""
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, metadata)
    fresh.chmod(0o644)
    fresh.replace(path)


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    dtypes = {name: torch.float32 if x.ndim < 2 else torch.bfloat16 for name, x in tensors.items()}
    return {name: x.detach().to("cpu", dtypes[name]).contiguous() for name, x in tensors.items()}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file. Raises `WeightsError`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise WeightsError(f"the weights are missing: there is no {path}") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} can not be read as a checkpoint: {type(error).__name__}") from error
    for name, x in tensors.items():
        if x.dtype not in STORED or not x.isfinite().all():
            raise WeightsError(f"{path.name}: {name} must be finite and of {STORED}, and is of {x.dtype}")
    return tensors, metadata


def _words(weight: Tensor | None, metadata: Mapping[str, str], config: SanaWMConfig) -> WordEmbedder:
    if weight is None or _VOCABULARY not in metadata:
        raise WeightsError(f"{TRANSFORMER_FILE} has no vocabulary")
    if weight.shape[1:] != (config.caption_channels,):
        raise WeightsError(f"{_WORDS} has shape {tuple(weight.shape)}, not [words, {config.caption_channels}]")
    try:
        vocabulary = Vocabulary(tuple(metadata[_VOCABULARY].split(" ")), config.model_max_length)
        words = WordEmbedder(vocabulary, weight.float())
    except ValueError as error:
        raise WeightsError(f"the vocabulary of {TRANSFORMER_FILE} is damaged: {error}") from error
    return words.requires_grad_(requires_grad=False).eval()


def _familiarity(metadata: Mapping[str, str]) -> Familiarity:
    try:
        known = Familiarity(float(metadata["scenes_db"]), float(metadata["limit_db"]))
        if not (math.isfinite(known.scenes_db) and math.isfinite(known.limit_db)):
            raise ValueError("not finite")
        return known
    except (KeyError, ValueError) as error:
        raise WeightsError(f"{VAE_FILE} does not say how well it restores its scenes") from error
