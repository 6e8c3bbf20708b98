"""Requests that come again: idempotency keys, expected positions, and what a failure in the middle leaves."""

import asyncio

import httpx
import pytest
from server_fixtures import begin, client_of, digests, first_frame, path, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import Commit, Holder, MemoryStore, StoreUnavailable


async def test_a_repeated_request_is_carried_out_once(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    first = await post(http, session, path(53), key="walk-1")
    again = await post(http, session, path(53), key="walk-1")
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert (await http.get(session)).json()["next_frame"] == 54


async def test_a_replay_answers_as_it_did_when_the_session_has_moved_on(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    first = await post(http, session, path(30), key="one")
    await post(http, session, path(40, start=31))
    assert (await post(http, session, path(30), key="one")).content == first.content


async def test_a_repeated_request_without_a_whole_chunk(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    first = await post(http, session, path(5), key="five")
    assert (await post(http, session, path(5), key="five")).content == first.content
    assert (await http.get(session)).json()["pending_poses"] == 5


async def test_a_key_with_another_request_is_refused(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    await post(http, session, path(24), key="walk")
    other = await post(http, session, path(25), key="walk")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert (await http.get(session)).json()["next_frame"] == 25


async def test_keys_of_two_sessions_have_nothing_to_do_with_each_other(http: httpx.AsyncClient) -> None:
    one, two = await begin(http), await begin(http)
    assert digests(await post(http, one, path(24), key="k")) == digests(await post(http, two, path(24), key="k"))
    assert (await http.get(two)).json()["next_chunk"] == 1


async def test_the_first_request_still_running(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answers = await asyncio.gather(*(post(http, session, path(48), key="twice") for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    refused = [answer for answer in answers if answer.status_code == 409]
    assert {answer.json()["code"] for answer in refused} == {"in_progress"}
    assert all("Retry-After" in answer.headers for answer in refused)
    assert (await http.get(session)).json()["next_chunk"] == 2


async def test_creation_is_repeated_too(http: httpx.AsyncClient) -> None:
    async def create(prompt: str) -> httpx.Response:
        body = {"image": first_frame(), "prompt": prompt}
        return await http.post("/v1/sessions", json=body, headers={"Idempotency-Key": "new"})

    first = await create("a quay")
    await post(http, f"/v1/sessions/{first.json()['id']}", "w-24")
    again = await create("a quay")
    assert (again.status_code, again.content, again.headers["Idempotent-Replayed"]) == (201, first.content, "true")
    other = await create("a pier")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert len((await http.get("/v1/sessions")).json()["data"]) == 1


@pytest.mark.parametrize(("field", "stale", "right"), [("expected_chunk", 0, 1), ("expected_frame", 25, 30)])
async def test_a_stale_expectation_is_a_conflict(http: httpx.AsyncClient, field: str, stale: int, right: int) -> None:
    session = await begin(http)
    await post(http, session, path(29))
    refused = await post(http, session, path(24, start=30), **{field: stale})
    assert (refused.status_code, refused.json()["code"]) == (409, "chunk_conflict")
    assert (refused.json()["next_chunk"], refused.json()["next_frame"], refused.json()["pending_poses"]) == (1, 30, 5)
    assert (await post(http, session, path(24, start=30), **{field: right})).status_code == 201


async def test_two_clients_that_expect_the_same_chunk(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answers = await asyncio.gather(*(post(http, session, path(24), expected_chunk=0) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    assert (await http.get(session)).json()["next_chunk"] == 1


class Breaking:
    """A model or a store that fails at a given call, once."""

    def __init__(self, at: int) -> None:
        self.left = at

    def tick(self, error: Exception) -> None:
        self.left -= 1
        if self.left == 0:
            raise error


class BreakingModel:
    """The served model, out of memory at one chunk."""

    def __init__(self, model: WorldModel, at: int) -> None:
        self._model = model
        self._breaking = Breaking(at)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        self._breaking.tick(MemoryError("no memory left on the device"))
        return self._model.generate(conditions, state, index, camera, seed)


class BreakingStore(MemoryStore):
    """A store that goes away at one commit, before or after it took place."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self._breaking = Breaking(at)
        self._after = after

    def commit(self, commit: Commit) -> None:
        if self._after:
            super().commit(commit)
        self._breaking.tick(StoreUnavailable("gone"))
        if not self._after:
            super().commit(commit)


async def test_a_model_that_fails_in_the_middle(model: WorldModel, memory: MemoryStore) -> None:
    broken = BreakingModel(model, at=3)
    engine = Engine(broken, memory, Limits(queue_size=4))  # type: ignore[arg-type]
    async with client_of(engine) as http:
        session = await begin(http)
        refused = await post(http, session, path(100), key="long")
        assert (refused.status_code, refused.json()["code"]) == (500, "internal_error")
        assert (refused.json()["committed"], refused.json()["next_chunk"]) == (2, 2)
        assert "memory" not in refused.text
        standing = (await http.get(session)).json()
        assert (standing["next_chunk"], standing["pending_poses"]) == (2, 0)
        finished = await post(http, session, path(100), key="long")
        uncut = await post(http, await begin(http), path(100))
    engine.close()
    assert digests(finished) == digests(uncut)
    assert finished.json()["pending_poses"] == 4


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "commit done, answer lost"])
@pytest.mark.parametrize("camera", ["w-30,wd-30,i-12", path(72)], ids=["actions", "poses"])
async def test_a_store_that_goes_away_in_the_middle(model: WorldModel, camera: object, *, after: bool) -> None:
    engine = Engine(model, BreakingStore(2, after=after), Limits(queue_size=4))
    async with client_of(engine) as http:
        session = await begin(http)
        refused = await post(http, session, camera, key="long")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        assert "Retry-After" in refused.headers
        committed = 2 if after else 1
        assert (refused.json()["committed"], refused.json()["next_chunk"]) == (committed, committed)
        assert (await http.get(session)).json()["next_chunk"] == committed
        finished = await post(http, session, camera, key="long")
        assert digests(finished) == digests(await post(http, await begin(http), camera))
    engine.close()


async def test_a_cut_request_does_not_go_on_where_others_went(model: WorldModel) -> None:
    engine = Engine(model, BreakingStore(2, after=False), Limits(queue_size=4))
    async with client_of(engine) as http:
        session = await begin(http)
        await post(http, session, path(72), key="cut")
        await post(http, session, path(24, start=25))
        refused = await post(http, session, path(72), key="cut")
        assert (refused.status_code, refused.json()["code"]) == (409, "chunk_conflict")
        assert (await http.get(session)).json()["next_chunk"] == 2
    engine.close()


async def test_servers_take_turns(model: WorldModel, memory: MemoryStore) -> None:
    engines = [Engine(model, memory, Limits(queue_size=4)) for _ in range(2)]
    async with client_of(engines[0]) as here, client_of(engines[1]) as there:
        session = await begin(here)
        taken = digests(await post(here, session, path(24)))
        taken += digests(await post(there, session, path(24, start=25)))
        taken += digests(await post(here, session, path(24, start=49)))
        assert taken == digests(await post(here, await begin(here), path(72)))
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "between",
    [{"camera": {"actions": "s-5"}}, {"prompt": "a pier"}],
    ids=["poses that wait", "another prompt"],
)
async def test_a_cut_request_does_not_go_on_with_what_others_left(
    model: WorldModel, between: dict[str, object]
) -> None:
    engine = Engine(model, BreakingStore(2, after=False), Limits(queue_size=4))
    async with client_of(engine) as http:
        session = await begin(http)
        await post(http, session, "w-36,d-36", key="cut")
        assert (await http.post(f"{session}/chunks", json=between)).status_code == 201
        refused = await post(http, session, "w-36,d-36", key="cut")
        assert (refused.status_code, refused.json()["code"]) == (409, "chunk_conflict")
        assert (await http.get(session)).json()["next_chunk"] == 1
    engine.close()


def _take_over(store: MemoryStore, session_id: str) -> None:
    """As another server does once the lease has lapsed."""
    fence = store.read(session_id)[2]
    assert fence is not None
    store.release(session_id, fence)
    store.acquire(session_id, Holder("another"), 10)


async def test_a_server_that_was_overtaken_can_not_commit(model: WorldModel, memory: MemoryStore) -> None:
    class Overtaken(BreakingModel):
        def generate(
            self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int
        ) -> ChunkOutput:
            if index == 1:
                _take_over(memory, session.rsplit("/", 1)[1])
            return self._model.generate(conditions, state, index, camera, seed)

    engine = Engine(Overtaken(model, at=0), memory, Limits(queue_size=4))  # type: ignore[arg-type]
    async with client_of(engine) as http:
        session = await begin(http)
        refused = await post(http, session, path(72))
        assert (refused.status_code, refused.json()["code"]) == (409, "session_fenced")
        committed = refused.json()["committed"]
        assert (await http.get(session)).json()["next_chunk"] == committed == refused.json()["next_chunk"]
        assert committed in (0, 1)
    engine.close()
