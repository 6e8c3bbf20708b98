"""Time and memory of a training step through the scans of one block on this GPU, each gradient checked first.

A step is timed as one captured graph, and so is its forward pass alone: the difference is the backward pass. Its floor
is what it must read and write once: inputs, what comes back for the results, and gradients. q, k and v are views of one
buffer and leaves of their own: where they are unbound from one leaf, autograd copies their gradients into one tensor,
which is stated apart.
Beside time and memory stand those of a step that runs the forward pass again instead of keeping its snapshots.
"""

import argparse
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_timing import captured
from benchmarks.kernel_work import COPY_RATE, LIMITS, Inputs, Results, Shape, camera, draw, gdn
from benchmarks.kernels import parse_shape, rotating_inputs
from benchmarks.results import present_commit, report
from longtake.kernels.backend import Backend
from longtake.kernels.scan.configurations import Precision

SHAPES = ("1x11", "4x11")
TRAINED = {
    "GDN": ("beta", "decay", "q_weight", "k_weight", "kv", "z"),
    "camera": ("beta", "decay", "q_weight", "k_weight", "kv"),
}
POSITIONS = {"GDN": ("cos", "sin"), "camera": ("projection", "inverse", "cam_cos", "cam_sin")}
Public = Callable[[Inputs, Precision, Backend | None], Results]


class Step(NamedTuple):
    """A scan that is trained: its reads without quotient, gate or output transform, which are PyTorch's."""

    name: str
    public: Public

    def forward(self, x: Inputs, precision: Precision, backend: Backend | None = None) -> list[Tensor]:
        """Everything that the scan reads."""
        return list(self.public(x, precision, backend).values())

    def gradients(
        self, x: Inputs, precision: Precision, backend: Backend | None = None, *, again: bool = False
    ) -> dict[str, Tensor]:
        """Of all inputs, when the reads themselves come back; `again`: what is kept for them is made a second time."""
        if again:
            results = checkpoint(self.forward, x, precision, backend, use_reentrant=False, preserve_rng_state=False)
        else:
            results = self.forward(x, precision, backend)
        back = [y.detach() for y in results]
        leaves = {name: y for name, y in x.items() if y.requires_grad}
        return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), back), strict=True))


STEPS = (
    Step("GDN", lambda x, precision, backend: gdn(x, precision, backend, merged=False)),
    Step("camera", lambda x, precision, backend: camera(x, precision, backend, transformed=False)),
)


def trainable(step: Step, x: Inputs, *, packed: bool = False) -> Inputs:
    """The inputs, of which those that are trained are leaves that want a gradient; `packed`: q, k and v are one."""
    trained = TRAINED[step.name] + (("qkv",) if packed else ("q", "k", "v"))
    apart = dict(zip("qkv", x["qkv"].unbind(2), strict=True))
    found = {name: y for name, y in x.items() if name not in apart} | ({} if packed else apart)
    return {name: y.detach().requires_grad_(name in trained) for name, y in found.items()}


def largest_error(step: Step, x: Inputs, precision: Precision) -> float:
    """The largest relative RMS difference of a gradient from that of the fp32 reference.

    Raises:
        SystemExit: it is larger than the precision explains.
    """
    ours, exact = step.gradients(x, precision), step.gradients(x, precision, "reference")
    errors = {name: float((ours[name] - y).norm() / y.norm()) for name, y in exact.items()}
    print(f"  {step.name}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    if not max(errors.values()) < 2 * LIMITS[precision]:
        raise SystemExit(f"{step.name}: wrong gradients: {errors}")
    return max(errors.values())


def floor(step: Step, x: Inputs, precision: Precision) -> float:
    """Microseconds to move all inputs, what comes back for the results, and the gradients once."""
    inputs = [y for name, y in x.items() if y.requires_grad or name in POSITIONS[step.name]]
    moved = [*inputs, *step.forward(x, precision), *step.gradients(x, precision).values()]
    return sum(y.numel() * y.element_size() for y in moved) / COPY_RATE * 1e6


def peak_memory(step: Step, x: Inputs, precision: Precision, *, again: bool) -> float:
    """GB that a step allocates beside its inputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.gradients(x, precision, again=again)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure(step: Step, shape: Shape, inputs: Sequence[Inputs], precision: Precision, commit: str) -> str:
    """Row of one scan at one shape."""
    error = largest_error(step, trainable(step, draw(shape)), precision)
    both, twice = (
        captured(partial(step.gradients, precision=precision, again=again), inputs)[0] for again in (False, True)
    )
    with torch.no_grad():
        inference, _ = captured(lambda x: step.forward(x, precision), inputs)
    ahead, _ = captured(lambda x: step.forward(x, precision), inputs)
    one = [trainable(step, x, packed=True) for x in inputs]
    packed, _ = captured(partial(step.gradients, precision=precision), one)
    back, least = both - ahead, floor(step, inputs[0], precision)
    kept, made = (peak_memory(step, inputs[0], precision, again=again) for again in (False, True))
    number = (
        f"{back:.0f} µs backward, {back / inference:.1f} × the {inference:.0f} µs forward (with what it keeps "
        f"{ahead:.0f} µs), {back / least:.1f} × floor "
        f"({packed - both:.0f} µs more where q, k and v are unbound from one leaf), "
        f"{kept:.2f} GB at the peak; snapshots made again, not kept: {twice - both:.0f} µs more, {made:.2f} GB "
        f"(error {error:.1e})"
    )
    work = f"gradients of {step.name} of one block, {precision}; {shape}"
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"| {day} | {commit} | {torch.cuda.get_device_name()} | {work} | {number} | {least:.0f} µs |"


def main() -> None:
    """Check, measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="BxF", help=f"batch and frames; default: {SHAPES}")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed on a CUDA GPU, and there is none")
    for shape in map(parse_shape, arguments.shape or SHAPES):
        torch.manual_seed(0)
        for step in STEPS:
            inputs = [trainable(step, x) for x in rotating_inputs(shape)]
            commit = arguments.commit or present_commit()
            report([measure(step, shape, inputs, "bf16", commit)], record=arguments.record)


if __name__ == "__main__":
    main()
