"""Snapshots: when one is due, and that none is in the store before its chunk, in its way, or in the way of others."""

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

import pytest
import torch
from store_fixtures import HOLDER, RIVAL, make_session, make_step
from torch import Tensor

from longtake.server.engine.copies import Copies, Parked, memory
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.snapshots import (
    Snapshot,
    SnapshotPolicy,
    Snapshots,
    SnapshotWriter,
    Written,
    snapshot_interval,
)
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.workers import Workers
from longtake.server.model.world import ModelSpec
from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    Fence,
    Holder,
    MemoryStore,
    Store,
    StoreFull,
    StoreUnavailable,
    load_tensors,
)

P = ParamSpec("P")
R = TypeVar("R")

MIB = 2**20
SPEC = ModelSpec("tiny", "a model", 64, 64)
STATE_BYTES = 48


@pytest.mark.parametrize(
    ("nbytes", "replay_s", "interval"),
    [
        (0, 9.0, 1),
        (32 * MIB, 9.0, 1),
        (32 * MIB + 1, 0.1, 1),
        (64 * MIB, 0.1, 1),
        (64 * MIB + 1, 0.1, 2),
        (1433 * MIB, 0.1, 23),
        (1433 * MIB, 0.0, 23),
        (1433 * MIB, 0.25, 20),
        (1433 * MIB, 2.4, 2),
        (1433 * MIB, 5.0, 1),
        (1433 * MIB, 60.0, 1),
    ],
)
def test_the_interval_follows_bytes_and_replay_time(nbytes: int, replay_s: float, interval: int) -> None:
    assert snapshot_interval(nbytes, replay_s, 5.0) == interval


def test_a_setting_decides_for_every_size() -> None:
    policy = SnapshotPolicy(every=3)
    policy.replayed(60.0)
    assert policy.interval(1) == policy.interval(1433 * MIB) == 3


def test_a_snapshot_is_due_an_interval_after_the_last_one() -> None:
    policy = SnapshotPolicy(every=3)
    assert [chunk for chunk in range(8) if policy.due(chunk, -1, 1)] == [2, 3, 4, 5, 6, 7]
    assert [chunk for chunk in range(8) if policy.due(chunk, 2, 1)] == [5, 6, 7]
    assert all(SnapshotPolicy().due(chunk, chunk - 1, 8 * MIB) for chunk in range(8))


def test_replay_time_is_a_running_mean() -> None:
    policy = SnapshotPolicy(budget_s=10.0)
    assert policy.interval(64 * MIB * 100) == 100
    policy.replayed(1.0)
    assert policy.interval(64 * MIB * 100) == 10
    for _ in range(60):
        policy.replayed(2.0)
    assert policy.interval(64 * MIB * 100) == 5
    policy.replayed(12.0)
    assert policy.interval(64 * MIB * 100) == 3, "one slow chunk counts a tenth"


class Gate:
    """A store whose uploads wait for `go`, and whose steps fail as planned."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.go = threading.Event()
        self.go.set()
        self.puts = 0
        self.put_errors: list[Exception] = []
        self.attach_errors: list[Exception] = []
        self._lock = threading.Lock()

    def put(self, session_id: str, data: Sequence[bytes | memoryview], *, mend: bool = False) -> tuple[BlobRef, ...]:
        assert not mend, "a snapshot is sent anew in vain"
        with self._lock:
            self.puts += 1
        assert self.go.wait(30)
        if self.put_errors:
            raise self.put_errors.pop(0)
        return self._store.put(session_id, data)

    def attach(self, session_id: str, fence: Fence, revision: int, index: int, snapshot: Arena) -> None:
        if self.attach_errors:
            raise self.attach_errors.pop(0)
        self._store.attach(session_id, fence, revision, index, snapshot)


class Bench:
    """A writer on a store, and what it reported."""

    def __init__(
        self, store: Store, workers: Workers, *, limit_bytes: int = 10**6, copies: Copies | None = None
    ) -> None:
        self.store, self.gate = store, Gate(store)
        self.written: list[Written] = []
        calls = StoreCalls(self.gate, workers, Metrics(SPEC, "cpu"))  # type: ignore[arg-type]
        self.copied = asyncio.Semaphore(0)
        self.writer = SnapshotWriter(
            self.gate,  # type: ignore[arg-type]
            calls.call,
            self._copy,
            self.written.append,
            limit_bytes=limit_bytes,
            copies=copies,
        )
        self._io = workers.io

    async def _copy(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = await self._io(function, *args, **kwargs)
        self.copied.release()
        return result

    @property
    def outcomes(self) -> list[str]:
        return [written.outcome for written in self.written]

    def begin(self) -> tuple[str, Fence]:
        """A session of one chunk."""
        session_id = make_session(self.store)
        fence = self.store.acquire(session_id, HOLDER, 60).fence
        self.store.commit(make_step(self.store, session_id, fence, 0))
        return session_id, fence

    def stored(self, session_id: str) -> dict[int, dict[str, Tensor]]:
        snapshots = self.store.snapshots(session_id)
        return {index: load_tensors(self.store, session_id, arena) for index, arena in snapshots.items()}


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(8)
    yield workers
    workers.close()


@pytest.fixture
async def bench(workers: Workers) -> AsyncIterator[Bench]:
    bench = Bench(MemoryStore(), workers)
    yield bench
    bench.gate.go.set()
    await bench.writer.drain()


def make_state(value: float = 1.0) -> dict[str, Tensor]:
    return {"kv": torch.full((2, 3), value), "z": torch.full((6,), -value)}


async def turns() -> None:
    """Let everything that is ready have its turn."""
    for _ in range(10):
        await asyncio.sleep(0)


def done(result: object = None) -> asyncio.Future[object]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


async def test_a_snapshot_is_stored_and_reported(any_store: Store, workers: Workers) -> None:
    bench = Bench(any_store, workers)
    session_id, fence = bench.begin()
    state = make_state(2.5)
    assert memory(state.values()) == STATE_BYTES
    assert bench.writer.write(Snapshot(session_id, fence, 0, 0, state), done())
    await bench.writer.drain()
    found = bench.stored(session_id)
    assert list(found) == [0]
    assert list(found[0]) == ["kv", "z"]
    assert all(torch.equal(found[0][name], state[name]) for name in state)
    (written,) = bench.written
    assert (written.session_id, written.outcome, written.nbytes) == (session_id, "ok", STATE_BYTES)
    assert written.seconds > 0


async def test_nothing_is_uploaded_before_its_chunk_is_committed(bench: Bench) -> None:
    session_id, fence = bench.begin()
    committed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), committed)
    await bench.copied.acquire()
    await turns()
    assert (bench.gate.puts, bench.written) == (0, [])
    committed.set_result(None)
    await bench.writer.drain()
    assert (list(bench.stored(session_id)), bench.outcomes) == ([0], ["ok"])


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_without_its_chunk_a_snapshot_is_dropped(bench: Bench, how: str) -> None:
    session_id, fence = bench.begin()
    committed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), committed)
    if how == "failed":
        committed.set_exception(StoreFull())
    else:
        committed.cancel()
    await bench.writer.drain()
    assert bench.written == [Written(session_id, "skipped", STATE_BYTES)]
    assert bench.gate.puts == 0
    assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done()), "and nothing is in the way"


async def test_one_snapshot_of_a_session_at_a_time(bench: Bench) -> None:
    session_id, fence = bench.begin()
    other_id, other_fence = bench.begin()
    bench.gate.go.clear()
    assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state(1.0)), done())
    assert not bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state(2.0)), done())
    assert bench.writer.write(Snapshot(other_id, other_fence, 0, 0, make_state(3.0)), done())
    assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state(4.0)), done(), force=True)
    bench.gate.go.set()
    await bench.writer.drain()
    assert bench.outcomes == ["skipped", "ok", "ok", "ok"]
    assert float(bench.stored(session_id)[0]["kv"][0, 0]) == 4.0
    assert float(bench.stored(other_id)[0]["kv"][0, 0]) == 3.0


async def test_bytes_under_way_are_bounded(workers: Workers) -> None:
    bench = Bench(MemoryStore(), workers, limit_bytes=2 * STATE_BYTES)
    sessions = [bench.begin() for _ in range(4)]
    snapshots = [Snapshot(session_id, fence, 0, 0, make_state()) for session_id, fence in sessions]
    bench.gate.go.clear()
    assert [bench.writer.write(snapshot, done()) for snapshot in snapshots[:3]] == [True, True, False]
    assert bench.writer.write(snapshots[3], done(), force=True)
    bench.gate.go.set()
    await bench.writer.drain()
    assert bench.outcomes == ["skipped", "ok", "ok", "ok"]
    assert bench.stored(sessions[2][0]) == {}
    large = Snapshot(*sessions[2], 0, 0, {"kv": torch.zeros(STATE_BYTES)})
    assert bench.writer.write(large, done()), "a state above the limit goes alone"
    await bench.writer.drain()
    assert list(bench.stored(sessions[2][0])) == [0]


async def test_uploads_leave_threads_to_commits(bench: Bench, workers: Workers) -> None:
    bench.gate.go.clear()
    for session_id, fence in [bench.begin() for _ in range(4)]:
        assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    for _ in range(4):
        await bench.copied.acquire()
    await turns()
    await asyncio.wait_for(workers.io(bench.begin), 10)
    assert bench.gate.puts <= 2
    bench.gate.go.set()
    await bench.writer.drain()
    assert bench.outcomes == ["ok"] * 4


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("put", StoreFull(), "store_full"),
        ("put", StoreUnavailable(), "store_unavailable"),
        ("attach", StoreFull(), "store_full"),
        ("attach", StoreUnavailable(), "store_unavailable"),
        ("put", ZeroDivisionError("a bug"), "internal_error"),
    ],
)
async def test_a_failure_is_counted_and_nothing_stays_in_the_way(
    bench: Bench, caplog: pytest.LogCaptureFixture, where: str, error: Exception, code: str
) -> None:
    caplog.set_level(logging.INFO)
    session_id, fence = bench.begin()
    errors = bench.gate.put_errors if where == "put" else bench.gate.attach_errors
    errors.append(error)
    for _ in range(2):
        assert bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
        await bench.writer.drain()
    assert bench.outcomes == [code, "ok"]
    assert "the snapshot of chunk 0 was not stored" in caplog.text
    assert list(bench.stored(session_id)) == [0]


async def test_blobs_that_went_away_are_put_again_once(bench: Bench) -> None:
    session_id, fence = bench.begin()
    bench.gate.attach_errors += [BlobsMissing()]
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    await bench.writer.drain()
    assert (bench.outcomes, bench.gate.puts) == (["ok"], 2)
    bench.gate.attach_errors += [BlobsMissing(), BlobsMissing(), BlobsMissing()]
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    await bench.writer.drain()
    assert (bench.outcomes, bench.gate.puts) == (["ok", "state_corrupt"], 4)


@pytest.mark.parametrize("later", [HOLDER, RIVAL], ids=["here", "elsewhere"])
async def test_a_session_that_moved_on_refuses_its_snapshot(
    bench: Bench, caplog: pytest.LogCaptureFixture, later: Holder
) -> None:
    caplog.set_level(logging.INFO)
    session_id, fence = bench.begin()
    bench.writer.write(Snapshot(session_id, fence, 1, 0, make_state()), done())
    await bench.writer.drain()
    bench.store.release(session_id, fence)
    bench.store.acquire(session_id, later, 60)
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    await bench.writer.drain()
    bench.store.delete(session_id)
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    await bench.writer.drain()
    assert bench.outcomes == ["chunk_conflict", "session_fenced", "session_not_found"]
    assert "a later request has taken the session over, here or on another server" in caplog.text


async def test_snapshots_are_taken_when_they_are_due(bench: Bench) -> None:
    session_id, fence = bench.begin()
    snapshots = Snapshots(SnapshotPolicy(every=2), bench.writer)
    assert not snapshots.offer(Snapshot(session_id, fence, 0, 0, make_state()), -1, done())
    assert bench.written == [], "not due is not skipped"
    bench.store.commit(make_step(bench.store, session_id, fence, 1))
    assert snapshots.offer(Snapshot(session_id, fence, 0, 1, make_state()), -1, done())
    await snapshots.drain()
    assert list(bench.stored(session_id)) == [1]


async def test_failpoints_stand_where_a_crash_would_tell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, fence = bench.begin()
    seen: list[tuple[str, int, list[int]]] = []

    def see(name: str) -> None:
        seen.append((name, bench.gate.puts, list(bench.stored(session_id))))

    monkeypatch.setattr("longtake.server.engine.snapshots.failpoint", see)
    bench.writer.write(Snapshot(session_id, fence, 0, 0, make_state()), done())
    await bench.writer.drain()
    assert seen == [("snapshot.before", 0, []), ("snapshot.uploaded", 1, []), ("snapshot.attached", 1, [0])]


class Clones:
    """Copies as a GPU makes them, from host memory to host memory."""

    def leaving(self, tensors: Mapping[str, Tensor]) -> Callable[[], Parked]:
        return lambda: Parked({name: x.clone() for name, x in tensors.items()}, frozenset(tensors))

    def back(self, parked: Parked) -> dict[str, Tensor]:
        raise NotImplementedError


async def test_the_device_is_free_of_a_state_before_it_is_uploaded(workers: Workers) -> None:
    bench = Bench(MemoryStore(), workers, copies=Clones())
    session_id, fence = bench.begin()
    state = make_state(2.5)
    freed = threading.Event()
    weakref.finalize(state["kv"], freed.set)
    bench.gate.go.clear()
    bench.writer.write(Snapshot(session_id, fence, 0, 0, state), done())
    del state
    assert await asyncio.to_thread(freed.wait, 30)
    bench.gate.go.set()
    await bench.writer.drain()
    assert float(bench.stored(session_id)[0]["kv"][0, 0]) == 2.5
