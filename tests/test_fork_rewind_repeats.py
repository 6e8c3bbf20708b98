"""Forks and rewinds that come again: done once, answered alike, whatever was lost on the way."""

import asyncio

import httpx
import pytest
from branch_calls import branch, fork, log, rewind, state
from faults.toy_model import ToyModel
from server_fixtures import begin, client_of, digests, path, post

from longtake.server.engine.branching import rewound
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.state_cache import (
    Commit,
    Cursor,
    Head,
    HeadConflict,
    MemoryStore,
    RequestRecord,
    Retention,
    Rewind,
    SessionRecord,
    Store,
    StoreUnavailable,
    lineage_of,
)


async def test_a_fork_that_is_repeated_is_made_once(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    """Here and on another server, after it has gone on."""
    parent = await begin(quick)
    await post(quick, parent, path(24))
    first = await branch(quick, parent, "fork", from_chunk=0, seed=9, key="f")
    assert "Idempotent-Replayed" not in first.headers
    await post(quick, first.json()["links"]["self"], path(24, start=25), prompt="a pier")
    await post(quick, parent, path(24, start=25))
    other = Engine(ToyModel(), memory, Limits())
    async with client_of(other) as there:
        for http in (quick, there):
            again = await branch(http, parent, "fork", from_chunk=0, seed=9, key="f")
            assert (again.status_code, again.content) == (201, first.content)
            assert again.headers["Idempotent-Replayed"] == "true"
            refused = await branch(http, parent, "fork", from_chunk=0, seed=8, key="f")
            assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
    other.close()
    assert len((await quick.get("/v1/sessions")).json()["data"]) == 2
    unkeyed = [await fork(quick, parent, 0) for _ in range(2)]
    elsewhere = await branch(quick, unkeyed[0], "fork", from_chunk=0, seed=9, key="f")
    assert len({*unkeyed, elsewhere.json()["links"]["self"], first.json()["links"]["self"]}) == 4


async def test_a_refused_fork_binds_no_key(quick: httpx.AsyncClient) -> None:
    """While the one that was made holds it, wherever the parent stands since."""
    parent = await begin(quick)
    await post(quick, parent, path(48))
    for _ in range(2):
        refused = await branch(quick, parent, "fork", from_chunk=2, key="f")
        assert (refused.status_code, refused.json()["code"]) == (404, "chunk_not_found")
    made = await branch(quick, parent, "fork", from_chunk=1, key="f")
    assert (made.status_code, made.json()["next_chunk"]) == (201, 2)
    await rewind(quick, parent, -1)
    again = await branch(quick, parent, "fork", from_chunk=1, key="f")
    assert (again.content, again.headers["Idempotent-Replayed"]) == (made.content, "true")
    for chunk in (-1, 2):
        other = await branch(quick, parent, "fork", from_chunk=chunk, key="f")
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


async def test_two_servers_fork_under_one_key_at_once(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    parent = await begin(quick)
    await post(quick, parent, path(24))
    other = Engine(ToyModel(), memory, Limits())
    async with client_of(other) as there:
        await asyncio.gather(*(branch(http, parent, "fork", from_chunk=0, key="f") for http in (quick, there)))
        answers = [await branch(http, parent, "fork", from_chunk=0, key="f") for http in (quick, there)]
    other.close()
    assert [answer.status_code for answer in answers] == [201, 201]
    forks = (await state(quick, parent))["forks"]
    assert forks == [{"id": answers[0].json()["id"], "from_chunk": 0}]
    assert answers[0].content == answers[1].content


async def test_a_rewind_that_is_repeated_is_done_once(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    session = await begin(quick)
    await post(quick, session, path(48))
    first = await branch(quick, session, "rewind", to_chunk=0, key="r")
    await post(quick, session, "d-48")
    standing = await state(quick, session)
    other = Engine(ToyModel(), memory, Limits())
    async with client_of(other) as there:
        for http in (quick, there):
            again = await branch(http, session, "rewind", to_chunk=0, key="r")
            assert (again.status_code, again.content) == (200, first.content)
            assert again.headers["Idempotent-Replayed"] == "true"
            refused = await branch(http, session, "rewind", to_chunk=1, key="r")
            assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
    other.close()
    assert await state(quick, session) == standing
    assert digests(await post(quick, session, path(24), key="r"))  # a key of this route is none of another


async def test_a_request_whose_chunks_were_rewound_away(quick: httpx.AsyncClient) -> None:
    session = await begin(quick)
    kept = await post(quick, session, path(24), key="kept")
    await post(quick, session, path(48, start=25), key="gone")
    await post(quick, session, path(24, start=73), key="gone-too")
    await rewind(quick, session, 1)
    assert (await post(quick, session, path(24), key="kept")).content == kept.content
    await post(quick, session, path(72, start=49))
    for key, poses in (("gone", path(48, start=25)), ("gone-too", path(24, start=73))):
        refused = await post(quick, session, poses, key=key)
        assert (refused.status_code, refused.json()["code"]) == (409, "rewound")
    assert (await state(quick, session))["next_chunk"] == 5


def request(first_chunk: int, chunks: int, revision: int) -> RequestRecord:
    return RequestRecord(
        fingerprint="",
        first_chunk=first_chunk,
        chunks=chunks,
        frames_used=0,
        done=True,
        revision=revision,
        pending_poses=0,
    )


@pytest.mark.parametrize(
    ("record", "gone"),
    [
        (request(0, 5, 0), False),
        (request(0, 6, 0), True),
        (request(5, 1, 0), True),
        (request(5, 1, 1), True),
        (request(3, 1, 1), False),
        (request(4, 0, 1), False),
        (request(9, 9, 2), False),
    ],
)
def test_what_a_rewind_takes_away(record: RequestRecord, gone: object) -> None:
    """Two rewinds, to chunks 7 and 4."""
    head = Head(chunk=12, revision=2, cursor=Cursor(controller={}, seed=0), rewinds=(7, 4))
    assert rewound(record, head) == gone


class Unlucky(MemoryStore):
    """A store whose sessions move just before they are forked or rewound, or whose answers get lost."""

    conflicts = 0
    lost = 0

    def fork(self, child: SessionRecord, source: Head, cursor: Cursor) -> None:
        self._tick()
        super().fork(child, source, cursor)
        self._lose()

    def rewind(self, rewind: Rewind) -> None:
        self._tick()
        super().rewind(rewind)
        self._lose()

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        if commit.chunk is None:
            self._lose()

    def _tick(self) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise HeadConflict(0, 0)

    def _lose(self) -> None:
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("gone")


@pytest.fixture
def memory() -> MemoryStore:
    return Unlucky()


@pytest.mark.parametrize(("how", "field"), [("fork", "from_chunk"), ("rewind", "to_chunk")])
async def test_a_session_that_moves_meanwhile(quick: httpx.AsyncClient, memory: Unlucky, how: str, field: str) -> None:
    session = await begin(quick)
    await post(quick, session, path(24))
    memory.conflicts = 2
    assert (await branch(quick, session, how, **{field: 0})).is_success
    memory.conflicts = 3
    refused = await branch(quick, session, how, **{field: 0})
    assert (refused.status_code, refused.json()["code"]) == (409, "chunk_conflict")


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_fork_whose_answer_was_lost(quick: httpx.AsyncClient, memory: Unlucky, lost: int) -> None:
    """The child is there already; at the second failure, so is what was to be answered."""
    parent = await begin(quick)
    await post(quick, parent, path(24))
    memory.lost = lost
    for _ in range(lost):
        failed = await branch(quick, parent, "fork", from_chunk=0, key="f")
        assert (failed.status_code, failed.json()["code"]) == (503, "store_unavailable")
    made = await branch(quick, parent, "fork", from_chunk=0, key="f")
    assert (made.status_code, made.json()["next_chunk"]) == (201, 1)
    assert (await state(quick, parent))["forks"] == [{"id": made.json()["id"], "from_chunk": 0}]
    assert (await branch(quick, parent, "fork", from_chunk=0, key="f")).content == made.content


async def test_a_rewind_whose_answer_was_lost(quick: httpx.AsyncClient, memory: Unlucky) -> None:
    session = await begin(quick)
    made = digests(await post(quick, session, path(48)))
    memory.lost = 1
    failed = await branch(quick, session, "rewind", to_chunk=0, key="r")
    assert (failed.status_code, failed.json()["code"]) == (503, "store_unavailable")
    assert digests(await post(quick, session, path(24, start=25))) == made[1:]
    again = await branch(quick, session, "rewind", to_chunk=0, key="r")
    assert (again.status_code, again.json()["revision"], again.headers["Idempotent-Replayed"]) == (200, 1, "true")
    assert (await state(quick, session))["next_chunk"] == 2


async def test_on_every_store_with_two_servers(any_store: Store) -> None:
    """Two servers take turns; what one was answered, the other answers too."""
    engines = [Engine(ToyModel(), any_store, Limits(retention=Retention(chunks=4))) for _ in range(2)]
    here, there = [client_of(engine) for engine in engines]
    async with here, there:
        parent = await begin(here)
        whole = digests(await post(here, parent, path(96)))
        child = await fork(there, parent, 1, key="f")
        assert await fork(here, parent, 1, key="f") == child
        assert digests(await post(there, child, path(48, start=49))) == whole[2:]
        await post(here, parent, path(24, start=97), key="gone")
        back = await branch(there, parent, "rewind", to_chunk=0, key="r")
        assert (await branch(here, parent, "rewind", to_chunk=0, key="r")).content == back.content
        assert (await post(there, parent, path(24, start=97), key="gone")).json()["code"] == "rewound"
        assert digests(await post(here, parent, path(72, start=25))) == whole[1:]
        await post(here, parent, path(240, start=97))
        for engine in engines:
            await engine.settle()
        any_store.collect(lineage_of(parent.rsplit("/", 1)[1]), Retention(chunks=4))
        oldest = int(str((await state(there, parent))["rewind_from"]))
        assert oldest > 0
        assert (await branch(there, parent, "rewind", to_chunk=oldest - 1)).json()["code"] == "chunk_expired"
        assert await fork(there, parent, oldest)
        assert (await rewind(there, parent, oldest))["next_chunk"] == oldest + 1
        assert await log(here, child) == whole
    for engine in engines:
        engine.close()
