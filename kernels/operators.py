"""Custom operators of many arguments: a NamedTuple declares them once, for schema, kernels and fake kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from longtake.kernels.backend import BackendError

KINDS: dict[object, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    float: "float",
    float | None: "float?",
    str: "str",
}


Fields = type[tuple[object, ...]]
"""A NamedTuple."""


def schema(arguments: Sequence[Fields], mutated: Sequence[str], results: int) -> str:
    """Schema of an operator that takes the fields of NamedTuples in order and returns some tensors."""
    kinds = {name: KINDS[kind] for part in arguments for name, kind in get_type_hints(part).items()}
    for i, name in enumerate(mutated):
        kinds[name] = kinds[name].replace("Tensor", f"Tensor(a{i}!)")
    taken = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
    return f"({taken}) -> ({', '.join(['Tensor'] * results)})"


def or_nothing(x: Tensor | None, like: Tensor) -> Tensor:
    """The tensor, or an empty one in fp32: operators return no None."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def refuse_second_gradient(operator: CustomOpDef) -> None:
    """Let a gradient of what an operator of a backward pass gives raise `BackendError`."""

    def refuse(*_: object) -> None:
        raise BackendError("the kernels give no gradient of a gradient: take backward='reference'")

    operator.register_autograd(refuse)


def reference_gradients(
    run: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the wanted inputs by the autograd of a reference, which computes once more; None for the others.

    `upstream`: gradients of the results of `run`, None where nothing came back.
    """
    again = torch.is_grad_enabled()  # a gradient of the gradient is wanted
    leaves = [
        None if y is None else y.view_as(y) if again else y.detach().requires_grad_(want)
        for y, want in zip(inputs, wanted, strict=True)
    ]
    device = next(y.device for y in inputs if y is not None)
    with torch.autocast(device.type, enabled=False):
        with torch.enable_grad():
            results = run(*leaves)
        pairs = [(y, g) for y, g in zip(results, upstream, strict=True) if y is not None and g is not None]
        pairs = [(y, g) for y, g in pairs if y.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        outs, given = zip(*pairs, strict=True)
        asked = [y for y, want in zip(leaves, wanted, strict=True) if y is not None and want]
        taken = iter(torch.autograd.grad(outs, asked, given, allow_unused=True, create_graph=again))
    return [next(taken) if want else None for want in wanted]


class Operator(NamedTuple):
    """An operator twice: `fresh` writes to no argument; `into` writes states in place.

    PyTorch takes 0.3 ms of every call of an operator of thirty arguments that may write to some of them.
    """

    fresh: Callable[..., Any]
    into: Callable[..., Any]

    def __call__(self, *arguments: Any, writes: bool) -> Any:  # noqa: ANN401
        """The results; an empty tensor for what there is none of, or is written to an argument."""
        return (self.into if writes else self.fresh)(*arguments)


def operator(
    name: str,
    arguments: Fields,
    mutated: Sequence[str],
    results: int,
    run: Callable[..., Any],
    fake: Callable[..., Any],
) -> Operator:
    """Register `longtake::<name>` and `longtake::<name>_into`, which take the fields of a NamedTuple in order."""

    def register(full_name: str, writes: Sequence[str]) -> Callable[..., Any]:
        defined = torch.library.custom_op(
            f"longtake::{full_name}", run, mutates_args=writes, schema=schema([arguments], writes, results)
        )
        defined.register_fake(fake)
        return defined

    return Operator(register(name, ()), register(f"{name}_into", mutated))
