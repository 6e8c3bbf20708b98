"""Rigid camera-to-world poses: checked, turned to OpenCV axes, and made relative to another pose.

Products are written out element by element, so that a pose has the same bits however many are handled at once.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longtake.api_schemas.camera import MAX_POSES
from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import Convention
from longtake.server.camera.numbers import real_numbers, refuse

MAX_DISTANCE = 1e6
MAX_STEP = 0.5
"""Units a frame above which a path is faster than those the model was trained on."""
MAX_TURN_DEGREES = 10.0
"""Degrees a frame above which a path is faster than those the model was trained on."""

_CODE = "poses_invalid"
_LAST_ROW_TOLERANCE = 1e-6
_REFUSED_ERROR = 1e-3
_PROJECTED_ERROR = 1e-6


def to_opencv(c2w: NDArray[np.float64], convention: Convention) -> NDArray[np.float64]:
    """Poses [..., 4, 4] in OpenCV camera axes; from OpenGL c2w · diag(1, −1, −1, 1). The world keeps its axes."""
    return c2w if convention == "opencv" else c2w * np.array([1.0, -1.0, -1.0, 1.0])


def check_poses(poses: ArrayLike, field: str, limit: int = MAX_POSES) -> NDArray[np.float64]:
    """Poses as a new float64 array [F,4,4] of rigid transforms.

    A rotation whose error max |RᵀR − I| lies between 1e-6 and 1e-3 is replaced by the nearest one (SVD).

    Args:
        poses: numbers of shape [F,4,4], 1 ≤ F ≤ `limit`; not changed.
        field: name of the input, for errors.
        limit: most poses taken.

    Raises:
        ProblemError: `poses_invalid` for a wrong shape, too many poses, numbers that are not finite, a last row other
            than 0 0 0 1, a translation beyond 1e6 units, and a rotation that is sheared, scaled or mirrored.
    """
    checked = real_numbers(poses, _CODE, field)
    if checked.ndim != 3 or checked.shape[1:] != (4, 4) or len(checked) == 0:
        raise ProblemError(_CODE, "poses must be a list of at least one 4x4 matrix", field)
    if len(checked) > limit:
        raise ProblemError(_CODE, f"at most {limit} poses are taken at once", field)
    refuse(~np.isfinite(checked).all(axis=(1, 2)), _CODE, "every number must be finite", field)
    last_row = np.abs(checked[:, 3] - [0.0, 0.0, 0.0, 1.0]).max(axis=1)
    refuse(last_row > _LAST_ROW_TOLERANCE, _CODE, "the last row must be 0 0 0 1", field)
    distance = np.abs(checked[:, :3, 3]).max(axis=1)
    refuse(distance > MAX_DISTANCE, _CODE, f"the camera must stay within {MAX_DISTANCE:.0f} units of the origin", field)
    checked[:, :3, :3] = _rotations(checked[:, :3, :3], field)
    checked[:, 3] = [0.0, 0.0, 0.0, 1.0]
    return checked


def rebase(poses: NDArray[np.float64], first_pose: NDArray[np.float64]) -> NDArray[np.float64]:
    """Poses [F,4,4] as seen from `first_pose` [4,4]: first_pose⁻¹ · pose, exactly the identity for first_pose itself.

    Positions are subtracted before they are rotated, so that a path far from the origin keeps its precision.
    """
    inverse_rotation = first_pose[:3, :3].T
    offsets = poses[:, :3, 3] - first_pose[:3, 3]
    relative = _rigid(_product(inverse_rotation, poses[:, :3, :3]), _rotated(inverse_rotation, offsets))
    relative[(poses == first_pose).all(axis=(1, 2))] = np.eye(4)
    return relative


def compose(pose: NDArray[np.float64], relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative poses [F,4,4] placed at `pose` [4,4]: pose · relative, the inverse of `rebase`."""
    rotation = pose[:3, :3]
    return _rigid(_product(rotation, relative[:, :3, :3]), _rotated(rotation, relative[:, :3, 3]) + pose[:3, 3])


def inverse(poses: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse [F,4,4] of rigid transforms [F,4,4]: Rᵀ and −Rᵀ · t."""
    rotations = poses[:, :3, :3].swapaxes(1, 2)
    positions: NDArray[np.float64] = -(rotations * poses[:, None, :3, 3]).sum(axis=2)
    return _rigid(rotations, positions)


def steps_and_turns(poses: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ways in units and turns in degrees, each [F−1] float64, from each of consecutive poses [F,4,4] to the next.

    A turn by the angle a lies at the chord ‖R′ − R‖ = √8 · sin(a/2).
    """
    steps = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1)
    chords = np.linalg.norm(np.diff(poses[:, :3, :3], axis=0), axis=(1, 2))
    return steps, np.degrees(2 * np.arcsin(np.minimum(chords / np.sqrt(8), 1.0)))


def pose_warnings(poses: NDArray[np.float64]) -> list[str]:
    """What is unusual about consecutive poses [F,4,4], the one before them in front: long steps and wide turns."""
    steps, turns = steps_and_turns(poses)
    warnings = []
    if long := np.count_nonzero(steps > MAX_STEP):
        excess = f"above {MAX_STEP:g} in {long} of {len(steps)} frames"
        warnings.append(f"the camera moves up to {steps.max():.3g} units a frame, {excess}")
    if wide := np.count_nonzero(turns > MAX_TURN_DEGREES):
        excess = f"above {MAX_TURN_DEGREES:g}° in {wide} of {len(turns)} frames"
        warnings.append(f"the camera turns up to {turns.max():.3g}° a frame, {excess}")
    return warnings


def _rotations(rotations: NDArray[np.float64], field: str) -> NDArray[np.float64]:
    """Checked rotations [F,3,3], those that are slightly off replaced by the nearest ones."""
    detail = "the upper left 3x3 must be a rotation: orthogonal columns of length 1"
    refuse(np.abs(rotations).max(axis=(1, 2)) > 1 + _REFUSED_ERROR, _CODE, detail, field)
    gram = _product(rotations.swapaxes(1, 2), rotations)
    error = np.abs(gram - np.eye(3)).max(axis=(1, 2))
    refuse(error > _REFUSED_ERROR, _CODE, detail, field)
    refuse(np.linalg.det(rotations) < 0, _CODE, "the rotation is mirrored: its determinant must be +1", field)
    nearest = rotations.copy()
    if (off := error > _PROJECTED_ERROR).any():
        u, _, vt = np.linalg.svd(rotations[off])
        nearest[off] = _product(u, vt)
    return nearest


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Products [F,3,3] of a [3,3] or [F,3,3] with b [F,3,3]."""
    product: NDArray[np.float64] = a[..., 0, None] * b[:, 0, None, :]
    for k in (1, 2):
        product = product + a[..., k, None] * b[:, k, None, :]
    return product


def _rotated(rotation: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points [F,3] turned by one rotation [3,3]."""
    return (
        points[:, 0, None] * rotation[:, 0] + points[:, 1, None] * rotation[:, 1] + points[:, 2, None] * rotation[:, 2]
    )


def _rigid(rotations: NDArray[np.float64], positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Poses [F,4,4] from rotations [F,3,3] and positions [F,3]."""
    poses = np.zeros((len(rotations), 4, 4))
    poses[:, :3, :3], poses[:, :3, 3], poses[:, 3, 3] = rotations, positions, 1.0
    return poses
