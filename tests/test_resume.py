"""Sessions outlive their server: killed with SIGKILL at any point and started again, the take goes on bit for bit."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_fixtures import path, picture

from longtake.api_schemas.resources import Advanced, Chunk
from longtake.client import Client, Move, Retry
from longtake.server.private import PrivateServer, private_server, start_private_server

Digest = tuple[int, str, str]
CHUNKS = 6


class Host:
    """A server that can be killed and started again on the same data."""

    def __init__(self, data_dir: Path, options: list[str]) -> None:
        self._data_dir = data_dir
        self._options = options
        self.server: PrivateServer = self._start()
        self.client = self._connect()

    def _start(self) -> PrivateServer:
        return start_private_server(self._data_dir, *self._options)

    def _connect(self) -> Client:
        return Client(self.server.url, retry=Retry(attempts=1))

    def kill_and_start(self) -> None:
        self.server.kill()
        self.client.close()
        self.server = self._start()
        self.client = self._connect()


@pytest.fixture(scope="module", params=["embedded", "redis"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server on the embedded default, and one on a separate redis-server given by URL."""
    options = [] if request.param == "embedded" else ["--state-url", request.getfixturevalue("redis_server")]
    with pytest.MonkeyPatch.context() as environment:
        # the same name after a restart: nobody waits for the lease of the server that was killed
        environment.setenv("LONGTAKE_REPLICA_ID", "host")
        host = Host(tmp_path_factory.mktemp("data"), options)
        yield host
        host.client.close()
        host.server.stop()


@pytest.fixture(scope="module")
def uncut(host: Host) -> list[Digest]:
    """The take in one request, on a server that nobody kills."""
    taken = digests(host.client.generate(begin(host), **poses(24 * CHUNKS)))
    assert [index for index, _, _ in taken] == list(range(CHUNKS))
    return taken


def begin(host: Host) -> str:
    return host.client.create(picture(), seed=7).id


def poses(count: int, start: int = 1, key: str | None = None) -> Move:
    return {"poses": path(count, start), "key": key}


def digests(answer: Advanced | list[Chunk]) -> list[Digest]:
    chunks = answer if isinstance(answer, list) else answer.data
    return [(chunk.index, chunk.frames_digest, chunk.state_digest) for chunk in chunks]


def test_killed_after_every_chunk(host: Host, uncut: list[Digest]) -> None:
    session, taken = begin(host), []
    for chunk in range(CHUNKS):
        taken += digests(host.client.generate(session, **poses(24, 24 * chunk + 1)))
        host.kill_and_start()
        assert host.client.session(session).next_chunk == chunk + 1
    assert taken == uncut


def test_killed_between_uneven_pieces(host: Host, uncut: list[Digest]) -> None:
    session, taken, start = begin(host), [], 1
    for size in (7, 50, 31, 56):
        answer = host.client.generate(session, **poses(size, start))
        taken += digests(answer)
        start += size
        host.kill_and_start()
        standing = host.client.session(session)
        assert (standing.next_frame, standing.pending_poses) == (start, answer.pending_poses)
    assert taken == uncut


def test_killed_in_the_middle_of_a_request_that_is_repeated_with_its_key(host: Host, uncut: list[Digest]) -> None:
    """Twice as many chunks as elsewhere, so that the kill falls into the request on any machine."""
    long, keyed = poses(24 * 2 * CHUNKS + 3), poses(24 * 2 * CHUNKS + 3, key="walk")
    session = begin(host)
    failed: list[Exception] = []

    def post() -> None:
        try:
            host.client.generate(session, **keyed)
        except httpx.HTTPError as error:
            failed.append(error)

    request = threading.Thread(target=post)
    with Client(host.server.url) as watcher:
        request.start()
        while watcher.session(session).next_chunk < 2:
            assert request.is_alive(), "the request ended before the server could be killed"
    host.server.kill()
    request.join()
    host.kill_and_start()
    assert len(failed) == 1
    committed = host.client.session(session).next_chunk
    assert 2 <= committed < 2 * CHUNKS
    answer = host.client.generate(session, **keyed)
    assert digests(answer)[:CHUNKS] == uncut
    assert digests(answer) == digests(host.client.generate(begin(host), **long))
    assert (answer.pending_poses, host.client.session(session).next_chunk) == (3, 2 * CHUNKS)
    assert host.client.generate(session, **keyed) == answer


def test_killed_while_idle_the_video_is_whole(host: Host, uncut: list[Digest], tmp_path: Path) -> None:
    session = begin(host)
    host.client.generate(session, **poses(48))
    host.client.save_video(session, tmp_path / "before.mp4")
    host.kill_and_start()
    host.client.save_video(session, tmp_path / "after.mp4")
    assert (tmp_path / "after.mp4").read_bytes() == (tmp_path / "before.mp4").read_bytes()
    assert digests(host.client.generate(session, **poses(24, 49))) == uncut[2:3]


def test_the_embedded_store_is_killed_and_comes_back_under_a_running_server(tmp_path: Path) -> None:
    with private_server(tmp_path) as server, Client(server.url) as client:
        session, twin = (client.create(picture(), seed=7).id for _ in range(2))
        taken = digests(client.generate(session, **poses(48)))
        os.kill(int((tmp_path / "lock").read_text().split()[1]), signal.SIGKILL)
        taken += digests(client.generate(session, **poses(24, 49)))
        assert taken == digests(client.generate(twin, **poses(72)))
        assert client.ready().ready
