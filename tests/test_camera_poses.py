"""Poses: what is refused and by which name, what is repaired, and relative poses in float64."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.spatial.transform import Rotation

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.poses import check_poses, compose, pose_warnings, rebase, to_opencv

GOLDEN = Path(__file__).parent / "data" / "golden" / "camera.safetensors"
Poses = NDArray[np.float64]


def random_poses(count: int, distance: float = 3.0, seed: int = 0) -> Poses:
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.random(count, rng=rng).as_matrix()
    poses[:, :3, 3] = rng.normal(scale=distance, size=(count, 3))
    return poses


def with_entry(row: int, column: int, value: float) -> Poses:
    poses = random_poses(5)
    poses[3, row, column] = value
    return poses


def with_rotation(rotation: Poses) -> Poses:
    poses = random_poses(5)
    poses[3, :3, :3] = poses[3, :3, :3] @ rotation
    return poses


def test_opengl_camera_looks_along_minus_z() -> None:
    pose = random_poses(1)[0]
    turned = to_opencv(pose, "opengl")
    assert np.array_equal(turned[:, [0, 3]], pose[:, [0, 3]])
    assert np.array_equal(turned[:, [1, 2]], -pose[:, [1, 2]])
    assert np.array_equal(to_opencv(pose, "opencv"), pose)


@pytest.mark.parametrize(
    "poses",
    [
        pytest.param(random_poses(7), id="float64"),
        pytest.param(random_poses(7).astype(np.float32), id="float32"),
        pytest.param(random_poses(1).tolist(), id="lists"),
        pytest.param([np.eye(4, dtype=int).tolist()], id="integers"),
        pytest.param(random_poses(4096), id="most-allowed"),
    ],
)
def test_rigid_poses_pass_unchanged(poses: object) -> None:
    checked = check_poses(poses, "camera.poses")  # type: ignore[arg-type]
    assert checked.dtype == np.float64
    assert np.array_equal(checked, np.asarray(poses, np.float64))


@pytest.mark.parametrize(
    ("poses", "field"),
    [
        pytest.param(with_entry(1, 2, np.nan), "camera.poses[3]", id="nan"),
        pytest.param(with_entry(0, 3, np.inf), "camera.poses[3]", id="infinite"),
        pytest.param(with_entry(2, 3, 1.1e6), "camera.poses[3]", id="too-far"),
        pytest.param(with_entry(0, 0, 1e300), "camera.poses[3]", id="huge-rotation"),
        pytest.param(with_entry(3, 0, 1e-5), "camera.poses[3]", id="last-row"),
        pytest.param(with_entry(3, 3, 2.0), "camera.poses[3]", id="homogeneous-scale"),
        pytest.param(with_rotation(np.diag([1.0, 1.0, -1.0])), "camera.poses[3]", id="mirrored"),
        pytest.param(with_rotation(np.diag([1.001, 1.001, 1.001])), "camera.poses[3]", id="scaled"),
        pytest.param(with_rotation(np.array([[1, 2e-3, 0], [0, 1, 0], [0, 0, 1]])), "camera.poses[3]", id="sheared"),
        pytest.param(with_rotation(np.zeros((3, 3))), "camera.poses[3]", id="zero-rotation"),
        pytest.param(np.eye(4), "camera.poses", id="one-matrix"),
        pytest.param(np.zeros((0, 4, 4)), "camera.poses", id="none"),
        pytest.param([], "camera.poses", id="empty-list"),
        pytest.param(random_poses(2)[:, :3], "camera.poses", id="3x4"),
        pytest.param(random_poses(4)[None], "camera.poses", id="four-axes"),
        pytest.param([[[1.0, 0.0], [1.0]]], "camera.poses", id="ragged"),
        pytest.param([[["1"] * 4] * 4], "camera.poses", id="text"),
        pytest.param([[[None] * 4] * 4], "camera.poses", id="nulls"),
        pytest.param(random_poses(2) + 0j, "camera.poses", id="complex"),
        pytest.param([[[10**400] * 4] * 4], "camera.poses", id="huge-integers"),
        pytest.param(random_poses(4097), "camera.poses", id="too-many"),
    ],
)
def test_bad_poses_are_refused_by_name(poses: object, field: str) -> None:
    with pytest.raises(ProblemError) as error:
        check_poses(poses, "camera.poses")  # type: ignore[arg-type]
    assert (error.value.code, error.value.field) == ("poses_invalid", field)


def test_slightly_skewed_rotation_becomes_the_nearest_one() -> None:
    exact = random_poses(6)
    skewed = exact.copy()
    skewed[1, :3, :3] = exact[1, :3, :3] @ np.diag([1 + 2e-4, 1.0, 1 - 2e-4])
    skewed[2, :3, :3] += 1e-8
    before = skewed.copy()
    checked = check_poses(skewed, "poses")
    assert np.array_equal(skewed, before)
    assert np.allclose(checked[1], exact[1], rtol=0, atol=1e-12)
    assert np.array_equal(np.delete(checked, 1, axis=0), np.delete(skewed, 1, axis=0))


def test_last_row_is_made_exact() -> None:
    poses = random_poses(2)
    poses[1, 3] = [1e-7, -1e-7, 0.0, 1 + 1e-7]
    assert check_poses(poses, "poses")[1, 3].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_golden_relative_poses() -> None:
    golden = load_file(GOLDEN)
    absolute, relative = golden["rel.c2w_abs"][0].astype(np.float64), golden["rel.c2w_rel"][0]
    assert np.abs(rebase(absolute, absolute[0]) - relative).max() < 1e-6


def test_first_pose_becomes_exactly_the_identity() -> None:
    poses = random_poses(9, distance=5e3)
    relative = rebase(poses, poses[4])
    assert np.array_equal(relative[4], np.eye(4))
    assert not np.array_equal(relative[3], np.eye(4))


def test_relative_poses_far_from_the_origin_keep_float64() -> None:
    near = random_poses(11)
    far = near.copy()
    far[:, :3, 3] += 2.0**19
    assert np.abs(rebase(far, far[0]) - rebase(near, near[0])).max() < 1e-9


def test_compose_undoes_rebase() -> None:
    poses = random_poses(8, seed=1)
    first = random_poses(1, seed=2)[0]
    assert np.abs(compose(first, rebase(poses, first)) - poses).max() < 1e-13
    assert np.abs(rebase(poses, first) - np.linalg.inv(first) @ poses).max() < 1e-13


def test_bits_do_not_depend_on_how_many_poses_are_rebased() -> None:
    poses = random_poses(37)
    whole = rebase(poses, poses[5])
    parts = [rebase(poses[start : start + 3], poses[5]) for start in range(0, 37, 3)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_ordinary_motion_has_no_warnings() -> None:
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, 2, 3] = [0.0, 0.5, 0.9, 1.4]
    poses[2:, :3, :3] = Rotation.from_euler("y", 9.99, degrees=True).as_matrix()
    assert pose_warnings(poses) == []
    assert pose_warnings(poses[:1]) == []


def test_long_steps_and_wide_turns_are_warned_of() -> None:
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, 0, 3] = [0.0, 0.75, 1.0, 1.0]
    poses[2:, :3, :3] = Rotation.from_euler("x", 180.0, degrees=True).as_matrix()
    moves, turns = pose_warnings(poses)
    assert "0.75 units" in moves
    assert "in 1 of 3 frames" in moves
    assert "180°" in turns
