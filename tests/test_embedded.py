import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from store_fixtures import listed, make_cursor, make_session, make_snapshot, make_step, take

from longtake.state_cache import (
    Commit,
    DataDirectoryBusy,
    EmbeddedServer,
    Head,
    NoServerBinary,
    RedisStore,
    ServerFailed,
    StoreUnavailable,
    embedded,
    load_file,
    packaged_binary,
)

PARENT = """
import sys, threading
from pathlib import Path
from longtake.state_cache import EmbeddedServer, packaged_binary
server = EmbeddedServer(Path(sys.argv[1]), packaged_binary())
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "data", packaged_binary()) as running:
        yield running


@contextlib.contextmanager
def opened(server: EmbeddedServer, timeout: float = 3.0) -> Iterator[RedisStore]:
    store = RedisStore(server.start(), timeout=timeout)
    yield store
    store.close()


def signal_server(server: EmbeddedServer, number: signal.Signals) -> None:
    assert server.pid is not None
    os.kill(server.pid, number)


def read_forever(store: RedisStore, session_id: str) -> None:
    while True:
        store.read(session_id)


def read_once_it_answers(store: RedisStore, session_id: str) -> Head:
    """A second passes until calls are tried again."""
    while True:
        try:
            return store.read(session_id)[1]
        except StoreUnavailable:
            time.sleep(0.05)


def commit_until_it_ends(store: RedisStore, session_id: str, acknowledged: list[int], enough: threading.Event) -> None:
    fence = take(store, session_id)
    with contextlib.suppress(StoreUnavailable):
        for index in range(10_000):
            store.commit(make_step(store, session_id, fence, index))
            store.attach(session_id, fence, 0, index, make_snapshot(store, session_id, float(index)))
            acknowledged.append(index)
            if index == 20:
                enough.set()


def test_the_store_it_gives_is_strict(server: EmbeddedServer) -> None:
    with opened(server) as store:
        status = store.check()
    assert (status.server, status.durability, status.policy) == ("valkey", "strict", "noeviction")
    assert status.limit_bytes > 0


def test_directories_are_private_and_the_network_is_off(server: EmbeddedServer, tmp_path: Path) -> None:
    socket = Path(server.start().removeprefix("unix://"))
    assert len(os.fsencode(socket)) < 104
    for folder in (tmp_path / "data", socket.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with redis.Redis(unix_socket_path=str(socket)) as client:
        assert client.config_get("port") == {"port": "0"}


def test_kill_9_of_the_server_loses_nothing_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    with EmbeddedServer(tmp_path, packaged_binary()) as first, opened(first) as store:
        session_id, enough = make_session(store), threading.Event()
        writer = threading.Thread(target=commit_until_it_ends, args=(store, session_id, acknowledged, enough))
        writer.start()
        assert enough.wait(30)
        signal_server(first, signal.SIGKILL)
        writer.join(30)
    with EmbeddedServer(tmp_path, packaged_binary()) as second, opened(second) as store:
        head = store.read(session_id)[1]
        assert head.chunk in (acknowledged[-1], acknowledged[-1] + 1)
        chunks = store.chunks(session_id, 0, head.chunk + 1)
        assert [chunk.index for chunk in chunks] == list(range(head.chunk + 1))
        for chunk in chunks:
            assert load_file(store, session_id, chunk.segment) == b"segment %d" % chunk.index
        assert list(store.snapshots(session_id))[: len(acknowledged)] == acknowledged


def test_a_killed_server_can_be_started_again(server: EmbeddedServer) -> None:
    with opened(server) as store:
        session_id = make_session(store)
        before = server.pid
        signal_server(server, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            read_forever(store, session_id)
        server.start()
        read_once_it_answers(store, session_id)
        assert store.read(session_id)[0].id == session_id
        assert server.pid != before


def test_stopping_and_starting_keeps_everything(server: EmbeddedServer) -> None:
    with opened(server) as store:
        session_id = make_session(store, ttl_s=60)
        head = store.read(session_id)[1]
    socket = Path(server.start().removeprefix("unix://"))
    server.stop()
    assert server.pid is None
    assert not socket.parent.exists()
    server.stop()
    with opened(server) as store:
        assert listed(store, 9) == [session_id]
        assert store.read(session_id)[1] == head
        assert head.expires_at is not None


def test_starting_twice_keeps_the_server(server: EmbeddedServer) -> None:
    before = server.pid
    assert server.start() == server.start()
    assert server.pid == before


def test_a_second_server_on_the_directory_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    rival = EmbeddedServer(tmp_path / "data", packaged_binary(), patience=0.1)
    with pytest.raises(DataDirectoryBusy, match=rf"process {os.getpid()} \(its store is process {server.pid}\)"):
        rival.start()
    with opened(server) as store:
        assert listed(store, 1) == []


def test_a_second_server_is_told_where_the_first_answers(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path, packaged_binary(), url="http://127.0.0.1:8000"),
        pytest.raises(DataDirectoryBusy, match=r"process \d+\), at http://127\.0\.0\.1:8000$"),
    ):
        EmbeddedServer(tmp_path, packaged_binary(), patience=0).start()


def test_a_wait_for_another_server_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedServer(tmp_path, packaged_binary(), url="http://127.0.0.1:8000"):
        for patience in (0.1, 1.2):
            with pytest.raises(DataDirectoryBusy):
                EmbeddedServer(tmp_path, packaged_binary(), patience=patience).start()
    (told,) = caplog.messages
    assert f"in use by process {os.getpid()} " in told
    assert told.endswith("), at http://127.0.0.1:8000; waiting up to 1 s for it to end")


def test_a_second_server_waits_for_the_first_to_end(server: EmbeddedServer, tmp_path: Path) -> None:
    heir = EmbeddedServer(tmp_path / "data", packaged_binary())
    waiting = threading.Thread(target=heir.start)
    waiting.start()
    server.stop()
    waiting.join(30)
    assert heir.pid is not None
    heir.stop()


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        with pytest.raises(DataDirectoryBusy, match=str(parent.pid)):
            EmbeddedServer(tmp_path, packaged_binary(), patience=0).start()
        parent.kill()
    with EmbeddedServer(tmp_path, packaged_binary()) as heir:
        assert heir.pid not in (None, orphan)


def test_a_frozen_server_is_unavailable_until_it_goes_on(server: EmbeddedServer) -> None:
    with opened(server, timeout=0.3) as store:
        session_id = make_session(store)
        fence = take(store, session_id)
        commit = Commit(session_id=session_id, fence=fence, revision=0, expected_head=-1, cursor=make_cursor("late"))
        signal_server(server, signal.SIGSTOP)
        try:
            for call in (
                lambda: store.read(session_id),
                lambda: store.put(session_id, [bytes(1 << 20)] * 3),
                lambda: store.commit(commit),
                store.check,
            ):
                with pytest.raises(StoreUnavailable):
                    call()
        finally:
            signal_server(server, signal.SIGCONT)
        # the commit that nobody heard back from was applied, once
        assert read_once_it_answers(store, session_id).cursor in (make_cursor(), make_cursor("late"))
        store.commit(commit)
        assert take(store, session_id).token == fence.token + 1


def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, packaged_binary()) as server, opened(server) as store:
        make_session(store)
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"X" + log.read_bytes()[1:])
    with pytest.raises(ServerFailed, match="Bad file format"):
        EmbeddedServer(tmp_path, packaged_binary()).start()


def test_a_binary_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoServerBinary, match="none/valkey"):
        EmbeddedServer(tmp_path, Path("/none/valkey")).start()


def test_the_data_directory_must_be_ours(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to("elsewhere")
    with pytest.raises(ServerFailed, match="somebody else"):
        embedded._make_private(link)


def test_a_supervised_server_comes_back_by_itself(server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    server.supervise()
    with opened(server) as store:
        session_id = make_session(store)
        for _ in range(2):
            killed = server.pid
            signal_server(server, signal.SIGKILL)
            give_up = time.monotonic() + 15
            while server.pid in (None, killed):
                assert time.monotonic() < give_up, "the server did not come back"
                time.sleep(0.01)
            assert answer_of(store, session_id) == session_id
    server.stop()
    assert server.pid is None
    assert "started again" in caplog.text


def answer_of(store: RedisStore, session_id: str) -> str:
    """Read a session, waiting until the server serves."""
    give_up = time.monotonic() + 15
    while True:
        try:
            return store.read(session_id)[0].id
        except StoreUnavailable:
            assert time.monotonic() < give_up, "the server does not serve"
            time.sleep(0.01)


def test_stopping_a_supervised_server_keeps_it_stopped(server: EmbeddedServer) -> None:
    server.supervise()
    server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "embedded-supervisor"]
    assert server.pid is None
