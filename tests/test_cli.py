"""The command line, run as a user runs it: processes, files and videos."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from server_fixtures import path, picture

from longtake.client import Client
from longtake.server.private import private_server
from longtake.server.settings import unknown_variables


def longtake(*arguments: str, cwd: Path, fails: bool = False) -> str:
    """Run a command; returns what it printed, or where it fails what it said on standard error alone."""
    command = [sys.executable, "-m", "longtake.server", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if not fails:
        return done.stdout
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def beside(*arguments: str, cwd: Path, **environment: str) -> tuple[str, str]:
    """Run a command that goes well; returns what it printed, and what beside it on standard error."""
    command = [sys.executable, "-m", "longtake.server", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LONGTAKE_")}
    inherited = kept | {"LONGTAKE_MODEL": os.environ["LONGTAKE_MODEL"]}
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=True, timeout=120, env=inherited | environment
    )
    return done.stdout, done.stderr


def frames(video: Path) -> int:
    with av.open(str(video)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_the_demo_resumes_and_leaves_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAKE_THREADS", "2")  # more than tests otherwise take: the same bits nevertheless
    said = longtake("demo", "-o", "here", cwd=tmp_path)
    assert "killed the server (SIGKILL)" in said
    assert "same digests" in said
    assert frames(tmp_path / "here" / "take.mp4") == 240
    assert "serve --data-dir here/data" in said
    session = re.search(r"session (ses_\w+)", said)
    assert session is not None
    assert f"curl http://127.0.0.1:8000/v1/sessions/{session[1]}" in said
    assert session[1] in longtake("sessions", "ls", "--data-dir", "here/data", cwd=tmp_path)


def test_generate_and_go_on_and_drop(tmp_path: Path) -> None:
    (tmp_path / "first.png").write_bytes(picture(400, 300))
    np.save(tmp_path / "path.npy", np.array(path(80, start=0)))
    np.save(tmp_path / "k.npy", np.tile([300.0, 300, 200, 150], (80, 1)))
    with private_server(tmp_path / "data") as server:
        here = ("--server", server.url)
        begin = ("generate", "first.png", "--trajectory", "path.npy", "--intrinsics", "k.npy", "--frames", "30")
        said = longtake(*begin, "--seed", "7", "-o", "a.mp4", *here, cwd=tmp_path)
        assert "chunk 0: queue" in said
        assert frames(tmp_path / "a.mp4") == 24
        session = re.findall(r"session (ses_\w+)", said)[0]
        where = f"--server {server.url} -o a.mp4"
        fill, go_on = said.splitlines()[-2:]
        begins = "6 poses wait for a whole chunk of 24; fill it with: longtake generate --session"
        assert fill == f"{begins} {session} --pad {where}"
        assert go_on == f"go on with: longtake generate --session {session} --actions w-24 {where}"
        longtake("generate", "--session", session, "--trajectory", "path.npy", "-o", "b.mp4", *here, cwd=tmp_path)
        assert frames(tmp_path / "b.mp4") == 72
        longtake("generate", "--session", session, "--actions", "a-30", "--pad", "-o", "b.mp4", *here, cwd=tmp_path)
        assert frames(tmp_path / "b.mp4") == 120
        assert '"next_chunk": 5' in longtake("sessions", "show", session, *here, cwd=tmp_path)
        assert session in longtake("sessions", "ls", *here, cwd=tmp_path)
        longtake("sessions", "rm", session, *here, cwd=tmp_path)
        assert session not in longtake("sessions", "ls", *here, cwd=tmp_path)


def test_a_path_without_a_whole_chunk_changes_nothing(tmp_path: Path, url: str) -> None:
    (tmp_path / "first.png").write_bytes(picture())
    np.save(tmp_path / "path.npy", np.array(path(24, start=0)))
    with Client(url) as client:
        session = client.create(picture(), seed=7).id
        client.generate(session, actions="w-3")
        before = [each.id for each in client.sessions()]
        begin = ("generate", "first.png", "--trajectory", "path.npy", "--server", url)
        assert "there are 23 (row 0 of a trajectory is the image's): give" in longtake(*begin, cwd=tmp_path, fails=True)
        go_on = ("generate", "--session", session, "--server", url)
        said = longtake(*go_on, "--actions", "w-20", cwd=tmp_path, fails=True)
        assert said == (
            "error: a chunk takes 24 poses, one a new frame, and there are 23 with those that wait: "
            "give more, or --pad to hold the last one\n"
        )
        assert [each.id for each in client.sessions()] == before
        assert client.session(session).pending_poses == 3
        longtake(*go_on, "--actions", "w-21", "-o", "a.mp4", cwd=tmp_path)
        assert frames(tmp_path / "a.mp4") == 24
        assert "3 poses wait" in longtake(*go_on, "--actions", "w-3", "-o", "a.mp4", cwd=tmp_path)
        client.delete(session)


def test_what_waits_is_filled_by_the_command_that_is_printed(tmp_path: Path, url: str) -> None:
    (tmp_path / "first.png").write_bytes(picture())
    begin = ("generate", "first.png", "--actions", "w-27", "-o", "my take.mp4", "--server", url)
    hint = re.findall(r"fill it with: longtake (.*)", longtake(*begin, cwd=tmp_path))[0]
    longtake(*shlex.split(hint), cwd=tmp_path)
    assert frames(tmp_path / "my take.mp4") == 48
    (tmp_path / "my take.mp4").unlink()
    said = longtake(*shlex.split(hint), cwd=tmp_path, fails=True)
    assert said == "error: --pad: no poses wait for a whole chunk: there is nothing to fill\n"
    assert not (tmp_path / "my take.mp4").exists()
    with Client(url) as client:
        client.delete(shlex.split(hint)[2])


def test_fork_rewind_and_the_tree(tmp_path: Path) -> None:
    (tmp_path / "first.png").write_bytes(picture())
    with private_server(tmp_path / "data") as server:
        here = ("--server", server.url)
        said = longtake("generate", "first.png", "--actions", "w-48", "--prompt", "a quay", *here, cwd=tmp_path)
        parent = re.findall(r"session (ses_\w+)", said)[0]
        child = longtake("sessions", "fork", parent, "--from-chunk", "0", "--seed", "9", *here, cwd=tmp_path).strip()
        longtake("generate", "--session", child, "--prompt", "a red pier", *here, cwd=tmp_path)
        longtake("generate", "--session", child, "--actions", "d-24", "--prompt", "a pier", *here, cwd=tmp_path)
        back = longtake("sessions", "rewind", parent, "--to-chunk", "-1", *here, cwd=tmp_path)
        assert back == f"{parent}: the next chunk is 0\n"
        show = [sys.executable, "-m", "longtake.server", "sessions", "show", child, *here]
        shown = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True, check=True)
        session = json.loads(shown.stdout)
        assert (session["parent"], session["seed"], session["prompt"], session["next_chunk"]) == (
            parent,
            9,
            "a pier",
            2,
        )
        root, branch = shown.stderr.splitlines()
        assert root == f"{parent}  0 chunks"
        assert branch.endswith(f"{child}  2 chunks  from chunk 0")


MISTAKES = {
    "no camera": (["generate", "first.png"], "give --trajectory or --actions"),
    "two cameras": (["generate", "first.png", "--actions", "w-1", "--trajectory", "p.npy"], "give either"),
    "seed of a session": (["generate", "--session", "ses_x", "--seed", "3", "--actions", "w-1"], "new session"),
    "fork from nowhere": (["sessions", "fork", "ses_" + "a" * 39, "--from-chunk", "3"], "session_not_found"),
    "rewind of nothing": (["sessions", "rewind", "ses_" + "a" * 39, "--to-chunk", "3"], "session_not_found"),
    "too few frames": (["generate", "first.png", "--actions", "w-3", "--frames", "9"], "the camera gives 3 frames"),
    "no such folder": (["generate", "first.png", "--actions", "w-3", "-o", "none/out.mp4"], "output: give"),
    "another container": (["generate", "first.png", "--actions", "w-3", "-o", "out.avi"], "output: give"),
    "no image": (["generate", "--actions", "w-24"], "give either an image"),
    "no such image": (["generate", "none.png", "--actions", "w-24"], "error: no such file or folder: none.png\n"),
    "no such file": (["generate", "first.png", "--trajectory", "none.npy"], "no such file or folder: none.npy"),
    "a folder for an image": (["generate", ".", "--actions", "w-24"], "error: .: Is a directory\n"),
    "no whole chunk": (["generate", "first.png", "--actions", "w-23"], "24 poses, one a new frame, and there are 23:"),
    "too few asked for": (
        ["generate", "first.png", "--actions", "w-48", "--frames", "9"],
        "and there are 9: give more",
    ),
    "unknown key": (["generate", "first.png", "--actions", "x-24"], "actions: segment 1 has an unknown key"),
    "odd size": (
        ["generate", "first.png", "--actions", "w-24", "--intrinsics", "1,1,1,1", "--intrinsics-size", "3"],
        "intrinsics_size: give",
    ),
    "unknown model": (["serve", "--model", "huge", "--data-dir", "data2", "--port", "0"], "tiny-untrained"),
    "unknown device": (["serve", "--device", "tpu", "--data-dir", "data2", "--port", "0"], "error: device: "),
    "no such device": (["serve", "--device", "cuda", "--data-dir", "data2", "--port", "0"], "finds no device 'cuda'"),
    "address of another": (["serve", "--port", "1", "--host", "192.0.2.1", "--insecure", "--data-dir", "d3"], "--port"),
    "no store there": (["serve", "--state-url", "redis://127.0.0.1:1", "--port", "0"], "error:"),
    "uncertain format": (["generate", "first.png", "--trajectory", "poses.txt"], "error: --format: what it is"),
    "unknown session": (["sessions", "show", "ses_" + "a" * 39], "session_not_found"),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> object:
    with private_server(tmp_path_factory.mktemp("data")) as server:
        yield server.url


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_get_one_clear_line(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "first.png").write_bytes(picture())
    (tmp_path / "poses.txt").write_text("0 0 0 0 0 0 0 1\n")
    server = ["--log-level", "warning"] if arguments[0] == "serve" else ["--server", url]
    said = longtake(*arguments, *server, cwd=tmp_path, fails=True)
    assert said.startswith("error:")
    assert expected in said
    assert said.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first.png", "poses.txt"]


def test_a_key_that_is_wanted_is_asked_for_by_its_variable(tmp_path: Path) -> None:
    with private_server(tmp_path / "data", api_key="theirs") as server:
        said = longtake("sessions", "ls", "--server", server.url, cwd=tmp_path, fails=True)
    assert said == "error: set LONGTAKE_API_KEY to one of the server's keys [unauthorized]\n"


def test_a_listing_of_nothing_says_where_it_looked(tmp_path: Path, url: str) -> None:
    said, told = beside("sessions", "ls", "--data-dir", "empty", cwd=tmp_path)
    assert said == ""
    assert told == "no sessions in empty; LONGTAKE_API_KEY is unset, so those that belong to a key are not shown\n"
    said, told = beside("sessions", "ls", "--server", url, cwd=tmp_path, LONGTAKE_API_KEY="mine")
    assert said == ""
    assert told.startswith(f"no sessions at {url} of the key in LONGTAKE_API_KEY")


def test_a_private_server_shows_the_sessions_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "first.png").write_bytes(picture())
    begin = ("generate", "first.png", "--actions", "w-3", "--pad", "--data-dir", "data")
    said, _ = beside(*begin, cwd=tmp_path, LONGTAKE_API_KEY="mine")
    session = re.findall(r"session (ses_\w+)", said)[0]
    listing = ("sessions", "ls", "--data-dir", "data")
    assert session in beside(*listing, cwd=tmp_path, LONGTAKE_API_KEY="mine")[0]
    for other in ({}, {"LONGTAKE_API_KEY": "another"}):
        said, told = beside(*listing, cwd=tmp_path, **other)
        assert (said, told[:11]) == ("", "no sessions")


def test_the_session_that_is_not_there_is_named(tmp_path: Path, url: str) -> None:
    gone = "ses_" + "b" * 39
    for command in (["rm"], ["show"], ["video"], ["fork", "--from-chunk", "0"], ["rewind", "--to-chunk", "0"]):
        said = longtake("sessions", *command, gone, "--server", url, cwd=tmp_path, fails=True)
        assert said == f"error: there is no such session: {gone} [session_not_found]\n"


def test_serving_warns_of_variables_that_nothing_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longtake.server", "serve", "--port", "0", "--data-dir", "data"]
    set_here = {"LONGTAKE_RETAIN_CHUNK": "9", "LONGTAKE_API_KEY": "k", "LONGTAKE_HOST_STATE_BYTES": "9"}
    with subprocess.Popen(
        [*command, "--while-stdin-open"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | set_here,
    ) as server:
        _, told = server.communicate(timeout=120)  # its standard input ends
    warned = re.findall(r"WARNING \S+: (LONGTAKE_\w+) is no setting", told)
    assert warned == ["LONGTAKE_RETAIN_CHUNK"]


def test_every_variable_that_the_code_reads_is_known() -> None:
    root = Path(__file__).parents[1]
    files = [
        file for folder in ("server", "state_cache", "kernels", "client") for file in (root / folder).rglob("*.py")
    ]
    named = {name for file in files for name in re.findall(r"LONGTAKE_[A-Z_]*[A-Z]", file.read_text())}
    assert "LONGTAKE_KERNELS" in named
    assert unknown_variables(named) == []
    assert unknown_variables(["LONGTAKE_HOTS", "longtake_port", "LONGTAKE_", "PATH"]) == ["LONGTAKE_", "LONGTAKE_HOTS"]


def test_a_second_server_on_the_same_data_names_the_first(tmp_path: Path) -> None:
    with private_server(tmp_path / "data") as server:
        direct = longtake("serve", "--data-dir", "data", "--port", "0", cwd=tmp_path, fails=True)
        through = longtake("sessions", "ls", "--data-dir", "data", cwd=tmp_path, fails=True)
    (wait, error), (private_wait, private_error) = direct.splitlines(), through.splitlines()
    busy = f"the data directory {tmp_path / 'data'} is in use by process {server.process.pid} "
    assert error.startswith(f"error: {busy}")
    assert error.endswith(f", at {server.url}")
    assert private_error.startswith(f"error: a server of our own could not start ({busy}")
    assert f", at {server.url}); give --server URL" in private_error
    for line in (wait, private_wait):
        assert f" WARNING longtake.state_cache.embedded: {busy}" in line
        assert line.endswith(f", at {server.url}; waiting up to 10 s for it to end")
