"""The operators around the camera scan as PyTorch operators, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from cam_cases import SMALL, Inputs, draw, draw_beta, draw_inflation
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, REAL, assert_same_bits, mapped
from torch import Tensor

from longtake.kernels.cam import prepare_ops
from longtake.kernels.cam.prepare import cam_discount, cam_output, cam_prepare

each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


def operators(mode: str) -> list[tuple[Callable[..., object], tuple[object, ...]]]:
    """Every custom operator and arguments for it."""
    x = draw(SMALL, BF16, mode)
    tables = [y if y is None else y[None] for y in (x["cos"], x["sin"])]
    places = [x[name] for name in ("projection", "projection_inverse")]
    norms = [x["q_weight"], x["k_weight"], *x.get("inverse_rms", (None, None)), x.get("norm", "full")]
    return [
        (prepare_ops.cam_prepare, (x["q"], x["k"], x["v"], *places, *tables, *norms, 1e-5, 0.1, True)),
        (prepare_ops.cam_discount, (draw_beta(SMALL, per_frame=mode == "plain"), draw_inflation(SMALL))),
        (prepare_ops.cam_output, (x["v"], x["projection"], *tables, FP32)),
    ]


@pytest.mark.parametrize("mode", ["plain", "full-given", "unrotated"])
def test_operators_are_registered_soundly(mode: str) -> None:
    for operator, arguments in operators(mode):
        torch.library.opcheck(operator, arguments)


def branch(x: Inputs, beta: Tensor, backend: str) -> tuple[Tensor, ...]:
    """All three operators, one after the other."""
    tokens = cam_prepare(**x, backend=backend)
    out = cam_output(tokens.v, x["projection"], x["cos"], x["sin"], dtype=BF16, backend=backend)
    return (*tokens, cam_discount(beta, tokens.inflation, backend=backend), out)


@each_backend
def test_operators_compile_without_a_break(backend: str) -> None:
    x, beta = draw(SMALL, BF16, "full-given"), draw_beta(SMALL)
    compiled = torch.compile(branch, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, beta, backend), branch(x, beta, backend))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_captured_runs_equal_eager_ones_and_never_wait() -> None:
    x, beta, graph = draw(REAL, BF16), draw_beta(REAL), torch.cuda.CUDAGraph()
    eager = branch(x, beta, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = branch(x, beta, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for y in captured:
        y.zero_()
    graph.replay()
    assert_same_bits(captured, eager)


def zeros(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@each_backend
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"q": zeros(2, 6, 3, 12)}, "q must be .* multiple of 8", id="head-dim-12"),
        pytest.param({"q": zeros(2, 6, 120)}, "q must be", id="q-without-heads"),
        pytest.param({"k": zeros(2, 5, 3, 40)}, "k must be", id="short-k"),
        pytest.param({"v": zeros(2, 6, 3, 40).to(torch.int64)}, "v must be", id="whole-v"),
        pytest.param({"v": zeros(2, 6, 40, 3).mT}, "v must have unit stride", id="strided-v"),
        pytest.param({"projection": zeros(2, 5, 4, 4)}, "projection must be", id="projection-of-fewer-tokens"),
        pytest.param({"projection_inverse": zeros(2, 6, 4, 4).mT}, "projection_inverse .* contiguous", id="inverse-mT"),
        pytest.param({"projection": zeros(2, 6, 4, 4, dtype=BF16)}, "projection must be", id="projection-in-bf16"),
        pytest.param({"projection": torch.zeros(2, 6, 4, 4, device="meta")}, "projection must be on", id="elsewhere"),
        pytest.param({"sin": None}, "cos and sin come together", id="cos-without-sin"),
        pytest.param({"sin": zeros(5, 10)}, "sin must be", id="short-sin"),
        pytest.param({"cos": zeros(3, 6, 10)}, "cos must be", id="cos-of-another-batch"),
        pytest.param({"norm": "layer"}, "norm is one of", id="unknown-norm"),
        pytest.param({"norm_eps": float("inf")}, "norm_eps must be finite", id="endless-eps"),
        pytest.param({"norm": "none"}, "q_weight", id="weight-without-a-norm"),
        pytest.param({"k_weight": zeros(40)}, "k_weight must be", id="weight-of-one-head"),
        pytest.param({"k_weight": zeros(120, dtype=FP16)}, "k_weight must be", id="weight-in-fp16"),
        pytest.param({"inverse_rms": (zeros(2, 6), zeros(2, 5))}, "inverse_rms of k must be", id="short-inverse"),
        pytest.param({"norm": "head", "inverse_rms": (zeros(2, 6),) * 2}, "inverse_rms", id="inverse-of-heads"),
    ],
)
def test_misfits_of_the_preparation_are_refused(changes: Inputs, message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        cam_prepare(**(draw(SMALL, FP32) | changes), backend=backend)


@each_backend
@pytest.mark.parametrize(
    ("beta", "inflation", "message"),
    [
        pytest.param(zeros(2, 3, 3, 8), zeros(2, 21, 3), "beta must be", id="beta-of-other-frames"),
        pytest.param(zeros(2, 3, 4, 7), zeros(2, 21, 3), "beta .* does not fit", id="beta-of-more-frames"),
        pytest.param(zeros(2, 3), zeros(2, 21, 3), "beta", id="beta-without-frames"),
        pytest.param(zeros(2, 3, 7, 3).mT, zeros(2, 21, 3), "beta must be contiguous", id="strided-beta"),
        pytest.param(zeros(2, 3, 3, 7), zeros(2, 3, 21).mT, "inflation must be contiguous", id="strided-inflation"),
        pytest.param(zeros(2, 3, 3, 7), zeros(2, 21, 3, dtype=BF16), "inflation must be", id="inflation-in-bf16"),
    ],
)
def test_misfits_of_the_discount_are_refused(beta: Tensor, inflation: Tensor, message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        cam_discount(beta, inflation, backend=backend)


@each_backend
@pytest.mark.parametrize(
    ("out", "projection", "dtype", "message"),
    [
        pytest.param(zeros(1, 7, 2, 12), zeros(1, 7, 4, 4), None, "out must be .* multiple of 8", id="head-dim-12"),
        pytest.param(zeros(1, 7, 2, 16), zeros(1, 6, 4, 4), None, "projection must be", id="short-projection"),
        pytest.param(zeros(1, 7, 2, 16), zeros(1, 7, 4, 4), torch.int32, "dtype is one of", id="whole-numbers"),
    ],
)
def test_misfits_of_the_output_are_refused(
    out: Tensor, projection: Tensor, dtype: torch.dtype | None, message: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cam_output(out, projection, zeros(7, 4), zeros(7, 4), dtype=dtype, backend=backend)


def test_only_the_reference_takes_float64() -> None:
    x = mapped(Tensor.double, draw(SMALL, FP32))
    with pytest.raises(ValueError, match="float64"):
        cam_prepare(**x, backend="triton")
    assert all(y.dtype == torch.float64 for y in cam_prepare(**x))


def test_what_needs_a_gradient_gets_it_from_the_reference() -> None:
    x = draw(SMALL, FP32)
    weight = x["q_weight"].requires_grad_()
    cam_prepare(**x).q.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
