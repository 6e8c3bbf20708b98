"""Full states for the store: when one is worth taking, and how it gets there beside the chunks that go on.

The log is the truth: a snapshot that fails or is left out only makes the next restore replay more chunks.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.copies import Copies, InThread, Parked, memory, parked_memory
from longtake.server.model.world import State
from longtake.state_cache import BlobsMissing, Fence, Store, save_tensors
from longtake.state_cache.failpoints import failpoint

log = logging.getLogger(__name__)

SMALL_STATE = 32 * 2**20
"""Bytes up to which a state is stored after every chunk."""

BYTES_A_CHUNK = 64 * 2**20
"""Bytes of a larger state for each chunk between two snapshots, unless replaying those would take too long."""


def snapshot_interval(nbytes: int, replay_s: float, budget_s: float) -> int:
    """Chunks from one snapshot to the next, at least 1.

    Args:
        nbytes: size of the state.
        replay_s: seconds that replaying one chunk takes, 0 when nobody knows yet.
        budget_s: seconds that the replay of a restore may take.
    """
    if nbytes <= SMALL_STATE:
        return 1
    wanted = -(-nbytes // BYTES_A_CHUNK)
    return wanted if replay_s <= 0 else min(wanted, max(1, int(budget_s / replay_s)))


class SnapshotPolicy:
    """When a snapshot is due.

    Args:
        every: chunks from one snapshot to the next; 0: by size and measured replay time.
        budget_s: seconds that the replay of a restore may take.
    """

    def __init__(self, every: int = 0, budget_s: float = 5.0) -> None:
        self._every = every
        self._budget_s = budget_s
        self._replay_s = 0.0

    def replayed(self, seconds: float) -> None:
        """A chunk's t=0 pass and decode took this long; of many, the last ten or so count."""
        self._replay_s = seconds if self._replay_s == 0 else 0.9 * self._replay_s + 0.1 * seconds

    def interval(self, nbytes: int) -> int:
        """Chunks from one snapshot of a state of this size to the next."""
        return self._every or snapshot_interval(nbytes, self._replay_s, self._budget_s)

    def due(self, chunk: int, last: int, nbytes: int) -> bool:
        """Whether to take a snapshot after `chunk`, the last one being that after chunk `last` (-1: none)."""
        return chunk - last >= self.interval(nbytes)


@dataclass(frozen=True)
class Snapshot:
    """The state after chunk `index`, and the right to attach it to the log."""

    session_id: str
    fence: Fence
    revision: int
    index: int
    state: State


@dataclass(frozen=True)
class Written:
    """What became of a snapshot.

    Attributes:
        outcome: `ok`, `skipped` (no room, an earlier one under way, or its chunk not committed) or a problem's code.
        nbytes: bytes of host memory that it takes.
        seconds: from asking for it to its end, 0 when it was skipped.
    """

    session_id: str
    outcome: str
    nbytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class _Job:
    """A snapshot without its state, which the copy has."""

    snapshot: Snapshot
    nbytes: int
    committed: Awaitable[object]
    asked: float


class SnapshotWriter:
    """Takes states to the store behind their chunks, one of a session at a time; used from the event loop alone.

    Args:
        store: where they go.
        call: runs what uses the store, and turns its failures into problems: `StoreCalls.call`.
        in_thread: runs the copies: `Workers.io`.
        report: told how every snapshot ended.
        limit_bytes: host memory of all snapshots under way; a single one may take more.
        copies: how states leave the device; None on a CPU.
        uploads: snapshots that are sent at once; others wait, so that commits find a thread.
    """

    def __init__(
        self,
        store: Store,
        call: InThread,
        in_thread: InThread,
        report: Callable[[Written], None],
        *,
        limit_bytes: int,
        copies: Copies | None = None,
        uploads: int = 2,
    ) -> None:
        self._store = store
        self._call = call
        self._in_thread = in_thread
        self._report = report
        self._limit = limit_bytes
        self._copies = copies
        self._uploads = asyncio.Semaphore(uploads)
        self._nbytes = 0
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    def write(self, snapshot: Snapshot, committed: Awaitable[object], *, force: bool = False) -> bool:
        """Begin to copy a state; it is attached once `committed` is done, since then its chunk is in the log.

        Call it as soon as the state is computed: the copy waits for all that the device has been asked for. When
        `committed` fails or is cancelled, the snapshot is dropped. What goes wrong is reported, never raised.

        Returns whether it was begun. It is skipped while an earlier one of its session is under way or when too many
        bytes are; with `force` it waits instead, its state where it is.
        """
        nbytes = parked_memory(snapshot.state.values())
        job = _Job(replace(snapshot, state={}), nbytes, committed, time.perf_counter())
        tasks = self._in_the_way(job)
        if tasks and not force:
            self._report(Written(snapshot.session_id, "skipped", nbytes))
            return False
        copy = self._leaving(snapshot.state)
        if tasks:
            task = asyncio.create_task(self._begin_later(job, copy))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self._begin(job, copy)
        return True

    async def drain(self) -> None:
        """Wait for every snapshot that was begun."""
        while tasks := self._waiting.union(self._under_way.values()):
            await asyncio.wait(tasks)

    def _leaving(self, state: State) -> Callable[[], Parked]:
        return (lambda: Parked(state, frozenset())) if self._copies is None else self._copies.leaving(state)

    def _in_the_way(self, job: _Job) -> set[asyncio.Task[None]]:
        """Tasks of which one must end before this one may begin."""
        if (earlier := self._under_way.get(job.snapshot.session_id)) is not None:
            return {earlier}
        return set(self._under_way.values()) if self._nbytes + job.nbytes > self._limit else set()

    def _begin(self, job: _Job, copy: Callable[[], Parked]) -> None:
        session_id = job.snapshot.session_id

        def ended(_: asyncio.Task[None]) -> None:
            del self._under_way[session_id]
            self._nbytes -= job.nbytes

        self._nbytes += job.nbytes
        copying = asyncio.create_task(self._in_thread(copy))  # lets go of the device's memory when it is done
        self._under_way[session_id] = task = asyncio.create_task(self._carry_out(job, copying))
        task.add_done_callback(ended)

    async def _begin_later(self, job: _Job, copy: Callable[[], Parked]) -> None:
        while tasks := self._in_the_way(job):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self._begin(job, copy)

    async def _carry_out(self, job: _Job, copying: asyncio.Task[Parked]) -> None:
        outcome, snapshot = "internal_error", job.snapshot
        try:
            outcome = await self._write(job, copying)
        except ProblemError as problem:
            outcome = problem.code
            log.info("the snapshot of chunk %d was not stored: %s", snapshot.index, problem)
        except Exception:
            log.exception("the snapshot of chunk %d was not stored", snapshot.index)
        seconds = 0.0 if outcome == "skipped" else time.perf_counter() - job.asked
        self._report(Written(snapshot.session_id, outcome, job.nbytes, seconds))

    async def _write(self, job: _Job, copying: asyncio.Task[Parked]) -> str:
        parked = await copying
        if not await _succeeded(job.committed):
            return "skipped"
        async with self._uploads:
            await self._call(self._attach_snapshot, replace(job.snapshot, state=parked.tensors))
        return "ok"

    def _attach_snapshot(self, snapshot: Snapshot) -> None:
        """Put the blobs and name them; a second time when some went away in between. Blocks."""
        failpoint("snapshot.before")
        try:
            self._put_and_attach(snapshot)
        except BlobsMissing:
            self._put_and_attach(snapshot)
        failpoint("snapshot.attached")

    def _put_and_attach(self, snapshot: Snapshot) -> None:
        arena = save_tensors(self._store, snapshot.session_id, snapshot.state)
        failpoint("snapshot.uploaded")
        self._store.attach(snapshot.session_id, snapshot.fence, snapshot.revision, snapshot.index, arena)


class Snapshots:
    """Takes the snapshots that are due."""

    def __init__(self, policy: SnapshotPolicy, writer: SnapshotWriter) -> None:
        self._policy = policy
        self._writer = writer

    def replayed(self, seconds: float) -> None:
        """As `SnapshotPolicy.replayed`."""
        self._policy.replayed(seconds)

    def offer(self, snapshot: Snapshot, last: int, committed: Awaitable[object]) -> bool:
        """Begin to write a snapshot if one is due, the last one being that after chunk `last`; whether it was begun.

        As `SnapshotWriter.write` otherwise.
        """
        if not self._policy.due(snapshot.index, last, memory(snapshot.state.values())):
            return False
        return self._writer.write(snapshot, committed)

    async def drain(self) -> None:
        """Wait for every snapshot that was begun."""
        await self._writer.drain()


async def _succeeded(committed: Awaitable[object]) -> bool:
    """Whether it comes; it is not cancelled with the one who waits."""
    future = asyncio.ensure_future(committed)
    await asyncio.wait([future])
    return not future.cancelled() and future.exception() is None
