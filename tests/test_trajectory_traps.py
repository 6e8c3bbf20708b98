"""What is refused of trajectory files, and where it says the fault stands."""

import io
import zipfile
from random import Random

import numpy as np
import pytest
from trajectory_samples import (
    CAMERAS,
    FILES,
    TURN,
    Poses,
    colmap,
    content,
    frame,
    npy,
    npz,
    orbit,
    read,
    transforms,
    tripod,
)

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import MAX_FILE_BYTES
from longtake.server.camera.poses import check_poses
from longtake.server.camera.trajectory_files import TrajectoryFile


def refusal(data: bytes, name: str = "auto", cameras: bytes | None = None, **options: object) -> str:
    """Why a file is refused, as `field: detail`."""
    with pytest.raises(ProblemError) as error:
        read(data, name, cameras, **options)
    assert error.value.code == "trajectory_invalid"
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("tum", "101.0", "100.0", "line 4: its time must be after"),
        ("tum", "0.9999", "0.98", "line 4: its quaternion must have the length 1"),
        ("tum", "0 0 0 1\n", "0 0 0 0\n", "line 2: its quaternion"),
        ("tum", "102.0 1", "102.0 1e400", "line 5: every number must be finite"),
        ("tum", "102.0 1", "102.0 nan", "line 5: it must hold 8 numbers"),
        ("tum", "102.0 1", "102.0 1_0", "line 5: it must hold 8 numbers"),
        ("tum", "102.0 1", "102.0 ١", "line 5: it must hold 8 numbers"),
        ("tum", "102.0 1", "102.0", "line 5: it must hold 8 numbers: t tx ty tz qx qy qz qw"),
        ("tum", "102.0 1", "102.0 2e6", "line 5: the camera must stay within"),
        ("tum", "102.0", "10200.0", "longer than 65536 frames"),
        ("tum", "102.0", "1e300", "longer than 65536 frames"),
        ("realestate10k", "6000000 0.5", "5000000 0.5", "line 3: its time"),
        ("realestate10k", "7000000 0.6 1.050 0.5 0.5 0.0 0.0", "7000000 0.6 1.05 0.5 0.5 0.1 0.0", "line 4: k1 is not"),
        ("realestate10k", "7000000 0.6 1.050 0.5 0.5 0.0 0.0", "7000000 0.6 1.05 0.5 0.5 0.0 0.1", "line 4: k2 is not"),
        ("realestate10k", "7000000 0.6", "7000000 -0.6", "line 4: focal lengths must be above zero"),
        ("realestate10k", "0.8 0 -0.6", "0.9 0 -0.6", "line 4: the upper left 3x3 must be a rotation"),
        ("kitti", "8.0e-1 0 6.0e-1 1 0 1", "8.0e-1 0 6.0e-1 1 0 -1", "line 3: the rotation is mirrored"),
        ("kitti", "8.0e-1 2\n", "8.0e-1 2 0 0 0 1\n", "line 3: it must hold 12 numbers"),
        ("transforms", "images/9.png", "images/10.png", "two pictures have the same name"),
        ("transforms", '"images/9.png"', "9", "frames[1].file_path: "),
        ("transforms", "[[1, 0, 0, 0]", "[[NaN, 0, 0, 0]", "frames[1].transform_matrix[0][0]: "),
        ("transforms", "[[1, 0, 0, 0], ", "[", "frames[1].transform_matrix"),
        ("transforms", "[0, -1, 0, -0.5]", "[0, 1, 0, -0.5]", "frames[0]: the rotation is mirrored"),
        ("transforms", '"k1": 0.0', '"k1": 0.05', "frames[1]: k1 is not zero"),
        ("transforms", '"fl_x": 384.0', '"p2": 1, "fl_x": 384.0', "frames[0]: p2 is not zero"),
        ("transforms", '"k1": 0.0', '"camera_model": "OPENCV_FISHEYE"', "frames[1]: its camera model"),
        ("transforms", '"k1": 0.0', '"is_fisheye": true', "frames[1]: its camera model"),
        ("transforms", '"fl_x": 384.0', '"w": 320, "fl_x": 384.0', "frames[0]: w and h must be the same"),
        ("transforms", '"frames"', '"pictures"', "frames: Field required"),
        ("colmap", "\n\n5 1", "\n5 1", "line 8: the line after an image"),
        ("colmap", "-1 14.0 31.0 4", "-1 14.0 31.0", "line 6: the line after an image"),
        ("colmap", "frame_9.png", "frame_8.png", "two pictures have the same name"),
        ("colmap", "5 1 0 0 0", "5 1 0 0.2 0", "line 9: its quaternion"),
        ("colmap", "5 1 0 0 0", "x 1 0 0 0", "line 9: it must hold IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"),
        ("colmap", "0.5 -2.2 7", "0.5 1e999 7", "line 5: every number must be finite"),
        ("colmap", " clip 1/frame_9.png", "", "line 9: it must hold"),
    ],
)  # fmt: skip
def test_traps_are_refused_where_they_stand(name: str, old: str, new: str, told: str) -> None:
    text = content(name).decode()
    assert old in text
    assert told in refusal(text.replace(old, new, 1).encode(), name)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("2 PINHOLE", "3 PINHOLE", "line 7: its camera is not in cameras.txt"),
        ("2 PINHOLE", "7 PINHOLE", "cameras.txt, line 4: it must hold CAMERA_ID MODEL"),
        ("PINHOLE 640", "PINHOLE 320", "line 5: all pictures must have the same size"),
        ("PINHOLE 640", "PINHOLE 0", "cameras.txt, line 3: its sides"),
        ("PINHOLE", "SIMPLE_PINHOLE", "cameras.txt, line 3: it must hold"),
        ("PINHOLE", "OPENCV_FISHEYE", "cameras.txt, line 3: it must hold"),
        ("180 0 0 0 0", "180 0 -0.01 0 0", "cameras.txt, line 4: k2 is not zero"),
        ("320 315", "0 315", "line 7: focal lengths"),
    ],
)
def test_traps_of_cameras(old: str, new: str, told: str) -> None:
    assert told in refusal(content("colmap"), "colmap", CAMERAS.decode().replace(old, new, 1).encode())


@pytest.mark.parametrize(
    ("model", "intrinsics"),
    [
        ("SIMPLE_PINHOLE 640 360 300 310 170", [300, 300, 310, 170]),
        ("SIMPLE_RADIAL 640 360 300 310 170 0.1", [300, 300, 310, 170]),
        ("RADIAL 640 360 300 310 170 0.1 0.2", [300, 300, 310, 170]),
        ("FULL_OPENCV 640 360 300 301 310 170 1 2 3 4 5 6 7 8", [300, 301, 310, 170]),
    ],
)
def test_models_of_colmap(model: str, intrinsics: list[float]) -> None:
    cameras = f"1 {model}\n2 {model}\n7 {model}\n".encode()
    file = read(content("colmap"), "colmap", cameras, ignore_distortion="PINHOLE" not in model)
    assert file.intrinsics is not None
    assert file.intrinsics.tolist() == [intrinsics] * 3
    assert any("is left out" in warning for warning in file.resolved.warnings) == ("PINHOLE" not in model)


def test_distortion_is_left_out_on_demand() -> None:
    bent = content("transforms").replace(b'"k2": 0.0', b'"k2": 0.1')
    warnings = read(bent, ignore_distortion=True).resolved.warnings
    assert "lens distortion (k2) is left out" in warnings
    fisheye = transforms([frame(0, k1=0.1), frame(1, is_fisheye=True)])
    assert "frames[1]: its camera model" in refusal(fisheye, ignore_distortion=True)


@pytest.mark.parametrize(
    ("data", "name", "options", "field"),
    [
        pytest.param(content("tum"), "tum", {"fps": 30.0}, "fps", id="fps-of-tum"),
        pytest.param(content("realestate10k"), "auto", {"fps": 30.0}, "fps", id="fps-of-realestate10k"),
        pytest.param(npz(c2w=TURN, fps=16), "npz", {"fps": 16.0}, "fps", id="fps-twice"),
        pytest.param(content("kitti"), "kitti", {"convention": "opengl"}, "convention", id="convention-of-kitti"),
        pytest.param(npy(TURN), "npy", {"ignore_distortion": True}, "ignore_distortion", id="distortion-of-npy"),
        pytest.param(npy(TURN), "npy", {"cameras": b""}, "cameras", id="cameras-of-npy"),
    ],
)
def test_options_without_effect_are_refused(data: bytes, name: str, options: dict[str, object], field: str) -> None:
    cameras = b"" if "cameras" in options else None
    given = {option: value for option, value in options.items() if option != "cameras"}
    assert refusal(data, name, cameras, **given).startswith(f"trajectory.{field}: ")


def test_small_errors_are_projected_away_before_inversion() -> None:
    drift = np.zeros((1, 4, 4))
    drift[:, 0, 2] = 3e-4
    rows = np.linalg.inv(TURN) + drift
    lines = [f"{k} 1 1 0.5 0.5 0 0 " + " ".join(map(str, row[:3].ravel())) for k, row in enumerate(rows)]
    poses = read("\n".join(lines).encode(), "realestate10k").poses
    assert np.abs(check_poses(poses, "poses") - poses).max() < 1e-12


@pytest.mark.parametrize("syntax", ["transforms", "colmap"])
@pytest.mark.parametrize(
    ("poses", "told"),
    [
        pytest.param(orbit(24, 300.0)[Random(1).sample(range(24), 24)], "turns more than 60°", id="shuffled-orbit"),
        pytest.param(orbit(24, 50.0)[Random(2).sample(range(24), 24)], "as in a random order", id="shuffled-arc"),
        pytest.param(
            np.concatenate([orbit(9, 9.0), orbit(9, 9.0) + 30 * np.eye(4, k=3)]), "10 times as far", id="leap"
        ),
    ],
)
def test_photographs_are_no_path(syntax: str, poses: Poses, told: str) -> None:
    data = colmap(poses) if syntax == "colmap" else transforms([frame(k, pose) for k, pose in enumerate(poses)])
    assert told in refusal(data, syntax)


@pytest.mark.parametrize(
    "poses",
    [
        pytest.param(orbit(24, 300.0), id="orbit"),
        pytest.param(np.concatenate([orbit(24, 350.0)] * 3), id="three-rounds"),
        pytest.param(np.tile(np.eye(4), (9, 1, 1)), id="standing"),
        pytest.param(np.concatenate([np.tile(np.eye(4), (9, 1, 1)), TURN[1:]]), id="starting"),
        pytest.param(tripod(20), id="tripod"),
    ],
)
def test_videos_are_paths(poses: Poses) -> None:
    assert np.abs(read(colmap(poses)).poses - poses).max() < 1e-9


def test_limits() -> None:
    assert "larger than 16 MiB" in refusal(bytes(MAX_FILE_BYTES + 1))
    assert "larger than 16 MiB" in refusal(content("colmap"), "colmap", bytes(MAX_FILE_BYTES + 1))
    assert "line 2: it is longer than 64 KiB" in refusal(b"#\n" + b"1 " * 40_000, "tum")
    assert "more than 65536 poses" in refusal(b"1 0 0 0 0 1 0 0 0 0 1 0\n" * 65_537, "kitti")
    assert "longer than 65536 frames" in refusal(npy(TURN), fps=1e-4)
    assert len(read(b"1 0 0 0 0 1 0 0 0 0 1 0\n" * 65_536, "kitti", fps=16).poses) == 65_536


def test_line_of_points_may_be_long() -> None:
    points = " ".join(["1.5 2.5 -1"] * 20_000)
    assert len(read(content("colmap").replace(b"12.5 30.25 -1 14.0 31.0 4", points.encode())).poses) == 3


@pytest.mark.parametrize("opening", [b"[", b'{"frames":', b'{"transform_matrix": [{"frames": ['])
def test_deep_json_is_refused(opening: bytes) -> None:
    assert "trajectory: " in refusal(opening * 200_000, "transforms")


def test_announced_size_of_an_array_is_not_believed() -> None:
    huge = io.BytesIO()
    with zipfile.ZipFile(huge, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c2w.npy", npy(np.zeros((2, 4, 4))) + bytes(50_000_000))
    assert "c2w: it is not a complete .npy file" in refusal(huge.getvalue())
    assert "c2w: its array must have the shape [F,4,4]" in refusal(npz(c2w=np.zeros((65_537, 4, 4), np.int8)))


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"poses": TURN}, "neither c2w (SANA-WM) nor data and inds (ViPE)"),
        ({"c2w": TURN[:, :3]}, "c2w: its array must have the shape [F,4,4]"),
        ({"c2w": TURN.astype(object)}, "c2w: it is not a complete .npy file of numbers"),
        ({"c2w": TURN + 0j}, "c2w: it is not a complete .npy file of numbers"),
        ({"c2w": -TURN}, "c2w[0]: the last row"),
        ({"c2w": TURN, "fps": 0}, "fps: it must be above 0"),
        ({"c2w": TURN, "fps": np.nan}, "fps: it must be above 0"),
        ({"c2w": TURN, "fps": [16, 16]}, "fps: its array must have the shape []"),
        ({"c2w": TURN, "intrinsics": np.ones((2, 4))}, "intrinsics: its array must have the shape [4], [3,3]"),
        ({"c2w": TURN, "intrinsics": np.ones((3, 3))}, "intrinsics: its matrices must be fx 0 cx"),
        ({"c2w": TURN, "intrinsics": [np.inf, 1, 1, 1]}, "c2w[0]: every number must be finite"),
        ({"data": TURN, "inds": [0, 2, 1]}, "inds[2]: its time must be after"),
        ({"data": TURN, "inds": [0, 2]}, "inds: its array must have the shape [F]"),
    ],
)
def test_bad_npz(arrays: dict[str, object], told: str) -> None:
    assert told in refusal(npz(**arrays))


def test_array_refusals_name_the_pose() -> None:
    sheared = TURN.copy()
    sheared[1, 0, 1] = 0.01
    assert "array[1]: the upper left 3x3" in refusal(npy(sheared))


def test_nothing_of_the_content_is_repeated() -> None:
    for name in FILES:
        told = refusal(content(name).replace(b"2", b"hunter2").replace(b"images", b"hunter"), name)
        assert "hunter" not in told


def seeds() -> list[tuple[str, bytes]]:
    return [
        *((name, content(name)) for name in FILES),
        ("npy", npy(TURN)),
        ("npz", npz(c2w=TURN, fps=8, intrinsics=np.ones((3, 4)))),
        ("npz", npz(data=TURN, inds=[0, 3, 4])),
    ]


def mutated(data: bytes, random: Random) -> bytes:
    """The file with a few bytes changed, cut, repeated or put in."""
    for _ in range(random.randint(1, 4)):
        at, length = random.randrange(len(data)), random.choice([1, 1, 2, 8, 40])
        part = random.choice(
            [
                bytes([random.randrange(256)]),
                b"",
                data[at : at + length] * 3,
                random.choice([b"nan", b"1e999", b"-", b"\n", b"\x00", b"null", b"[[[", b"9" * 400, b'"', b"0", b"e"]),
            ]
        )
        data = data[:at] + part + data[at + length :] or b"\n"
    return data


def attempt(data: bytes, name: str, cameras: bytes | None = None) -> TrajectoryFile | ProblemError:
    try:
        return read(data, name, cameras)
    except ProblemError as problem:
        return problem


@pytest.mark.parametrize("seed", range(len(seeds())), ids=[f"{name}-{k}" for k, (name, _) in enumerate(seeds())])
def test_mutated_files_give_a_path_or_a_problem(seed: int) -> None:
    name, data = seeds()[seed]
    random = Random(seed)
    refused = 0
    for _ in range(400):
        file = attempt(mutated(data, random), random.choice([name, name, "auto"]))
        if isinstance(file, ProblemError):
            assert file.code == "trajectory_invalid"
            refused += 1
        else:
            assert len(file.poses) == file.resolved.frames
            assert np.abs(check_poses(file.poses, "poses", limit=65_536) - file.poses).max() < 1e-9
            assert file.intrinsics is None or file.intrinsics.shape == (len(file.poses), 4)
    assert refused > 50


def test_mutated_cameras_give_intrinsics_or_a_problem() -> None:
    random = Random(0)
    files = [attempt(content("colmap"), "colmap", mutated(CAMERAS, random)) for _ in range(300)]
    problems = [file for file in files if isinstance(file, ProblemError)]
    assert 0 < len(problems) < 300
    assert {problem.code for problem in problems} == {"trajectory_invalid"}
    assert all(file.intrinsics is not None for file in files if not isinstance(file, ProblemError))
