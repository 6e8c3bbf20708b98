"""Sessions: created once, claimed, listed by owner, deleted without a trace, on every store."""

import msgspec
import pytest
from store_fixtures import CALLS, check_whole, furnish, listed, make_cursor, make_fork, make_session, take, write
from store_probes import Probe, RedisProbe

from longtake.state_cache import (
    BlobsMissing,
    RedisStore,
    Retention,
    SessionExists,
    SessionNotFound,
    Store,
    lineage_of,
    new_session_id,
)


def test_creating_twice_or_without_blobs_is_refused(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    take(store, session_id)
    record = store.read(session_id)[0]
    with pytest.raises(SessionExists):
        store.create(record, make_cursor("other"))
    assert store.read(session_id)[1].cursor == make_cursor()

    orphan = msgspec.structs.replace(record, id=new_session_id())
    with pytest.raises(BlobsMissing):
        store.create(orphan, make_cursor())
    with pytest.raises(SessionNotFound):
        store.read(orphan.id)
    assert listed(store, 9) == [session_id]


def test_a_claim_holds_until_its_session_is_deleted(any_store: Store) -> None:
    first, second = new_session_id(), new_session_id()
    assert any_store.claim("create café", "print 1", first) == ("print 1", first)
    assert any_store.claim("create café", "print 2", second) == ("print 1", first)
    make_session(any_store, first, key="create café")
    make_session(any_store, second, key="create café")
    any_store.delete(second)
    assert any_store.claim("create café", "print 2", second) == ("print 1", first)
    any_store.delete(first)
    assert any_store.claim("create café", "print 2", second) == ("print 2", second)


def test_sessions_are_listed_newest_first(any_store: Store) -> None:
    made = [make_session(any_store, created_at=1.8e9 + age) for age in (0.001, 30, 10, 20)]
    newest = [made[1], made[3], made[2], made[0]]
    places = any_store.list(10)
    assert [place.session_id for place in places] == newest
    assert [place.created_at for place in places] == [any_store.read(name)[0].created_at for name in newest]
    assert listed(any_store, 2) == newest[:2]
    assert listed(any_store, 2, places[1]) == newest[2:]
    assert listed(any_store, 2, places[3]) == []


def test_a_listing_goes_on_behind_what_was_deleted(any_store: Store) -> None:
    made = sorted(make_session(any_store, created_at=age / 3) for age in (1.8e9, 1.8e9, 1.8e9, 1.9e9, 1.9e9))
    newest, last, met = listed(any_store, 9), None, []
    assert sorted(newest) == made
    while places := any_store.list(2, last):
        for place in places:
            any_store.delete(place.session_id)
        met += [place.session_id for place in places]
        last = places[-1]
    assert met == newest
    assert last is not None
    newer = make_session(any_store, created_at=2e9)
    assert listed(any_store, 9, last) == []
    older = make_session(any_store, created_at=1.0)
    assert listed(any_store, 9, last) == [older]
    assert listed(any_store, 9) == [newer, older]


def test_both_protocols_list_alike(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    made = [make_session(probe.store, created_at=1.7e9 + age / 3) for age in range(3)]
    for protocol in (2, 3):
        store = RedisStore(f"{redis_server}?protocol={protocol}", probe.prefix)
        assert store.list(9) == [(1.7e9 + age / 3, made[age]) for age in (2, 1, 0)]
        store.close()
    probe.close()


@pytest.mark.parametrize("limit", [1, 3, 9])
def test_sessions_of_one_moment_are_listed_once_each(any_store: Store, limit: int) -> None:
    made = [make_session(any_store, created_at=1.7e9 + 0.1) for _ in range(7)]
    met, last = [], None
    while places := any_store.list(limit, last):
        met += [place.session_id for place in places]
        last = places[-1]
    assert met == sorted(made, reverse=True)


def test_a_listing_passes_over_sessions_that_were_never_finished(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    made = [make_session(probe.store, created_at=age) for age in (1, 2, 3, 4)]
    for lost in made[1:3]:
        probe.raw.delete(f"{probe.prefix}:{{{lineage_of(lost)}}}:s:{lost}", probe.head(lost))
    assert listed(probe.store, 2) == [made[3], made[0]]
    probe.close()


def test_each_owner_sees_their_own_sessions(any_store: Store) -> None:
    made = [
        make_session(any_store, created_at=age, owner=owner) for age, owner in enumerate(["", "ada", "bob", "ada", ""])
    ]
    assert listed(any_store, 9) == [made[4], made[0]]
    assert listed(any_store, 9, owner="ada") == [made[3], made[1]]
    assert listed(any_store, 9, any_store.list(1, owner="ada")[0], "ada") == [made[1]]
    assert listed(any_store, 9, owner="bob") == [made[2]]
    assert listed(any_store, 9, owner="eve") == []
    assert any_store.read(made[3])[0].owner == "ada"
    any_store.delete(made[3])
    assert listed(any_store, 9, owner="ada") == [made[1]]


def test_an_id_that_is_taken_is_listed_for_its_first_owner_only(any_store: Store) -> None:
    session_id = make_session(any_store, owner="ada")
    with pytest.raises(SessionExists):
        make_session(any_store, session_id, owner="bob")
    assert listed(any_store, 9, owner="bob") == []
    assert listed(any_store, 9, owner="ada") == [session_id]


@pytest.mark.parametrize(("owner", "ttl_s"), [("", None), ("ada", 60)], ids=["plain", "owned, expires"])
def test_deleting_leaves_nothing_behind(probe: Probe, owner: str, ttl_s: int | None) -> None:
    store = probe.store
    session_id = furnish(store, owner=owner, ttl_s=ttl_s)
    assert probe.keys()
    store.delete(session_id)
    assert listed(store, 9, owner=owner) == []
    store.collect(lineage_of(session_id), Retention())
    assert probe.keys() == set()


@pytest.mark.parametrize("gone", ["parent", "fork"])
def test_deleting_spares_what_another_session_needs(probe: Probe, gone: str) -> None:
    store, parent = probe.store, make_session(probe.store)
    write(store, parent, take(store, parent), 3)
    fork = make_fork(store, parent, 1)
    write(store, fork, take(store, fork), 2, seeds=100)
    first, last = (parent, fork) if gone == "parent" else (fork, parent)
    store.delete(first)
    check_whole(store, last)
    assert store.forks(last) == {}
    store.collect(lineage_of(last), Retention())
    check_whole(store, last)
    write(store, last, take(store, last), 1, seeds=200)
    store.delete(last)
    store.collect(lineage_of(last), Retention())
    assert probe.keys() == set()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "session_id",
    ["ses_" + "a" * 39, "", "ses_" + "a" * 39 + "\n", "ses_" + "1" * 39],
    ids=["absent", "empty", "newline", "alphabet"],
)
def test_every_call_names_an_unknown_session(any_store: Store, call: str, session_id: str) -> None:
    with pytest.raises(SessionNotFound):
        CALLS[call](any_store, session_id)
