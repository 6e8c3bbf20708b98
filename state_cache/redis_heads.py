"""The fields of a session's head on a Redis server, and what they say."""

from collections.abc import Sequence

import msgspec

from longtake.state_cache.errors import SchemaError
from longtake.state_cache.records import Cursor, Fence, Head, Span, decode

FIELDS = ("chunk", "revision", "cursor", "base", "path", "horizon", "rewinds", "expires", "token", "nonce")
"""In the order in which `read_head` and `read_fence` take them."""


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
            path=msgspec.msgpack.decode(path, type=tuple[Span, ...]),
            base=int(base),
            horizon=int(horizon),
            rewinds=msgspec.msgpack.decode(rewinds, type=tuple[int, ...]) if rewinds else (),
            expires_at=float(expires) / 1000 if expires else None,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise SchemaError("the session's head is damaged") from error


def read_fence(fields: Sequence[bytes | None]) -> Fence | None:
    """The fence in force, None when there never was one."""
    token, nonce = fields[-2:]
    return Fence(int(token), nonce.decode()) if token and nonce else None
