"""Server-sent events as a browser gets them: framed, told by requests that run, and freed when it leaves."""

import asyncio

import httpx
import pytest
from faults.toy_model import ToyModel
from heard_events import Seen, parsed
from live_clients import LiveClient, StepModel, begin_on
from server_fixtures import client_of, path, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.routes import sessions
from longtake.state_cache import MemoryStore


def get(engine: Engine, session: str, query: str = "", **headers: str) -> LiveClient:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return LiveClient(engine, f"{session}/events{query}", b"", named, method="GET")


async def heard(client: LiveClient, count: int) -> list[Seen]:
    return [parsed(await client.piece()) for _ in range(count)]


async def test_a_browser_hears_of_a_request(stepped: tuple[Engine, StepModel]) -> None:
    engine, step = stepped
    session = await begin_on(engine)
    client = get(engine, session)
    start = await asyncio.wait_for(client.messages.get(), 20)
    headers = dict(start["headers"])  # type: ignore[call-overload]
    assert (start["status"], headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    assert headers[b"cache-control"] == b"no-store"
    assert [event.id for event in await heard(client, 1)] == ["0--1"]
    async with client_of(engine) as http:
        step.permits.release(2)
        made = (await post(http, session, path(48))).json()["data"]
        told: list[Seen] = []
        while sum(event.name == "chunk" for event in told) < 2:
            told += await heard(client, 1)
        assert [event.data for event in told if event.name == "chunk"] == made
        assert [event.id for event in told if event.id] == ["0-0", "0-1"]
        for index in range(2):
            stages = [event.what[1] for event in told if (event.data or {}).get("chunk") == index]
            assert stages[-2:] == ["computing", "committing"]
        await http.post(f"{session}/rewind", json={"to_chunk": 0})
        assert [event.what for event in await heard(client, 1)] == [("rewound", 0)]
        await http.delete(session)
        assert [event.what for event in await heard(client, 1)] == [("end", None)]
    last = await asyncio.wait_for(client.messages.get(), 20)
    assert (last["body"], last["more_body"]) == (b"", False)
    await client.task


@pytest.mark.parametrize("how", ["header", "query", "both"])
async def test_the_last_id_comes_as_header_or_query(stepped: tuple[Engine, StepModel], how: str) -> None:
    """A browser that comes again sends the header beside the query that it began with."""
    engine, step = stepped
    session = await begin_on(engine)
    step.permits.release(2)
    async with client_of(engine) as http:
        await post(http, session, path(48))
    query = {"header": "", "query": "?last_event_id=0-0", "both": "?last_event_id=0-1"}[how]
    client = get(engine, session, query, **({} if how == "query" else {"Last_Event_ID": "0-0"}))
    assert await client.status() == 200
    assert [event.id for event in await heard(client, 2)] == ["0-0", "0-1"]
    client.leave()
    await client.task


async def test_one_who_leaves_is_forgotten(stepped: tuple[Engine, StepModel]) -> None:
    engine, _ = stepped
    session = await begin_on(engine)
    clients = [get(engine, session) for _ in range(3)]
    for client in clients:
        assert await client.status() == 200
    assert len(engine.events) == 3
    for client in clients:
        client.leave()
        await asyncio.wait_for(client.task, 20)
    assert len(engine.events) == 0


async def test_one_who_takes_nothing_is_cut_off(
    stepped: tuple[Engine, StepModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SEND_PATIENCE_S", 0.01)
    engine, _ = stepped
    session = await begin_on(engine)
    client = get(engine, session)
    client.messages = asyncio.Queue(1)
    await asyncio.wait_for(client.task, 20)
    assert len(engine.events) == 0
    assert await client.status() == 200
    assert client.messages.empty()


async def test_refusals_are_problems(http: httpx.AsyncClient, engine: Engine) -> None:
    missing = await http.get("/v1/sessions/ses_" + "a" * 39 + "/events")
    assert (missing.status_code, missing.json()["code"]) == (404, "session_not_found")
    session = await begin_on(engine)
    bad = await http.get(f"{session}/events", headers={"Last-Event-ID": "soon"})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "Last-Event-ID")


async def test_a_request_that_fails_is_told(memory: MemoryStore) -> None:
    engine = Engine(ToyModel(fail_at=1), memory, Limits())
    session = await begin_on(engine)
    client = get(engine, session)
    assert await client.status() == 200
    async with client_of(engine) as http:
        assert (await post(http, session, path(48))).json()["code"] == "internal_error"
    async with asyncio.timeout(10):
        while (event := (await heard(client, 1))[0]).name != "error":
            pass
    assert event.data == {"code": "internal_error"}
    client.leave()
    await client.task
    engine.close()


async def test_draining_sends_everyone_away(stepped: tuple[Engine, StepModel]) -> None:
    engine, _ = stepped
    client = get(engine, await begin_on(engine))
    assert await client.status() == 200
    engine.drain()
    await asyncio.wait_for(client.task, 20)
