"""Weights by the public checkpoint's key names: strict loading, and untrained weights for tests and demos."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtake.server.model.config import SanaWMConfig
from longtake.server.model.transformer import SanaWMTransformer


class WeightsError(Exception):
    """A checkpoint that can not be read or does not fit the model."""


def unused_keys(config: SanaWMConfig) -> frozenset[str]:
    """Keys of public checkpoints that no pass reads; they are accepted and ignored."""
    embedders = ("pos_embed", "y_embedder.y_embedding", "raymap_embedder.proj.weight", "raymap_embedder.proj.bias")
    recall = [f"blocks.{i}.attn.recall_gate" for i in range(config.num_layers)]
    gates = ("beta_proj.weight", "beta_proj.bias", "gate_proj.weight", "gate_proj.bias", "A_log", "dt_bias")
    softmax = [i for i in range(config.num_layers) if config.is_softmax(i)]
    return frozenset((*embedders, *recall, *(f"blocks.{i}.attn.{gate}" for i in softmax for gate in gates)))


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Tensors of a `.safetensors` file or of a torch file, on the CPU, under names without wrapper prefixes.

    Torch files are read with `weights_only=True`; the level `generator` and the prefix `model.` are taken off.

    Raises:
        WeightsError: the file is missing, damaged, or holds anything but tensors.
    """
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
        raise WeightsError(f"{path.name} can not be read as a checkpoint: {type(error).__name__}") from error
    if isinstance(content, dict) and "generator" in content:
        content = content["generator"]
    if not isinstance(content, dict):
        raise WeightsError(f"{path.name} holds no tensors by name")
    tensors = {str(name).removeprefix("model."): tensor for name, tensor in content.items()}
    if odd := [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]:
        raise WeightsError(f"{path.name}: {odd[0]} is not a tensor")
    return tensors


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], unused: frozenset[str] = frozenset()
) -> None:
    """Raises `WeightsError` unless these are the tensors expected, by name and shape; `unused` ones may be there."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise WeightsError(f"{len(missing)} keys are missing, the first is {missing[0]}")
    if unknown := sorted(tensors.keys() - expected.keys() - unused):
        raise WeightsError(f"{len(unknown)} keys are unknown, the first is {unknown[0]}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise WeightsError(f"{name} has shape {tuple(tensors[name].shape)}, the configuration asks for {shape}")


def build_transformer(
    config: SanaWMConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> SanaWMTransformer:
    """A transformer in eval mode with these weights, cast to `dtype` and moved to `device`; no gradients.

    Tensors that need neither are shared, not copied.

    Raises:
        WeightsError: a key is missing or unknown, or a tensor has another shape than the configuration asks for.
    """
    with torch.device("meta"):
        model = SanaWMTransformer(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_tensors(expected, tensors, unused_keys(config))
    weights = {name: tensors[name].to(device, dtype).contiguous() for name in expected}
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def load_transformer(
    path: Path, config: SanaWMConfig, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> SanaWMTransformer:
    """`read_checkpoint`, then `build_transformer`."""
    return build_transformer(config, read_checkpoint(path), dtype=dtype, device=device)


def untrained_weights(
    config: SanaWMConfig, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Random weights of a sensible size, each from a generator seeded by (seed, name); gates start near 1.

    Matrices are scaled by their inputs, norms are ones, taps of the short convolutions pass the present frame.
    """
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in SanaWMTransformer(config).named_parameters()}
    return {name: _untrained(name, shape, seed, torch.device(device)).to(dtype) for name, shape in shapes.items()}


def _untrained(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    starts = {"beta_proj.bias": 5.0, "dt_bias": -5.0, "A_log": 0.0, "output_gate.bias": 1.27846}
    for ending, value in starts.items():
        if name.endswith(ending):
            return torch.full(shape, value, device=device)
    if name.endswith("norm.weight") or "norm_cam" in name:
        return torch.ones(shape, device=device)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    noise = torch.randn(shape, generator=generator, device=device)
    if name.endswith("scale_shift_table"):
        return noise / math.sqrt(shape[-1])
    scaled = noise / math.sqrt(math.prod(shape[1:]))
    if ".conv_k" in name:
        scaled[..., -1] += 1
    return scaled
