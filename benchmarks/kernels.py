"""Time of the kernels of one block on this GPU, each checked first; rows for RESULTS.md.

A work is timed only when every result is near the float64 reference and has the same bits in a second run and in a
captured graph. Inputs rotate through more memory than the L2 cache holds. With `--public FOLDER`, a checkout of
NVlabs/Sana, its kernels are checked and timed at the same shapes in the same run.
"""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.gpu_timing import captured, eager, kernels
from benchmarks.kernel_work import Inputs, Shape, Work, draw, own_works, relative_errors
from benchmarks.results import present_commit, report
from longtake.kernels.scan.configurations import Precision

SHAPES = ("1x3", "1x4", "8x3", "1x11", "8x11", "1x121")
ROTATING_BYTES, ROTATING_SETS = 500e6, 3


class WrongError(Exception):
    """A work has wrong results, so that there is nothing to time."""


class Timing(NamedTuple):
    """Microseconds of one call, captured and eager, and the largest relative RMS error of its results."""

    work: Work
    shape: Shape
    errors: dict[str, float]
    captured: float
    eager: float

    @property
    def number(self) -> str:
        """What it took, against what it must move and compute."""
        moved = self.work.moved(self.shape) / self.captured / 1e6
        operations = self.work.operations(self.shape) / self.captured / 1e6
        floors = self.captured / self.work.floor(self.shape)
        return (
            f"{self.captured:.1f} µs captured, {self.eager:.1f} µs eager, {moved:.2f} TB/s, {operations:.0f} TFLOP/s, "
            f"{floors:.1f} × floor (error {max(self.errors.values()):.1e})"
        )

    def row(self, commit: str) -> str:
        """Date, commit, hardware, work and shape, number, floor."""
        work, floor = f"{self.work.name}; {self.shape}", f"{self.work.floor(self.shape):.1f} µs"
        cells = (f"{datetime.now(UTC):%Y-%m-%d}", commit, torch.cuda.get_device_name(), work, self.number, floor)
        return f"| {' | '.join(cells)} |"


def rotating_inputs(shape: Shape) -> list[Inputs]:
    """Several sets of inputs, more bytes together than a cache holds."""
    first = draw(shape)
    sets = max(ROTATING_SETS, ceil(ROTATING_BYTES / sum(x.nbytes for x in first.values())))
    return [first, *(draw(shape) for _ in range(sets - 1))]


def check_truth(work: Work, x: Inputs) -> dict[str, float]:
    """Relative RMS error of every result.

    Raises:
        WrongError: one is not small.
    """
    found = work.results(x)
    errors = relative_errors(work, x, found)
    print(f"  {work.name}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    for name, error in errors.items():
        if not error < work.limit(found[name]):
            raise WrongError(f"{work.name}: relative RMS error {error:.1e} of {name}")
    return errors


def tensors(result: object) -> list[Tensor]:
    """The tensors in what a work returned."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else ()
    return [x for part in parts for x in tensors(part)]


def check_bits(work: Work, what: str, one: object, other: object) -> None:
    """Raise `WrongError` unless both hold the same bits, as an exact work must."""
    if work.exact and not all(map(torch.equal, tensors(one), tensors(other))):
        raise WrongError(f"{work.name}: other bits {what}")


def measure(work: Work, shape: Shape, drawn: list[Inputs]) -> Timing:
    """Check, warm up and time one work at one shape."""
    inputs = [work.prepare(x) for x in drawn]
    errors = check_truth(work, inputs[0])
    once = work.run(inputs[0])
    check_bits(work, "in a second run", once, work.run(inputs[0]))
    in_graph, result = captured(work.run, inputs)
    check_bits(work, "in a captured graph", once, result)
    return Timing(work, shape, errors, in_graph, eager(work.run, inputs))


def measure_all(works: Sequence[Work], shapes: Sequence[Shape], commit: str, *, record: bool) -> list[str]:
    """Measure and print; with `record` append each row as soon as it is known. What is wrong is returned."""
    wrong = []
    for shape in shapes:
        torch.manual_seed(0)
        inputs = rotating_inputs(shape)
        for work in works:
            try:
                report([measure(work, shape, inputs).row(commit)], record=record)
            except WrongError as error:
                wrong.append(f"WRONG {error}; {shape}")
                print(wrong[-1], flush=True)
        del inputs
        torch.cuda.empty_cache()
    return wrong


def show_profile(works: Sequence[Work], shape: Shape) -> None:
    """Print the kernels of each work with their times."""
    drawn = rotating_inputs(shape)
    for work in works:
        inputs = [work.prepare(x) for x in drawn]
        eager(work.run, inputs)
        rows = kernels(work.run, inputs)
        print(f"{work.name}; {shape}: {sum(time for _, time, _ in rows):.1f} µs in kernels")
        for name, time, launches in rows:
            print(f"  {time:8.1f} µs  {launches:4.1f} ×  {name[:100]}")


def parse_shape(text: str) -> Shape:
    """`BxF` → shape."""
    batch, frames = map(int, text.split("x"))
    return Shape(batch, frames)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="BxF", help=f"batch and frames; default: {SHAPES}")
    parser.add_argument("--work", choices=["gdn", "camera"], help="only this one")
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="also those of an NVlabs/Sana checkout")
    parser.add_argument("--profile", action="store_true", help="times of every kernel at the first shape, no rows")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    return parser.parse_args()


def main() -> None:
    """Measure and print; with --record also append the rows. Ends with an error when something was wrong."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed on a CUDA GPU, and there is none")
    shapes = [parse_shape(text) for text in arguments.shape or SHAPES]
    chosen = {"gdn": slice(0, 1), "camera": slice(1, 2), None: slice(None)}[arguments.work]
    own, public = own_works(arguments.precision)[chosen], []
    if arguments.public:
        from benchmarks.public_kernels import public_works

        public = public_works(arguments.public, arguments.precision)[chosen]
    commit = arguments.commit or present_commit()
    with torch.inference_mode():
        if arguments.profile:
            show_profile([*own, *public], shapes[0])
            return
        wrong = measure_all(own, shapes, commit, record=arguments.record)
        wrong += measure_all(public, shapes, commit, record=arguments.record)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
