"""The scans on the Triton kernels are as exact as eager PyTorch, in every mode."""

import golden
import pytest
import torch
from kernel_checks import DEVICE, FP32, GPU, Shape, assert_as_good, name_of, relative_rms
from scan_modes import CASES, draw, draw_branch, eager, measurable, run, true
from torch import Tensor

from longtake.kernels import GdnState, Precision, cam_scan, gdn_scan
from longtake.server.model.rope import rope_tables

GOLDEN = ["scan112"] + ["scan"] * GPU
"""The other one takes the interpreter too long."""


@pytest.mark.parametrize(("name", "shape", "dtype", "precision", "features"), CASES, ids=name_of)
def test_scans_are_as_exact_as_eager_pytorch(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision, features: str
) -> None:
    x = draw(name, shape, dtype, features)
    assert_as_good(*measurable(name, x, run(name, x, precision), eager(name, x, precision), true(name, x)))


@pytest.mark.parametrize("precision", ["bf16", "ieee"])
def test_a_discount_of_far_cameras_is_as_exact(precision: Precision) -> None:
    shape = Shape(1, 2, 3, 2, 16)
    x = draw_branch(shape, FP32, "both state", distance=30.0)
    assert relative_rms(true("branch", x | {"discount": False})[1], true("branch", x)[1]) > 0.1
    assert_as_good(run("branch", x, precision), eager("branch", x, precision), true("branch", x))


@pytest.mark.parametrize("precision", ["bf16", "ieee"] if GPU else ["bf16"])
@pytest.mark.parametrize("name", ["gdn", "cam"])
def test_a_long_scan_keeps_its_state_exact(name: str, precision: Precision) -> None:
    """The interpreter takes a tenth of a second for a frame."""
    shape = Shape(1, 400, 8, 1, 112) if GPU else Shape(1, 32, 1, 1, 16)
    x = draw(name, shape, FP32, "forward state")
    states = (found[-1:] for found in (run(name, x, precision), eager(name, x, precision), true(name, x)))
    assert_as_good(*states)


def golden_scan(prefix: str) -> tuple[dict[str, Tensor], GdnState]:
    """Golden inputs with their tables, and the state before them."""
    grid = {"scan": (7, 4, 6), "scan112": (4, 2, 5)}[prefix]
    expected = golden.load("gdn_ops")
    x = {name: golden.tokens(expected[f"{prefix}.{name}"]).float().contiguous() for name in "qkv"}
    tables = rope_tables(5, grid, x["q"].shape[-1], 10000.0)
    x |= {"cos": tables.cos.float(), "sin": tables.sin.float()}
    x |= {name: expected[f"{prefix}.{name}"].float() for name in ("beta", "decay")}
    kv, z = golden.key_rows(expected[f"{prefix}.init_state_kv"]), expected[f"{prefix}.init_state_z"].squeeze(-1)
    state = GdnState(*(y.float().contiguous().to(DEVICE) for y in (kv, z)))
    return {name: y.to(DEVICE) for name, y in x.items()}, state


def relative(ours: Tensor, reference: Tensor) -> float:
    return golden.worst(ours.cpu(), reference) / float(reference.abs().max())


@pytest.mark.parametrize("prefix", GOLDEN)
def test_ieee_matches_the_golden_scan(prefix: str) -> None:
    (x, state), expected = golden_scan(prefix), golden.load("gdn_ops")
    found = gdn_scan(**x, direction="both", initial_state=state, eps=1e-8, precision="ieee", backend="triton")
    assert found.state is not None
    assert relative(found.out, golden.tokens(expected[f"{prefix}.cached_out.ref64"])) < 1e-6
    assert relative(found.state.kv, golden.key_rows(expected[f"{prefix}.final_state_kv"])) < 1e-6
    assert relative(found.state.z, expected[f"{prefix}.final_state_z"].squeeze(-1)) < 1e-6


@pytest.mark.parametrize("prefix", GOLDEN)
def test_ieee_matches_the_golden_camera_scan(prefix: str) -> None:
    (x, state), expected = golden_scan(prefix), golden.load("gdn_ops")
    names = {"q": "q_rot", "k": "k_rot", "v": "v"}
    tokens = {name: golden.tokens(expected[f"{prefix}.{y}"]).float().contiguous() for name, y in names.items()}
    x = {name: y.to(DEVICE) for name, y in tokens.items()} | {name: x[name] for name in ("beta", "decay")}
    found = cam_scan(**x, direction="both", initial_state=state.kv, precision="ieee", backend="triton")
    assert found.state is not None
    assert relative(found.out, golden.tokens(expected[f"{prefix}.cam_cached_out.ref64"])) < 1e-6
    assert relative(found.state, golden.key_rows(expected[f"{prefix}.final_state_kv"])) < 1e-6
