"""The client against a real server, sync and async: every call, streams that are cut, and a server that is killed."""

import contextlib
import hashlib
import io
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
import safetensors.numpy
from client_kinds import KINDS, Awaited
from PIL import Image
from server_fixtures import path, picture

from longtake.client import Client, Retry, pngs
from longtake.server.private import PrivateServer, private_server, start_private_server

Digest = tuple[int, str, str]
WALK = path(5 * 24)
PATIENT = Retry(deadline_s=120, attempts=100, max_delay_s=1)
EXAMPLE = Path(__file__).parents[1] / "examples" / "walk_and_resume.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with private_server(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, server: PrivateServer) -> Iterator[Client]:
    with KINDS[request.param](server.url, retry=PATIENT) as client:
        yield client


def begin(client: Client) -> str:
    return client.create(picture(), seed=7).id


def digests(client: Client, session: str) -> list[Digest]:
    return [(chunk.index, chunk.frames_digest, chunk.state_digest) for chunk in client.chunks(session)]


@pytest.fixture(scope="module")
def uncut(server: PrivateServer) -> tuple[list[Digest], bytes]:
    """Digests and video of five chunks that nothing ever interrupted."""
    with Client(server.url) as client:
        session = begin(client)
        client.generate(session, poses=WALK)
        return digests(client, session), b"".join(client.video(session))


def test_a_take_from_its_beginning_to_its_end(client: Client, tmp_path: Path) -> None:
    made = client.create(picture(), prompt="a yard", seed=7, intrinsics=[300, 300, 160, 96], first_pose=np.eye(4))
    assert (made.prompt, made.seed, made.model) == ("a yard", 7, client.models().data[0].id)
    assert client.ready().ready
    assert made.id in [each.id for each in client.sessions()]
    client.generate(made.id, actions="w-30", controls="sana-legacy", expected_chunk=0, expected_frame=1)
    answer = client.generate(made.id, poses=np.array(path(20)), pad=True, expected_frame=31)
    assert [chunk.index for chunk in answer.data] == [1, 2]
    assert client.session(made.id).next_frame == 73
    chunk = client.chunk(made.id, 1)
    assert [chunk] == list(client.chunks(made.id))[1:2]
    shown = [np.asarray(Image.open(io.BytesIO(png))) for png in pngs(client.frames(made.id, 1))]
    assert f"sha256:{hashlib.sha256(np.stack(shown).tobytes()).hexdigest()}" == chunk.frames_digest
    assert decoded(client.chunk_video(made.id, 1)) == 24
    client.save_video(made.id, tmp_path / "take.mp4")
    assert decoded((tmp_path / "take.mp4").read_bytes()) == 72
    client.delete(made.id)
    assert made.id not in [each.id for each in client.sessions()]


def test_sessions_are_dropped_while_they_are_listed(client: Client) -> None:
    first = begin(client)
    made = [first, *(client.fork(first, -1).id for _ in range(110))]  # more than a page
    met = []
    for session in client.sessions():
        if session.id in made:
            client.delete(session.id)
            met.append(session.id)
    assert met == made[::-1]
    assert not set(made) & {session.id for session in client.sessions()}


def test_forks_rewinds_and_what_is_heard_of_them(client: Client) -> None:
    parent = begin(client)
    client.generate(parent, poses=WALK[:48])
    child = client.fork(parent, 0, key="once")
    assert client.fork(parent, 0, key="once") == child
    assert (child.parent, child.forked_at, child.next_chunk) == (parent, 0, 1)
    assert [fork.id for fork in client.session(parent).forks] == [child.id]
    client.generate(child.id, poses=WALK[24:48])
    assert digests(client, child.id) == digests(client, parent)
    assert safetensors.numpy.load(client.latents(child.id, 1))["latents"].shape[2] == 3
    back = client.rewind(child.id, -1, seed=9)
    assert (back.revision, back.next_chunk, back.seed) == (1, 0, 9)
    client.generate(child.id, poses=WALK[:24])
    with contextlib.closing(client.events(child.id, "0-1")) as events:
        told = [next(events) for _ in range(2)]
        assert [(event.name, event.id) for event in told] == [("rewound", "1--1"), ("chunk", "1-0")]
        assert told[1].data == client.chunk(child.id, 0)
        client.delete(child.id)
        assert [event.name for event in events] == ["end"]


def test_a_trajectory_file_goes_on_where_the_session_stands(client: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "path.npy", np.array(path(49, start=0)))
    one, two = begin(client), begin(client)
    answer = client.generate(one, trajectory=tmp_path / "path.npy")
    assert answer.resolved is not None
    assert (answer.resolved.format, answer.resolved.file_poses, answer.next_frame) == ("npy", 49, 49)
    client.generate(two, poses=path(24))
    client.generate(two, trajectory=(tmp_path / "path.npy").read_bytes())
    assert digests(client, one) == digests(client, two)


def test_frames_are_observed(client: Client) -> None:
    session = begin(client)
    frames = [picture()] * 25
    answer = client.observe(session, frames, poses=path(25))
    assert [(chunk.index, chunk.kind) for chunk in answer.data] == [(0, "observe")]
    assert (answer.frames_used, answer.frames_unused) == (24, 1)
    stream = b"".join(client.stream(session, frames[:24], poses=path(24, start=25)))
    assert decoded(stream) == 24
    assert [chunk.kind for chunk in client.chunks(session)] == ["observe", "observe"]


def decoded(video: bytes) -> int:
    """Frames that a decoder finds."""
    with av.open(io.BytesIO(video)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_stream_comes_chunk_by_chunk(client: Client, uncut: tuple[list[Digest], bytes]) -> None:
    session = begin(client)
    with contextlib.closing(client.stream(session, poses=WALK)) as pieces:
        video = next(pieces)
        assert client.session(session).next_chunk < 5
        video += b"".join(pieces)
    assert video == uncut[1]
    assert digests(client, session) == uncut[0]


class CutStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off after so many bytes."""

    def __init__(self, stream: object, size: int) -> None:
        self._stream = stream
        self._left = size

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            yield self._cut(piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield self._cut(piece)

    def _cut(self, piece: bytes) -> bytes:
        if not self._left:
            raise httpx.ReadError("cut")
        kept = piece[: self._left]
        self._left -= len(kept)
        return kept

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


class CutTransport(httpx.HTTPTransport):
    """HTTP that breaks the first videos off after these numbers of bytes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return cut(super().handle_request(request), self.sizes)


class AsyncCutTransport(httpx.AsyncHTTPTransport):
    """The same for async code."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return cut(await super().handle_async_request(request), self.sizes)


def cut(answer: httpx.Response, sizes: list[int]) -> httpx.Response:
    if answer.headers.get("content-type") != "video/mp4" or not sizes:
        return answer
    stream = CutStream(answer.stream, sizes.pop(0))
    return httpx.Response(answer.status_code, headers=answer.headers, stream=stream, extensions=answer.extensions)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_cut_goes_on_byte_for_byte(
    server: PrivateServer, uncut: tuple[list[Digest], bytes], kind: str
) -> None:
    """Cut before its first byte, inside the first chunk, and later; the download of the same bytes too."""
    taken, video = uncut
    sizes = [0, 1000, len(video) // 2]
    transport = (CutTransport if kind == "sync" else AsyncCutTransport)(sizes)
    with KINDS[kind](server.url, retry=PATIENT, transport=transport) as client:
        session = begin(client)
        assert b"".join(client.stream(session, poses=WALK)) == video
        assert sizes == []
        sizes += [0, 1, len(video) // 3]
        assert b"".join(client.video(session)) == video
        assert sizes == []
        assert digests(client, session) == taken


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_killed_in_the_middle_and_started_again_calls_end_by_themselves(
    tmp_path: Path, uncut: tuple[list[Digest], bytes]
) -> None:
    """A sync generate() and an async stream() live through one kill -9; their callers hear nothing of it."""
    start = (tmp_path / "data", "--port", str(free_port()))
    server = start_private_server(*start)
    with (
        ThreadPoolExecutor(2) as threads,
        Client(server.url, retry=PATIENT) as client,
        Awaited(server.url, retry=PATIENT) as awaited,
    ):
        one, two = begin(client), begin(client)
        answer = threads.submit(client.generate, one, poses=WALK)
        video = threads.submit(lambda: b"".join(awaited.stream(two, poses=WALK)))
        while not all(client.session(session).next_chunk for session in (one, two)):
            assert not answer.done(), "it ended before the server could be killed"
            assert not video.done(), "it ended before the server could be killed"
        server.kill()
        server = start_private_server(*start)
        try:
            assert [chunk.index for chunk in answer.result().data] == list(range(5))
            assert video.result() == uncut[1]
            assert digests(client, one) == digests(client, two) == uncut[0]
        finally:
            server.stop()


def test_the_example_walks_in_two_processes(server: PrivateServer) -> None:
    command = [sys.executable, str(EXAMPLE), "--server", server.url]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [line.split()[:2] for line in said.splitlines()[:-1]] == [["chunk", f"{index}:"] for index in range(4)]
    assert said.endswith("two processes or one call, the same digests\n")
