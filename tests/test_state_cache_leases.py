"""Leases and fences: one writer at a time, by the clock of the store, on every store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_fixtures import HOLDER, RIVAL, make_session, make_snapshot, make_step, seeds, take
from store_probes import RedisProbe

from longtake.state_cache import Fence, Fenced, Holder, Lease, LeaseHeld, MemoryStore, SessionNotFound, Store


def lapse(store: Store, session_id: str, fence: Fence) -> None:
    """Let a lease run out."""
    store.renew(session_id, fence, 0.001)
    threading.Event().wait(0.01)


def test_a_lease_keeps_others_out(any_store: Store) -> None:
    session_id = make_session(any_store)
    assert any_store.read(session_id)[2] is None
    lease = any_store.acquire(session_id, HOLDER, 60)
    assert (lease.fence.token, len(lease.fence.nonce), lease.taken_over) == (1, 32, False)
    with pytest.raises(LeaseHeld) as held:
        any_store.acquire(session_id, RIVAL, 60)
    assert 50 < held.value.left_s <= 60
    assert held.value.address == "http://one:8000"
    assert any_store.read(session_id)[2] == lease.fence
    any_store.commit(make_step(any_store, session_id, lease.fence, 0))


def test_a_fence_shown_by_somebody_else_opens_nothing(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    with pytest.raises(LeaseHeld):
        any_store.acquire(session_id, RIVAL, 60, fence)


def test_a_lease_that_lapsed_is_taken_over(any_store: Store) -> None:
    session_id = make_session(any_store)
    first = take(any_store, session_id)
    lapse(any_store, session_id, first)
    any_store.commit(make_step(any_store, session_id, first, 0))
    lease = any_store.acquire(session_id, RIVAL, 60)
    assert (lease.taken_over, lease.fence.token) == (True, 2)
    assert lease.fence.nonce != first.nonce
    with pytest.raises(LeaseHeld) as held:
        any_store.acquire(session_id, HOLDER, 60, first)
    assert held.value.address == "http://two:8000"


def test_a_lapsed_lease_of_ones_own_is_no_takeover(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    lapse(any_store, session_id, fence)
    assert any_store.acquire(session_id, HOLDER, 60, fence) == Lease(fence, taken_over=False)
    lapse(any_store, session_id, fence)
    assert not any_store.acquire(session_id, HOLDER, 60).taken_over


def test_the_same_holder_takes_its_own_lease_over(any_store: Store) -> None:
    session_id = make_session(any_store)
    first = take(any_store, session_id)
    lease = any_store.acquire(session_id, Holder(HOLDER.id, "http://moved:8000"), 60)
    assert (lease.taken_over, lease.fence.token) == (False, 2)
    with pytest.raises(Fenced):
        any_store.commit(make_step(any_store, session_id, first, 0))
    with pytest.raises(LeaseHeld) as held:
        any_store.acquire(session_id, RIVAL, 60)
    assert held.value.address == "http://moved:8000"


def test_a_fence_in_force_is_kept(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    assert any_store.acquire(session_id, HOLDER, 60, fence).fence == fence
    any_store.release(session_id, fence)
    any_store.commit(make_step(any_store, session_id, fence, 0))
    assert any_store.acquire(session_id, HOLDER, 60, fence) == Lease(fence, taken_over=False)
    any_store.release(session_id, fence)
    rival = any_store.acquire(session_id, RIVAL, 60)
    assert not rival.taken_over
    any_store.release(session_id, rival.fence)
    again = any_store.acquire(session_id, HOLDER, 60, fence)
    assert (again.taken_over, again.fence.token) == (False, 3)


def test_renewing_puts_the_end_of_a_lease_off(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.acquire(session_id, HOLDER, 0.2).fence
    any_store.renew(session_id, fence, 60)
    with pytest.raises(LeaseHeld) as held:
        any_store.acquire(session_id, RIVAL, 60)
    assert held.value.left_s > 50


def test_who_lost_a_session_can_do_nothing_there(any_store: Store) -> None:
    session_id = make_session(any_store)
    lost = take(any_store, session_id)
    any_store.commit(make_step(any_store, session_id, lost, 0))
    any_store.release(session_id, lost)
    kept = any_store.acquire(session_id, RIVAL, 60).fence
    for wrong in (lost, Fence(kept.token, lost.nonce), Fence(lost.token, kept.nonce)):
        with pytest.raises(Fenced):
            any_store.renew(session_id, wrong, 60)
        with pytest.raises(Fenced):
            any_store.release(session_id, wrong)
        with pytest.raises(Fenced):
            any_store.commit(make_step(any_store, session_id, wrong, 1))
        with pytest.raises(Fenced):
            any_store.attach(session_id, wrong, 0, 0, make_snapshot(any_store, session_id, 0.0))
    with pytest.raises(LeaseHeld):
        any_store.acquire(session_id, HOLDER, 60)
    any_store.commit(make_step(any_store, session_id, kept, 1))


def test_a_lease_in_memory_passes_by_the_given_clock() -> None:
    now = 50.0
    store = MemoryStore(lambda: now)
    session_id = make_session(store)
    fence = store.acquire(session_id, HOLDER, 10).fence
    now = 55.0
    with pytest.raises(LeaseHeld) as held:
        store.acquire(session_id, RIVAL, 10)
    assert held.value.left_s == 5
    store.renew(session_id, fence, 10)
    now = 64.9
    with pytest.raises(LeaseHeld):
        store.acquire(session_id, RIVAL, 10)
    now = 65.0
    assert store.acquire(session_id, RIVAL, 10).taken_over


def test_a_session_lives_while_its_lease_is_renewed_and_no_longer() -> None:
    now = 50.0
    store = MemoryStore(lambda: now)
    session_id = make_session(store, ttl_s=5)
    fence = store.acquire(session_id, HOLDER, 60).fence
    now = 54.0
    store.renew(session_id, fence, 60)
    now = 58.0
    store.release(session_id, fence)
    now = 59.0
    with pytest.raises(SessionNotFound):
        store.renew(session_id, fence, 60)


def test_renewing_puts_off_the_end_on_a_server_too(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store, ttl_s=60)
    fence = probe.store.acquire(session_id, HOLDER, 60).fence
    probe.set_expiry(session_id, 5)
    near = probe.store.read(session_id)[1].expires_at
    probe.store.release(session_id, fence)
    assert probe.store.read(session_id)[1].expires_at == near
    probe.store.renew(session_id, fence, 60)
    later = probe.store.read(session_id)[1].expires_at
    assert near is not None
    assert later is not None
    assert later > near + 50
    probe.close()


def test_rivals_for_a_free_session_have_one_winner(any_store: Store) -> None:
    session_id = make_session(any_store)
    barrier = threading.Barrier(6)

    def attempt(number: int) -> Fence | None:
        barrier.wait(10)
        try:
            return any_store.acquire(session_id, Holder(f"replica {number}"), 60).fence
        except LeaseHeld:
            return None

    with ThreadPoolExecutor(6) as pool:
        (winner,) = [fence for fence in pool.map(attempt, range(6)) if fence is not None]
    assert any_store.read(session_id)[2] == winner


def test_rival_committers_have_one_winner_a_chunk(any_store: Store) -> None:
    session_id = make_session(any_store)
    rivals, rounds = 4, 6
    barrier = threading.Barrier(rivals)

    def compete(rival: int) -> list[tuple[int, int]]:
        won = []
        for index in range(rounds):
            # all under one name, so that each takes the lease of the one before
            fence = take(any_store, session_id)
            commit = make_step(any_store, session_id, fence, index, seed=100 * rival + index)
            barrier.wait(10)
            try:
                any_store.commit(commit)
                won.append((index, commit.chunk.seed if commit.chunk else -1))
            except Fenced:
                pass
            barrier.wait(10)
        return won

    with ThreadPoolExecutor(rivals) as pool:
        wins = sorted(win for won in pool.map(compete, range(rivals)) for win in won)
    assert [index for index, _ in wins] == list(range(rounds))
    assert seeds(any_store, session_id) == [seed for _, seed in wins]
