"""Trajectory files: what is read, what is refused, and a path continued from any frame."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.trajectory import MAX_FILE_POSES, continue_from, load_trajectory

Poses = NDArray[np.float64]
FORWARD = Rotation.from_euler("zyx", [20.0, 65.0, -10.0], degrees=True).as_matrix()


def straight_path(count: int, origin: float = 0.0) -> Poses:
    """A camera that looks along its path and moves 0.1 units a frame, from (origin, −origin, origin)."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = FORWARD
    poses[:, :3, 3] = np.array([origin, -origin, origin]) + 0.1 * np.arange(count)[:, None] * FORWARD[:, 2]
    return poses


def saved(folder: Path, array: NDArray[np.generic]) -> Path:
    path = folder / "path.npy"
    np.save(path, array)
    return path


def with_header(folder: Path, header: str, version: int = 1) -> Path:
    path = folder / "path.npy"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + np.eye(4).tobytes())
    return path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda poses: poses, id="float64"),
        pytest.param(lambda poses: poses.astype(">f8"), id="big-endian"),
        pytest.param(np.asfortranarray, id="fortran-order"),
        pytest.param(lambda poses: poses.astype(np.float32), id="float32"),
    ],
)
def test_file_gives_its_poses(tmp_path: Path, layout: type[np.ndarray]) -> None:
    array = layout(straight_path(5))
    loaded = load_trajectory(saved(tmp_path, array))
    assert loaded.dtype == np.float64
    assert np.array_equal(loaded, array)


@pytest.mark.parametrize(
    ("array", "code", "field"),
    [
        pytest.param(np.eye(4), "trajectory_invalid", "trajectory", id="one-matrix"),
        pytest.param(straight_path(3)[:, :3], "trajectory_invalid", "trajectory", id="3x4"),
        pytest.param(np.zeros((0, 4, 4)), "trajectory_invalid", "trajectory", id="no-poses"),
        pytest.param(np.zeros((MAX_FILE_POSES + 1, 4, 4), np.int8), "trajectory_invalid", "trajectory", id="too-many"),
        pytest.param(straight_path(3) + 0j, "trajectory_invalid", "trajectory", id="complex"),
        pytest.param(np.full((3, 4, 4), "1"), "trajectory_invalid", "trajectory", id="text"),
        pytest.param(straight_path(3) * np.nan, "poses_invalid", "trajectory[0]", id="nan"),
        pytest.param(straight_path(3) * [[[1], [1], [-1], [1]]], "poses_invalid", "trajectory[0]", id="mirrored"),
    ],
)
def test_bad_arrays_are_refused_by_name(tmp_path: Path, array: NDArray[np.generic], code: str, field: str) -> None:
    with pytest.raises(ProblemError) as error:
        load_trajectory(saved(tmp_path, array))
    assert (error.value.code, error.value.field) == (code, field)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("{'descr': '<f8', 'fortran_order': False, 'shape': (9000000, 4, 4), }", id="promises-too-much"),
        pytest.param("{'descr': '<f8', 'fortran_order': False, 'shape': (2, 4, 4), }", id="truncated"),
        pytest.param("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 4, 4), }", id="negative"),
        pytest.param("{'descr': '|O', 'fortran_order': False, 'shape': (1, 4, 4), }", id="objects"),
        pytest.param("{'descr': '<f8', 'fortran_order': False, 'shape': ((((1, 4, 4), }", id="unclosed"),
        pytest.param("(" * 9000 + ")" * 9000, id="nested"),
        pytest.param("{1: 2, 'a': 3, 'b': 4}", id="other-keys"),
        pytest.param("", id="empty-header"),
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_bad_headers_are_refused(tmp_path: Path, header: str, version: int) -> None:
    with pytest.raises(ProblemError) as error:
        load_trajectory(with_header(tmp_path, header, version), "camera.file")
    assert (error.value.code, error.value.field) == ("trajectory_invalid", "camera.file")


class Pickled:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Path, ("never",)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x93NUMPY", id="magic-only"),
        pytest.param(b"t fx fy cx cy\n1 2 3 4 5\n", id="text"),
        pytest.param(b"PK\x03\x04" + bytes(60), id="zip"),
        pytest.param(pickle.dumps(Pickled()), id="pickle"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "path.npy"
    path.write_bytes(content)
    with pytest.raises(ProblemError) as error:
        load_trajectory(path)
    assert error.value.code == "trajectory_invalid"


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trajectory(tmp_path / "none.npy")


def test_path_continues_in_the_world_of_the_first_pose() -> None:
    first = np.eye(4)
    first[:3, :3], first[:3, 3] = Rotation.from_euler("y", 90.0, degrees=True).as_matrix(), [7.0, 8.0, 9.0]
    poses = continue_from(straight_path(6, origin=50.0), first, 2, 3)
    assert np.abs(poses[:, :3, 3] - [[7.2, 8, 9], [7.3, 8, 9], [7.4, 8, 9]]).max() < 1e-12
    assert np.abs(poses[:, :3, :3] - first[:3, :3]).max() < 1e-15


def test_row_zero_is_the_first_pose_itself() -> None:
    path = straight_path(4, origin=5680.0)
    assert np.array_equal(continue_from(path, np.eye(4), 0, None)[0], np.eye(4))
    assert len(continue_from(path, np.eye(4), 1, None)) == 3


def test_path_far_from_the_origin_keeps_float64() -> None:
    far = continue_from(straight_path(9, origin=5680.0), np.eye(4), 1, None)
    near = continue_from(straight_path(9), np.eye(4), 1, None)
    assert np.abs(far - near).max() < 1e-11


def test_any_cut_gives_the_same_bits() -> None:
    path, first = straight_path(25, origin=100.0), straight_path(3, origin=-4.0)[2]
    path[7:, :3, :3] = FORWARD.T
    parts = [continue_from(path, first, start, min(5, 25 - start)) for start in range(1, 25, 5)]
    assert np.concatenate(parts).tobytes() == continue_from(path, first, 1, None).tobytes()


@pytest.mark.parametrize(
    ("start", "count", "code", "field"),
    [
        pytest.param(5, None, "trajectory_exhausted", "trajectory", id="nothing-left"),
        pytest.param(9, 1, "trajectory_exhausted", "trajectory", id="past-the-end"),
        pytest.param(3, 3, "trajectory_exhausted", "trajectory", id="too-few-left"),
        pytest.param(-1, 2, "invalid_request", "trajectory.start", id="negative-start"),
        pytest.param(1, 0, "invalid_request", "trajectory.count", id="no-frames"),
    ],
)
def test_frames_outside_the_file_are_refused(start: int, count: int | None, code: str, field: str) -> None:
    with pytest.raises(ProblemError) as error:
        continue_from(straight_path(5), np.eye(4), start, count)
    assert (error.value.code, error.value.field) == (code, field)
