"""`longtake trajectory`: what it prints, draws and writes."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from trajectory_samples import DATA, FILES, TURN, Poses, content, npy, read
from typer.testing import CliRunner

from longtake.server.trajectory_cli import trajectory_app


def shrunk(poses: Poses, factor: float) -> Poses:
    """The same path on another scale."""
    small = poses.copy()
    small[:, :3, 3] *= factor
    return small


def test_show_prints_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "path.png"
    shown = CliRunner().invoke(trajectory_app, ["show", str(DATA / FILES["realestate10k"]), "--out", str(picture)])
    assert shown.exit_code == 0
    assert "format      realestate10k: world to camera, OpenCV axes, 3 poses" in shown.output
    assert "frames      33 at 16 fps, 2 s" in shown.output
    with Image.open(picture) as image:
        assert image.size == (1000, 960)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    green, red = (np.abs(pixels - colour).max(axis=2) < 8 for colour in ([34, 139, 58], [200, 40, 45]))
    (start_y, start_x), (end_y, end_x) = (np.argwhere(mark[:720]).mean(axis=0) for mark in (green, red))
    assert start_x < end_x
    assert start_y > end_y


@pytest.mark.parametrize(
    "poses", [TURN[:1], np.tile(TURN[2], (5, 1, 1)), shrunk(TURN, 1e-7)], ids=["one", "still", "tiny"]
)
def test_any_path_can_be_drawn(tmp_path: Path, poses: Poses) -> None:
    file = tmp_path / "path.npy"
    file.write_bytes(npy(poses))
    shown = CliRunner().invoke(trajectory_app, ["show", str(file), "-o", str(tmp_path / "path.png")])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "path.png").stat().st_size > 1000


def test_convert_goes_round(tmp_path: Path) -> None:
    out = tmp_path / "turn.npy"
    args = ["convert", str(DATA / FILES["colmap"]), "--cameras", str(DATA / "turn_cameras.txt"), "-o", str(out)]
    assert CliRunner().invoke(trajectory_app, args).exit_code == 0
    again = read(out.read_bytes())
    assert np.array_equal(again.poses, read(content("colmap"), "colmap").poses)
    assert again.resolved.path_length == read(content("colmap"), "colmap").resolved.path_length


def test_convert_warns_as_show_does_and_of_what_it_leaves_out(tmp_path: Path) -> None:
    file, out = str(DATA / FILES["realestate10k"]), tmp_path / "turn.npy"
    shown = CliRunner().invoke(trajectory_app, ["show", file])
    told = CliRunner().invoke(trajectory_app, ["convert", file, "-o", str(out)]).output.splitlines()
    warnings = [
        line.removeprefix("warning").strip() for line in shown.output.splitlines() if line.startswith("warning")
    ]
    left_out = "the file's intrinsics are left out: the .npy holds poses alone"
    assert any("its units are unknown" in warning for warning in warnings)
    assert told == [f"{out}: 33 poses", *(f"warning: {warning}" for warning in (*warnings, left_out))]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        pytest.param([str(DATA / FILES["tum"])], "--format: what it is", id="uncertain"),
        pytest.param([str(DATA / FILES["tum"]), "--format", "kitti"], "line 2: it must hold 12", id="other-format"),
        pytest.param([str(DATA / FILES["kitti"]), "--format", "kitti", "--fps", "0"], "--fps: ", id="no-rate"),
        pytest.param(
            [str(DATA / FILES["kitti"]), "--format", "kitti", "--ignore-distortion"],
            "--ignore-distortion: it goes with",
            id="no-lens",
        ),
        pytest.param([str(DATA / "none.txt")], "no such file or folder: ", id="missing"),
    ],
)
def test_failures_are_one_line(args: list[str], told: str) -> None:
    shown = CliRunner().invoke(trajectory_app, ["show", *args])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert re.fullmatch(rf"error: .*{re.escape(told)}.*\n", shown.stderr)
