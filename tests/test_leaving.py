"""Clients that leave, at any point: what is committed stays, the rest is dropped, everything is freed."""

import asyncio
import threading

import httpx
import pytest
from live_clients import MP4, LiveClient, StepModel, begin_on, body, decoded, head_of, until
from server_fixtures import MAX_BODY, digests, path, post

from longtake.server.app import create_app
from longtake.server.doors import Doors
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import WorldModel
from longtake.state_cache import Commit, MemoryStore


@pytest.mark.parametrize("kind", ["json", "video"])
@pytest.mark.parametrize("permits", range(5), ids=lambda n: f"after {n} chunks")
@pytest.mark.parametrize("reading", [True, False], ids=["reading", "not reading"])
async def test_a_client_that_leaves(
    stepped: tuple[Engine, StepModel], memory: MemoryStore, kind: str, permits: int, *, reading: bool
) -> None:
    """Twenty points: what is committed stays, the chunk in flight and the rest are dropped, everything is freed."""
    engine, step = stepped
    session = await begin_on(engine)
    headers = MP4 if kind == "video" else {"Content-Type": "application/json"}
    client = LiveClient(engine, f"{session}/chunks", body(240), headers)
    for _ in range(permits):
        step.permits.release()
    await until(lambda: head_of(memory, session) == permits - 1 and step.waiting)
    if reading and kind == "video" and permits:
        assert await client.status() == 200
        received = b"".join([await client.piece() for _ in range(permits)])
        assert decoded(received) == 24 * permits
    client.leave()
    await asyncio.wait_for(client.task, 10)
    await until(lambda: engine.free_places == 4)
    step.permits.release(100)
    await asyncio.sleep(0.05)
    assert head_of(memory, session) == permits - 1
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
    session = await begin_on(engine)
    first = LiveClient(engine, f"{session}/chunks", body(24), MP4)
    await until(lambda: engine.free_places == 3)
    second = LiveClient(engine, f"{session}/chunks", body(24, 25), MP4)
    await until(lambda: engine.free_places == 2)
    second.leave()
    await asyncio.wait_for(second.task, 10)
    assert engine.free_places == 3
    step.permits.release()
    assert await first.status() == 200
    await first.task
    assert head_of(memory, session) == 0


async def test_a_client_that_leaves_during_the_commit(model: WorldModel) -> None:
    committing, go = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def commit(self, commit: Commit) -> None:
            committing.set()
            assert go.wait(10)
            super().commit(commit)

    memory = Slow()
    engine = Engine(model, memory, Limits())
    session = await begin_on(engine)
    client = LiveClient(engine, f"{session}/chunks", body(24), MP4)
    await until(committing.is_set)
    client.leave()
    go.set()
    await asyncio.wait_for(client.task, 10)
    await until(lambda: engine.free_places == 32)
    assert head_of(memory, session) == 0
    engine.close()
