"""Poses at uneven or other times, as one pose a video frame."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation, Slerp

FPS = 16
"""Video frames a second."""

# a path of exactly k frames must not lose the last to rounding of its times
_SLACK_FRAMES = 1e-6


def frames_within(seconds: float) -> int:
    """Video frames of a path that lasts so long: those at k/16 s up to its end, the first one included."""
    return math.floor(seconds * FPS + _SLACK_FRAMES) + 1


def resample_poses(poses: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Poses at k/16 s: rotations by spherical linear interpolation (Slerp), positions linear. The duration stays.

    Args:
        poses: [N,4,4] float64 rigid transforms; not changed.
        times: [N] float64 seconds, from 0 on, increasing.

    Returns:
        [F,4,4] float64 with F = `frames_within(times[-1])`: what is left after the last whole frame is not used.
    """
    at = _frame_times(times)
    frames = np.tile(np.eye(4), (len(at), 1, 1))
    frames[:, :3, 3] = resample_numbers(poses[:, :3, 3], times)
    if len(poses) == 1:
        frames[:, :3, :3] = poses[:, :3, :3]
    else:
        frames[:, :3, :3] = Slerp(times, Rotation.from_matrix(poses[:, :3, :3]))(at).as_matrix()
    return frames


def resample_numbers(values: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values [N,C] at `times` [N] as values [F,C] at k/16 s, linear between their neighbours."""
    at = _frame_times(times)
    return np.stack([np.interp(at, times, column) for column in values.T], axis=1)


def _frame_times(times: NDArray[np.float64]) -> NDArray[np.float64]:
    at: NDArray[np.float64] = np.minimum(np.arange(frames_within(float(times[-1]))) / FPS, times[-1])
    return at
