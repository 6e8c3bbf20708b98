"""Train the model that ships, stage by stage.

    python -m training.train --list
    python -m training.train --config training/configs/2-flow.toml

A stage takes up the weights that lie in `--weights`, trains for its minutes and puts its own in their place: begun
again it goes on from there. SIGTERM ends it early, its weights saved. Losses go to NAME.csv, pictures of what is
restored or generated to NAME.png. With torchrun it trains on several GPUs, with a batch on each; with `python` in its
place every stage runs on one. It first draws its clips, which takes seconds on a GPU and an hour on a laptop.
"""

import argparse
import csv
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tomllib import TOMLDecodeError

import torch
from pydantic import ValidationError
from torch import Tensor, distributed

from longtake.server.model.weights import WeightsError
from longtake.training.stage import Stage, all_stages, read_stage
from longtake.training.vae_stage import VaeStage
from longtake.training.world_stage import WorldStage

WEIGHTS = Path(__file__).parent / "weights"
LOG_EVERY = 50
LOWEST_RATE = 0.05


def learning_rate(stage: Stage, progress: float) -> float:
    """The rate after a part `progress` (0…1) of the stage: a linear rise, then a cosine."""
    rise = min(1.0, (progress + 1e-3) / max(stage.warm_up, 1e-3))
    fall = LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return stage.rate * rise * fall


def progress_of(stage: Stage, steps: int | None) -> Iterator[float]:
    """Parts of the stage that are over, before each step: by the clock, or of a number of steps."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    yield 0.0  # the first step compiles, which is not part of the time
    start = time.monotonic()
    while True:
        yield (time.monotonic() - start) / (60 * stage.minutes)


@contextmanager
def sigterm_noted() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM came, which ends nothing by itself meanwhile."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)


def until_stopped(progress: Iterator[float], asked: Callable[[], bool]) -> Iterator[float]:
    """The progress while it is below 1 and nobody asked to stop; the first GPU decides for all, but for one step."""
    yield next(progress)
    for part in progress:
        if (agreed := _agreed(1.0 if asked() else part)) >= 1:
            return
        yield agreed


def _agreed(number: float) -> float:
    if not distributed.is_initialized():
        return number
    found = torch.tensor(number, device="cuda")
    distributed.broadcast(found, 0)
    return float(found)


def device_of_this_process() -> tuple[torch.device, int]:
    """The GPU of this process, or the CPU, and its number among those that train together."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), 0
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    if "LOCAL_RANK" in os.environ:
        distributed.init_process_group("nccl")
    return torch.device("cuda", rank), rank


def run(name: str, stage: Stage, weights: Path, steps: int | None, report: Callable[[str], object]) -> None:
    """Train one stage and save what it made."""
    device, rank = device_of_this_process()
    torch.manual_seed(1000 * stage.seed + rank)
    torch.set_float32_matmul_precision("high")
    if steps is not None:
        stage = stage.model_copy(update={"clips": min(stage.clips, steps * stage.batch)})
    report(f"{name} draws {stage.clips} clips")
    learner = (VaeStage if stage.part == "vae" else WorldStage)(stage, weights, device, rank)
    weights.mkdir(parents=True, exist_ok=True)
    with sigterm_noted() as asked:  # also while weights are saved
        rows = _trained(name, learner, until_stopped(progress_of(stage, steps), asked), stage, report)
        if rank == 0:
            _save(name, learner, weights, rows)
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def _trained(
    name: str,
    learner: VaeStage | WorldStage,
    progress: Iterator[float],
    stage: Stage,
    report: Callable[[str], object],
) -> list[dict[str, float]]:
    """Take all steps → what every fiftieth and the last one found. Raises `SystemExit` if that is not finite."""
    begun, rows = time.monotonic(), []
    for step, part in enumerate(progress):
        found = learner.step(learning_rate(stage, part))
        if step % LOG_EVERY == 0:
            rows.append(_row(step, begun, found))
            report(f"{name} {rows[-1]}")
    if rows[-1]["step"] != step:
        rows.append(_row(step, begun, found))
    if not all(math.isfinite(number) for number in rows[-1].values()):
        raise SystemExit(f"{name} went astray, and its weights are not saved: {rows[-1]}")
    return rows


def _save(name: str, learner: VaeStage | WorldStage, weights: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Weights, curves and pictures."""
    learner.save(weights)
    with (weights / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    learner.picture(weights / f"{name}.png")


def _row(step: int, begun: float, found: Mapping[str, Tensor]) -> dict[str, float]:
    """What a step found, with when that was."""
    return {"step": step, "seconds": round(time.monotonic() - begun, 1), **{key: float(x) for key, x in found.items()}}


def main() -> None:
    """Run one stage, or list them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="TOML file of a stage")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help=f"folder of the weights; default: {WEIGHTS}")
    parser.add_argument("--minutes", type=float, help="train so long instead")
    parser.add_argument("--steps", type=int, help="train so many steps instead")
    parser.add_argument("--list", action="store_true", help="name the stages of the recipe")
    arguments = parser.parse_args()
    if arguments.list or arguments.config is None:
        for name, stage in all_stages().items():
            python = "python" if stage.gpus == 1 else f"torchrun --nproc-per-node {stage.gpus}"
            print(f"{python} -m training.train --config training/configs/{name}.toml  # {stage.minutes:g} minutes")
        return
    if arguments.steps is not None and arguments.steps < 1:
        parser.error("--steps must be at least 1")
    given = {} if arguments.minutes is None else {"minutes": arguments.minutes}
    try:
        stage = Stage.model_validate(read_stage(arguments.config).model_dump() | given)
        run(arguments.config.stem, stage, arguments.weights, arguments.steps, lambda line: print(line, flush=True))
    except (OSError, ValidationError, TOMLDecodeError, WeightsError) as error:
        parser.error(f"{arguments.config}, {arguments.weights}: {error}")


if __name__ == "__main__":
    main()
