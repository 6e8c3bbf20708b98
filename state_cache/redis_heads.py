"""The fields of a session's head on a Redis server, and what they say."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from longtake.state_cache.client import milliseconds
from longtake.state_cache.errors import SchemaError
from longtake.state_cache.records import Cursor, Fence, Head, Parent, Span, decode, seal, unseal

log = logging.getLogger(__name__)

FIELDS = ("chunk", "revision", "cursor", "base", "path", "horizon", "rewinds", "expires", "token", "nonce")
"""In the order in which `read_head` and `read_fence` take them."""

STANDING = ("chunk", "expires", "owner")
"""In the order in which `is_there` takes them."""


def encode_path(path: Sequence[Span]) -> bytes:
    """A path as the head keeps it."""
    return seal(msgspec.msgpack.encode(path))


def encode_rewinds(rewinds: Sequence[int]) -> bytes:
    """The last chunks that rewinds have kept, as the head keeps them."""
    return seal(msgspec.msgpack.encode(rewinds))


def encode_parent(parent: Parent) -> bytes:
    """Where a fork began, as its lineage keeps it."""
    return seal(msgspec.msgpack.encode(parent))


def read_head(fields: Sequence[bytes | None]) -> Head:
    """Where a session stands. Raises `SchemaError`; without a head at all that of an unknown version."""
    chunk, revision, cursor, base, path, horizon, rewinds, expires, *_ = fields
    if chunk is None or revision is None or cursor is None or base is None or path is None or horizon is None:
        raise SchemaError("the session's head lacks fields of this version")
    try:
        return Head(
            chunk=int(chunk),
            revision=int(revision),
            cursor=decode(cursor, Cursor),
            path=msgspec.msgpack.decode(unseal(path, "the session's path"), type=tuple[Span, ...]),
            base=int(base),
            horizon=int(horizon),
            rewinds=_rewinds(rewinds),
            expires_at=None if expires is None else read_expiry(expires) / 1000,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise SchemaError("the session's head is damaged") from error


def read_fence(fields: Sequence[bytes | None]) -> Fence | None:
    """The fence in force, None when there never was one. Raises `SchemaError`."""
    token, nonce = fields[-2:]
    try:
        return Fence(int(token), nonce.decode()) if token and nonce else None
    except ValueError as error:
        raise SchemaError("the session's fence is damaged") from error


def read_expiry(data: bytes) -> float:
    """When a session expires, in unix ms of the server. Raises `SchemaError`."""
    try:
        if math.isfinite(expiry := float(data)):
            return expiry
    except ValueError as error:
        raise SchemaError("the session's expiry is damaged") from error
    raise SchemaError("the session's expiry is damaged")


def read_parents(family: Mapping[bytes, bytes]) -> dict[str, Parent]:
    """Forks of a lineage with where each began; those of which that can not be read are left out."""
    parents = {}
    for child, data in family.items():
        try:
            if data:
                body = unseal(data, "where a fork began")
                parents[child.decode()] = msgspec.msgpack.decode(body, type=Parent)
        except (SchemaError, msgspec.DecodeError) as error:
            log.warning("a fork can not be shown: %s", error)
    return parents


def is_there(standing: object, time: object) -> bool:
    """Whether a session is there at a `time` of the server, also when it can not be read any more."""
    chunk, expires, owner = cast("list[bytes | None]", standing)
    try:
        return (chunk, owner) != (None, None) and not is_over(expires, time)
    except SchemaError:
        return True


def is_over(expires: bytes | None, time: object) -> bool:
    """Whether a session's time is up. Raises `SchemaError`."""
    return expires is not None and read_expiry(expires) <= milliseconds(time)


def _rewinds(data: bytes | None) -> tuple[int, ...]:
    return msgspec.msgpack.decode(unseal(data, "the list of rewinds"), type=tuple[int, ...]) if data else ()
