"""Losses of the first steps of tiny-world's training on the kernels, beside those in plain PyTorch.

A new transformer learns the latents of the VAE that ships, in bf16. How far two curves may be apart is measured: a
third run is in plain PyTorch from weights moved by half a rounding to bf16.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch

from benchmarks.results import report, row
from benchmarks.training import ROUNDING, distance
from longtake.kernels.backend import VARIABLE, Backend
from longtake.server.model.bundle import VAE_FILE
from longtake.training.stage import Stage
from longtake.training.world_stage import WorldStage

VAE = Path(__file__).parents[1] / "server/model/assets/tiny-world" / VAE_FILE
RATE = 5e-4


def train(stage: Stage, backend: Backend | None, steps: int, weights: Path, *, moved: bool) -> list[float]:
    """The loss of every step, with the same scenes, noise and first weights, but for a rounding if they are `moved`."""
    os.environ[VARIABLE] = backend or ""
    torch.manual_seed(0)
    learner = WorldStage(stage, weights, torch.device("cuda"), rank=0)
    if moved:
        move(learner)
    torch.manual_seed(0)
    return [float(learner.step(RATE)["loss"]) for _ in range(steps)]


def move(learner: WorldStage) -> None:
    """Shift every weight by up to half of what rounding to bf16 moves it."""
    generator = torch.Generator("cuda").manual_seed(1)
    for master, parameter in zip(learner.masters.masters, learner.masters.parameters, strict=True):
        noise = torch.rand(master.shape, generator=generator, device=master.device) * 2 - 1
        master.mul_(1 + ROUNDING / 2 * noise)
        parameter.data.copy_(master)


def main() -> None:
    """Train three times, print the curves, and fail unless they are as near as rounding lets them be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="append the row to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels train on a CUDA GPU, and there is none")
    sizes = {"batch": arguments.batch, "chunks": arguments.chunks, "clips": 4 * arguments.batch}
    stage = Stage.model_validate({"part": "world", "minutes": 1, "rate": RATE, "reuse": 10**6, "seed": 9, **sizes})
    choices: tuple[tuple[Backend | None, bool], ...] = ((None, False), ("reference", False), ("reference", True))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / VAE_FILE).symlink_to(VAE)
        kernels, plain, moved = (
            train(stage, backend, arguments.steps, Path(folder), moved=moved) for backend, moved in choices
        )
    for step in range(0, arguments.steps, 7):
        print(step, f"kernels {kernels[step]:.5f} PyTorch {plain[step]:.5f} moved {moved[step]:.5f}", flush=True)
    ours, noise = distance(kernels, plain), distance(moved, plain)
    work = f"tiny-world: loss over the first {arguments.steps} steps in bf16, on the kernels and in plain PyTorch"
    number = f"apart by {ours:.1e} at most, {kernels[0]:.3f} → {kernels[-1]:.3f}"
    goal = f"{noise:.1e} (weights moved by half a rounding)"
    report([row(work, number, goal, torch.cuda.get_device_name(), arguments.commit)], record=arguments.record)
    if ours > 2 * noise:
        raise SystemExit(f"the curves are {ours:.1e} apart, and rounding explains {noise:.1e}")


if __name__ == "__main__":
    main()
