"""Sessions that expire: sliding lifetimes by the store's clock, and sweeping, on every store."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
from store_fixtures import (
    CALLS,
    HOLDER,
    RIVAL,
    check_whole,
    furnish,
    listed,
    make_fork,
    make_rewind,
    make_session,
    make_step,
    take,
)
from store_probes import Probe, RedisProbe

from longtake.state_cache import (
    SCHEMA,
    Fence,
    Fenced,
    LeaseHeld,
    MemoryStore,
    Retention,
    SessionExists,
    SessionNotFound,
    Store,
    lineage_of,
    load_file,
    new_session_id,
)
from longtake.state_cache.records import seal


def seconds_left(store: Store, session_id: str) -> float:
    expires_at = store.read(session_id)[1].expires_at
    assert expires_at is not None
    return expires_at - time.time()


def test_a_session_without_a_lifetime_never_expires(probe: Probe) -> None:
    session_id = furnish(probe.store)
    assert probe.store.read(session_id)[1].expires_at is None
    assert probe.store.sweep() == 0
    assert listed(probe.store, 9) == [session_id]


USES: dict[str, Callable[[Store, str, Fence], object]] = {
    "acquire": lambda store, session_id, _: store.acquire(session_id, HOLDER, 60),
    "acquire again": lambda store, session_id, fence: store.acquire(session_id, HOLDER, 60, fence),
    "rewind": lambda store, session_id, fence: store.rewind(make_rewind(store, session_id, fence, -1)),
    "commit a chunk": lambda store, session_id, fence: store.commit(make_step(store, session_id, fence, 0)),
    "commit a cursor": lambda store, session_id, fence: store.commit(
        replace(make_step(store, session_id, fence, 0), chunk=None)
    ),
}


@pytest.mark.parametrize("use", USES)
def test_using_a_session_puts_its_expiry_off(probe: Probe, use: str) -> None:
    session_id = make_session(probe.store, ttl_s=3600)
    assert seconds_left(probe.store, session_id) == pytest.approx(3600, abs=60)
    fence = take(probe.store, session_id)
    probe.set_expiry(session_id, 60)
    USES[use](probe.store, session_id, fence)
    assert seconds_left(probe.store, session_id) == pytest.approx(3600, abs=60)


def test_reading_and_failing_do_not_put_the_expiry_off(probe: Probe) -> None:
    store, session_id = probe.store, furnish(probe.store, ttl_s=3600)
    probe.set_expiry(session_id, 60)
    before = store.read(session_id)[1].expires_at
    for call in ("read", "chunk", "chunks", "request", "snapshots", "forks"):
        CALLS[call](store, session_id)
    with pytest.raises(LeaseHeld):
        store.acquire(session_id, RIVAL, 60)
    with pytest.raises(Fenced):
        store.commit(make_step(store, session_id, Fence(9, ""), 3))
    with pytest.raises(SessionExists):
        make_session(store, session_id, ttl_s=3600)
    listed(store, 9)
    store.sweep()
    assert store.read(session_id)[1].expires_at == before


@pytest.mark.parametrize("swept", [False, True], ids=["not swept yet", "swept"])
def test_an_expired_session_is_not_there(probe: Probe, *, swept: bool) -> None:
    store, session_id = probe.store, furnish(probe.store, ttl_s=60)
    other = make_session(store)
    commit = make_step(store, session_id, Fence(1, ""), 3)
    probe.set_expiry(session_id, -0.001)
    assert not swept or store.sweep() == 1
    for call in CALLS.values():
        with pytest.raises(SessionNotFound):
            call(store, session_id)
    with pytest.raises(SessionNotFound):
        store.commit(commit)
    assert listed(store, 9) == [other]


def test_a_lifetime_passes_by_the_clock_of_the_store(probe: Probe) -> None:
    session_id = make_session(probe.store, ttl_s=1)
    probe.set_expiry(session_id, 0.05)
    threading.Event().wait(0.06)
    with pytest.raises(SessionNotFound):
        take(probe.store, session_id)
    assert probe.store.sweep() == 1


def test_a_lifetime_in_memory_passes_by_the_given_clock() -> None:
    now = 50.0
    store = MemoryStore(lambda: now)
    session_id = make_session(store, ttl_s=10)
    now = 59.0
    fence = take(store, session_id)
    now = 68.0
    store.commit(make_step(store, session_id, fence, 0))
    now = 77.9
    assert (store.sweep(), listed(store, 9)) == (0, [session_id])
    now = 78.0
    with pytest.raises(SessionNotFound):
        store.commit(make_step(store, session_id, fence, 1))
    assert (store.sweep(), listed(store, 9)) == (1, [])


@pytest.mark.parametrize("owner", ["", "ada"])
def test_sweeping_leaves_nothing_behind(probe: Probe, owner: str) -> None:
    session_id = furnish(probe.store, owner=owner, ttl_s=60)
    probe.set_expiry(session_id, -1)
    assert probe.store.sweep() == 1
    assert probe.store.sweep() == 0
    probe.store.collect(lineage_of(session_id), Retention())
    assert probe.keys() == set()


def test_sweeping_takes_as_many_as_asked(probe: Probe) -> None:
    made = [make_session(probe.store, ttl_s=60) for _ in range(5)]
    for session_id in made[:4]:
        probe.set_expiry(session_id, -1)
    assert [probe.store.sweep(limit=3) for _ in range(3)] == [3, 1, 0]
    assert listed(probe.store, 9) == made[4:]


@pytest.mark.parametrize("expired", ["parent", "fork"])
def test_sweeping_spares_what_another_session_needs(probe: Probe, expired: str) -> None:
    store, parent = probe.store, furnish(probe.store, ttl_s=60)
    fork = make_fork(store, parent, 1, ttl_s=60)
    gone, kept = (parent, fork) if expired == "parent" else (fork, parent)
    probe.set_expiry(gone, -1)
    assert store.sweep() == 1
    store.collect(lineage_of(kept), Retention())
    check_whole(store, kept)
    probe.set_expiry(kept, -1)
    assert store.sweep() == 1
    store.collect(lineage_of(kept), Retention())
    assert probe.keys() == set()


def test_what_an_expired_session_needs_stays_until_it_is_swept(probe: Probe) -> None:
    store, session_id = probe.store, furnish(probe.store, ttl_s=60)
    probe.set_expiry(session_id, -1)
    store.collect(lineage_of(session_id), Retention(snapshots=9))
    probe.set_expiry(session_id, 60)
    check_whole(store, session_id)
    assert len(store.snapshots(session_id)) == 3


def test_sweepers_at_once_drop_each_session_once(probe: Probe) -> None:
    store, lineages = probe.store, [new_session_id() for _ in range(10)]
    made = [furnish(store, new_session_id(lineage_of(name)), ttl_s=60) for name in lineages * 2]
    for session_id in made:
        probe.set_expiry(session_id, -1)
    barrier = threading.Barrier(4)

    def sweep(_: int) -> int:
        barrier.wait(10)
        return store.sweep() + store.sweep()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(sweep, range(4))) == len(made)
    for session_id in lineages:
        store.collect(lineage_of(session_id), Retention())
    assert probe.keys() == set()


def test_a_commit_against_a_sweep_wins_or_finds_nothing(probe: Probe) -> None:
    store = probe.store
    barrier = threading.Barrier(2)

    def sweep() -> int:
        barrier.wait(10)
        return sum(store.sweep() for _ in range(20))

    with ThreadPoolExecutor(1) as pool:
        for round_ in range(20):
            session_id = make_session(store, ttl_s=60)
            commit = make_step(store, session_id, take(store, session_id), 0)
            sweeping = pool.submit(sweep)
            probe.set_expiry(session_id, 0.001 * (round_ % 4))
            barrier.wait(10)
            try:
                store.commit(commit)
            except SessionNotFound:
                assert sweeping.result(30) + store.sweep() == 1
                store.collect(lineage_of(session_id), Retention())
                assert session_id not in " ".join(probe.keys())
            else:
                assert sweeping.result(30) == 0
                assert load_file(store, session_id, store.chunk(session_id, 0).segment) == b"segment 0"
                store.delete(session_id)


def test_a_session_used_since_it_was_noted_is_left_alone(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store, ttl_s=60)
    probe.set_due(session_id, 1)
    assert probe.store.sweep() == 0
    assert (probe.due(session_id) or 0) / 1000 == probe.store.read(session_id)[1].expires_at
    probe.close()


def test_what_decides_a_sweep_is_the_script(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = RedisProbe(redis_server)
    session_id = furnish(probe.store, ttl_s=60)
    probe.set_expiry(session_id, -1)
    monkeypatch.setattr(probe.store._directory, "drop_claim", lambda session: probe.set_expiry(session.id, 50))
    assert probe.store.sweep() == 0
    assert probe.store.chunk(session_id, 2).index == 2
    assert listed(probe.store, 9) == [session_id]
    probe.close()


def test_a_session_noted_but_never_created_is_forgotten(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store, ttl_s=60)
    probe.set_due(session_id, 1)
    probe.raw.delete(f"{probe.prefix}:{{{lineage_of(session_id)}}}:s:{session_id}", probe.head(session_id))
    assert probe.store.sweep() == 0
    assert probe.due(session_id) is None
    probe.store._directory.postpone(session_id, 5.0)  # a slower sweeper, who had seen it before
    assert probe.due(session_id) is None
    probe.close()


def test_an_expired_session_that_can_not_be_read_is_left_alone(probe: Probe) -> None:
    damaged, other = (make_session(probe.store, ttl_s=60) for _ in range(2))
    probe.set_expiry(damaged, -2)
    probe.set_expiry(other, -1)
    probe.overwrite_session(damaged, seal(msgspec.msgpack.encode({"schema": SCHEMA + 1})))
    assert probe.store.sweep() == 1
    names = " ".join(probe.keys())
    assert damaged in names
    assert other not in names


def test_a_session_that_can_not_be_read_does_not_hold_sweeping_up(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    damaged, other = (make_session(probe.store, ttl_s=60) for _ in range(2))
    probe.set_expiry(damaged, -2)
    probe.set_expiry(other, -1)
    probe.overwrite_session(damaged, b"")
    assert [probe.store.sweep(limit=1) for _ in range(3)] == [0, 1, 0]
    probe.close()


def test_a_claim_lapses_unless_its_session_is_created(probe: Probe) -> None:
    store, first, second = probe.store, new_session_id(), new_session_id()
    store.claim("create", "print 1", first)
    assert probe.claim_lifetime("create") == pytest.approx(24 * 3600, abs=60)
    probe.set_claim_lifetime("create", 0.001)
    threading.Event().wait(0.01)
    assert store.claim("create", "print 2", second) == ("print 2", second)
    make_session(store, first, key="create")
    assert probe.claim_lifetime("create") is not None
    make_session(store, second, key="create")
    assert probe.claim_lifetime("create") is None
    assert store.claim("create", "print 1", first) == ("print 2", second)


def test_a_claim_that_was_not_kept_with_its_session_is_kept_later(redis_server: str) -> None:
    """By whoever claims it again, or comes too late to make the session."""
    probe = RedisProbe(redis_server)
    store, session_id = probe.store, new_session_id()
    fork = new_session_id(lineage_of(session_id))
    begin: dict[str, Callable[[], object]] = {
        session_id: lambda: make_session(store, session_id, key=session_id),
        fork: lambda: make_fork(store, session_id, -1, fork, key=fork),
    }
    for made, again in begin.items():
        store.claim(made, "print", made)
        assert store.claim(made, "print", new_session_id()) == ("print", made)
        assert probe.claim_lifetime(made) is not None
        again()
        probe.set_claim_lifetime(made, 60)
        assert store.claim(made, "print", new_session_id()) == ("print", made)
        assert probe.claim_lifetime(made) is None
        probe.set_claim_lifetime(made, 60)
        with pytest.raises(SessionExists):
            again()
        assert probe.claim_lifetime(made) is None
    probe.overwrite_session(fork, b"")
    assert store.claim(fork, "print", new_session_id()) == ("print", fork)
    probe.close()


def test_whether_a_key_is_claimed(probe: Probe) -> None:
    store, session_id = probe.store, new_session_id()
    assert not store.claimed("create")
    store.claim("create", "print", session_id)
    assert store.claimed("create")
    probe.set_claim_lifetime("create", 0.001)
    threading.Event().wait(0.01)
    assert not store.claimed("create")
    store.claim("create", "print", session_id)
    make_session(store, session_id, key="create", ttl_s=60)
    assert store.claimed("create")
    probe.set_expiry(session_id, -1)
    assert not store.claimed("create")


def test_the_claim_of_an_expired_session_is_free(probe: Probe) -> None:
    store, new = probe.store, new_session_id()
    old = furnish(store, ttl_s=60)
    assert store.claim(old, "other", new) == ("print", old)
    probe.set_expiry(old, -1)
    assert store.claim(old, "other", new) == ("other", new)
    make_session(store, new, key=old)
    assert store.sweep() == 0
    assert store.claim(old, "third", new_session_id()) == ("other", new)
    store.delete(new)
    for session_id in (old, new):
        store.collect(lineage_of(session_id), Retention())
    assert probe.keys() == set()
