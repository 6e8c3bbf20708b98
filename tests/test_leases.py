"""Leases as a server holds them: renewed in time whatever else runs, given up whoever leaves."""

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from branch_calls import log
from faults.toy_model import ToyModel
from server_fixtures import begin, client_of, path, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State
from longtake.state_cache import Fence, Holder, Lease, MemoryStore


class SlowStore(MemoryStore):
    """A store that can be held up at a call."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.held: str | None = None
        self.renewals = 0

    def _wait(self, call: str) -> None:
        if self.held == call:
            self.held = None
            self.reached.set()
            assert self.go_on.wait(10)

    def acquire(self, session_id: str, holder: Holder, lease_s: float, fence: Fence | None = None) -> Lease:
        self._wait("acquire")
        return super().acquire(session_id, holder, lease_s, fence)

    def renew(self, session_id: str, fence: Fence, lease_s: float) -> None:
        self._wait("renew")
        self.renewals += 1
        super().renew(session_id, fence, lease_s)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def slow(store: SlowStore) -> Iterator[Engine]:
    engine = Engine(ToyModel(), store, Limits(lease_s=0.6))
    yield engine
    store.go_on.set()
    engine.close()


async def is_free(store: MemoryStore, session: str) -> bool:
    """Whether another server gets in, within a second."""
    for _ in range(50):
        try:
            store.acquire(session.rsplit("/", 1)[1], Holder("another"), 0.01)
        except Exception:
            await asyncio.sleep(0.02)
        else:
            return True
    return False


async def test_a_client_that_leaves_while_the_lease_is_asked_for(slow: Engine, store: SlowStore) -> None:
    async with client_of(slow) as http:
        session = await begin(http)
        store.held = "acquire"
        request = asyncio.create_task(post(http, session, path(24)))
        await asyncio.to_thread(store.reached.wait, 10)
        request.cancel()
        store.go_on.set()
        await asyncio.wait([request])
        fence = store.read(session.rsplit("/", 1)[1])[2]
        assert fence is None or await is_free(store, session)
        assert (await http.get(session)).json()["next_chunk"] == 0


async def test_a_renewal_under_way_does_not_come_after_the_release(slow: Engine, store: SlowStore) -> None:
    async with client_of(slow) as http:
        session = await begin(http)
        async with slow._advancer._leases.held(session.rsplit("/", 1)[1]):
            store.held = "renew"
            await asyncio.to_thread(store.reached.wait, 10)
            asyncio.get_running_loop().call_later(0.2, store.go_on.set)
        assert store.renewals == 1
        store.acquire(session.rsplit("/", 1)[1], Holder("another"), 1)


class PatientModel(ToyModel):
    """Replays take their time."""

    def absorb(
        self,
        conditions: Conditions,
        state: State,
        index: int,
        camera: ChunkCamera,
        latents: object,
        *,
        decode: bool = True,
    ) -> ChunkOutput:
        time.sleep(0.15)
        return super().absorb(conditions, state, index, camera, latents, decode=decode)  # type: ignore[arg-type]


async def test_leases_are_renewed_while_many_sessions_are_restored(store: SlowStore) -> None:
    """Six restores of 1.8 s each on leases of 0.6 s: none is lost, and the server answers meanwhile."""
    first = Engine(ToyModel(), store, Limits(snapshot_every=1000))
    async with client_of(first) as http:
        sessions = [await begin(http) for _ in range(6)]
        for session in sessions:
            await post(http, session, path(24 * 12))
        before = [await log(http, session) for session in sessions]
    first.close()
    second = Engine(PatientModel(), store, Limits(lease_s=0.6))
    async with client_of(second) as http:
        posts = [asyncio.create_task(post(http, session, path(24, start=24 * 12 + 1))) for session in sessions]
        while store.renewals == 0:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        assert (await http.get("/readyz")).status_code == 200
        assert time.perf_counter() - began < 1
        answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [201] * 6
        assert [(await log(http, session))[:12] for session in sessions] == before
        assert "longtake_lease_takeovers_total 0.0" in (await http.get("/metrics")).text
    second.close()


async def test_a_busy_session_names_its_server(store: SlowStore) -> None:
    here = Engine(ToyModel(), store, Limits(), Holder("here", "http://here:8000"))
    there = Engine(ToyModel(), store, Limits(), Holder("there"))
    async with client_of(here) as http, client_of(there) as other:
        session = await begin(http)
        async with here._advancer._leases.held(session.rsplit("/", 1)[1]):
            refused: httpx.Response = await post(other, session, path(24))
        assert (refused.status_code, refused.json()["code"]) == (409, "session_busy")
        assert refused.json()["owner_address"] == "http://here:8000"
        assert int(refused.headers["Retry-After"]) <= 10
        assert (await post(other, session, path(24))).status_code == 201
    here.close()
    there.close()
