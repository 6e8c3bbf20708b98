"""Server-sent events: what those who listen to a session are told, and what they are not told twice."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from heard_events import Seen, parsed
from live_clients import until
from store_fixtures import make_rewind, make_session, take, write

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.events import EventLimits, Events
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.workers import Workers
from longtake.server.model.world import ModelSpec
from longtake.state_cache import ChunkRecord, Fence, Head, MemoryStore, SessionRecord, StoreUnavailable

QUIET = EventLimits(poll_s=1000, heartbeat_s=1000)
"""Nothing happens but what a test does."""


class Line:
    """One who listens, event by event."""

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        self._pieces = pieces

    async def next(self) -> Seen:
        async with asyncio.timeout(20):
            return parsed(await anext(self._pieces))

    async def take(self, count: int) -> list[Seen]:
        return [await self.next() for _ in range(count)]

    async def over(self) -> bool:
        async with asyncio.timeout(20):
            return [piece async for piece in self._pieces] == []


class Take:
    """A session that a test writes by hand, as another server would."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.id = make_session(store)
        self.fence: Fence = take(store, self.id)

    def write(self, count: int, seeds: int = 0) -> None:
        write(self.store, self.id, self.fence, count, seeds=seeds, snapshots=False)

    def rewind(self, to_chunk: int) -> None:
        self.store.rewind(make_rewind(self.store, self.id, self.fence, to_chunk))


@pytest.fixture
def session(memory: MemoryStore) -> Take:
    return Take(memory)


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


Listen = Callable[..., object]


@pytest.fixture
def events_of(workers: Workers) -> Callable[..., Events]:
    def make(store: MemoryStore, limits: EventLimits = QUIET) -> Events:
        return Events(StoreCalls(store, workers, Metrics(ModelSpec("m", "", 32, 32), "cpu")), limits)

    return make


@pytest.fixture
def events(memory: MemoryStore, events_of: Callable[..., Events]) -> Events:
    return events_of(memory)


@asynccontextmanager
async def listening(events: Events, session_id: str, last_event_id: str | None = None) -> AsyncIterator[Line]:
    """One who listens, and has been told where it stands."""
    async with aclosing(events.listen(session_id, last_event_id)) as pieces:
        line = Line(pieces)
        greeting = await line.next()
        assert (greeting.name, greeting.data) == ("", None)
        assert last_event_id in (None, greeting.id)
        yield line


async def test_what_comes_next_is_told_as_it_is_committed(events: Events, session: Take) -> None:
    session.write(2)
    async with listening(events, session.id) as line:
        for index in (2, 3):
            session.write(1)
            events.moved(session.id)
            event = await line.next()
            assert (event.what, event.id) == (("chunk", index), f"0-{index}")
            assert event.data is not None
            assert (event.data["frames_digest"], event.data["expired"]) == (f"sha256:frames {index}", False)


async def test_the_last_id_goes_on_behind_it_and_misses_nothing(events: Events, session: Take) -> None:
    """More than the log is read at once, and more is committed while it is read."""
    session.write(70)
    async with listening(events, session.id, "0-3") as line:
        first = await line.take(40)
        session.write(10)
        events.moved(session.id)
        rest = await line.take(36)
    assert [event.id for event in first + rest] == [f"0-{index}" for index in range(4, 80)]


async def test_the_id_of_the_greeting_is_where_one_stands(events: Events, session: Take) -> None:
    """One who is cut off before its first event comes again with it."""
    session.write(2)
    async with aclosing(events.listen(session.id, None)) as pieces:
        greeting = await Line(pieces).next()
    session.write(1)
    async with listening(events, session.id, greeting.id) as line:
        assert (await line.next()).what == ("chunk", 2)


async def test_a_record_that_is_gone_is_told_and_not_passed_over(events: Events, session: Take) -> None:
    session.write(3)
    records = session.store._log.branches[f"{session.id}:0"].records
    gone = records.pop(1)
    async with listening(events, session.id, "0--1") as line:
        event = await line.next()
        assert (event.name, event.data) == ("error", {"code": "state_corrupt"})
        records[1] = gone
        events.moved(session.id)
        assert [each.what for each in await line.take(3)] == [("chunk", 0), ("chunk", 1), ("chunk", 2)]


async def test_a_session_is_told_from_its_first_chunk(events: Events, session: Take) -> None:
    session.write(2)
    async with listening(events, session.id, "0--1") as line:
        assert [event.what for event in await line.take(2)] == [("chunk", 0), ("chunk", 1)]


async def test_commits_of_other_servers_are_seen(events_of: Callable[..., Events], session: Take) -> None:
    events = events_of(session.store, replace(QUIET, poll_s=0.005))
    async with listening(events, session.id) as line:
        session.write(2)
        assert [event.what for event in await line.take(2)] == [("chunk", 0), ("chunk", 1)]
        session.rewind(0)
        assert (await line.next()).what == ("rewound", 0)
        session.store.delete(session.id)
        assert (await line.next()).what == ("end", None)
        assert await line.over()


async def test_a_rewind_is_told_with_a_place_to_go_on_from(events: Events, session: Take) -> None:
    session.write(5)
    async with listening(events, session.id) as line:
        session.rewind(1)
        session.write(2, seeds=10)
        events.moved(session.id)
        rewound, *chunks = await line.take(3)
    assert (rewound.what, rewound.id, rewound.data) == (("rewound", 1), "1-1", {"revision": 1, "to_chunk": 1})
    assert [(event.id, (event.data or {})["frames_digest"]) for event in chunks] == [
        ("1-2", "sha256:frames 12"),
        ("1-3", "sha256:frames 13"),
    ]
    async with listening(events, session.id, rewound.id) as line:
        assert [event.id for event in await line.take(2)] == ["1-2", "1-3"]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ("0-9", [("rewound", 2), ("chunk", 3), ("chunk", 4)]),
        ("0-2", [("rewound", 2), ("chunk", 3), ("chunk", 4)]),
        ("0-0", [("rewound", 2), ("chunk", 1), ("chunk", 2), ("chunk", 3), ("chunk", 4)]),
        ("1-4", [("rewound", 3), ("chunk", 4)]),
        ("2-3", [("chunk", 4)]),
    ],
)
async def test_an_id_of_an_older_revision(
    events: Events, session: Take, seen: str, told: list[tuple[str, object]]
) -> None:
    """Two rewinds went by: what was seen stays as far as the farther one left it."""
    session.write(10)
    session.rewind(2)
    session.write(4)
    session.rewind(3)
    session.write(1)
    async with listening(events, session.id, seen) as line:
        assert [event.what for event in await line.take(len(told))] == told


async def test_a_session_that_lost_chunks_with_its_store_takes_its_listeners_back(
    events: Events, session: Take
) -> None:
    session.write(2)
    async with listening(events, session.id, "0-6") as line:
        rewound = await line.next()
        assert (rewound.what, rewound.id) == (("rewound", 1), "0-1")
        session.write(1)
        events.moved(session.id)
        assert (await line.next()).id == "0-2"


async def test_a_rewind_while_the_log_is_read(events_of: Callable[..., Events]) -> None:
    """Records read across a rewind are of no revision: they are not told."""

    class Rewound(MemoryStore):
        armed = True

        def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
            found = super().chunks(session_id, start, stop)
            if self.armed:
                self.armed = False
                session.rewind(0)
                session.write(1, seeds=20)
            return found

    session = Take(Rewound())
    session.write(3)
    async with listening(events_of(session.store), session.id, "0--1") as line:
        rewound, *chunks = await line.take(3)
    assert rewound.what == ("rewound", 0)
    assert [(event.id, (event.data or {})["frames_digest"]) for event in chunks] == [
        ("1-0", "sha256:frames 0"),
        ("1-1", "sha256:frames 21"),
    ]


async def test_progress_and_errors_have_no_id(events: Events, session: Take) -> None:
    async with listening(events, session.id) as line:
        events.progress(session.id, 0, "computing")
        events.failed(session.id, "store_full")
        events.progress("ses_another", 0, "computing")
        told = await line.take(2)
    assert [(event.what, event.id) for event in told] == [
        (("progress", "computing"), None),
        (("error", "store_full"), None),
    ]


async def test_one_who_is_too_slow_is_cut_off_and_comes_again(events: Events, session: Take) -> None:
    async with listening(events, session.id) as slow, listening(events, session.id) as quick:
        for index in range(QUIET.queue + 1):
            events.progress(session.id, index, "queued")
            assert (await quick.next()).data == {"chunk": index, "stage": "queued"}
        session.write(1)
        assert await slow.over()
        events.moved(session.id)
        assert (await quick.next()).id == "0-0"
    async with listening(events, session.id, "0--1") as again:
        assert (await again.next()).id == "0-0"


async def test_silence_is_broken_by_comments(events_of: Callable[..., Events], session: Take) -> None:
    async with listening(events_of(session.store, replace(QUIET, heartbeat_s=0.005)), session.id) as line:
        assert [event.name for event in await line.take(3)] == ["heartbeat"] * 3


async def test_a_store_that_is_away_is_told_once_and_passes(events_of: Callable[..., Events]) -> None:
    class Away(MemoryStore):
        away = False

        def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
            if self.away:
                raise StoreUnavailable("gone")
            return super().read(session_id)

    session = Take(store := Away())
    limits = EventLimits(poll_s=0.002, heartbeat_s=0.01)
    async with listening(events_of(store, limits), session.id) as line:
        session.write(1)
        while (event := await line.next()).name == "heartbeat":
            pass
        assert event.what == ("chunk", 0)
        store.away = True
        told = [event for event in await line.take(5) if event.name != "heartbeat"]
        assert [event.what for event in told] == [("error", "store_unavailable")]
        store.away = False
        session.write(1)
        while (event := await line.next()).name == "heartbeat":
            pass
        assert event.what == ("chunk", 1)


async def test_only_so_many_may_listen(events_of: Callable[..., Events], session: Take) -> None:
    events = events_of(session.store, replace(QUIET, listeners=2))
    async with listening(events, session.id), listening(events, session.id):
        with pytest.raises(ProblemError) as refused:
            await anext(events.listen(session.id, None))
        assert (refused.value.code, refused.value.retry_after) == ("queue_full", 5)
    assert len(events) == 0
    async with listening(events, session.id):
        assert len(events) == 1


@pytest.mark.parametrize("last_event_id", ["", "0", "0-", "-1-0", "0-1-2", "a-b", "0-99999999999", "0-1\n", "٣-٣"])
async def test_an_id_that_is_none(events: Events, session: Take, last_event_id: str) -> None:
    with pytest.raises(ProblemError) as refused:
        await anext(events.listen(session.id, last_event_id))
    assert (refused.value.code, refused.value.field) == ("invalid_request", "Last-Event-ID")
    assert len(events) == 0


async def test_an_id_of_a_revision_that_there_never_was(events: Events, session: Take) -> None:
    session.write(3)
    session.rewind(0)
    for impossible in ("2--1", "9-99"):
        with pytest.raises(ProblemError) as refused:
            await anext(events.listen(session.id, impossible))
        assert (refused.value.code, refused.value.field) == ("invalid_request", "Last-Event-ID")
    assert len(events) == 0
    async with listening(events, session.id, "1-99") as line:  # as ids are when a store has lost chunks
        assert (await line.next()).what == ("rewound", 0)


async def test_no_such_session(events: Events) -> None:
    with pytest.raises(ProblemError) as refused:
        await anext(events.listen("ses_" + "a" * 39, None))
    assert refused.value.code == "session_not_found"
    assert len(events) == 0


async def test_a_server_that_stops_sends_everyone_away(events: Events, session: Take) -> None:
    async with listening(events, session.id) as line:
        waiting = asyncio.create_task(line.over())
        events.close()
        assert await waiting
        with pytest.raises(ProblemError) as refused:
            await anext(events.listen(session.id, None))
        assert refused.value.code == "shutting_down"


async def test_nobody_polls_for_nobody(events_of: Callable[..., Events]) -> None:
    class Counting(MemoryStore):
        reads = 0

        def read(self, session_id: str) -> object:
            self.reads += 1
            return super().read(session_id)

    def polling() -> int:
        return sum("_poll" in repr(task.get_coro()) for task in asyncio.all_tasks())

    session = Take(store := Counting())
    events = events_of(store, replace(QUIET, poll_s=0.001))
    async with listening(events, session.id), listening(events, session.id):
        await until(lambda: store.reads > 10)
        assert polling() == 1
    await until(lambda: not polling())
