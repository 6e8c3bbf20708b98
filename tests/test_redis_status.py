"""What the store says of its server, by what the server says of itself."""

from collections.abc import Callable
from typing import BinaryIO

import pytest
import redis
from redis_servers import own_server
from scripted_redis import scripted

from longtake.state_cache import StoreStatus, StoreUnavailable, StoreUnsuitable
from longtake.state_cache.client import Client
from longtake.state_cache.redis_status import check

FACTS = {
    "redis_version": "7.0.15",
    "role": "master",
    "loading": "0",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "maxmemory_policy": "noeviction",
    "maxmemory": "1000",
    "used_memory": "10",
}
CONFIG = b"%2\r\n$11\r\nappendfsync\r\n$6\r\nalways\r\n$25\r\nno-appendfsync-on-rewrite\r\n$2\r\nno\r\n"


def answering(**changes: str) -> Callable[[list[bytes], BinaryIO], None]:
    facts = "".join(f"{name}:{value}\r\n" for name, value in {**FACTS, **changes}.items()).encode()

    def answer(command: list[bytes], out: BinaryIO) -> None:
        out.write(b"$%d\r\n%s\r\n" % (len(facts), facts) if command[0] == b"INFO" else CONFIG)

    return answer


def status_of(url: str) -> StoreStatus:
    client = Client(url, 2, 1)
    try:
        return check(client)
    finally:
        client.close()


def test_a_server_as_it_should_be() -> None:
    expected = StoreStatus(
        server="redis", version="7.0.15", durability="strict", policy="noeviction", used_bytes=10, limit_bytes=1000
    )
    with scripted(answering()) as (url, _):
        assert status_of(url) == expected
    with scripted(answering(valkey_version="9.1.2", redis_version="7.2.4")) as (url, _):
        assert (status_of(url).server, status_of(url).version) == ("valkey", "9.1.2")


@pytest.mark.parametrize(
    ("fact", "value", "kind", "words"),
    [
        ("redis_version", "6.2.14", StoreUnsuitable, "version 6.2.14"),
        ("maxmemory_policy", "allkeys-lru", StoreUnsuitable, "allkeys-lru"),
        ("role", "slave", StoreUnsuitable, "replica"),
        ("loading", "1", StoreUnavailable, "loading"),
        ("aof_last_write_status", "err", StoreUnavailable, "disk"),
    ],
)
def test_a_server_that_is_not(fact: str, value: str, kind: type[Exception], words: str) -> None:
    with scripted(answering(**{fact: value})) as (url, _), pytest.raises(kind, match=words):
        status_of(url)


@pytest.mark.parametrize(
    ("appendonly", "fsync", "on_rewrite", "durability"),
    [
        ("yes", "always", "no", "strict"),
        ("yes", "always", "yes", "relaxed"),
        ("yes", "everysec", "no", "relaxed"),
        ("no", "always", "no", "none"),
    ],
)
def test_durability_is_what_every_setting_allows(appendonly: str, fsync: str, on_rewrite: str, durability: str) -> None:
    options = ["--appendonly", appendonly, "--appendfsync", fsync, "--no-appendfsync-on-rewrite", on_rewrite]
    with own_server(*options) as (url, _):
        assert status_of(url).durability == durability


def test_a_user_who_may_not_read_settings_gets_the_weaker_class() -> None:
    with own_server("--appendonly", "yes", "--appendfsync", "always") as (url, _), redis.Redis.from_url(url) as raw:
        raw.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"], commands=["-config"])
        assert status_of(url.replace("//", "//app:pw@")).durability == "relaxed"
