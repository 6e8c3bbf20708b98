"""What the token-wise kernels have in common: exact, bitwise repeatable, and good citizens of PyTorch."""

import pytest
import torch
from kernel_checks import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    GPU,
    REAL,
    Shape,
    assert_as_good,
    assert_same_bits,
    mapped,
    name_of,
    poisoned_memory,
    tensors,
)
from small_kernels import OPERATORS, SHARED, Arguments, draw
from torch import Tensor

SHAPES = [
    Shape(1, 1, 63, 1, 16),
    Shape(2, 3, 7, 3, 40),
    Shape(1, 2, 7, 1, 56),
    Shape(1, 4, 7, 3, 80),
    Shape(2, 11, 1, 3, 112),
    Shape(1, 1, 7, 3, 128),
]
CASES = [(shape, dtype) for shape in SHAPES + [REAL] * GPU for dtype in (FP32, BF16)]
CASES += [(shape, FP16) for shape in [SHAPES[1]] + [REAL] * GPU]
FEW = [(Shape(3, 3, 2, 3, 40), BF16), (Shape(2, 4, 1, 1, 16), FP32)]
FEW += [(REAL._replace(batch=2), dtype) for dtype in (BF16, FP32)] * GPU
each_operator = pytest.mark.parametrize("name", OPERATORS)
each_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=name_of)
few_cases = pytest.mark.parametrize(("shape", "dtype"), FEW, ids=name_of)


def run(name: str, arguments: Arguments) -> tuple[Tensor, ...]:
    with poisoned_memory():
        return tensors(OPERATORS[name].public(**arguments, backend="triton"))


def entry(arguments: Arguments, b: int) -> Arguments:
    """Batch entry b alone."""
    return {name: x if name in SHARED else mapped(lambda y: y[b : b + 1], x) for name, x in arguments.items()}


@each_case
@each_operator
def test_kernels_are_as_exact_as_eager_pytorch(name: str, shape: Shape, dtype: torch.dtype) -> None:
    x, reference = draw(name, shape, dtype), OPERATORS[name].reference
    wide = mapped(Tensor.double, {key: None if key == "dtype" else y for key, y in x.items()})
    assert_as_good(run(name, x), tensors(reference(**x)), tensors(reference(**wide)))


@few_cases
@each_operator
def test_repeating_changes_no_bit_and_no_argument(name: str, shape: Shape, dtype: torch.dtype) -> None:
    x = draw(name, shape, dtype)
    before, first = tensors(mapped(Tensor.clone, x)), run(name, x)
    for _ in range(3 if GPU else 1):
        assert_same_bits(run(name, x), first)
    assert_same_bits(tensors(x), before)


@few_cases
@each_operator
def test_a_batch_equals_its_single_runs_bitwise(name: str, shape: Shape, dtype: torch.dtype) -> None:
    x = draw(name, shape, dtype)
    whole = run(name, x)
    for b in range(shape.batch):
        assert_same_bits(tuple(y[b : b + 1] for y in whole), run(name, entry(x, b)))


@few_cases
@each_operator
def test_a_neighbour_of_nan_changes_no_bit(name: str, shape: Shape, dtype: torch.dtype) -> None:
    x = draw(name, shape, dtype)
    clean = run(name, x)
    for key, y in x.items():
        if key not in SHARED:
            for z in tensors(y):
                z[1] = torch.nan
    spoilt = run(name, x)
    others = [b for b in range(shape.batch) if b != 1]
    assert_same_bits(tuple(y[others] for y in spoilt), tuple(y[others] for y in clean))
    assert all(y[1].isnan().all() for y in spoilt)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@each_operator
def test_operators_are_registered_soundly(name: str, dtype: torch.dtype) -> None:
    x, operator = draw(name, SHAPES[1], dtype), OPERATORS[name]
    torch.library.opcheck(operator.custom, operator.flat(x))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@each_operator
def test_operators_compile_without_a_break(name: str, backend: str) -> None:
    x, public = draw(name, SHAPES[1], BF16), OPERATORS[name].public
    compiled = torch.compile(public, fullgraph=True, backend="aot_eager")
    assert_same_bits(tensors(compiled(**x, backend=backend)), tensors(public(**x, backend=backend)))


@each_operator
def test_float64_runs_the_reference_only(name: str) -> None:
    x = mapped(Tensor.double, draw(name, SHAPES[1], FP32) | ({"dtype": None} if name.startswith("gdn_merge") else {}))
    with pytest.raises(ValueError, match="float64"):
        OPERATORS[name].public(**x, backend="triton")
    out = tensors(OPERATORS[name].public(**x))
    assert all(y.dtype == torch.float64 for y in out)
    assert_same_bits(out, tensors(OPERATORS[name].reference(**x)))


@each_operator
def test_tensors_on_another_device_are_refused(name: str) -> None:
    x = draw(name, SHAPES[1], FP32)
    for key in [key for key, y in x.items() if tensors(y)][1:]:
        with pytest.raises(ValueError, match=rf"{key}.* must be on {DEVICE}"):
            OPERATORS[name].public(**(x | {key: mapped(lambda y: y.to("meta"), x[key])}))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@each_operator
def test_captured_runs_equal_eager_ones_and_never_wait(name: str) -> None:
    x, public, graph = draw(name, REAL, BF16), OPERATORS[name].public, torch.cuda.CUDAGraph()
    public(**x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = tensors(public(**x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        captured = tensors(public(**x))
    for y in captured:
        y.zero_()
    graph.replay()
    assert_same_bits(captured, eager)
