"""Garbage collection beside writers, forks, rewinds and other collectors: nothing that is named meanwhile goes."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from store_fixtures import check_whole, listed, make_fork, make_rewind, make_session, make_step, seeds, take, write
from store_probes import Probe, RedisProbe

from longtake.state_cache import (
    BlobsMissing,
    Collected,
    Fence,
    HeadConflict,
    Holder,
    Retention,
    SessionNotFound,
    Store,
    failpoints,
    lineage_of,
    redis_collect,
    retention,
)

KEEP = Retention(snapshots=1, chunks=8)
"""Every second of the older snapshots stays."""


class Interrupted(Exception):
    """The process ends here."""


class At:
    """Does something once, at the first failpoint of a name."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action: Callable[[], object] | None = action

    @property
    def reached(self) -> bool:
        return self._action is None

    def hit(self, name: str) -> None:
        if name == self._name and self._action is not None:
            action, self._action = self._action, None
            action()


@pytest.fixture
def server(redis_server: str) -> Iterator[RedisProbe]:
    """A store whose collections go step by step; in memory they are one step."""
    probe = RedisProbe(redis_server)
    yield probe
    probe.close()


class Scene:
    """A session of ten chunks after a rewind from ten others, whose blobs are garbage now, and a fork of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session_id = make_session(store)
        self.fence = take(store, self.session_id)
        write(store, self.session_id, self.fence, 12, seeds=100)
        store.rewind(make_rewind(store, self.session_id, self.fence, 1))
        write(store, self.session_id, self.fence, 8)
        self.fork = make_fork(store, self.session_id, 5)
        self.fork_fence = take(store, self.fork)
        write(store, self.fork, self.fork_fence, 2, seeds=200)
        self.lineage = lineage_of(self.session_id)
        # put before the collection begins: their blobs are those of records that were rewound away
        self.prepared = make_step(store, self.session_id, self.fence, 10, seed=110, revision=1)

    def collect(self) -> Collected:
        return self.store.collect(self.lineage, KEEP)

    def commit_prepared(self) -> None:
        self.store.commit(self.prepared)

    def write_dead_blobs_again(self) -> None:
        write(self.store, self.session_id, self.fence, 2, seeds=100)

    def write_on(self) -> None:
        # so far that the next horizon is at a snapshot that a marking before would not keep
        write(self.store, self.session_id, self.fence, 5)
        write(self.store, self.fork, self.fork_fence, 5, seeds=200)

    def rewind(self) -> None:
        kept = max(self.store.read(self.session_id)[1].horizon, 5)
        self.store.rewind(make_rewind(self.store, self.session_id, self.fence, kept))
        write(self.store, self.session_id, self.fence, 3, seeds=100)

    def fork_and_write(self) -> None:
        head = self.store.read(self.session_id)[1]
        for chunk in {head.horizon - 1, head.horizon, head.chunk}:
            child = make_fork(self.store, self.session_id, chunk)
            write(self.store, child, take(self.store, child), 2, seeds=100)

    def fork_and_delete_the_parent(self) -> None:
        make_fork(self.store, self.session_id, self.store.read(self.session_id)[1].chunk)
        self.store.delete(self.session_id)

    def collect_too(self) -> None:
        self.store.collect(self.lineage, KEEP)

    def write_on_and_collect(self) -> None:
        self.write_on()
        self.store.collect(self.lineage, KEEP)
        self.write_dead_blobs_again()

    def sessions(self) -> list[str]:
        return listed(self.store, 99)

    def check(self) -> None:
        for session_id in self.sessions():
            check_whole(self.store, session_id)

    def clear(self) -> None:
        for session_id in self.sessions():
            self.store.delete(session_id)
        self.store.collect(self.lineage, KEEP)


STEPS = [
    "commit_prepared",
    "write_dead_blobs_again",
    "write_on",
    "rewind",
    "fork_and_write",
    "fork_and_delete_the_parent",
    "collect_too",
    "write_on_and_collect",
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", ["collect.marked", "collect.swept"])
def test_what_happens_during_a_collection_stays(
    server: RedisProbe, monkeypatch: pytest.MonkeyPatch, place: str, step: str
) -> None:
    scene = Scene(server.store)
    at = At(place, getattr(scene, step))
    monkeypatch.setattr(failpoints, "_armed", at)
    before = seeds(server.store, scene.fork)
    # all that was prepared may be gone by then: the commit says so, and is made again
    with suppress(BlobsMissing):
        scene.collect()
    assert at.reached
    scene.check()
    assert seeds(server.store, scene.fork)[: len(before)] == before
    scene.collect()
    scene.check()
    scene.clear()
    assert server.keys() == set()


@pytest.mark.parametrize("step", STEPS)
def test_what_happens_right_after_the_marking_stays(
    server: RedisProbe, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    scene, done = Scene(server.store), []

    def mark(*arguments: object) -> retention.Needed:
        marked = retention.needed(*arguments)  # type: ignore[arg-type]
        if not done:
            done.append(step)
            getattr(scene, step)()
        return marked

    monkeypatch.setattr(redis_collect, "needed", mark)
    scene.collect()
    assert done
    scene.check()
    scene.collect()
    scene.check()
    scene.clear()
    assert server.keys() == set()


@pytest.mark.parametrize("step", STEPS)
def test_what_happens_before_a_horizon_moves_stays(
    server: RedisProbe, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    scene, done = Scene(server.store), []

    def choose(root: retention.Root, *arguments: object) -> int:
        horizon = retention.next_horizon(root, *arguments)  # type: ignore[arg-type]
        if not done and horizon > root.head.horizon:
            done.append(step)
            getattr(scene, step)()
        return horizon

    monkeypatch.setattr(redis_collect, "next_horizon", choose)
    scene.collect()
    assert done
    scene.check()
    scene.collect()
    scene.check()
    scene.clear()
    assert server.keys() == set()


def blobs_of(server: RedisProbe, lineage: str) -> set[str]:
    keys = server.keys()
    return {key.rsplit(":", 1)[1] for key in keys if f"{{{lineage}}}:b:" in key}


@pytest.mark.parametrize("place", ["collect.marked", "collect.swept"])
def test_a_collection_that_was_interrupted_is_finished_by_the_next(
    server: RedisProbe, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def end() -> None:
        raise Interrupted

    scene = Scene(server.store)
    monkeypatch.setattr(failpoints, "_armed", At(place, end))
    with pytest.raises(Interrupted):
        scene.collect()
    assert server.store.littered() == [scene.lineage]
    scene.check()
    scene.collect()
    scene.check()
    assert scene.collect() == Collected()
    other = Scene(server.store)
    other.collect()
    left, right = (blobs_of(server, each.lineage) for each in (scene, other))
    assert left == right
    for each in (scene, other):
        each.clear()
        each.store.collect(each.lineage, KEEP)
    assert server.keys() == set()


class Worker:
    """Writes, forks, rewinds and deletes in one lineage, as chance has it."""

    def __init__(self, store: Store, first: str, number: int) -> None:
        self._store = store
        self._holder = Holder(f"replica {number}")
        self._random = random.Random(number)
        self._next_seed = 1000 * number
        self.own = {make_fork(store, first, 3): [0, 1, 2, 3]}

    def run(self) -> None:
        for _ in range(25):
            session_id = self._random.choice(sorted(self.own))
            fence = self._store.acquire(session_id, self._holder, 60).fence
            self._random.choice([self._write, self._write, self._rewind, self._fork])(session_id, fence)
            if len(self.own) > 4:
                self._delete(self._random.choice(sorted(self.own)))

    def _write(self, session_id: str, fence: Fence) -> None:
        count, log = self._random.randint(1, 4), self.own[session_id]
        # some of these are the blobs of records that are garbage already
        first = self._random.randrange(self._next_seed - 20, self._next_seed)
        with suppress(BlobsMissing):
            write(self._store, session_id, fence, count, seeds=first)
        wrote = self._store.read(session_id)[1].chunk + 1 - len(log)
        self.own[session_id] = log + [first + index for index in range(len(log), len(log) + wrote)]
        self._next_seed += 5

    def _rewind(self, session_id: str, fence: Fence) -> None:
        log, horizon = self.own[session_id], self._store.read(session_id)[1].horizon
        to_chunk = self._random.randint(horizon - 1, len(log) - 1)
        with suppress(HeadConflict):  # the horizon moved on
            self._store.rewind(make_rewind(self._store, session_id, fence, to_chunk))
            self.own[session_id] = log[: to_chunk + 1]

    def _fork(self, session_id: str, _: Fence) -> None:
        log, horizon = self.own[session_id], self._store.read(session_id)[1].horizon
        chunk = self._random.randint(horizon - 1, len(log) - 1)
        with suppress(HeadConflict):
            self.own[make_fork(self._store, session_id, chunk)] = log[: chunk + 1]

    def _delete(self, session_id: str) -> None:
        self._store.delete(session_id)
        del self.own[session_id]


def test_collectors_and_writers_at_once(probe: Probe) -> None:
    store, first = probe.store, make_session(probe.store)
    write(store, first, take(store, first), 5)
    workers, ended = [Worker(store, first, number) for number in (1, 2, 3)], threading.Event()

    def collect_on() -> int:
        rounds = 0
        while not ended.is_set():
            store.collect(lineage_of(first), KEEP)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(5) as pool:
        collectors = [pool.submit(collect_on) for _ in range(2)]
        try:
            for running in [pool.submit(worker.run) for worker in workers]:
                running.result(60)
        finally:
            ended.set()
        assert all(collector.result(60) for collector in collectors)

    store.collect(lineage_of(first), KEEP)
    for worker in workers:
        for session_id, log in worker.own.items():
            check_whole(store, session_id)
            assert seeds(store, session_id) == log
    for session_id in listed(store, 99):
        store.delete(session_id)
    store.collect(lineage_of(first), KEEP)
    with pytest.raises(SessionNotFound):
        store.read(first)
    # blobs whose commit was refused go by themselves
    left = probe.keys()
    assert left <= probe.blobs() | {key for key in left if ":b:" in key}


def test_a_step_that_is_prepared_before_and_made_after_a_collection(probe: Probe) -> None:
    scene = Scene(probe.store)
    scene.collect()
    with pytest.raises(BlobsMissing):
        scene.commit_prepared()
    again = make_step(probe.store, scene.session_id, scene.fence, 10, seed=110, revision=1)
    assert again == replace(scene.prepared)
    scene.collect()
    scene.store.commit(again)
    scene.check()


def test_a_collection_that_was_overtaken_leaves_its_note(server: RedisProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that overtook it may die: then somebody has to come back."""
    store, session_id = server.store, make_session(server.store)
    write(store, session_id, take(store, session_id), 3)
    store.delete(session_id)
    lineage, needed = lineage_of(session_id), redis_collect.needed

    def overtaken(*arguments: object) -> retention.Needed:
        server.raw.incr(f"{server.prefix}:{{{lineage}}}:e")
        return needed(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(redis_collect, "needed", overtaken)
        assert not store.collect(lineage, Retention()).complete
    assert store.littered() == [lineage]
    assert store.collect(lineage, Retention()).complete
    assert server.keys() == set()
