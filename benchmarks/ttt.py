"""Time and memory of TTT-linear forward and backward on this GPU, results and gradients checked first.

Calls are timed as captured graphs and as eager calls: forward alone as in inference, and a training step. The backward
pass is a step without its own forward pass. The floor of either is what it must read and write once. With
`--public FOLDER`, where the package `fla` of flash-linear-attention lies, its kernel is checked and timed on the same
inputs in the same run.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.gpu_timing import captured, eager
from benchmarks.kernel_work import COPY_RATE, LIMITS
from benchmarks.kernels import ROTATING_BYTES, ROTATING_SETS
from benchmarks.results import present_commit, report
from longtake.kernels import ttt_linear

SHAPES = ("4096x64", "4096x128", "16384x64", "16384x128")
CHECKED_TOKENS = 256
CHUNK = 16
LOOSE_LIMIT = 0.1
"""Relative RMS error of the public kernel, whose inner gradient is in bf16. A wrong convention costs about 1."""
Inputs = dict[str, Tensor]
Results = dict[str, Tensor]


class Shape(NamedTuple):
    """Sizes of a call."""

    tokens: int
    dim: int
    batch: int = 1
    heads: int = 20

    @property
    def rows(self) -> int:
        """Of one entry a token and head, as the rates."""
        return self.batch * self.tokens * self.heads

    def floor(self, tensors: int, rates: int) -> float:
        """Microseconds to move as many bf16 tensors of all tokens, and of their rates, once."""
        return 2 * self.rows * (tensors * self.dim + rates) / COPY_RATE * 1e6

    def __str__(self) -> str:
        return f"B={self.batch} T={self.tokens} H={self.heads} D={self.dim} C={CHUNK}"


class Operator(NamedTuple):
    """Who computes, how, and the largest relative RMS error of its output and gradients."""

    name: str
    forward: Callable[[Inputs], Tensor]
    limit: float

    def gradients(self, x: Inputs) -> Results:
        """The output, and the gradients of all inputs when the output itself comes back."""
        out = self.forward(x)
        found = torch.autograd.grad(out, list(x.values()), out.detach())
        return {"out": out.detach()} | {f"d{name}": y for name, y in zip(x, found, strict=True)}


def own(x: Inputs) -> Tensor:
    """By this library."""
    return ttt_linear(*x.values(), chunk_size=CHUNK).out


def reference(x: Inputs) -> Tensor:
    """By the reference in float64."""
    return ttt_linear(*x.values(), chunk_size=CHUNK, backend="reference").out


def public_operator(folder: Path) -> Operator:
    """That of a flash-linear-attention package.

    Raises:
        SystemExit: it is not there.
    """
    if not (folder / "fla/ops/ttt/fused_chunk.py").exists():
        raise SystemExit(f"there is no flash-linear-attention in {folder}")
    sys.path.insert(0, str(folder))
    version = importlib.import_module("fla").__version__
    published = importlib.import_module("fla.ops.ttt.fused_chunk").fused_chunk_ttt_linear

    def forward(x: Inputs) -> Tensor:
        out: Tensor = published(**x, chunk_size=CHUNK)[0]
        return out

    return Operator(f"public TTT-linear (fla {version})", forward, LOOSE_LIMIT)


def draw(shape: Shape, device: str = "cuda") -> Inputs:
    """All in bf16, as the public kernel takes it: keys of unit size, and rates at which the inner model learns."""
    batch, tokens, heads, dim = shape.batch, shape.tokens, shape.heads, shape.dim
    q, k, v = (torch.randn(batch, tokens, heads, dim, device=device) for _ in range(3))
    x = {"q": q, "k": normalize(k, dim=-1), "v": v}
    x |= {"w": 1 + torch.randn(heads, dim, device=device) / 4, "b": torch.randn(heads, dim, device=device) / 4}
    x |= {"eta": torch.rand(batch, tokens, heads, 1, device=device) / 8}
    return {name: y.bfloat16().requires_grad_() for name, y in x.items()}


def rotating_inputs(shape: Shape) -> list[Inputs]:
    """Several sets of inputs, more bytes together than a cache holds."""
    first = draw(shape)
    sets = max(ROTATING_SETS, ceil(ROTATING_BYTES / sum(x.nbytes for x in first.values())))
    return [first, *(draw(shape) for _ in range(sets - 1))]


def largest_error(operator: Operator, shape: Shape, device: str = "cuda") -> float:
    """The largest relative RMS difference of the output or a gradient from the float64 reference, on a short clip.

    Raises:
        SystemExit: it is larger than the precision explains.
    """
    torch.manual_seed(1)
    x = draw(shape._replace(tokens=min(shape.tokens, CHECKED_TOKENS)), device)
    exact = Operator("reference", reference, 0.0).gradients(
        {name: y.detach().double().requires_grad_() for name, y in x.items()}
    )
    found = operator.gradients(x)
    errors = {name: float((found[name] - y).norm() / y.norm()) for name, y in exact.items()}
    print(f"  {operator.name}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    if not max(errors.values()) < operator.limit:
        raise SystemExit(f"{operator.name}: wrong results: {errors}")
    return max(errors.values())


def peak_memory(operator: Operator, x: Inputs) -> float:
    """GB that a training step allocates beside its inputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    operator.gradients(x)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


class Times(NamedTuple):
    """Microseconds of inference, of the forward pass of training, and of a training step."""

    inference: float
    ahead: float
    step: float

    @property
    def back(self) -> float:
        """Of the backward pass."""
        return self.step - self.ahead


def times(operator: Operator, inputs: Sequence[Inputs], clock: Callable[..., float]) -> Times:
    """By a clock of `gpu_timing`."""
    with torch.no_grad():
        inference = clock(operator.forward, inputs)
    return Times(inference, clock(operator.forward, inputs), clock(operator.gradients, inputs))


def in_graph(run: Callable[[Inputs], object], inputs: Sequence[Inputs]) -> float:
    """Median microseconds of a call in a captured graph."""
    return captured(run, inputs)[0]


def measure(operator: Operator, shape: Shape, inputs: Sequence[Inputs], commit: str) -> list[str]:
    """Rows of the forward and the backward pass of one operator at one shape."""
    error = largest_error(operator, shape)
    one_by_one, memory = times(operator, inputs, eager), peak_memory(operator, inputs[0])
    print(f"  eager: {one_by_one.inference:.0f} µs forward, {one_by_one.back:.0f} µs backward, {memory:.2f} GB")
    graph = times(operator, inputs, in_graph)
    least, least_back = shape.floor(4, 1), shape.floor(7, 2)
    forward = (
        f"{graph.inference:.0f} µs captured, {one_by_one.inference:.0f} µs eager, {graph.inference / least:.1f} × floor"
    )
    backward = (
        f"{graph.back:.0f} µs backward, {graph.back / graph.inference:.1f} × the {graph.inference:.0f} µs forward "
        f"(where a gradient is wanted {graph.ahead:.0f} µs), "
        f"{one_by_one.back:.0f} µs eager, {graph.back / least_back:.1f} × floor, {memory:.2f} GB at the peak"
    )
    start = f"| {datetime.now(UTC):%Y-%m-%d} | {commit} | {torch.cuda.get_device_name()} |"
    return [
        f"{start} {operator.name}, bf16; {shape} | {forward} (error {error:.1e}) | {least:.1f} µs |",
        f"{start} gradients of {operator.name}, bf16; {shape} | {backward} (error {error:.1e}) | {least_back:.0f} µs |",
    ]


def parse_shape(text: str) -> Shape:
    """`TxD` → shape."""
    tokens, dim = map(int, text.split("x"))
    return Shape(tokens, dim)


def main() -> None:
    """Check, measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="TxD", help=f"tokens and head dim; default: {SHAPES}")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="also the kernel of the package fla in there")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed on a CUDA GPU, and there is none")
    operators = [Operator("TTT-linear", own, 2 * LIMITS["bf16"])]
    if arguments.public:
        operators.append(public_operator(arguments.public))
    commit = arguments.commit or present_commit()
    for operator in operators:
        for shape in map(parse_shape, arguments.shape or SHAPES):
            torch.manual_seed(0)
            report(measure(operator, shape, rotating_inputs(shape), commit), record=arguments.record)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
