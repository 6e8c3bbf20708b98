"""Blobs on the wire: replies that are missing, wrong, cut off or late, and what is left of the connection."""

import os
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

import pytest
import redis
from scripted_redis import says, scripted

from longtake.state_cache import (
    MAX_BLOB,
    BlobCorrupt,
    BlobRef,
    BlobsMissing,
    StoreFull,
    StoreUnavailable,
    failpoints,
)
from longtake.state_cache.blobs import describe
from longtake.state_cache.bulk import Bulk, UnexpectedReply
from longtake.state_cache.client import Client
from longtake.state_cache.redis_blobs import RedisBlobs

PREFIX = "wire:b:"


@pytest.fixture(params=["redis", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        found: str = request.getfixturevalue("redis_server")
        return found
    started: str = request.getfixturevalue("embedded").start()
    return started


@pytest.fixture
def raw(url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(url) as client:
        yield client
        for key in client.scan_iter(f"{PREFIX}*"):
            client.delete(key)


@pytest.fixture
def blobs(url: str) -> Iterator[RedisBlobs]:
    client = Client(url, 3, 1)
    yield RedisBlobs(client)
    client.close()


def make_blobs(count: int, size: int = 1000) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]


def fetch(blobs: RedisBlobs, refs: tuple[BlobRef, ...]) -> list[bytes]:
    buffers = [bytearray(b"?" * ref.size) for ref in refs]
    blobs.get_into(PREFIX, refs, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize(("count", "size"), [(1, 0), (1, 1), (300, 5), (200, 4096), (21, MAX_BLOB), (9, MAX_BLOB - 7)])
def test_blobs_of_any_number_and_size_come_back(blobs: RedisBlobs, raw: "redis.Redis", count: int, size: int) -> None:
    data = make_blobs(count, size)
    refs = blobs.put(PREFIX, data)
    assert fetch(blobs, refs) == data
    assert blobs.get(PREFIX, refs) == data


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_missing_blob_is_named_at_once_and_no_reply_is_mixed_up(
    blobs: RedisBlobs, raw: "redis.Redis", place: int
) -> None:
    data = make_blobs(20, 300_000)
    refs = blobs.put(PREFIX, data)
    raw.delete(PREFIX + refs[place].name)
    started = time.monotonic()
    with pytest.raises(BlobsMissing):
        fetch(blobs, refs)
    assert time.monotonic() - started < 1
    assert fetch(blobs, refs[:place] + refs[place + 1 :]) == data[:place] + data[place + 1 :]


@pytest.mark.parametrize("stored", [b"", b"1", b"x" * 999, b"x" * 1000, b"x" * 1001, b"x" * 200_000], ids=len)
def test_a_blob_of_other_bytes_or_another_size_is_corrupt(blobs: RedisBlobs, raw: "redis.Redis", stored: bytes) -> None:
    data = make_blobs(3)
    refs = blobs.put(PREFIX, data)
    raw.set(PREFIX + refs[-1].name, stored)
    started = time.monotonic()
    with pytest.raises(BlobCorrupt):
        fetch(blobs, refs)
    assert time.monotonic() - started < 1
    assert fetch(blobs, refs[:2]) == data[:2]


def test_a_key_of_another_kind_is_an_error_that_is_named(blobs: RedisBlobs, raw: "redis.Redis") -> None:
    refs = blobs.put(PREFIX, make_blobs(2))
    raw.delete(PREFIX + refs[0].name)
    raw.lpush(PREFIX + refs[0].name, "item")
    with pytest.raises(Exception, match="WRONGTYPE"):
        fetch(blobs, refs)
    assert fetch(blobs, refs[1:])


def test_only_what_is_not_there_is_sent(blobs: RedisBlobs, raw: "redis.Redis") -> None:
    data = make_blobs(12, 50_000)
    blobs.put(PREFIX, data[:10])
    before = raw.info("commandstats")["cmdstat_set"]["calls"]
    blobs.put(PREFIX, [*data, *data])
    assert raw.info("commandstats")["cmdstat_set"]["calls"] - before == 2


def test_an_upload_that_dies_in_the_middle_is_taken_up_again(blobs: RedisBlobs, raw: "redis.Redis") -> None:
    data = make_blobs(40, MAX_BLOB // 4)
    failpoints.arm("put.middle=die@2")
    with pytest.raises(ValueError, match="die"):
        blobs.put(PREFIX, data)
    assert 8 <= len(list(raw.scan_iter(f"{PREFIX}*"))) <= 16
    refs = blobs.put(PREFIX, data)
    assert fetch(blobs, refs) == data


def test_a_server_that_becomes_full_refuses_the_rest_and_nothing_is_mixed_up(
    blobs: RedisBlobs, raw: "redis.Redis"
) -> None:
    kept = make_blobs(1)
    refs = blobs.put(PREFIX, kept)
    limit, clients = (raw.config_get(name)[name] for name in ("maxmemory", "maxmemory-clients"))
    raw.config_set("maxmemory-clients", 0)  # a share of so little memory that the upload would be disconnected
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 5 * MAX_BLOB)
    try:
        with pytest.raises(StoreFull):
            blobs.put(PREFIX, make_blobs(30, MAX_BLOB))
        assert fetch(blobs, refs) == kept
    finally:
        raw.config_set("maxmemory", limit)
        raw.config_set("maxmemory-clients", clients)
    assert fetch(blobs, refs) == kept


def test_the_socket_is_where_it_is_looked_for(url: str, raw: "redis.Redis") -> None:
    client = Client(url, 3, 1)
    with client.bulk() as bulk:
        assert isinstance(bulk._connection._sock, socket.socket), "redis-py has moved it: reads are slow now"
    client.close()


def test_without_the_socket_blobs_are_read_through_the_library(
    blobs: RedisBlobs, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UnexpectedReply

    data = make_blobs(20)
    refs = blobs.put(PREFIX, data)
    monkeypatch.setattr(Bulk, "receive_into", refuse)
    assert fetch(blobs, refs) == data


DATA = b"0123456789" * 100


@pytest.mark.parametrize(
    "sent", [b"", b"$", b"$1000\r\n", b"$1000\r\n" + DATA[:-1], b"$1000\r\n" + DATA + b"\r"], ids=len
)
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_reply_that_is_cut_off_or_stops_is_unavailable_in_time(sent: bytes, hangs_up: bool) -> None:
    def answer(_: list[bytes], out: BinaryIO) -> bool:
        out.write(sent)
        return hangs_up

    with scripted(answer) as (url, seen):
        client = Client(url, 0.3, 1)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            fetch(RedisBlobs(client), (describe(DATA),))
        assert time.monotonic() - started < 1.5
        client.close()
    assert len(seen) == 1


def test_a_reply_that_trickles_in_ends_at_the_time_limit() -> None:
    def trickle(_: list[bytes], out: BinaryIO) -> None:
        out.write(b"$1000\r\n")
        for value in DATA:
            out.write(bytes([value]))
            time.sleep(0.02)

    with scripted(trickle) as (url, _):
        client = Client(url, 0.3, 1)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="in time"):
            fetch(RedisBlobs(client), (describe(DATA),))
        assert time.monotonic() - started < 1.5
        client.close()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING wait\r\n", StoreUnavailable),
        (b"_\r\n", BlobsMissing),
        (b"$-1\r\n", BlobsMissing),
        (b"$1000\r\n" + DATA[::-1] + b"\r\n", BlobCorrupt),
    ],
)
def test_other_replies_are_named(reply: bytes, kind: type[Exception]) -> None:
    with scripted(says(reply)) as (url, _):
        client = Client(url, 3, 1)
        with pytest.raises(kind):
            fetch(RedisBlobs(client), (describe(DATA),))
        client.close()
