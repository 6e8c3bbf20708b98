"""How the results of kernels are compared: on the GPU, or in Triton's interpreter where there is none."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cuda" if GPU else "cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ULP = 2.0**-24


class Shape(NamedTuple):
    """Sizes of a case."""

    batch: int
    frames: int
    per_frame: int
    heads: int
    dim: int

    @property
    def tokens(self) -> tuple[int, int, int, int]:
        """[B,N,H,D]."""
        return self.batch, self.frames * self.per_frame, self.heads, self.dim


REAL = Shape(1, 3, 880, 20, 112)


def name_of(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def mapped(function: Callable[[Tensor], Tensor], value: object) -> object:
    """The value with every tensor in its tuples and dictionaries replaced."""
    if isinstance(value, dict):
        return {name: mapped(function, x) for name, x in value.items()}
    if isinstance(value, tuple):
        parts = [mapped(function, x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return function(value) if isinstance(value, Tensor) else value


def tensors(value: object) -> tuple[Tensor, ...]:
    """Every tensor in a result or in arguments."""
    if isinstance(value, Tensor):
        return (value,)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return tuple(x for part in parts for x in tensors(part))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3, device=DEVICE).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_rms(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def assert_as_good(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    """Every tensor is finite, and its error within twice that of eager PyTorch, or than one rounding to fp32 costs."""
    for x, y, z in zip(ours, eager, truth, strict=True):
        assert x.shape == y.shape == z.shape
        assert x.dtype == y.dtype
        assert x.is_contiguous()
        assert torch.isfinite(x).all()
        if not z.any():
            assert not x.any()
        else:
            assert relative_rms(x, z) <= 2 * max(relative_rms(y, z), ULP)


def assert_same_bits(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for x, y in zip(ours, other, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
