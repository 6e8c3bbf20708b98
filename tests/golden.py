"""Golden vectors of two public SANA-WM implementations, in the layouts of this project."""

import json
from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from longtake.server.model.config import SanaWMConfig

FOLDER = Path(__file__).parent / "data" / "golden"


@cache
def load(name: str) -> dict[str, Tensor]:
    """Tensors of one golden file."""
    return load_file(FOLDER / f"{name}.safetensors")


def tiny_config(**switches: bool | int) -> SanaWMConfig:
    """Configuration of the tiny golden model, with switches."""
    values = json.loads((FOLDER / "tiny_config.json").read_text())
    names = SanaWMConfig.__dataclass_fields__.keys() & values.keys()
    read = {name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in names}
    return SanaWMConfig(**(read | switches))


def tokens(x: Tensor) -> Tensor:
    """[B,H,D,N] → [B,N,H,D]."""
    return x.permute(0, 3, 1, 2)


def key_rows(kv: Tensor) -> Tensor:
    """Golden states have rows = value dim; ours have rows = key dim."""
    return kv.mT


def worst(ours: Tensor, golden: Tensor) -> float:
    """Largest absolute difference, after the shapes were compared."""
    assert ours.shape == golden.shape
    return float((ours - golden).abs().max())
