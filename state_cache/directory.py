"""What stands beside the sessions on a Redis server: listings, expiries and claims, each outside any session's slot."""

import hashlib
from collections.abc import Sequence
from typing import cast

import msgspec

from longtake.state_cache.client import Argument, Client, milliseconds
from longtake.state_cache.protocol import CLAIM_SECONDS, Place
from longtake.state_cache.records import SessionRecord
from longtake.state_cache.scripts import drop_claim, drop_mark, mark, postpone


class Directory:
    """Which sessions an owner has, when sessions may expire, and which idempotency keys made them.

    It is a hint, the session itself is the truth: a listed session may be gone, and one that is due may have been used
    again since. No session that expires is missing from it.
    """

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._expiries = f"{prefix}:expiries"
        self._litter = f"{prefix}:litter"

    def add(self, session: SessionRecord) -> None:
        """List a session that is about to be created."""
        commands: list[Sequence[Argument]] = [
            ("ZADD", self._owned(session.owner), "NX", session.created_at, session.id)
        ]
        if session.ttl_s is not None:
            expires = milliseconds(self._client.run("TIME")) + session.ttl_s * 1000
            commands.append(("ZADD", self._expiries, "NX", expires, session.id))
        self._client.run_all(commands)

    def remove(self, session_id: str, owner: str) -> None:
        """Forget a session."""
        self._client.run_all([("ZREM", index, session_id) for index in (self._owned(owner), self._expiries)])

    def page(self, owner: str, after: Place | None, count: int) -> list[Place]:
        """At most `count` sessions of an owner, newest first, from behind a place on."""
        index, newest, ties = self._owned(owner), "+inf", 0
        if after is not None:
            newest = repr(after.created_at)
            ties = cast("int", self._client.run("ZCOUNT", index, newest, newest))
        options: tuple[Argument, ...] = ("BYSCORE", "REV", "LIMIT", 0, count + ties, "WITHSCORES")
        places = _places(self._client.run("ZRANGE", index, newest, "-inf", *options))
        return [place for place in places if after is None or place < after][:count]

    def due(self, now: float, count: int) -> list[str]:
        """Ids of sessions that may have expired at `now` (unix ms of the server), the longest ago first."""
        return _ids(self._client.run("ZRANGE", self._expiries, "-inf", now, "BYSCORE", "LIMIT", 0, count))

    def postpone(self, session_id: str, expires: float | None) -> None:
        """A session is not due before `expires` (unix ms of the server); None when it is gone."""
        if expires is None:
            self._client.run("ZREM", self._expiries, session_id)
        else:
            postpone(self._client, self._expiries, session_id, expires)

    def litter(self, lineage: str) -> None:
        """Note that a lineage will have something to collect."""
        mark(self._client, self._litter, lineage, milliseconds(self._client.run("TIME")))

    def littered(self, count: int) -> list[str]:
        """Lineages noted so, the longest ago first."""
        return _ids(self._client.run("ZRANGE", self._litter, 0, count - 1))

    def litter_mark(self, lineage: str) -> float | None:
        """When a lineage was noted last, if it is noted; goes into `tidied`."""
        score = cast("bytes | float | None", self._client.run("ZSCORE", self._litter, lineage))
        return None if score is None else float(score)

    def tidied(self, lineage: str, score: float) -> None:
        """Forget a note, unless the lineage was noted again since."""
        drop_mark(self._client, self._litter, lineage, score)

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """Bind a route key unless it is bound; the pair in force. Without `keep_claim` it lapses."""
        pair, key = (fingerprint, session_id), self._claim_key(route_key)
        known = self._client.run("SET", key, msgspec.msgpack.encode(pair), "NX", "GET", "EX", CLAIM_SECONDS)
        return pair if known is None else _pair(known)

    def claimed(self, route_key: str) -> tuple[str, str] | None:
        """What a route key is bound to."""
        known = self._client.run("GET", self._claim_key(route_key))
        return None if known is None else _pair(known)

    def keep_claim(self, session: SessionRecord) -> None:
        """The claim that a session was created under lapses no more."""
        if (claim := self._claim_of(session)) is not None:
            self._client.run("PERSIST", claim[0])

    def drop_claim(self, session: SessionRecord) -> None:
        """Drop the claim that a session was created under."""
        if (claim := self._claim_of(session)) is not None:
            drop_claim(self._client, *claim)

    def _owned(self, owner: str) -> str:
        return f"{self._prefix}:sessions:{owner}" if owner else f"{self._prefix}:sessions"

    def _claim_key(self, route_key: str) -> str:
        return f"{self._prefix}:claim:{hashlib.sha256(route_key.encode()).hexdigest()}"

    def _claim_of(self, session: SessionRecord) -> tuple[str, bytes] | None:
        """Key and value of the session's claim, unless the key is bound to another session."""
        if session.create_key is None:
            return None
        key = self._claim_key(session.create_key)
        known = cast("bytes | None", self._client.run("GET", key))
        return None if known is None or _pair(known)[1] != session.id else (key, known)


def _ids(reply: object) -> list[str]:
    return [name.decode() for name in cast("list[bytes]", reply)]


def _places(reply: object) -> list[Place]:
    """Places out of names with scores: one after the other in RESP2, in pairs in RESP3."""
    rows = cast("list[bytes | list[bytes | float]]", reply)
    flat = [value for row in rows for value in (row if isinstance(row, list) else (row,))]
    names = cast("list[bytes]", flat[::2])
    return [Place(float(score), name.decode()) for name, score in zip(names, flat[1::2], strict=True)]


def _pair(data: object) -> tuple[str, str]:
    return msgspec.msgpack.decode(cast("bytes", data), type=tuple[str, str])
