"""Trajectory files: a path in the world of its own, laid on to a session's first pose."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import MAX_FILE_POSES
from longtake.server.camera.formats.arrays import read_matrices
from longtake.server.camera.poses import check_poses, compose, rebase


def load_trajectory(path: Path, field: str = "trajectory") -> NDArray[np.float64]:
    """Poses [F,4,4] float64 of a `.npy` file: camera to world in OpenCV axes, row k for video frame k.

    Shape and type are checked before any data is read, and nothing is ever unpickled.

    Raises:
        ProblemError: `trajectory_invalid` for a file that is not a whole `.npy` array [F,4,4] of numbers with
            F ≤ 65536, `poses_invalid` for poses that `check_poses` refuses, such as `trajectory[12]`.
        OSError: the file can not be opened.
    """
    with path.open("rb") as file:
        matrices = read_matrices(file, lambda detail: ProblemError("trajectory_invalid", detail, field))
    return check_poses(matrices, field, limit=MAX_FILE_POSES)


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
        raise ProblemError(
            "trajectory_exhausted",
            f"the file has {left} poses left there: row k is frame k unless `start` names another row",
            field,
        )
    return compose(first_pose, rebase(file_poses[start:stop], file_poses[0]))
