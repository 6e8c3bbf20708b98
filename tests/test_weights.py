"""Loading of public checkpoints: their keys, their wrappers, and every way they can be wrong."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import golden
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longtake.server.model.config import SANA_WM_1600M, TINY_UNTRAINED
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import (
    WeightsError,
    build_transformer,
    load_transformer,
    read_checkpoint,
    untrained_weights,
    unused_keys,
)

CONFIG = golden.tiny_config()
WEIGHTS = golden.load("tiny_weights")


def test_names_and_sizes_are_those_of_the_public_checkpoint() -> None:
    with torch.device("meta"):
        model = SanaWMTransformer(SANA_WM_1600M)
    names = {name for name, _ in model.named_parameters()}
    assert len(names | unused_keys(SANA_WM_1600M)) == 15 * 43 + 5 * 41 + 22
    assert not names & unused_keys(SANA_WM_1600M)
    assert sum(p.numel() for p in model.blocks[0].parameters()) == 130_764_561 - 1
    assert sum(p.numel() for p in model.blocks[3].parameters()) == 130_746_641 - 1 - 2 * (20 * 2240 + 20) - 40


def test_golden_weights_have_all_keys_and_no_other() -> None:
    with torch.device("meta"):
        names = {name for name, _ in SanaWMTransformer(CONFIG).named_parameters()}
    assert names | unused_keys(CONFIG) == WEIGHTS.keys()


def wrap(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda path: save_file(WEIGHTS, path.with_suffix(".safetensors")), id="safetensors"),
        pytest.param(lambda path: torch.save(WEIGHTS, path.with_suffix(".pt")), id="torch"),
        pytest.param(
            lambda path: torch.save({"generator": wrap("model.", WEIGHTS), "step": 3}, path.with_suffix(".pt")),
            id="torch-generator-model",
        ),
    ],
)
def test_file_formats_and_wrappers_load_alike(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "model")
    model = load_transformer(next(tmp_path.iterdir()), CONFIG, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, WEIGHTS[name]), name
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_weights_are_cast() -> None:
    model = build_transformer(CONFIG, WEIGHTS, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16


def test_building_leaves_the_given_tensors_alone() -> None:
    tensors = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    build_transformer(CONFIG, tensors, dtype=torch.float32)
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in tensors.items())


def test_unused_keys_may_be_absent() -> None:
    used = {name: tensor for name, tensor in WEIGHTS.items() if name not in unused_keys(CONFIG)}
    assert build_transformer(CONFIG, used, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"blocks.2.attn.qkv.weight": None}, r"1 keys are missing.*blocks\.2\.attn\.qkv\.weight", id="missing"
        ),
        pytest.param({"blocks.4.attn.qkv.weight": torch.zeros(1)}, r"1 keys are unknown.*blocks\.4", id="unknown"),
        pytest.param({"blocks.0.attn.A_log": torch.zeros(5)}, r"A_log has shape \(5,\)", id="shape"),
    ],
)
def test_misfits_are_named(changes: dict[str, Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in (WEIGHTS | changes).items() if tensor is not None}
    with pytest.raises(WeightsError, match=message):
        build_transformer(CONFIG, tensors, dtype=torch.float32)


class Exploit:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exec, ("raise SystemExit",)


def torch_file(content: object) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("bare.pt", pickle.dumps({"a": Exploit()}), id="bare-pickle"),
        pytest.param("code.pt", torch_file({"a": Exploit()}), id="code-in-a-torch-file"),
        pytest.param("noise.pt", b"\x80\x02garbage", id="torch-garbage"),
        pytest.param("empty.pt", b"", id="torch-empty"),
        pytest.param("noise.safetensors", b"\xff" * 64, id="safetensors-garbage"),
        pytest.param("empty.safetensors", b"", id="safetensors-empty"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name):
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["none.pt", "none.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=name):
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize(("content", "message"), [([torch.zeros(1)], "no tensors by name"), ({"lr": 3}, "lr is not")])
def test_files_of_anything_else_are_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(WeightsError, match=message):
        read_checkpoint(tmp_path / "other.pt")


def test_untrained_weights_run_and_repeat() -> None:
    first, again, other = (untrained_weights(TINY_UNTRAINED, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["x_embedder.proj.weight"], other["x_embedder.proj.weight"])
    model = build_transformer(TINY_UNTRAINED, first, dtype=torch.float32)
    beta, decay = model.blocks[0].attn.gates(torch.zeros(1, 2, 24, TINY_UNTRAINED.hidden_size))
    torch.testing.assert_close(beta, torch.full_like(beta, 0.9933), rtol=0, atol=1e-4)
    torch.testing.assert_close(decay, torch.full_like(decay, 0.9933), rtol=0, atol=1e-4)
