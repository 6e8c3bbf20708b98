"""`longtake sessions verify`: on a server, on a data directory, on a terminal, and where it can not begin."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from take_fixtures import begin_take

from longtake.server.engine import start
from longtake.server.engine.verify import opened_for_verifying
from longtake.server.model.world import WorldModel
from longtake.server.settings import Settings, StartError
from longtake.state_cache import ChunkRecord, EmbeddedServer, RedisStore, new_session_id


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "longtake.server", "sessions", "verify", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    assert "chunks checked" not in done.stderr
    return done.returncode, done.stdout or done.stderr.splitlines(keepends=True)[-1]  # behind what was logged


def test_the_command_on_a_server_by_url(redis_server: str, model: WorldModel) -> None:
    store = RedisStore(redis_server, "lt")
    take = begin_take(store, model)
    take.post(50, prompt="night")
    status, said = run(take.id, "--state-url", redis_server)
    assert (status, said.count("\n")) == (0, 1 + said.startswith("other numerics"))
    assert "2 chunks, 2 replayed, 2 with the digests committed" in said
    assert said.endswith("all is well\n")
    record: ChunkRecord = take.records()[1]
    blob = next(key for key in store._client.run("KEYS", f"*{record.segment.blobs[0].name}"))
    store._client.run("SET", blob, b"damaged")
    status, said = run(take.id, "--state-url", redis_server)
    assert status == 1
    assert "chunk 1: video: blob" in said
    assert said.endswith("problems: 1\n")
    store._client.run("DEL", store._keys(take.id).session)
    status, said = run(take.id, "--state-url", redis_server)
    assert status == 1
    assert said.startswith("session: it can not be read: SessionRecord is missing\n")
    store.close()


def test_the_command_on_a_data_directory(tmp_path: Path, model: WorldModel) -> None:
    with EmbeddedServer(tmp_path) as embedded:
        store = RedisStore(embedded.start(), "lt")
        take = begin_take(store, model)
        take.post(24)
        store.close()
    status, said = run(take.id, "--data-dir", str(tmp_path))
    assert status == 0
    assert said.endswith("all is well\n")


def test_a_terminal_is_told_how_far_it_is(redis_server: str, model: WorldModel) -> None:
    store = RedisStore(redis_server, "lt")
    take = begin_take(store, model)
    take.post(24)
    store.close()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "longtake.server", "sessions", "verify", take.id, "--state-url", redis_server]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as running:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how a terminal says that nobody writes there any more
            while piece := os.read(ours, 4096):
                shown += piece
        said, _ = running.communicate(timeout=120)
    os.close(ours)
    assert running.returncode == 0
    assert said.endswith("all is well\n")
    assert shown[shown.index(b"chunks checked") :].count(b"\n") <= 1  # one line, updated


def test_a_data_directory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "EmbeddedServer", partial(EmbeddedServer, patience=0.1))
    with EmbeddedServer(tmp_path) as embedded:
        embedded.start()
        with (
            pytest.raises(StartError, match=r"in use by .*stop it first, or give the --state-url"),
            opened_for_verifying(Settings(data_dir=tmp_path), new_session_id(), None),
        ):
            pass


@pytest.mark.parametrize(
    ("device", "model", "message"), [("cuda", None, "finds no device 'cuda' here"), ("cpu", "huge", "no model 'huge'")]
)
def test_what_can_not_run_makes_no_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "cuda"], model: str | None, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with (
        pytest.raises(StartError, match=message),
        opened_for_verifying(Settings(data_dir=tmp_path / "data", device=device), new_session_id(), model),
    ):
        pass
    assert not (tmp_path / "data").exists()


def test_mistakes_get_one_clear_line(redis_server: str, tmp_path: Path) -> None:
    cases = [
        (("ses_" + "a" * 39, "--state-url", redis_server), "there is no such session"),
        (("ses_x", "--state-url", redis_server), "there is no such session"),
        (("ses_x", "--state-url", "redis://127.0.0.1:1"), "no session store answers"),
    ]
    for arguments, expected in cases:
        status, said = run(*arguments)
        assert (status, said.count("\n"), said.startswith("error:")) == (1, 1, True)
        assert expected in said
