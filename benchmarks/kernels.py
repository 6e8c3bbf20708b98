"""Time of the kernels of one block on this GPU, each checked against float64 first; rows for RESULTS.md."""

import argparse
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.cam import cam_bidirectional, cam_discount, cam_output, cam_prepare
from longtake.kernels.gdn import GdnState, gdn_bidirectional, gdn_prepare

RESULTS = Path(__file__).parent / "RESULTS.md"
HEADER = """# Results

Every number is made by a command of this repository that first checks that the answer is right.

| date | commit | hardware | work and shape | number | floor |
|---|---|---|---|---|---|
"""
PER_FRAME, HEADS, DIM = 880, 20, 112
SHAPES = [(1, 3), (1, 4), (8, 3)]
ROTATING_BYTES = 400e6
REPLAYS = 30
COPY_RATE, MATRIX_RATE = 4.24e12, 791e12
ERROR_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 2e-6}
Inputs = dict[str, Tensor]


class Work(NamedTuple):
    """What is timed: a function of inputs whose keys have `dtype`, and the dtype of its products."""

    name: str
    run: Callable[[Inputs], Tensor]
    dtype: torch.dtype
    operands: torch.dtype


class Timing(NamedTuple):
    """Median microseconds of one call, relative error against float64, and the floor in microseconds."""

    work: Work
    batch: int
    frames: int
    error: float
    median: float
    floor: float

    def cells(self) -> tuple[str, ...]:
        """Work and shape, number, floor."""
        shape = f"B={self.batch} F={self.frames} S={PER_FRAME} H={HEADS} D={DIM}"
        return f"{self.work.name}; {shape}", f"{self.median:.1f} µs (error {self.error:.1e})", f"{self.floor:.1f} µs"


def gdn(x: Inputs) -> Tensor:
    """Main branch: both scans from a state, merged."""
    tables, state = {"cos": x["cos"], "sin": x["sin"]}, GdnState(x["kv"], x["z"])
    tokens = (x["q"], x["k"], x["v"])
    return gdn_bidirectional(*tokens, x["beta"], x["decay"], **tables, initial_state=state, eps=1e-8)[0]


def camera(x: Inputs, operands: torch.dtype) -> Tensor:
    """Camera branch: preparation, discount, both scans with products in `operands`, output transform."""
    tables = (x["cam_cos"], x["cam_sin"])
    weights = {"q_weight": x["weight"], "k_weight": x["weight"], "eps": 1e-5, "k_scale": (PER_FRAME * DIM) ** -0.5}
    *tokens, inflation = cam_prepare(x["q"], x["k"], x["v"], x["projection"], x["inverse"], *tables, **weights)
    tokens = [y.to(operands) if y.dtype == torch.float32 else y for y in tokens]
    beta = cam_discount(x["beta"], inflation)
    out, _ = cam_bidirectional(*tokens, beta, x["decay"], initial_state=x["kv"])
    return cam_output(out, x["projection"], *tables)


WORKS = [
    Work("GDN both directions, q k v bf16", gdn, torch.bfloat16, torch.bfloat16),
    Work("GDN both directions, q k fp32, v bf16", gdn, torch.float32, torch.float32),
    Work("camera branch bf16, scans in bf16", lambda x: camera(x, torch.bfloat16), torch.bfloat16, torch.bfloat16),
    Work("camera branch bf16, scans in fp32", lambda x: camera(x, torch.float32), torch.bfloat16, torch.float32),
]


def draw(batch: int, frames: int, dtype: torch.dtype) -> Inputs:
    """Random inputs of both branches on the GPU; q and k in `dtype`, v in bf16."""
    tokens = frames * PER_FRAME
    q, k, v = torch.randn(3, batch, tokens, HEADS, DIM, device="cuda")
    q, k = gdn_prepare(q, k, q_weight=None, k_weight=None, eps=1e-5, k_scale=(PER_FRAME * DIM) ** -0.5)
    projection = torch.eye(4, device="cuda") + 0.1 * torch.randn(batch, tokens, 4, 4, device="cuda")
    angles, cam_angles = (6 * torch.rand(tokens, DIM // part, device="cuda") for part in (2, 4))
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.bfloat16(),
        "beta": torch.rand(batch, HEADS, frames, PER_FRAME, device="cuda"),
        "decay": 0.9 + 0.1 * torch.rand(batch, HEADS, frames, device="cuda"),
        "kv": torch.randn(batch, HEADS, DIM, DIM, device="cuda"),
        "z": torch.rand(batch, HEADS, DIM, device="cuda"),
        "weight": torch.rand(HEADS * DIM, device="cuda"),
        "projection": projection,
        "inverse": torch.linalg.inv(projection),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "cam_cos": cam_angles.cos(),
        "cam_sin": cam_angles.sin(),
    }


def relative_error(work: Work, x: Inputs) -> float:
    """‖out − truth‖ / ‖truth‖, the truth by the references, which alone take float64.

    Raises:
        SystemExit: it is not small, so that there is nothing to time.
    """
    truth = work.run({name: y.double() for name, y in x.items()})
    error = float((work.run(x) - truth).norm() / truth.norm())
    if not error < ERROR_LIMITS[work.operands]:
        raise SystemExit(f"{work.name} is wrong: relative error {error:.1e}")
    return error


def median_microseconds(work: Work, inputs: list[Inputs]) -> float:
    """Median over replays of one captured graph that runs every input set once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            work.run(x)
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(inputs))
    return statistics.median(times)


def floor_microseconds(work: Work, batch: int, frames: int) -> float:
    """The larger of operations over the dense bf16 rate and of bytes, each moved once, over the copy rate."""
    memories, entries = batch * HEADS, batch * frames * PER_FRAME * HEADS * DIM
    products = 4 if work.run is gdn else 3
    operations = memories * frames * (products * 2 * PER_FRAME * DIM**2 + 2 * 2 * DIM**3)
    moved = entries * (2 * work.dtype.itemsize + 2 + 4) + memories * 2 * 4 * DIM**2
    return max(operations / MATRIX_RATE, moved / COPY_RATE) * 1e6


def measure(work: Work, batch: int, frames: int) -> Timing:
    """Check, warm up and time one work at one shape."""
    first = draw(batch, frames, work.dtype)
    sets = max(1, round(ROTATING_BYTES / sum(y.nbytes for y in first.values())))
    inputs = [first, *(draw(batch, frames, work.dtype) for _ in range(sets - 1))]
    error = relative_error(work, first)
    median = median_microseconds(work, inputs)
    return Timing(work, batch, frames, error, median, floor_microseconds(work, batch, frames))


def results_row(timing: Timing, commit: str) -> str:
    """The row: date, commit, hardware, work and shape, number, floor."""
    cells = (f"{datetime.now(UTC):%Y-%m-%d}", commit, torch.cuda.get_device_name(), *timing.cells())
    return f"| {' | '.join(cells)} |"


def present_commit() -> str:
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or "?"


def record(rows: list[str]) -> None:
    """Append rows to the results."""
    if not RESULTS.exists():
        RESULTS.write_text(HEADER)
    with RESULTS.open("a") as file:
        file.writelines(f"{row}\n" for row in rows)


def main() -> None:
    """Measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed on a CUDA GPU, and there is none")
    torch.manual_seed(0)
    commit, rows = arguments.commit or present_commit(), []
    with torch.inference_mode():
        for work in WORKS:
            for batch, frames in SHAPES:
                rows.append(results_row(measure(work, batch, frames), commit))
                print(rows[-1], flush=True)
    if arguments.record:
        record(rows)


if __name__ == "__main__":
    main()
