"""The event loop stays free while chunks compute, and the queue is bounded."""

import asyncio
import threading
import time

import httpx
from server_fixtures import MAX_BODY, begin, client_of, path, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import MemoryStore


async def longest_stall(stop: asyncio.Event) -> float:
    """Longest time, in seconds, by which a short sleep came late."""
    worst = 0.0
    while not stop.is_set():
        asked = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - asked - 0.001)
    return worst


async def test_the_event_loop_is_never_blocked(http: httpx.AsyncClient) -> None:
    """Chunks of at least 150 ms, PNGs and a large request pass without holding the loop for a fraction of one."""
    session = await begin(http)
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_stall(stop))
    started = time.perf_counter()
    answer = await post(http, session, path(96))
    await http.get(answer.json()["data"][3]["links"]["frames"])
    await http.post("/v1/sessions", content=b'{"image": "' + b"A" * (MAX_BODY - 1000) + b'"}')
    busy = time.perf_counter() - started
    stop.set()
    assert await watch < min(0.1, busy / 5)


class HeldModel:
    """The served model, computing only while `go` is set."""

    def __init__(self, model: WorldModel) -> None:
        self._model = model
        self.go = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        assert self.go.wait(30)
        return self._model.generate(conditions, state, index, camera, seed)


async def test_a_full_queue_refuses_and_loses_nothing(model: WorldModel, memory: MemoryStore) -> None:
    held = HeldModel(model)
    engine = Engine(held, memory, Limits(queue_size=2))  # type: ignore[arg-type]
    async with client_of(engine) as http:
        sessions = [await begin(http) for _ in range(3)]
        waiting = [asyncio.create_task(post(http, session, path(24))) for session in sessions[:2]]
        while engine.free_places:
            await asyncio.sleep(0.001)
        refused = await post(http, sessions[2], path(24))
        assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
        assert int(refused.headers["Retry-After"]) > 0
        assert (await http.get(sessions[2])).json()["next_frame"] == 1
        held.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [201, 201]
        assert (await post(http, sessions[2], path(24))).status_code == 201
        assert engine.free_places == 2
    engine.close()


async def test_a_closed_engine_finishes_and_admits_nothing(model: WorldModel, memory: MemoryStore) -> None:
    engine = Engine(model, memory, Limits(queue_size=2))
    async with client_of(engine) as http:
        session = await begin(http)
        running = asyncio.create_task(post(http, session, path(48)))
        while engine.free_places == 2:
            await asyncio.sleep(0.001)
        assert (await running).status_code == 201
        engine.close()
        refused = await post(http, session, path(24, start=49))
        assert (refused.status_code, refused.json()["code"]) == (503, "shutting_down")


async def test_sessions_take_turns_chunk_by_chunk(model: WorldModel, memory: MemoryStore) -> None:
    order: list[int] = []

    class Watched(HeldModel):
        def generate(
            self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int
        ) -> ChunkOutput:
            output = super().generate(conditions, state, index, camera, seed)
            order.append(seed)
            return output

    held = Watched(model)
    engine = Engine(held, memory, Limits(queue_size=2))  # type: ignore[arg-type]
    async with client_of(engine) as http:
        sessions = [await begin(http, seed=seed) for seed in (1, 2)]
        requests = [asyncio.create_task(post(http, session, path(72))) for session in sessions]
        while engine.free_places:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        held.go.set()
        await asyncio.gather(*requests)
    engine.close()
    assert sorted(order[:2]) == sorted(order[2:4]) == [1, 2]
