"""Gradients of a public scan: on the kernels, in eager PyTorch, and the truth in float64."""

from collections.abc import Callable
from typing import Any

import torch
from kernel_checks import mapped, poisoned_memory, tensors
from scan_modes import SCANS, Arguments, RoundedProducts, random
from torch import Tensor

from longtake.kernels import Precision

FIXED = {"projection", "projection_inverse", "cos", "sin"}
"""What the kernels take as it is."""


def leaves(x: Arguments) -> Arguments:
    """The arguments, which want a gradient if they are of floating point."""

    def leaf(y: Tensor) -> Tensor:
        return y.detach().clone().requires_grad_(y.is_floating_point())

    return {name: y if name in FIXED else mapped(leaf, y) for name, y in x.items()}


def named(value: object, name: str) -> dict[str, Tensor]:
    """Tensors in an argument that want a gradient, by the name of the argument and their place in it."""
    if isinstance(value, Tensor):
        return {name: value} if value.requires_grad else {}
    parts = enumerate(value) if isinstance(value, tuple) else ()
    return {key: y for i, part in parts for key, y in named(part, f"{name}.{i}").items()}


def gradients(name: str, x: Arguments, **how: object) -> dict[str, Tensor]:
    """Gradients of all arguments, from random ones of all results."""
    given = leaves(x)
    results = tensors(SCANS[name].public(**given, **how))
    torch.autograd.backward(results, [random(90 + i, *y.shape).to(y.dtype) for i, y in enumerate(results)])
    found = {key: y for part, value in given.items() for key, y in named(value, part).items()}
    assert all(y.grad is not None for y in found.values())
    return {key: y.grad for key, y in found.items() if y.grad is not None}


def run(name: str, x: Arguments, precision: Precision, **how: object) -> dict[str, Tensor]:
    """On the kernels, from memory full of NaN."""
    with poisoned_memory():
        return gradients(name, x, backend="triton", precision=precision, **how)


class RoundedProduct(torch.autograd.Function):
    """A product of rounded operands whose gradients are products of rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        x, y = rounded(x), rounded(y)
        ctx.save_for_backward(x, y)
        ctx.rounded = rounded
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        x, y = ctx.saved_tensors
        grad = ctx.rounded(grad)
        return (grad @ y.mT).sum_to_size(x.shape), (x.mT @ grad).sum_to_size(y.shape), None


class RoundedBothWays(RoundedProducts):
    """Matrix products of rounded operands, in the backward pass too."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Arguments | None = None
    ) -> object:
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
            return RoundedProduct.apply(*args, self.rounded)
        return func(*args, **(kwargs or {}))


def eager(name: str, x: Arguments, precision: Precision) -> dict[str, Tensor]:
    """The yardstick of the kernels."""
    with RoundedBothWays(precision):
        return gradients(name, x, backend="reference")


def true(name: str, x: Arguments) -> dict[str, Tensor]:
    return gradients(name, mapped(lambda y: y.double() if y.is_floating_point() else y, x), backend="reference")
