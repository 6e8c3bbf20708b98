"""Trajectory files: a path in the world of its own, laid on to a session's first pose."""

from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.poses import check_poses, compose, rebase

MAX_FILE_POSES = 65_536
"""Poses a file may hold: over an hour at 16 fps."""

_NOT_NPY = "it is not a complete .npy file of numbers"


def load_trajectory(path: Path, field: str = "trajectory") -> NDArray[np.float64]:
    """Poses [F,4,4] float64 of a `.npy` file: camera to world in OpenCV axes, row k for video frame k.

    Shape and type are checked before any data is read, and nothing is ever unpickled.

    Raises:
        ProblemError: `trajectory_invalid` for a file that is not a whole `.npy` array [F,4,4] of numbers with
            F ≤ 65536, `poses_invalid` for poses that `check_poses` refuses, such as `trajectory[12]`.
        OSError: the file can not be opened.
    """
    with path.open("rb") as file:
        shape, fortran_order, dtype = _header(file, field)
        if dtype.kind not in "fiu":
            raise ProblemError("trajectory_invalid", _NOT_NPY, field)
        if len(shape) != 3 or shape[1:] != (4, 4) or not 0 < shape[0] <= MAX_FILE_POSES:
            detail = f"its array must have the shape [F,4,4] with 1 to {MAX_FILE_POSES} poses"
            raise ProblemError("trajectory_invalid", detail, field)
        data = file.read(prod(shape) * dtype.itemsize)
    if len(data) < prod(shape) * dtype.itemsize:
        raise ProblemError("trajectory_invalid", _NOT_NPY, field)
    array = np.frombuffer(data, dtype).reshape((-1, 4, 4), order="F" if fortran_order else "C")
    return check_poses(array, field, limit=MAX_FILE_POSES)


def continue_from(
    file_poses: NDArray[np.float64],
    first_pose: NDArray[np.float64],
    start: int,
    count: int | None,
    field: str = "trajectory",
) -> NDArray[np.float64]:
    """Poses of the video frames from `start` on: first_pose · file_0⁻¹ · file_k, each the same however the path is cut.

    Args:
        file_poses: [F,4,4] float64 of `load_trajectory`; row 0 belongs to frame 0. Not changed.
        first_pose: c2w [4,4] float64 of frame 0.
        start: first video frame wanted, at least 0.
        count: frames wanted, at least 1; all that are left when None.
        field: name of the input, for errors.

    Raises:
        ProblemError: `trajectory_exhausted` when the file ends before `start` or `start + count`, `invalid_request` for
            a negative `start` or a `count` below 1.
    """
    if start < 0:
        raise ProblemError("invalid_request", "must be 0 or more", f"{field}.start")
    if count is not None and count < 1:
        raise ProblemError("invalid_request", "must be 1 or more", f"{field}.count")
    stop = len(file_poses) if count is None else start + count
    if start >= stop or stop > len(file_poses):
        left = max(0, len(file_poses) - start)
        raise ProblemError("trajectory_exhausted", f"the file has {left} poses left from frame {start} on", field)
    return compose(first_pose, rebase(file_poses[start:stop], file_poses[0]))


def _header(file: BinaryIO, field: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, Fortran order and dtype a `.npy` file announces; leaves the file at its data."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        return read(file)
    except (ValueError, TypeError, KeyError, SyntaxError, TokenError, MemoryError):
        raise ProblemError("trajectory_invalid", _NOT_NPY, field) from None
