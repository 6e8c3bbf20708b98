"""What a Redis or Valkey server says of itself: whether sessions are safe there, and how safe."""

from collections.abc import Mapping
from typing import Literal, cast

from redis.exceptions import NoPermissionError

from longtake.state_cache.client import Client
from longtake.state_cache.errors import StoreError, StoreUnavailable, StoreUnsuitable
from longtake.state_cache.protocol import StoreStatus

OLDEST = 7
"""Oldest major version of Redis that has all the commands."""

_STRICT = {"appendfsync": "always", "no-appendfsync-on-rewrite": "no"}

Info = Mapping[str, str | int]


def check(client: Client) -> StoreStatus:
    """See `Store.check`. Raises `StoreUnavailable` also when the server could not write its log to disk."""
    info = cast("Info", client.run("INFO"))
    _refuse_unsuitable(info)
    _refuse_unavailable(info)
    version = str(info["redis_version"])
    return StoreStatus(
        server="valkey" if "valkey_version" in info else "redis",
        version=str(info.get("valkey_version", version)),
        durability=_durability(client, info),
        policy=str(info.get("maxmemory_policy", "unknown")),
        used_bytes=int(info.get("used_memory", 0)),
        limit_bytes=int(info.get("maxmemory", 0)),
    )


def _refuse_unsuitable(info: Info) -> None:
    version, policy = str(info["redis_version"]), str(info.get("maxmemory_policy", "unknown"))
    if int(version.split(".")[0]) < OLDEST:
        raise StoreUnsuitable(f"the server is version {version}; {OLDEST} or newer is needed")
    if policy != "noeviction":
        raise StoreUnsuitable(f"maxmemory-policy is {policy}: it must be noeviction, else sessions lose parts")
    if info.get("role") != "master":
        raise StoreUnsuitable("the server is a read-only replica")


def _refuse_unavailable(info: Info) -> None:
    if info.get("loading") == 1 or info.get("async_loading") == 1:
        raise StoreUnavailable("the store is still loading its data")
    if info.get("aof_enabled") == 1 and info.get("aof_last_write_status", "ok") != "ok":
        raise StoreUnavailable("the store could not write its log: is its disk full?")


def _durability(client: Client, info: Info) -> Literal["strict", "relaxed", "none"]:
    if info.get("aof_enabled") != 1:
        return "none"
    try:
        settings = cast("Mapping[str, str]", client.run("CONFIG GET", *_STRICT))
    except StoreUnavailable as error:
        if not isinstance(error.__cause__, NoPermissionError):
            raise
        return "relaxed"  # many hosted servers forbid CONFIG, and sync once a second
    except StoreError:
        return "relaxed"
    return "strict" if settings == _STRICT else "relaxed"
