"""Arguments of `ttt_linear`, and how its results and gradients are found: by kernels, eager PyTorch and in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, mapped, poisoned_memory
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from longtake.kernels import ttt_linear

Arguments = dict[str, object]
Results = tuple[Tensor, ...]
DIFFERENTIABLE = ("q", "k", "v", "w", "b", "eta", "initial_state", "initial_state_bias")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Case(NamedTuple):
    """Sizes of a call; `lengths` of the sequences of a pack instead of B and T."""

    dim: int
    dtype: torch.dtype = FP32
    tokens: int = 37
    batch: int = 1
    heads: int = 1
    chunk_size: int = 16
    lengths: tuple[int, ...] | None = None


PACK = Case(16, lengths=(0, 5, 16, 0, 17, 1))
CASES = [
    Case(16, batch=2, heads=4),
    Case(40, tokens=40, heads=8),
    Case(64, tokens=32, heads=2),
    Case(24, tokens=40, chunk_size=32),
    PACK,
    Case(16, BF16, batch=2),
    Case(40, BF16, tokens=70, chunk_size=64),
    Case(64, BF16),
    Case(64, FP16),
    PACK._replace(dtype=BF16),
    *[
        Case(128, tokens=500, heads=4),
        Case(64, BF16, tokens=4000, batch=2, heads=8),
        Case(112, BF16, tokens=1000, heads=20),
        Case(128, FP16, heads=8, chunk_size=64, lengths=(1000, 0, 63, 64, 65, 1)),
    ]
    * GPU,
]


def draw(case: Case, *, states: bool = True) -> Arguments:
    """Keys of unit size and rates at which the inner model learns without exploding."""
    generator = torch.Generator().manual_seed(case.dim + case.tokens)

    def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    heads, dim = case.heads, case.dim
    batch, tokens = (case.batch, case.tokens) if case.lengths is None else (1, sum(case.lengths))
    q, k, v = (random(batch, tokens, heads, dim) for _ in range(3))
    x: Arguments = {"q": q.to(case.dtype), "k": normalize(k, dim=-1).to(case.dtype), "v": v.to(case.dtype)}
    x |= {"w": 1 + random(heads, dim) / 4, "b": random(heads, dim) / 4, "eta": random(batch, tokens, heads).abs() / 8}
    x |= {"chunk_size": case.chunk_size}
    count = batch if case.lengths is None else len(case.lengths)
    if states:
        x |= {"initial_state": random(count, heads, dim, dim) / 4, "initial_state_bias": random(count, heads, 1, dim)}
    if case.lengths is not None:
        ends = torch.tensor((0, *case.lengths)).cumsum(0)
        x["cu_seqlens"] = ends.to(DEVICE)
    return x


def run(x: Arguments, **how: object) -> Results:
    """What the kernels give, from memory full of NaN."""
    with poisoned_memory():
        return tuple(ttt_linear(**x, **{"backend": "triton"} | how))


def randomly(found: Results) -> Results:
    """Random cotangents."""
    generator = torch.Generator().manual_seed(len(found))
    return tuple(torch.randn(y.shape, generator=generator).to(y) for y in found)


def itself(found: Results) -> Results:
    """Cotangents that an entry or a sequence has alone too."""
    return tuple(y.detach() for y in found)


def differentiated(x: Arguments, *, cotangents: Callable[[Results], Results] = randomly, **how: object) -> Results:
    """The results, and the gradients of a weighted sum of them to every tensor."""
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name in DIFFERENTIABLE}
    found = run(x | leaves, **how)
    used, given = zip(*((y, g) for y, g in zip(found, cotangents(found), strict=True) if y.requires_grad), strict=True)
    with poisoned_memory():
        grads = torch.autograd.grad(used, list(leaves.values()), given, materialize_grads=True)
    return *itself(found), *grads


class RoundedProducts(TorchDispatchMode):
    """Matrix products, also those of gradients, of operands rounded to a dtype, with fp32 sums."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Results = (), kwargs: Arguments | None = None
    ) -> object:
        if func in PRODUCTS:
            args = tuple(y.to(self.dtype).to(y.dtype) for y in args)
        return func(*args, **(kwargs or {}))


def eager(x: Arguments) -> Results:
    """As `differentiated`, in eager PyTorch with operands of the dtype of q: the yardstick of the kernels."""
    q = x["q"]
    assert isinstance(q, Tensor)
    with RoundedProducts(q.dtype):
        return differentiated(x, backend="reference")


def widened(x: Arguments) -> Arguments:
    return mapped(lambda y: y.double() if y.is_floating_point() else y, x)


def true(x: Arguments) -> Results:
    """As `differentiated`, in float64, of the cotangents that the others are given."""

    def rounded(found: Results) -> Results:
        given = randomly((found[0].to(x["v"].dtype), *(y.float() for y in found[1:])))
        return tuple(y.double() for y in given)

    return differentiated(widened(x), cotangents=rounded, backend="reference")


def between(x: Arguments, first: int, last: int) -> Arguments:
    """The arguments with some of their tokens."""
    return x | {name: x[name][:, first:last] for name in ("q", "k", "v", "eta")}


def after(x: Arguments, found: Results) -> Arguments:
    """The arguments with the states that a call returned."""
    return x | {"initial_state": found[1], "initial_state_bias": found[2]}


def apart(x: Arguments, lengths: tuple[int, ...]) -> list[Arguments]:
    """Each sequence of a pack by itself."""
    parts, first = [], 0
    for n, length in enumerate(lengths):
        part = between({name: y for name, y in x.items() if name != "cu_seqlens"}, first, first + length)
        states = {name: x[name][n : n + 1] for name in DIFFERENTIABLE[6:] if name in x}
        parts.append(part | states)
        first += length
    return parts


def of_tokens_and_states(found: Results) -> Results:
    """Results and gradients without those of the weights, which entries and sequences share."""
    return (*found[:6], *found[8:])


def joined(parts: list[Results]) -> Results:
    """Results and gradients of sequences as those of their pack."""
    columns = zip(*map(of_tokens_and_states, parts), strict=True)
    return tuple(torch.cat(column, dim=1 if n in (0, 3, 4, 5, 6) else 0) for n, column in enumerate(columns))
