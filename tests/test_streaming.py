"""Chunks as a video stream, sent as each is committed, and parts of the whole video."""

import httpx
import pytest
from live_clients import MP4, LiveClient, StepModel, begin_on, body, decoded, head_of
from server_fixtures import begin, path, post

from longtake.api_schemas.problems import Problem
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import WorldModel
from longtake.state_cache import Commit, MemoryStore


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
    session = await begin_on(engine)
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
    answer = await http.post(f"{session}/chunks", content=body(24, expected_frame=4), headers=MP4)
    assert (answer.status_code, Problem.model_validate_json(answer.content).code) == (409, "chunk_conflict")


async def test_a_failure_later_cuts_the_stream(model: WorldModel, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        def commit(self, commit: Commit) -> None:
            if commit.chunk is not None and commit.chunk.index == 1:
                raise RuntimeError("the disk is gone")
            super().commit(commit)

    engine = Engine(model, Failing(), Limits())
    session = await begin_on(engine)
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


async def test_a_stream_over_http_1_0_is_refused(model: WorldModel, memory: MemoryStore) -> None:
    engine = Engine(model, memory, Limits())
    session = await begin_on(engine)
    client = LiveClient(engine, f"{session}/chunks", body(24), MP4, http_version="1.0")
    assert await client.status() == 406
    await client.task
    assert head_of(memory, session) == -1
    engine.close()
