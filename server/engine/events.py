"""What happens to sessions, for those who listen: the log as server-sent events, from any position on.

A listener reads committed chunks from the log, at its own pace, so it misses none, whoever committed them. What is in
no log (progress, errors) waits in a short queue of its own.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from longtake.api_schemas.events import End, EventData, EventName, Failure, Progress, Rewound, Stage
from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import chunk_view
from longtake.state_cache import Head

PAGE = 32
"""Chunks that are read from the log at once."""

PATIENCE = 8
"""How many times rarer a store is asked that has just failed."""

HEARTBEAT = b":\n\n"
_ID = re.compile(r"(\d{1,9})-(-1|\d{1,10})", re.ASCII)


class Position(NamedTuple):
    """How much of a session a listener has seen: its revision and last chunk. As text it is the id of an event."""

    revision: int
    chunk: int

    @classmethod
    def of(cls, head: Head) -> Self:
        """All that there is."""
        return cls(head.revision, head.chunk)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Back from text. Raises `invalid_request`."""
        match = _ID.fullmatch(text)
        if match is None:
            raise ProblemError("invalid_request", "give the id of an event of this session", "Last-Event-ID")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.revision}-{self.chunk}"


NOTHING = Position(0, -1)


@dataclass(frozen=True)
class EventLimits:
    """How much is done for listeners.

    Attributes:
        listeners: how many there may be at once.
        queue: events beside the log that wait for one of them; with more it is cut off and has to come again.
        poll_s: seconds between looks at a session that somebody listens to, for what other servers commit.
        heartbeat_s: seconds of silence after which a comment is sent.
        retry_ms: when a browser whose connection broke should come again.
    """

    listeners: int = 256
    queue: int = 64
    poll_s: float = 0.5
    heartbeat_s: float = 15.0
    retry_ms: int = 1000


@dataclass(eq=False)
class _Listener:
    """One who listens: how much of the log it has seen, and what waits for it beside the log."""

    limit: int
    seen: Position
    failing: bool = False
    dismissed: bool = False
    _waiting: list[bytes] = field(default_factory=list)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self._woken.set()

    def tell(self, event: bytes) -> None:
        if len(self._waiting) == self.limit:
            self.dismiss()
        elif not self.dismissed:
            self._waiting.append(event)
            self.wake()

    def dismiss(self) -> None:
        self.dismissed = True
        self._waiting.clear()
        self.wake()

    def told(self) -> list[bytes]:
        """What waited; from here on it has to be woken again."""
        self._woken.clear()
        waited, self._waiting = self._waiting, []
        return waited

    async def is_woken(self, seconds: float) -> bool:
        """Whether that happens within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True


@dataclass
class _Topic:
    """Everyone who listens to one session."""

    polling: asyncio.Task[None]
    listeners: set[_Listener] = field(default_factory=set)


class Events:
    """Who listens to which session. All of it belongs to the event loop.

    Args:
        calls: the store.
        limits: how much is done for listeners.
    """

    def __init__(self, calls: StoreCalls, limits: EventLimits | None = None) -> None:
        self._calls = calls
        self._store = calls.store
        self._limits = limits or EventLimits()
        self._topics: dict[str, _Topic] = {}
        self._open = True

    def __len__(self) -> int:
        """Listeners."""
        return sum(len(topic.listeners) for topic in self._topics.values())

    def moved(self, session_id: str) -> None:
        """Something was committed here, rewound or deleted."""
        for listener in self._listeners(session_id):
            listener.wake()

    def progress(self, session_id: str, chunk: int, stage: Stage) -> None:
        """A chunk is on its way."""
        self._tell(session_id, "progress", Progress(chunk=chunk, stage=stage))

    def failed(self, session_id: str, code: str) -> None:
        """A request on the session failed with this problem."""
        self._tell(session_id, "error", Failure(code=code))

    def close(self) -> None:
        """Send everyone away; they go on at another server."""
        self._open = False
        for session_id in self._topics:
            for listener in self._listeners(session_id):
                listener.dismiss()

    async def listen(self, session_id: str, last_event_id: str | None) -> AsyncGenerator[bytes, None]:
        """Events of a session, framed, from behind the one with this id on, or from what comes next.

        The first piece only says where the listener stands. Ends when the session does, when the listener is too slow,
        and when the server stops. Raises `session_not_found`, `queue_full`, `shutting_down`, `invalid_request` before
        the first piece.
        """
        seen = None if last_event_id is None else Position.parse(last_event_id)
        with self._listening(session_id) as listener:
            head = (await self._calls.call(self._store.read, session_id))[1]
            if seen is not None and seen.revision > head.revision:
                detail = f"the session is at revision {head.revision}: this is no event of it"
                raise ProblemError("invalid_request", detail, "Last-Event-ID")
            listener.seen = seen or Position.of(head)
            yield f"retry: {self._limits.retry_ms}\nid: {listener.seen}\n\n".encode()
            while not listener.dismissed:
                for event in (*listener.told(), *await self._news(session_id, listener)):
                    yield event
                if not listener.dismissed and not await listener.is_woken(self._limits.heartbeat_s):
                    yield HEARTBEAT

    async def _news(self, session_id: str, listener: _Listener) -> list[bytes]:
        """The next events of the log; a failure is told once, and passes by itself."""
        try:
            found = await self._calls.call(self._behind, session_id, listener.seen)
        except ProblemError as problem:
            if problem.code == "session_not_found":
                listener.dismiss()
                return [_framed("end", End())]
            known, listener.failing = listener.failing, True
            return [] if known else [_framed("error", Failure(code=problem.code))]
        listener.failing = False
        if found:
            listener.seen = found[-1][0]
            listener.wake()  # there may be more
        return [event for _, event in found]

    def _behind(self, session_id: str, seen: Position) -> list[tuple[Position, bytes]]:
        """The next events of the log, a page at most, each with where the listener stands after it."""
        while True:
            head = self._store.read(session_id)[1]
            if (kept := _kept(seen, head)) is not None:
                after = Position(head.revision, min(seen.chunk, kept))
                return [(after, _framed("rewound", Rewound(revision=head.revision, to_chunk=kept), after))]
            if head.chunk == seen.chunk:
                return []
            stop = min(head.chunk, seen.chunk + PAGE) + 1
            records = self._store.chunks(session_id, seen.chunk + 1, stop)
            if self._store.read(session_id)[1].revision == head.revision:  # else they may be of either
                break
        found = ((Position(head.revision, record.index), record) for record in records)
        return [(after, _framed("chunk", chunk_view(session_id, record), after)) for after, record in found]

    @contextmanager
    def _listening(self, session_id: str) -> Iterator[_Listener]:
        if not self._open:
            raise ProblemError("shutting_down", "the server is shutting down", retry_after=5)
        if len(self) >= self._limits.listeners:
            raise ProblemError("queue_full", "too many listen to sessions of this server", retry_after=5)
        if session_id not in self._topics:
            self._topics[session_id] = _Topic(asyncio.create_task(self._poll(session_id)))
        topic, listener = self._topics[session_id], _Listener(self._limits.queue, NOTHING)
        topic.listeners.add(listener)
        try:
            yield listener
        finally:
            topic.listeners.discard(listener)
            if not topic.listeners:
                topic.polling.cancel()
                del self._topics[session_id]

    async def _poll(self, session_id: str) -> None:
        """Wake the listeners when the session has moved, is gone, or can be read again."""
        seen: Position | None = None
        pause = self._limits.poll_s
        while True:
            await asyncio.sleep(pause)
            pause, before, seen = self._limits.poll_s, seen, None
            try:
                seen = Position.of((await self._calls.call(self._store.read, session_id))[1])
            except ProblemError as problem:
                if problem.code != "session_not_found":
                    pause *= PATIENCE
                    continue
            if seen is None or seen != before:
                self.moved(session_id)

    def _tell(self, session_id: str, name: EventName, data: EventData) -> None:
        if session_id in self._topics:
            event = _framed(name, data)
            for listener in self._listeners(session_id):
                listener.tell(event)

    def _listeners(self, session_id: str) -> list[_Listener]:
        topic = self._topics.get(session_id)
        return [] if topic is None else list(topic.listeners)


def _kept(seen: Position, head: Head) -> int | None:
    """The last chunk that rewinds have left since; None when there was none.

    A session that stands before what was seen of it has lost chunks with its store: its listener goes back with it.
    """
    if head.revision > seen.revision:
        return min(head.rewinds[seen.revision :], default=head.chunk)
    return head.chunk if Position.of(head) < seen else None


def _framed(name: EventName, data: EventData, position: Position | None = None) -> bytes:
    """One server-sent event. Its JSON is ASCII: some clients take other characters for ends of lines."""
    number = "" if position is None else f"id: {position}\n"
    return f"event: {name}\n{number}data: {data.model_dump_json(ensure_ascii=True)}\n\n".encode()
