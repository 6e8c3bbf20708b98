"""Records that are not those that were written: found out on every store, and no more is lost than what they say."""

import logging
from collections.abc import Callable

import msgspec
import pytest
from store_fixtures import (
    check_whole,
    furnish,
    listed,
    make_fork,
    make_rewind,
    make_session,
    take,
    write,
)
from store_probes import Probe, RedisProbe

from longtake.state_cache import (
    ChunkRecord,
    Collected,
    Retention,
    SchemaError,
    SessionNotFound,
    decode,
    encode,
    lineage_of,
)
from longtake.state_cache.records import seal


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture
def taken(probe: Probe) -> str:
    """A session of three chunks."""
    session_id = make_session(probe.store)
    write(probe.store, session_id, take(probe.store, session_id), 3)
    return session_id


def test_every_flipped_bit_of_a_record_is_found(probe: Probe, taken: str) -> None:
    data = probe.record(taken, 1)
    for bit in range(0, len(data) * 8, 7):
        with pytest.raises(SchemaError, match="ChunkRecord is damaged"):
            decode(flipped(data, bit), ChunkRecord)
    probe.overwrite_record(taken, 1, flipped(data, data.index(b"velocity") * 8))
    with pytest.raises(SchemaError, match="ChunkRecord is damaged"):
        probe.store.chunk(taken, 1)
    assert probe.store.chunk(taken, 2).index == 2


def test_the_checksum_comes_before_the_schema() -> None:
    with pytest.raises(SchemaError, match="is damaged"):
        decode(msgspec.msgpack.encode({"schema": 1}), ChunkRecord)
    with pytest.raises(SchemaError, match="has schema 1"):
        decode(seal(msgspec.msgpack.encode({"schema": 1})), ChunkRecord)


@pytest.mark.parametrize("field", ["cursor", "path", "rewinds"])
def test_every_flipped_byte_of_a_head_is_found(redis_server: str, field: str) -> None:
    probe = RedisProbe(redis_server)
    parent = make_session(probe.store)
    write(probe.store, parent, take(probe.store, parent), 2)
    session_id = make_fork(probe.store, parent, 1)
    fence = take(probe.store, session_id)
    write(probe.store, session_id, fence, 2)
    probe.store.rewind(make_rewind(probe.store, session_id, fence, 2))
    data = probe.raw.hget(probe.head(session_id), field)
    for bit in range(0, len(data) * 8, 11):
        probe.raw.hset(probe.head(session_id), field, flipped(data, bit))
        with pytest.raises(SchemaError, match="damaged"):
            probe.store.read(session_id)
    probe.raw.hset(probe.head(session_id), field, data)
    check_whole(probe.store, session_id)
    probe.close()


@pytest.mark.parametrize(("span", "first"), [((0, 3), 0), ((1, 2), 1), ((1, 9), 1)])
def test_a_missing_log_record_is_named(probe: Probe, taken: str, span: tuple[int, int], first: int) -> None:
    probe.overwrite_record(taken, first, None)
    with pytest.raises(SchemaError, match=f"log record {first} is missing"):
        probe.store.chunks(taken, *span)
    with pytest.raises(SchemaError, match=f"log record {first} is missing"):
        probe.store.chunk(taken, first)
    assert [record.index for record in probe.store.chunks(taken, first + 1, 9)] == list(range(first + 1, 3))


def test_a_record_in_the_place_of_another_is_named(probe: Probe, taken: str) -> None:
    probe.overwrite_record(taken, 1, probe.record(taken, 2))
    with pytest.raises(SchemaError, match="log record 1 is that of chunk 2"):
        probe.store.chunks(taken, 0, 3)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_path_that_changes_while_it_is_read(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """A rewind and a collection, or a deletion and a collection, between the head and the records."""
    probe = RedisProbe(redis_server)
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    write(store, session_id, fence, 3)
    path_of, looks = store._path, []

    def path(name: str) -> object:
        found = path_of(name)
        looks.append(found)
        if len(looks) == 1:
            if deleted:
                store.delete(session_id)
            else:
                store.rewind(make_rewind(store, session_id, fence, 0))
            assert store.collect(lineage_of(session_id), Retention()).records == (3 if deleted else 2)
        return found

    monkeypatch.setattr(store, "_path", path)
    if deleted:
        with pytest.raises(SessionNotFound):
            store.chunks(session_id, 0, 9)
    else:
        monkeypatch.setattr(store, "chunk", lambda _, index: decode(probe.record(session_id, index), ChunkRecord))
        assert [record.index for record in store.chunks(session_id, 0, 9)] == [0]
        assert len(looks) == 2
    probe.close()


Harm = Callable[[RedisProbe, str], object]
HARMS: dict[str, Harm] = {
    "record damaged": lambda probe, session_id: probe.overwrite_session(session_id, b"nothing"),
    "record missing": lambda probe, session_id: probe.raw.delete(probe.session(session_id)),
    "cursor damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "cursor", b"nothing"),
    "cursor missing": lambda probe, session_id: probe.raw.hdel(probe.head(session_id), "cursor"),
    "path damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "path", b"nothing"),
    "chunk missing": lambda probe, session_id: probe.raw.hdel(probe.head(session_id), "chunk"),
    "chunk damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "chunk", b"\xff"),
    "horizon damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "horizon", b""),
    "nonce damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "nonce", b"\xff"),
    "expiry damaged": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "expires", b"1\xff"),
    "expiry not finite": lambda probe, session_id: probe.raw.hset(probe.head(session_id), "expires", b"nan"),
}


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> RedisProbe:
    fixture = request.getfixturevalue("redis_server" if request.param == "redis" else "embedded")
    return RedisProbe(fixture if isinstance(fixture, str) else fixture.start())


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_session_that_can_not_be_read_is_listed_and_can_be_deleted(server: RedisProbe, harm: Harm) -> None:
    store = server.store
    other, damaged = furnish(store, owner="a", ttl_s=60), furnish(store, owner="a", ttl_s=60)
    harm(server, damaged)
    with pytest.raises(SchemaError):
        store.read(damaged)
    assert set(listed(store, 9, owner="a")) == {other, damaged}
    assert (store.owner(damaged), store.owner(other)) == ("a", "a")
    assert store.sweep() == 0
    store.delete(damaged)
    assert listed(store, 9, owner="a") == [other]
    with pytest.raises(SessionNotFound):
        store.owner(damaged)
    with pytest.raises(SessionNotFound):
        store.delete(damaged)
    assert store.collect(lineage_of(damaged), Retention()).records == 3
    left = " ".join(server.keys())
    assert damaged not in left
    assert lineage_of(damaged) not in left
    check_whole(store, other)
    server.close()


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_nothing_of_a_lineage_with_such_a_session_is_collected(server: RedisProbe, harm: Harm) -> None:
    store, parent = server.store, make_session(server.store)
    fence = take(store, parent)
    write(store, parent, fence, 3)
    fork = make_fork(store, parent, 2)
    take(store, fork)
    store.rewind(make_rewind(store, parent, fence, -1))
    harm(server, fork)
    try:
        freed = store.collect(lineage_of(parent), Retention())
    except SchemaError:
        freed = Collected()
    assert freed.records == 0
    assert store.forks(parent) == {fork: 2}
    server.close()


def test_a_session_with_an_unreadable_record_on_every_store(probe: Probe) -> None:
    store = probe.store
    other, damaged = furnish(store, owner="a"), furnish(store, owner="a")
    fork = make_fork(store, damaged, 1)
    probe.overwrite_session(fork, b"nothing")
    assert store.forks(damaged) == {fork: 1}
    probe.overwrite_session(damaged, b"nothing")
    assert set(listed(store, 9, owner="a")) == {other, damaged, fork}
    assert store.owner(damaged) == "a"
    store.delete(damaged)
    store.delete(fork)
    assert listed(store, 9, owner="a") == [other]


def test_where_a_fork_began_that_is_damaged_is_left_out(redis_server: str, caplog: pytest.LogCaptureFixture) -> None:
    probe = RedisProbe(redis_server)
    parent = make_session(probe.store)
    first, second = make_fork(probe.store, parent, -1), make_fork(probe.store, parent, -1)
    key = f"{probe.prefix}:{{{lineage_of(parent)}}}:l"
    probe.raw.hset(key, first, flipped(probe.raw.hget(key, first), 80))
    caplog.set_level(logging.WARNING)
    assert probe.store.forks(parent) == {second: -1}
    assert "where a fork began is damaged" in caplog.text
    probe.close()


def test_a_stub_is_sealed_too(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    write(store, session_id, take(store, session_id), 4)
    assert store.collect(lineage_of(session_id), Retention(snapshots=1, chunks=1)).expired == 3
    assert encode(store.chunk(session_id, 0)) == probe.record(session_id, 0)
