"""Sessions that this server holds: on the device, then in pinned host memory; the store has everything dropped here.

A session's bytes are those of its state and conditions, every storage once. What two sessions share counts for both.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from longtake.server.engine.copies import Copies, InThread, Parked, memory, parked_memory
from longtake.server.model.world import Conditions, State

if TYPE_CHECKING:  # the GPU check runs where no client of a store is installed
    from longtake.state_cache import Fence, Head

log = logging.getLogger(__name__)

_STATE = "state."
_CONDITIONS = "conditions."


@dataclass(frozen=True)
class Live:
    """A session ready to go on: the right to commit, and its state after chunk `chunk`.

    Attributes:
        exact_until: last chunk up to which the state is exact to the bit, None when all of it is.
        snapshot: last chunk of which a snapshot was taken or begun, -1 for none.
    """

    fence: "Fence"
    revision: int
    chunk: int
    conditions: Conditions
    state: State
    exact_until: int | None = None
    snapshot: int = -1

    def stands_at(self, fence: "Fence | None", head: "Head") -> bool:
        """Whether the store still has this server's fence in force, and the session where it was left."""
        return (self.fence, self.revision, self.chunk) == (fence, head.revision, head.chunk)


class Holding(NamedTuple):
    """What one tier holds."""

    sessions: int
    nbytes: int


@dataclass(frozen=True)
class _Held:
    """A session in a tier; `copy` brings it from the device to the host, `moved` names tensors that it took there."""

    live: Live
    nbytes: int
    copy: Callable[[], Parked] | None = None
    moved: frozenset[str] = frozenset()


class _Tier:
    """Sessions, least recently used first, and a budget that they may exceed."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._nbytes = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()

    @property
    def holding(self) -> Holding:
        return Holding(len(self._held), self._nbytes)

    def get(self, session_id: str) -> _Held | None:
        if session_id in self._held:
            self._held.move_to_end(session_id)
        return self._held.get(session_id)

    def put(self, session_id: str, held: _Held) -> None:
        self.pop(session_id)
        self._held[session_id] = held
        self._nbytes += held.nbytes

    def pop(self, session_id: str) -> None:
        if (held := self._held.pop(session_id, None)) is not None:
            self._nbytes -= held.nbytes

    def surplus(self, spared: Collection[str], wanted: int = 0) -> Iterator[tuple[str, _Held]]:
        """Sessions to let go of until the rest leaves `wanted` bytes of the budget free."""
        excess = self._nbytes + wanted - self.budget
        for session_id, held in list(self._held.items()):
            if excess > 0 and session_id not in spared:
                excess -= held.nbytes
                yield session_id, held


class Tiers:
    """The most recently used sessions within two budgets of bytes; used from the event loop alone.

    A session that leaves the device is copied to the host first, beside what computes, so that the device holds a
    little more than its budget meanwhile. Sessions that a request has to itself count, and never leave.

    Args:
        device_bytes: budget of the device; without meaning on a CPU, where the host is the only tier.
        host_bytes: budget of the host, in bytes as they are pinned.
        in_thread: runs the copies.
        copies: how states leave the device; None on a CPU.
    """

    def __init__(self, device_bytes: int, host_bytes: int, in_thread: InThread, copies: Copies | None = None) -> None:
        self._device = _Tier(device_bytes)
        self._host = _Tier(host_bytes)
        self._in_thread = in_thread
        self._copies = copies
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[str] = set()
        self._leaving: dict[str, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def exclusive(self, session_id: str) -> AsyncIterator[None]:
        """Hold the session against other requests of this server, in the order of asking."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        async with lock:
            self._running.add(session_id)
            try:
                yield
            finally:
                self._running.discard(session_id)
                self._trim()

    @property
    def holdings(self) -> dict[str, Holding]:
        """Sessions and bytes by tier: `device` and `host`."""
        return {"device": self._device.holding, "host": self._host.holding}

    async def get(self, session_id: str) -> Live | None:
        """The session, on the device again if it was in host memory; None when the store has to be asked."""
        self._leaving.pop(session_id, None)
        if (held := self._device.get(session_id)) is not None:
            return held.live
        if (held := self._host.get(session_id)) is None or self._copies is None:
            return None if held is None else held.live
        self._trim(wanted=memory(_tensors(held.live).values()))
        live = _with(held.live, await self._in_thread(self._copies.back, Parked(_tensors(held.live), held.moved)))
        if self._host.get(session_id) is held:  # else it was dropped meanwhile
            self.put(session_id, live)
        return live

    def put(self, session_id: str, live: Live) -> None:
        """Keep the session in place of what was held of it, and let go of others past the budgets.

        Whatever computes its tensors is queued on the device by now; they never change.
        """
        self.drop(session_id)
        tensors = _tensors(live)
        held = _Held(live, memory(tensors.values()))
        if self._copies is None:
            self._host.put(session_id, held)
        else:
            self._device.put(session_id, replace(held, copy=self._copies.leaving(tensors)))
        self._trim()

    def drop(self, session_id: str) -> None:
        """Forget what is in memory; the next request restores it from the store."""
        self._leaving.pop(session_id, None)
        self._device.pop(session_id)
        self._host.pop(session_id)

    async def settled(self) -> None:
        """Wait for the copies under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _trim(self, wanted: int = 0) -> None:
        """Let go of idle sessions past the budgets, and past `wanted` bytes of the device that are needed soon."""
        for session_id, held in self._device.surplus(self._running, wanted):
            if session_id in self._leaving:
                continue
            if parked_memory(_tensors(held.live).values()) > self._host.budget:
                self._device.pop(session_id)
                continue
            self._leaving[session_id] = held
            task = asyncio.create_task(self._demote(session_id, held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for session_id, _ in self._host.surplus(self._running):
            self._host.pop(session_id)

    async def _demote(self, session_id: str, held: _Held) -> None:
        """Copy a session to the host; nothing comes of it when the session is used or dropped meanwhile."""
        assert held.copy is not None
        parked = None
        try:
            parked = await self._in_thread(held.copy)
        except Exception:
            log.exception("a state could not be copied to host memory and is dropped there")
        if self._leaving.get(session_id) is not held:
            return
        del self._leaving[session_id]
        if session_id in self._running:
            return
        self._device.pop(session_id)
        if parked is not None:
            nbytes = parked_memory(_tensors(held.live).values())
            self._host.put(session_id, _Held(_with(held.live, parked.tensors), nbytes, moved=parked.moved))
        self._trim()


def _tensors(live: Live) -> dict[str, Tensor]:
    """All tensors of a session by name."""
    conditions = {_CONDITIONS + name: x for name, x in live.conditions.to_tensors().items()}
    return conditions | {_STATE + name: x for name, x in live.state.items()}


def _with(live: Live, tensors: dict[str, Tensor]) -> Live:
    """The session with other copies of its tensors, those of `_tensors`."""
    conditions = {name: tensors[_CONDITIONS + name] for name in live.conditions.to_tensors()}
    state = {name: tensors[_STATE + name] for name in live.state}
    return replace(live, conditions=Conditions.from_tensors(conditions), state=state)
