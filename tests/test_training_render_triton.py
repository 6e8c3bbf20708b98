"""The ray tracer's kernel: the same pictures as from PyTorch, and quickly compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_checks import DEVICE, GPU
from torch import Tensor

from longtake.training.render import FAR, default_intrinsics, render, trace_image, visible_solids
from longtake.training.render_triton import PIXELS, render_frames
from longtake.training.scenes import draw_scenes

WIDTH, HEIGHT = (320, 192) if GPU else (20, 12)
POSES = {
    "ahead": (0.0, 0.0, (0.0, 0.0, 0.0)),
    "behind": (170.0, 0.0, (0.0, 0.0, -1.0)),
    "down": (40.0, -35.0, (0.5, -0.8, 1.0)),
    "up": (-75.0, 50.0, (-1.0, 0.0, 0.3)),
}


def pose(yaw: float, pitch: float, position: tuple[float, float, float]) -> Tensor:
    """c2w [4,4] of a camera turned to the right, then up."""
    y, p = torch.tensor([yaw, pitch], dtype=torch.float64).deg2rad()
    turn = torch.tensor([[y.cos(), 0, y.sin()], [0, 1, 0], [-y.sin(), 0, y.cos()]], dtype=torch.float64)
    tilt = torch.tensor([[1, 0, 0], [0, p.cos(), -p.sin()], [0, p.sin(), p.cos()]], dtype=torch.float64)
    camera = torch.eye(4, dtype=torch.float64)
    camera[:3, :3], camera[:3, 3] = turn @ tilt, torch.tensor(position, dtype=torch.float64)
    return camera


def arguments(seed: int, count: int) -> tuple[Tensor, ...]:
    """What both renderers take: `count` scenes, each from every pose, the last frame through a wider lens."""
    scenes = draw_scenes(count, seed).to(DEVICE)
    poses = torch.stack([pose(*each) for each in POSES.values()]).to(DEVICE)
    cameras = (scenes.start[:, None].double() @ poses).float()
    lenses = default_intrinsics(WIDTH, HEIGHT).repeat(count, len(POSES), 1)
    lenses[:, -1] = default_intrinsics(WIDTH, HEIGHT, 90)
    return visible_solids(scenes), scenes.paint, scenes.sky, cameras, lenses.to(DEVICE)


def assert_alike(ours: Tensor, right: Tensor) -> None:
    """Pixels at an edge may fall on its other side."""
    assert ours.shape == right.shape
    assert ours.dtype == right.dtype == torch.uint8
    difference = (ours.int() - right.int()).abs()
    assert (difference <= 1).float().mean() >= 0.995
    assert difference.float().mean() < 0.05


@pytest.mark.parametrize(("seed", "samples"), [(0, 1), (31, 1), (1000, 2), (77777, 4)])
def test_the_kernel_renders_what_pytorch_does(seed: int, samples: int) -> None:
    given = arguments(seed, 2)
    right = trace_image(*given, HEIGHT, WIDTH, samples)
    assert right.float().std() > 20
    assert_alike(render_frames(*given, HEIGHT, WIDTH, samples), right)


def test_cameras_inside_of_things_and_under_the_ground_break_nothing() -> None:
    shape, paint, sky, cameras, lenses = arguments(5, 2)
    cameras[:, :2, :3, 3] = shape[:, :2, :3]
    cameras[:, 2, 1, 3] = 0.7
    cameras[:, 3, 1, 3] = -FAR
    given = shape, paint, sky, cameras, lenses
    height = HEIGHT + 2
    assert height * WIDTH > PIXELS
    assert_alike(render_frames(*given, height, WIDTH, 1), trace_image(*given, height, WIDTH, 1))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_render_runs_the_kernel_on_a_gpu() -> None:
    scenes, poses = draw_scenes(2, 8), torch.stack([pose(*each) for each in POSES.values()]).expand(2, -1, 4, 4)
    lenses = default_intrinsics(WIDTH, HEIGHT).expand(2, 4)
    there = render(scenes.to(DEVICE), poses, lenses, HEIGHT, WIDTH)
    assert_alike(there.cpu(), render(scenes, poses, lenses, HEIGHT, WIDTH))


COMPILE = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import hopper
compiled = hopper.pretend()
from longtake.training.render_triton import render_frames
sizes = [(2, 19, 8), (2, 19, 13), (2, 24), (2, 3, 4, 4), (2, 3, 4)]
begin = time.perf_counter()
render_frames(*(torch.ones(size) for size in sizes), 192, 320, 4)
print(time.perf_counter() - begin, *compiled)
"""


def test_the_kernel_compiles_for_hopper_in_seconds(tmp_path: Path) -> None:
    """In a process of its own: under the interpreter there is nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seconds, *compiled = done.stdout.split()
    assert compiled == ["longtake.training.render_triton._kernel"]
    assert float(seconds) < 60
