"""Sessions that this server holds: their fence, constants and state in memory, bounded, one user at a time."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from longtake.server.model.world import Conditions, State
from longtake.state_cache import Fence, Head


@dataclass(frozen=True)
class Live:
    """A session ready to go on: the right to commit, and its state after chunk `chunk`."""

    fence: Fence
    revision: int
    chunk: int
    conditions: Conditions
    state: State

    def stands_at(self, fence: Fence | None, head: Head) -> bool:
        """Whether the store still has this server as the last opener, and the session where it was left."""
        return (self.fence, self.revision, self.chunk) == (fence, head.revision, head.chunk)


class HotSessions:
    """The most recently used sessions, at most `limit`; the store has everything that is dropped here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live: OrderedDict[str, Live] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def exclusive(self, session_id: str) -> AsyncIterator[None]:
        """Hold the session against other requests of this server, in the order of asking."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        async with lock:
            yield

    def __len__(self) -> int:
        return len(self._live)

    def get(self, session_id: str) -> Live | None:
        """The session if it is in memory."""
        if session_id in self._live:
            self._live.move_to_end(session_id)
        return self._live.get(session_id)

    def put(self, session_id: str, live: Live) -> None:
        """Keep the session, dropping the least recently used ones past the limit."""
        self._live[session_id] = live
        self._live.move_to_end(session_id)
        while len(self._live) > self._limit:
            self._live.popitem(last=False)

    def drop(self, session_id: str) -> None:
        """Forget what is in memory; the next request restores it from the store."""
        self._live.pop(session_id, None)
