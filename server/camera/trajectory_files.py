"""Trajectory files by upload: read in the syntax the client names, checked, and brought to 16 fps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import (
    MAX_FILE_BYTES,
    MAX_FILE_POSES,
    ResolvedTrajectory,
    TrajectoryFormat,
    TrajectoryOptions,
)
from longtake.server.camera.formats.arrays import read_npy_poses, read_npz_poses
from longtake.server.camera.formats.colmap import read_colmap
from longtake.server.camera.formats.detect import detect
from longtake.server.camera.formats.kitti import read_kitti
from longtake.server.camera.formats.names import refuse_jumps
from longtake.server.camera.formats.realestate10k import read_realestate10k
from longtake.server.camera.formats.source import FilePoses, Source
from longtake.server.camera.formats.transforms import read_transforms
from longtake.server.camera.formats.tum import read_tum
from longtake.server.camera.intrinsics import check_intrinsics
from longtake.server.camera.poses import check_poses, inverse, pose_warnings, steps_and_turns, to_opencv
from longtake.server.camera.resample import FPS, frames_within, resample_numbers, resample_poses

LONG_GAP_SECONDS = 0.5
"""Seconds between two poses above which the straight line between them is worth a warning."""

_READERS: dict[TrajectoryFormat, Callable[[Source], FilePoses]] = {
    "npy": read_npy_poses,
    "npz": read_npz_poses,
    "realestate10k": read_realestate10k,
    "tum": read_tum,
    "kitti": read_kitti,
    "transforms": read_transforms,
    "colmap": read_colmap,
}
_WITH_TIMES = ("realestate10k", "tum")
_WITHOUT_UNITS = ("realestate10k", "transforms", "colmap")
_WITH_DISTORTION = ("transforms", "colmap")
_WITH_OPEN_AXES = ("npy", "npz")


@dataclass(frozen=True, eq=False)
class TrajectoryFile:
    """A path at 16 fps, in the world of its file.

    Attributes:
        poses: c2w [F,4,4] float64, OpenCV axes.
        intrinsics: [F,4] float64, fx fy cx cy in pixels of `intrinsics_size`; None if the file has none.
        intrinsics_size: width and height the intrinsics belong to, (1, 1) where they are fractions of them; None when
            the file does not say.
        resolved: what was understood.
    """

    poses: NDArray[np.float64]
    intrinsics: NDArray[np.float64] | None
    intrinsics_size: tuple[int, int] | None
    resolved: ResolvedTrajectory


def read_trajectory(
    data: bytes, options: TrajectoryOptions, field: str = "trajectory", cameras: bytes | None = None
) -> TrajectoryFile:
    """The path in a file of any known syntax.

    Args:
        data: content of the file, at most 16 MiB.
        options: syntax and what it leaves open.
        field: name of the input, for errors.
        cameras: content of COLMAP's cameras.txt, at most 16 MiB.

    Raises:
        ProblemError: `trajectory_invalid`, naming the line or the pose at fault, for whatever is not understood, not
            rigid, mirrored, distorted, in no order, over 65536 poses or frames, and for options that do not apply.
    """
    source = Source(data, options, field, cameras)
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            return _read(source)
    except ArithmeticError:
        raise source.problem("its numbers are too large or too small to compute with") from None


def _read(source: Source) -> TrajectoryFile:
    if max(len(source.data), len(source.cameras or b"")) > MAX_FILE_BYTES:
        raise source.problem(f"it is larger than {MAX_FILE_BYTES // 2**20} MiB")
    name = detect(source) if source.options.format == "auto" else source.options.format
    _check_options(source, name)
    file = _READERS[name](source)
    poses = _camera_to_world(file, source)
    intrinsics = _checked_intrinsics(file, source)
    if file.times is not None:
        if not np.isfinite(file.times).all() or frames_within(float(file.times[-1])) > MAX_FILE_POSES:
            raise source.problem(f"it lasts longer than {MAX_FILE_POSES} frames at {FPS} fps")
        poses = resample_poses(poses, file.times)
        intrinsics = None if intrinsics is None else resample_numbers(intrinsics, file.times)
    return TrajectoryFile(poses, intrinsics, file.intrinsics_size, _resolve(name, file, poses, source.options))


def _check_options(source: Source, name: TrajectoryFormat) -> None:
    """Refuse options that the format has no use for: they would only seem to have an effect."""
    options = source.options
    for option, given, formats in (
        ("convention", options.convention is not None, _WITH_OPEN_AXES),
        ("ignore_distortion", options.ignore_distortion, _WITH_DISTORTION),
        ("cameras", source.cameras is not None, ("colmap",)),
    ):
        if given and name not in formats:
            raise source.option_problem(option, f"it goes with {' and '.join(formats)} only")
    if options.fps is not None and name in _WITH_TIMES:
        raise source.option_problem("fps", f"a {name} file has times of its own")


def _camera_to_world(file: FilePoses, source: Source) -> NDArray[np.float64]:
    """Checked poses [N,4,4]: camera to world, OpenCV axes, in metres if the client gave a scale."""
    try:
        poses = check_poses(file.matrices, "", limit=MAX_FILE_POSES)
        poses = to_opencv(poses if file.direction == "c2w" else inverse(poses), file.axes)
        poses[:, :3, 3] *= source.options.scale or 1.0
        poses = check_poses(poses, "", limit=MAX_FILE_POSES)
    except ProblemError as error:
        raise _placed(error, file, source) from None
    if file.by_name:
        refuse_jumps(poses, file.places, source)
    return poses


def _checked_intrinsics(file: FilePoses, source: Source) -> NDArray[np.float64] | None:
    if file.intrinsics is None:
        return None
    try:
        return check_intrinsics(file.intrinsics, "", limit=MAX_FILE_POSES)
    except ProblemError as error:
        raise _placed(error, file, source) from None


def _placed(error: ProblemError, file: FilePoses, source: Source) -> ProblemError:
    """An error at row `[3]` as one at the place in the file where that row stands."""
    row = (error.field or "").strip("[]")
    return source.problem(error.detail, file.places[int(row)] if row else None)


def _resolve(
    name: TrajectoryFormat, file: FilePoses, poses: NDArray[np.float64], options: TrajectoryOptions
) -> ResolvedTrajectory:
    steps, turns = steps_and_turns(poses)
    return ResolvedTrajectory(
        format=name,
        axes=file.axes,
        direction=file.direction,
        file_poses=len(file.matrices),
        frames=len(poses),
        duration_s=(len(poses) - 1) / FPS,
        path_length=float(steps.sum()),
        max_step=float(steps.max(initial=0.0)),
        max_turn_degrees=float(turns.max(initial=0.0)),
        intrinsics="none" if file.intrinsics is None else "file",
        warnings=[*file.warnings, *_warnings(name, file, options), *pose_warnings(poses)],
    )


def _warnings(name: TrajectoryFormat, file: FilePoses, options: TrajectoryOptions) -> list[str]:
    """What the file leaves open and how it was taken."""
    warnings = []
    if name in _WITHOUT_UNITS and options.scale is None:
        warnings.append("its units are unknown: they are taken for metres unless `scale` is given")
    if file.by_name and options.fps is None:
        warnings.append("it has no times: one pose a video frame is assumed unless `fps` is given")
    longest = 0.0 if file.times is None else float(np.diff(file.times).max(initial=0.0))
    if longest > LONG_GAP_SECONDS:
        warnings.append(f"up to {longest:.3g} s lie between two poses: the path between them is a straight line")
    return warnings
