"""The command line's `longtake trajectory`: what a trajectory file means, as text, as a picture, and as `.npy`."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import (
    MAX_FILE_BYTES,
    Convention,
    FormatChoice,
    ResolvedTrajectory,
    TrajectoryOptions,
)
from longtake.server.camera.intrinsics import DEFAULT_FIELD_OF_VIEW
from longtake.server.camera.resample import FPS
from longtake.server.camera.trajectory_files import TrajectoryFile, read_trajectory
from longtake.server.failing import fail, reason
from longtake.server.trajectory_picture import draw_path

trajectory_app = typer.Typer(help="Look at trajectory files and convert them.", no_args_is_help=True)
console = Console()

FileArgument = Annotated[Path, typer.Argument(help="Trajectory file.")]
FormatOption = Annotated[FormatChoice, typer.Option("--format", help="Syntax of the file; see docs/trajectories.md.")]
FpsOption = Annotated[float | None, typer.Option(help="Poses a second, for files without times.")]
ScaleOption = Annotated[float | None, typer.Option(help="Factor from the file's units to metres.")]
ConventionOption = Annotated[Convention | None, typer.Option(help="Camera axes, npy and npz only.")]
CamerasOption = Annotated[Path | None, typer.Option(help="COLMAP's cameras.txt.")]
IgnoreDistortionOption = Annotated[
    bool, typer.Option("--ignore-distortion", help="Leave lens distortion out instead of refusing it.")
]


@trajectory_app.command()
def show(
    file: FileArgument,
    file_format: FormatOption = "auto",
    fps: FpsOption = None,
    scale: ScaleOption = None,
    convention: ConventionOption = None,
    cameras: CamerasOption = None,
    ignore_distortion: IgnoreDistortionOption = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="PNG to draw the path into.")] = None,
) -> None:
    """Print what is understood of a file; with --out, draw its path from above and its height."""
    with _friendly():
        _check_name(out, ".png")
        trajectory = _read(file, cameras, _options(file_format, fps, scale, convention, ignore_distortion))
        for line in describe(trajectory.resolved):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if out is not None:
            title = f"{file.name}: {trajectory.resolved.frames} frames, {trajectory.resolved.duration_s:.1f} s"
            draw_path(trajectory.poses, title, _field_of_view(trajectory)).save(out, "PNG")


@trajectory_app.command()
def convert(
    file: FileArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help=".npy to write: c2w [F,4,4], OpenCV axes, 16 fps.")],
    file_format: FormatOption = "auto",
    fps: FpsOption = None,
    scale: ScaleOption = None,
    convention: ConventionOption = None,
    cameras: CamerasOption = None,
    ignore_distortion: IgnoreDistortionOption = False,
) -> None:
    """Write the poses of a file as .npy, in the file's own world."""
    with _friendly():
        _check_name(out, ".npy")
        trajectory = _read(file, cameras, _options(file_format, fps, scale, convention, ignore_distortion))
        with out.open("wb") as stream:
            np.save(stream, trajectory.poses, allow_pickle=False)
        console.print(f"{out}: {len(trajectory.poses)} poses", highlight=False, markup=False, soft_wrap=True)
        warnings = list(trajectory.resolved.warnings)
        if trajectory.intrinsics is not None:
            warnings.append("the file's intrinsics are left out: the .npy holds poses alone")
        for warning in warnings:
            console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def describe(resolved: ResolvedTrajectory) -> list[str]:
    """Lines that say what was understood of a file."""
    direction = {"c2w": "camera to world", "w2c": "world to camera"}[resolved.direction]
    axes = {"opencv": "OpenCV", "opengl": "OpenGL"}[resolved.axes]
    fastest = f"at most {resolved.max_step:.4g} units and {resolved.max_turn_degrees:.3g}° a frame"
    return [
        f"format      {resolved.format}: {direction}, {axes} axes, {resolved.file_poses} poses",
        f"frames      {resolved.frames} at {FPS} fps, {resolved.duration_s:g} s",
        f"path        {resolved.path_length:.4g} units, {fastest}",
        f"intrinsics  {'in the file' if resolved.intrinsics == 'file' else 'none'}",
        *(f"warning     {warning}" for warning in resolved.warnings),
    ]


def _options(
    file_format: FormatChoice,
    fps: float | None,
    scale: float | None,
    convention: Convention | None,
    ignore_distortion: bool,
) -> TrajectoryOptions:
    """The options given. Raises `ProblemError` for a number out of range."""
    try:
        return TrajectoryOptions(
            format=file_format,
            fps=fps,
            scale=scale,
            convention=convention,
            ignore_distortion=ignore_distortion,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ProblemError("invalid_request", first["msg"], f"--{first['loc'][0]}") from None


def _read(path: Path, cameras: Path | None, options: TrajectoryOptions) -> TrajectoryFile:
    """The trajectory in a file. Raises `ProblemError`, `OSError`."""
    return read_trajectory(_content(path), options, cameras=None if cameras is None else _content(cameras))


def _content(path: Path) -> bytes:
    """A file's bytes, or as many as show that it is too large."""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _field_of_view(trajectory: TrajectoryFile) -> float:
    """Horizontal degrees the first frame shows, as far as the file says."""
    if trajectory.intrinsics is None:
        return DEFAULT_FIELD_OF_VIEW
    focal, _, centre, _ = trajectory.intrinsics[0]
    width = 2 * centre if trajectory.intrinsics_size is None else trajectory.intrinsics_size[0]
    return math.degrees(2 * math.atan(width / 2 / focal))


def _check_name(out: Path | None, suffix: str) -> None:
    if out is not None and out.suffix.lower() != suffix:
        raise ProblemError("invalid_request", f"give the name of a {suffix} file", "out")


@contextmanager
def _friendly() -> Iterator[None]:
    """Expected failures end the command with one line instead of a traceback."""
    try:
        yield
    except (OSError, ProblemError) as error:
        fail(reason(error), error)
