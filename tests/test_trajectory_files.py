"""Trajectory files of every syntax: the same path read out of each."""

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from trajectory_samples import CAMERAS, TURN, TURN_DEGREES, content, frame, npy, npz, read, transforms

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import ResolvedTrajectory, TrajectoryFormat, TrajectoryOptions


@pytest.mark.parametrize("name", ["tum", "realestate10k"])
def test_timed_files_keep_their_duration(name: str) -> None:
    file = read(content(name), name)
    assert file.poses.shape == (33, 4, 4)
    assert np.abs(file.poses[[0, 16, 32]] - TURN).max() < 1e-12
    assert file.resolved.duration_s == 2.0
    assert file.resolved.file_poses == 3


@pytest.mark.parametrize(("name", "fps"), [("kitti", 16), ("transforms", None), ("colmap", None), ("colmap", 16.0)])
def test_untimed_files_are_one_pose_a_frame(name: str, fps: float | None) -> None:
    file = read(content(name), name, fps=fps)
    assert file.poses.dtype == np.float64
    assert np.abs(file.poses - TURN).max() < 1e-12


@pytest.mark.parametrize("convention", [None, "opencv", "opengl"])
def test_arrays_name_their_axes(convention: str | None) -> None:
    stored = TURN * np.array([1, -1, -1, 1]) if convention == "opengl" else TURN
    for data in (npy(stored), npz(c2w=stored)):
        file = read(data, convention=convention)
        assert np.array_equal(file.poses, TURN)
        assert file.resolved.axes == (convention or "opencv")


def test_what_was_understood_is_said() -> None:
    resolved = read(content("realestate10k")).resolved
    assert (resolved.format, resolved.axes, resolved.direction) == ("realestate10k", "opencv", "w2c")
    assert (resolved.frames, resolved.duration_s, resolved.intrinsics) == (33, 2.0, "file")
    assert resolved.path_length == pytest.approx(2 + np.hypot(1, 0.5))
    assert resolved.max_step == pytest.approx(2 / 16)
    assert resolved.max_turn_degrees == pytest.approx(TURN_DEGREES / 16)
    assert [warning for warning in resolved.warnings if "units are unknown" in warning]


def test_a_single_pose_is_a_path() -> None:
    resolved = read(npy(TURN[2:])).resolved
    assert (resolved.frames, resolved.duration_s, resolved.path_length, resolved.max_step) == (1, 0.0, 0.0, 0.0)
    assert len(read(b"5 0 0 0 0 0 0 1", "tum").poses) == 1


def test_scale_lengthens_the_path_and_settles_the_units() -> None:
    file = read(content("realestate10k"), scale=2.5)
    assert np.abs(file.poses[32, :3, 3] - [2.5, -1.25, 5.0]).max() < 1e-12
    assert np.abs(file.poses[32, :3, :3] - TURN[2, :3, :3]).max() < 1e-12
    assert not [warning for warning in file.resolved.warnings if "units" in warning]


def test_half_way_is_half_the_turn_and_half_the_way() -> None:
    pose = read(content("tum"), "tum").poses[24]
    half = Rotation.from_euler("y", TURN_DEGREES / 2, degrees=True).as_matrix()
    assert np.abs(pose[:3, :3] - half).max() < 1e-12
    assert np.abs(pose[:3, 3] - [0.5, -0.25, 2.0]).max() < 1e-12


@pytest.mark.parametrize(
    ("fps", "frames"),
    [
        pytest.param(None, 4, id="kitti-is-10-hz"),
        pytest.param(8.0, 5, id="8-hz"),
        pytest.param(32.0, 2, id="32-hz"),
        pytest.param(0.5, 65, id="half-a-hertz"),
    ],
)
def test_rate_of_untimed_files(fps: float | None, frames: int) -> None:
    file = read(content("kitti"), "kitti", fps=fps)
    assert len(file.poses) == frames
    assert [w for w in file.resolved.warnings if "10 poses a second are assumed" in w] == (
        ["the file has no times: 10 poses a second are assumed"] if fps is None else []
    )


def test_uneven_times_are_met_where_they_are() -> None:
    rows = [f"{1305031110 + t} {t} 0 0 0 0 0 1" for t in (0.0, 0.0625, 0.5, 0.9375)]
    positions = read("\n".join(rows).encode(), "tum").poses[:, 0, 3]
    assert np.abs(positions - np.arange(16) / 16).max() < 1e-6


def test_gap_between_poses_is_a_warning() -> None:
    assert [w for w in read(content("tum"), "tum").resolved.warnings if "up to 1 s lie between" in w]


@pytest.mark.parametrize(("fps", "frames"), [(16, 3), (np.array([8.0]), 5), (np.float32(4), 9)])
def test_npz_names_its_rate(fps: object, frames: int) -> None:
    file = read(npz(c2w=TURN, fps=fps))
    assert len(file.poses) == frames
    assert np.abs(file.poses[-1] - TURN[2]).max() < 1e-12


def test_vipe_fills_the_gaps_of_its_frames() -> None:
    file = read(npz(data=TURN, inds=np.array([10, 11, 14])))
    assert len(file.poses) == 5
    assert np.abs(file.poses[[0, 1, 4]] - TURN).max() < 1e-12
    assert len(read(npz(data=TURN, inds=np.array([3, 4, 5])), fps=8).poses) == 5
    assert np.array_equal(read(npz(data=TURN, inds=np.array([3, 4, 5]))).poses, TURN)


def test_realestate_intrinsics_are_fractions() -> None:
    file = read(content("realestate10k"))
    assert file.intrinsics_size == (1, 1)
    assert file.intrinsics is not None
    assert (
        np.abs(
            file.intrinsics[[0, 24, 32]] - [[0.5, 0.875, 0.5, 0.5], [0.55, 0.9625, 0.5, 0.5], [0.6, 1.05, 0.5, 0.5]]
        ).max()
        < 1e-12
    )


@pytest.mark.parametrize(("name", "cameras"), [("transforms", None), ("colmap", CAMERAS)])
def test_intrinsics_in_pixels_follow_the_order_of_the_frames(name: str, cameras: bytes | None) -> None:
    file = read(content(name), name, cameras)
    assert file.intrinsics_size == (640, 360)
    assert file.intrinsics is not None
    assert file.intrinsics.tolist() == [[320, 315, 320, 180], [320, 315, 320, 180], [384, 378, 320, 180]]


def test_files_without_intrinsics_say_so() -> None:
    for name in ("tum", "kitti", "colmap"):
        file = read(content(name), name)
        assert (file.intrinsics, file.intrinsics_size, file.resolved.intrinsics) == (None, None, "none")


@pytest.mark.parametrize("per_frame", [False, True])
@pytest.mark.parametrize("matrix", [False, True])
def test_intrinsics_of_npz(per_frame: bool, matrix: bool) -> None:
    values = np.array([[400, 0, 320], [0, 410, 180], [0, 0, 1.0]]) if matrix else np.array([400, 410, 320, 180.0])
    file = read(npz(c2w=TURN, intrinsics=np.stack([values] * 3) if per_frame else values, fps=8))
    assert file.intrinsics is not None
    assert file.intrinsics.tolist() == [[400, 410, 320, 180]] * 5
    assert file.intrinsics_size is None


@pytest.mark.parametrize(
    ("fields", "intrinsics", "size"),
    [
        pytest.param({"fl_x": 100, "w": 80, "h": 60}, [100, 100, 40, 30], (80, 60), id="square-pixels"),
        pytest.param({"camera_angle_x": np.pi / 2, "w": 80, "h": 60}, [40, 40, 40, 30], (80, 60), id="angle"),
        pytest.param(
            {"camera_angle_x": np.pi / 2, "camera_angle_y": np.pi / 2}, [0.5, 0.5, 0.5, 0.5], (1, 1), id="angles-alone"
        ),
        pytest.param({"fl_x": 100, "cx": 41, "cy": 31}, [100, 100, 41, 31], None, id="no-size"),
        pytest.param({"camera_angle_x": np.pi / 2}, None, None, id="blender"),
        pytest.param({}, None, None, id="nothing"),
    ],
)
def test_lens_of_transforms(fields: dict[str, object], intrinsics: list[float] | None, size: object) -> None:
    file = read(transforms([frame(0), frame(1)], **fields))
    assert file.intrinsics_size == size
    assert (intrinsics is None) == (file.intrinsics is None)
    if file.intrinsics is not None:
        assert np.abs(file.intrinsics - np.array(intrinsics)).max() < 1e-12
    assert any("not used" in warning for warning in file.resolved.warnings) == (
        "camera_angle_x" in fields and size is None
    )


def test_auto_takes_what_nothing_else_looks_like() -> None:
    for data, name in (
        (npy(TURN), "npy"),
        (npz(c2w=TURN), "npz"),
        (content("realestate10k"), "realestate10k"),
        (b"\n".join(content("realestate10k").splitlines()[1:]), "realestate10k"),
        (b"\xef\xbb\xbf" + content("realestate10k").replace(b"\n", b"\r\n"), "realestate10k"),
        (content("transforms"), "transforms"),
        (content("colmap"), "colmap"),
    ):
        assert read(data).resolved.format == name


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(content("tum"), id="eight-columns"),
        pytest.param(content("kitti"), id="twelve-columns"),
        pytest.param(b"\n".join(content("colmap").splitlines()[4:]), id="colmap-without-header"),
        pytest.param(b'{"camera_path": []}', id="other-json"),
        pytest.param(b"", id="empty"),
        pytest.param(bytes(range(256)), id="bytes"),
        pytest.param(b"0 " * 40_000, id="long-line"),
    ],
)
def test_auto_never_guesses(data: bytes) -> None:
    with pytest.raises(ProblemError, match="npy, npz, realestate10k, tum, kitti, transforms, colmap") as error:
        read(data)
    assert error.value.field == "trajectory.format"


def test_every_format_and_option_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trajectories.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {*get_args(TrajectoryFormat), *TrajectoryOptions.model_fields}
    assert all(f"`{field}`" in page for field in ResolvedTrajectory.model_fields)
