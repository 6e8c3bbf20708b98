"""`longtake scene`: what a first frame of the trained model looks like, and that a server takes what is written."""

import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from server_fixtures import post

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.actions import Controller, parse_actions, walk
from longtake.server.camera.trajectory import load_trajectory
from longtake.server.demo import AWAY, BACK, BEGINNING, FIRST_FRAME
from longtake.server.scene import draw_scene, run_scene

ASSETS = Path(__file__).parents[1] / "server" / "assets"


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of scene 3 with a drawn path, and what was printed."""
    folder = tmp_path_factory.mktemp("scenes") / "new"
    command = [sys.executable, "-m", "longtake.server", "scene", "--seed", "3", "--frames", "30", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return folder, done.stdout


def test_it_writes_a_frame_and_a_path_and_says_how_to_go_on(written: tuple[Path, str]) -> None:
    folder, said = written
    assert sorted(file.name for file in folder.iterdir()) == ["scene_03.npy", "scene_03.png"]
    assert pixels(folder / "scene_03.png").shape == (80, 128, 3)
    assert pixels(folder / "scene_03.png").std() > 10
    poses = load_trajectory(folder / "scene_03.npy")
    assert poses.shape == (31, 4, 4)
    assert (poses[0] == np.eye(4)).all()
    _, prompt = said.splitlines()[0].split(": ")
    command = shlex.split(said.splitlines()[-1].split("with: ")[1])
    assert command[-5:] == ["--intrinsics", "110.851,110.851,64,40", "--prompt", prompt, "--pad"]
    assert 4 < len(prompt.split()) <= 16


def test_the_same_seed_is_the_same_scene(written: tuple[Path, str]) -> None:
    picture, poses, _ = draw_scene(3, 30)
    assert (picture == pixels(written[0] / "scene_03.png")).all()
    assert (poses == load_trajectory(written[0] / "scene_03.npy")).all()
    assert (picture != draw_scene(4, 30)[0]).any()


async def test_a_server_takes_both(http: httpx.AsyncClient, written: tuple[Path, str]) -> None:
    image, file = (written[0] / f"scene_03.{ending}" for ending in ("png", "npy"))
    made = await http.post("/v1/sessions", files={"image": image.read_bytes()})
    assert made.status_code == 201
    params = '{"camera": {"trajectory": {"format": "npy"}}}'
    session = made.json()["links"]["self"]
    answer = await http.post(f"{session}/chunks", files={"trajectory": file.read_bytes()}, data={"params": params})
    assert answer.status_code == 201, answer.text
    assert answer.json()["pending_poses"] == 6
    assert (await post(http, session, "w-18")).status_code == 201


def test_actions_are_the_servers_own(tmp_path: Path) -> None:
    run_scene(5, "w-24,d-12", tmp_path, Console(quiet=True))
    expected, _ = walk(Controller.start(), parse_actions("w-24,d-12", "actions"), "sana-smooth")
    assert (load_trajectory(tmp_path / "scene_05.npy")[1:] == expected).all()


def test_actions_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="unknown key"):
        run_scene(5, "x-3", tmp_path / "none", Console(quiet=True))
    assert not (tmp_path / "none").exists()


def test_the_demo_begins_in_a_scene_that_can_be_drawn_again() -> None:
    keys = parse_actions(f"{AWAY['actions']},{BACK['actions']}", "actions")
    poses, _ = walk(Controller.start(), keys, "sana-smooth")
    picture, _, prompt = draw_scene(int(FIRST_FRAME[6:8]), 1, np.concatenate([np.eye(4)[None], poses]))
    assert np.abs(pixels(ASSETS / FIRST_FRAME).astype(int) - picture).mean() < 0.5
    assert BEGINNING["prompt"] == prompt


@pytest.mark.parametrize(
    ("flags", "told"),
    [(("--frames", "30", "--actions", "w-24"), "either --actions or --frames"), (("--actions", ""), "actions")],
)
def test_a_path_is_either_walked_or_drawn(flags: tuple[str, ...], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longtake.server", "scene", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
