"""Chunks as a video stream, uploads beside the JSON, and clients that leave."""

import asyncio
import io
import json
import threading
from collections.abc import Callable

import av
import httpx
import numpy as np
import pytest
from server_fixtures import MAX_BODY, STILL, begin, data_url, digests, path, picture, post

from longtake.api_schemas.problems import Problem, ProblemError
from longtake.server.app import create_app
from longtake.server.doors import Doors
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import Commit, MemoryStore

MP4 = {"Accept": "video/mp4", "Content-Type": "application/json"}


def body(frames: int, start: int = 1, **fields: object) -> bytes:
    return json.dumps({"camera": {"poses": path(frames, start)}, **fields}).encode()


def decoded(data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(video=0))


class StepModel:
    """The served model, which waits for a permit before every chunk."""

    def __init__(self, model: WorldModel) -> None:
        self._model = model
        self.permits = threading.Semaphore(0)
        self.waiting = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        self.waiting = True
        assert self.permits.acquire(timeout=30)
        self.waiting = False
        return self._model.generate(conditions, state, index, camera, seed)


class LiveClient:
    """An ASGI client that reads an answer piece by piece while it is produced, and can leave at any time."""

    def __init__(
        self, engine: Engine, address: str, content: bytes, headers: dict[str, str], http_version: str = "1.1"
    ) -> None:
        self._app = create_app(engine, MAX_BODY, Doors())
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": address,
            "raw_path": address.encode(),
            "query_string": b"",
            "scheme": "http",
            "http_version": http_version,
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"127.0.0.1"), *((k.lower().encode(), v.encode()) for k, v in headers.items())],
        }
        self._body: list[dict[str, object]] = [{"type": "http.request", "body": content, "more_body": False}]
        self._left = asyncio.Event()
        self.messages: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self.messages.put)

    async def _receive(self) -> dict[str, object]:
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._left.set()

    async def status(self) -> int:
        message = await asyncio.wait_for(self.messages.get(), 30)
        assert message["type"] == "http.response.start"
        assert isinstance(message["status"], int)
        return message["status"]

    async def piece(self) -> bytes:
        message = await asyncio.wait_for(self.messages.get(), 30)
        assert isinstance(message["body"], bytes)
        return message["body"]


@pytest.fixture
def stepped(model: WorldModel, memory: MemoryStore) -> object:
    step = StepModel(model)
    engine = Engine(step, memory, Limits(queue_size=4))  # type: ignore[arg-type]
    yield engine, step
    step.permits.release(100)
    engine.close()


async def test_the_stream_is_the_video(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await http.post(f"{session}/chunks", content=body(75), headers=MP4)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    assert answer.content == (await http.get(f"{session}/video")).content
    assert decoded(answer.content) == 72
    assert (await http.get(session)).json()["pending_poses"] == 3


async def test_a_stream_without_a_whole_chunk_is_empty(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await http.post(f"{session}/chunks", content=body(5), headers=MP4)
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await http.get(session)).json()["pending_poses"] == 5


async def test_every_piece_plays_as_soon_as_it_comes(
    stepped: tuple[Engine, StepModel], http: httpx.AsyncClient, memory: MemoryStore
) -> None:
    engine, step = stepped
    session = await _begin(engine)
    client = LiveClient(engine, f"{session}/chunks", body(72), MP4)
    received = b""
    for chunk in range(3):
        step.permits.release()
        if chunk == 0:
            assert await client.status() == 200
        received += await client.piece()
        assert decoded(received) == 24 * (chunk + 1)
        assert memory.read(session.rsplit("/", 1)[1])[1].chunk == chunk
        assert chunk == 2 or not client.task.done()
    assert await client.piece() == b""
    await client.task


async def test_a_failure_before_the_first_piece_is_a_problem(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await http.post(f"{session}/chunks", content=body(24, expected_chunk=4), headers=MP4)
    assert (answer.status_code, Problem.model_validate_json(answer.content).code) == (409, "chunk_conflict")


async def test_a_failure_later_cuts_the_stream(model: WorldModel, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        def commit(self, commit: Commit) -> None:
            if commit.chunk is not None and commit.chunk.index == 1:
                raise RuntimeError("the disk is gone")
            super().commit(commit)

    engine = Engine(model, Failing(), Limits())
    session = await _begin(engine)
    client = LiveClient(engine, f"{session}/chunks", body(72), MP4)
    assert await client.status() == 200
    assert decoded(await client.piece()) == 24
    await client.task
    assert client.messages.empty(), "the stream must be cut, not ended"
    assert "a stream was cut: the server failed; chunks committed before stay" in caplog.text
    engine.close()


async def test_a_replayed_stream_is_the_same_bytes(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    headers = {**MP4, "Idempotency-Key": "walk"}
    first = await http.post(f"{session}/chunks", content=body(50), headers=headers)
    again = await http.post(f"{session}/chunks", content=body(50), headers=headers)
    assert (again.status_code, again.content) == (200, first.content)
    as_json = await post(http, session, path(50), key="walk")
    assert [chunk["index"] for chunk in as_json.json()["data"]] == [0, 1]
    assert as_json.headers["Idempotent-Replayed"] == "true"


ACCEPTED = {
    None: 201,
    "*/*": 201,
    "application/json": 201,
    "text/html, application/json;q=0.9": 201,
    "video/mp4": 200,
    "video/*": 200,
    "video/mp4, application/json": 200,
    "text/html": 406,
    "image/png": 406,
}


@pytest.mark.parametrize(("accept", "status"), ACCEPTED.items())
async def test_what_the_client_accepts(http: httpx.AsyncClient, accept: str | None, status: int) -> None:
    session = await begin(http)
    headers = MP4 | {"Accept": accept or "*/*"}
    answer = await http.post(f"{session}/chunks", content=body(24), headers=headers)
    assert answer.status_code == status
    assert (await http.get(session)).json()["next_chunk"] == int(status != 406)


@pytest.mark.parametrize("kind", ["json", "video"])
@pytest.mark.parametrize("permits", range(5), ids=lambda n: f"after {n} chunks")
@pytest.mark.parametrize("reading", [True, False], ids=["reading", "not reading"])
async def test_a_client_that_leaves(
    stepped: tuple[Engine, StepModel], memory: MemoryStore, kind: str, permits: int, *, reading: bool
) -> None:
    """Twenty points: what is committed stays, the chunk in flight and the rest are dropped, everything is freed."""
    engine, step = stepped
    session = await _begin(engine)
    headers = MP4 if kind == "video" else {"Content-Type": "application/json"}
    client = LiveClient(engine, f"{session}/chunks", body(240), headers)
    for _ in range(permits):
        step.permits.release()
    await _until(lambda: _head(memory, session) == permits - 1 and step.waiting)
    if reading and kind == "video" and permits:
        assert await client.status() == 200
        received = b"".join([await client.piece() for _ in range(permits)])
        assert decoded(received) == 24 * permits
    client.leave()
    await asyncio.wait_for(client.task, 10)
    await _until(lambda: engine.free_places == 4)
    step.permits.release(100)
    await asyncio.sleep(0.05)
    assert _head(memory, session) == permits - 1
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(engine, MAX_BODY, Doors())), base_url="http://127.0.0.1"
    ) as http:
        standing = (await http.get(session)).json()
        assert (standing["next_chunk"], standing["pending_poses"]) == (permits, 0)
        rest = digests(await post(http, session, path(48 - 24 * (permits % 2), start=24 * permits + 1)))
        assert rest[0][0] == permits


async def test_a_client_that_leaves_while_it_waits_for_the_session(
    stepped: tuple[Engine, StepModel], memory: MemoryStore
) -> None:
    engine, step = stepped
    session = await _begin(engine)
    first = LiveClient(engine, f"{session}/chunks", body(24), MP4)
    await _until(lambda: engine.free_places == 3)
    second = LiveClient(engine, f"{session}/chunks", body(24, 25), MP4)
    await _until(lambda: engine.free_places == 2)
    second.leave()
    await asyncio.wait_for(second.task, 10)
    assert engine.free_places == 3
    step.permits.release()
    assert await first.status() == 200
    await first.task
    assert _head(memory, session) == 0


async def test_a_client_that_leaves_during_the_commit(model: WorldModel) -> None:
    committing, go = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def commit(self, commit: Commit) -> None:
            committing.set()
            assert go.wait(10)
            super().commit(commit)

    memory = Slow()
    engine = Engine(model, memory, Limits())
    session = await _begin(engine)
    client = LiveClient(engine, f"{session}/chunks", body(24), MP4)
    await _until(committing.is_set)
    client.leave()
    go.set()
    await asyncio.wait_for(client.task, 10)
    await _until(lambda: engine.free_places == 32)
    assert _head(memory, session) == 0
    engine.close()


RANGES = {
    "bytes=0-99": (206, 0, 100),
    "bytes=100-": (206, 100, None),
    "bytes=-50": (206, -50, None),
    "bytes=0-999999999": (206, 0, None),
    "bytes=5-4": (200, 0, None),
    "bytes=0-1,5-6": (200, 0, None),
    "frames=0-1": (200, 0, None),
}


@pytest.mark.parametrize(("header", "expected"), RANGES.items(), ids=RANGES.keys())
async def test_a_part_of_the_video(http: httpx.AsyncClient, header: str, expected: tuple[int, int, int | None]) -> None:
    session = await begin(http)
    await post(http, session, path(72))
    whole = (await http.get(f"{session}/video")).content
    status, start, stop = expected
    part = await http.get(f"{session}/video", headers={"Range": header})
    assert (part.status_code, part.content) == (status, whole[start:stop])
    assert int(part.headers["content-length"]) == len(part.content)
    if status == 206:
        first = start % len(whole)
        assert part.headers["content-range"] == f"bytes {first}-{first + len(part.content) - 1}/{len(whole)}"


async def test_parts_across_chunks_join_to_the_whole_and_beyond_is_refused(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    await post(http, session, path(72))
    whole = (await http.get(f"{session}/video")).content
    step = len(whole) // 7
    parts = [
        (await http.get(f"{session}/video", headers={"Range": f"bytes={start}-{start + step - 1}"})).content
        for start in range(0, len(whole), step)
    ]
    assert b"".join(parts) == whole
    beyond = await http.get(f"{session}/video", headers={"Range": f"bytes={len(whole)}-"})
    assert (beyond.status_code, beyond.json()["code"], beyond.json()["size"]) == (
        416,
        "range_not_satisfiable",
        len(whole),
    )


async def test_a_session_from_a_multipart_body(http: httpx.AsyncClient) -> None:
    files = {"image": ("first.png", picture(), "image/png"), "params": (None, '{"seed": 7}', "application/json")}
    answer = await http.post("/v1/sessions", files=files)
    assert answer.status_code == 201, answer.text
    session = answer.json()["links"]["self"]
    assert digests(await post(http, session, path(24))) == digests(await post(http, await begin(http), path(24)))


MISTAKES: dict[str, tuple[dict[str, object], str, str]] = {
    "no image": ({"params": (None, "{}")}, "invalid_request", "image"),
    "two images": (
        {"image": ("a.png", picture()), "params": (None, json.dumps({"image": data_url(picture())}))},
        "invalid_request",
        "image",
    ),
    "unknown part": ({"picture": ("a.png", picture())}, "invalid_request", "body"),
    "params that are no JSON": ({"image": ("a.png", picture()), "params": (None, "{")}, "malformed_json", ""),
    "bad params": ({"image": ("a.png", picture()), "params": (None, '{"seed": -1}')}, "invalid_request", "seed"),
    "a playlist": ({"image": ("a.png", b"ffconcat version 1.0\nfile /etc/hostname\n")}, "image_invalid", "image"),
}


@pytest.mark.parametrize(("files", "code", "field"), MISTAKES.values(), ids=MISTAKES.keys())
async def test_bad_multipart_bodies(http: httpx.AsyncClient, files: dict[str, object], code: str, field: str) -> None:
    answer = await http.post("/v1/sessions", files=files)
    problem = Problem.model_validate_json(answer.content)
    assert problem.code == code, answer.text
    assert not field or [error.field for error in problem.errors] == [field]
    assert (await http.get("/v1/sessions")).json()["data"] == []


async def test_a_trajectory_file_continues_where_the_session_stands(http: httpx.AsyncClient) -> None:
    file = io.BytesIO()
    np.save(file, np.array(path(101, start=0)))
    session = await begin(http)
    taken = []
    for frames in (30, None):
        options = {"format": "npy"} | ({"frames": frames} if frames else {})
        params = json.dumps({"camera": {"trajectory": options}})
        files = {"trajectory": ("path.npy", file.getvalue()), "params": (None, params)}
        answer = await http.post(f"{session}/chunks", files=files)
        taken += digests(answer)
        resolved = answer.json()["resolved"]
        assert (resolved["format"], resolved["frames"], resolved["axes"]) == ("npy", 101, "opencv")
    assert answer.json()["pending_poses"] == 4
    assert taken == digests(await post(http, await begin(http), path(100)))
    exhausted = await http.post(f"{session}/chunks", files=files)
    assert (exhausted.status_code, exhausted.json()["code"]) == (422, "trajectory_exhausted")


async def test_a_keyed_trajectory_is_replayed_and_another_file_refused(http: httpx.AsyncClient) -> None:
    session = await begin(http)

    async def send(poses: int) -> httpx.Response:
        file = io.BytesIO()
        np.save(file, np.array(path(poses, start=0)))
        params = json.dumps({"camera": {"trajectory": {"format": "npy"}}})
        files = {"trajectory": ("path.npy", file.getvalue()), "params": (None, params)}
        return await http.post(f"{session}/chunks", files=files, headers={"Idempotency-Key": "file"})

    first = await send(50)
    again = await send(50)
    assert (again.status_code, again.content) == (201, first.content)
    assert (await send(51)).json()["code"] == "idempotency_key_reused"


async def test_a_part_without_its_options_and_options_without_their_part(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    stray = {"trajectory": ("path.npy", b""), "params": (None, json.dumps({"camera": {"poses": [STILL]}}))}
    assert (await http.post(f"{session}/chunks", files=stray)).json()["code"] == "invalid_request"
    missing = await post(http, session, {"trajectory": {"format": "npy"}})
    assert [error["field"] for error in missing.json()["errors"]] == ["trajectory"]


async def _begin(engine: Engine) -> str:
    transport = httpx.ASGITransport(create_app(engine, MAX_BODY, Doors()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        return await begin(http)


def _head(memory: MemoryStore, session: str) -> int:
    return memory.read(session.rsplit("/", 1)[1])[1].chunk


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.002)


async def test_a_stream_over_http_1_0_is_refused(model: WorldModel, memory: MemoryStore) -> None:
    engine = Engine(model, memory, Limits())
    session = await _begin(engine)
    client = LiveClient(engine, f"{session}/chunks", body(24), MP4, http_version="1.0")
    assert await client.status() == 406
    await client.task
    assert _head(memory, session) == -1
    engine.close()


async def test_params_are_given_once(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    parts = [("params", ("a.json", body(24))), ("params", ("b.json", body(24)))]
    answer = await http.post(f"{session}/chunks", files=parts)
    assert [error["field"] for error in answer.json()["errors"]] == ["params"]
    broken = await http.post(f"{session}/chunks", content=b"x", headers={"content-type": "multipart/form-data"})
    assert (broken.status_code, broken.json()["code"]) == (400, "malformed_body")


NUMBERS = {
    "times past any clock": ("tum", b"0 0 0 0 0 0 0 1\n1e308 0 0 0 0 0 0 1\n", {}),
    "times that overflow": ("tum", b"-1e308 0 0 0 0 0 0 1\n1e308 0 0 0 0 0 0 1\n", {}),
    "slow beyond reason": ("kitti", b"1 0 0 0 0 1 0 0 0 0 1 0\n" * 30, {"fps": 1e-4, "frames": 1}),
    "a lens without width": (
        "transforms",
        json.dumps(
            {"camera_angle_x": 5e-324, "w": 65536, "h": 65536}
            | {"frames": [{"file_path": f"{i}.png", "transform_matrix": STILL} for i in range(3)]}
        ).encode(),
        {},
    ),
}


@pytest.mark.parametrize(("syntax", "data", "options"), NUMBERS.values(), ids=NUMBERS.keys())
async def test_numbers_of_a_file_that_nothing_can_be_computed_from(
    http: httpx.AsyncClient, syntax: str, data: bytes, options: dict[str, float]
) -> None:
    session = await begin(http)
    params = json.dumps({"camera": {"trajectory": {"format": syntax, **options}}})
    answer = await http.post(f"{session}/chunks", files={"trajectory": ("a", data), "params": (None, params)})
    assert (answer.status_code, answer.json()["code"]) in ((422, "trajectory_invalid"), (422, "intrinsics_invalid")), (
        answer.text
    )


async def test_plain_requests_do_not_wait_for_a_clip_and_a_clip_nobody_waits_for_ends(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, ended = threading.Event(), threading.Event()

    def slow(*_: object, abandoned: Callable[[], bool]) -> object:
        reading.set()
        while not abandoned():
            threading.Event().wait(0.01)
        ended.set()
        raise ProblemError("frames_invalid", "nobody waits", "frames")

    monkeypatch.setattr("longtake.server.engine.command.read_clip", slow)
    session = await begin(http)
    parts = [("params", (None, body(24))), ("frames", ("a.mp4", b"x"))]
    clip = asyncio.create_task(http.post(f"{session}/chunks", files=parts))
    await _until(reading.is_set)
    other = await begin(http)
    assert (await post(http, other, path(24))).status_code == 201
    assert not ended.is_set()
    clip.cancel()
    await _until(ended.is_set)
