"""Sessions in Redis or Valkey: blobs go up first as plain values, then one script makes the step."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec

from longtake.state_cache.blobs import ORPHAN_SECONDS, describe, names_in, verify
from longtake.state_cache.client import Argument, Client
from longtake.state_cache.errors import (
    BlobsMissing,
    ChunkNotFound,
    SessionNotFound,
    StoreError,
    StoreUnsuitable,
)
from longtake.state_cache.ids import lineage_of
from longtake.state_cache.protocol import Commit, StoreStatus
from longtake.state_cache.records import (
    Arena,
    BlobRef,
    ChunkRecord,
    Cursor,
    Fence,
    Head,
    RequestRecord,
    SessionRecord,
    decode,
    encode,
)
from longtake.state_cache.scripts import SessionScript, drop_claim

_WINDOW = 32  # blobs in flight on one connection
_OLDEST = 7


class _Keys(NamedTuple):
    """Keys of a session in the order of prelude.lua; all hash to the slot of its lineage."""

    session: str
    head: str
    chunks: str
    snapshots: str
    requests: str
    held: str
    kin: str


class RedisStore:
    """A `Store` on a Redis (7 or newer) or Valkey server.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        prefix: of every key, so that several services can share a server.
        timeout: seconds after which a silent server is `StoreUnavailable`.
        connections: most connections at a time; further callers wait.
    """

    def __init__(self, url: str, prefix: str = "lt", *, timeout: float = 3.0, connections: int = 8) -> None:
        self._client = Client(url, timeout, connections)
        self._prefix = prefix
        self._index = f"{prefix}:sessions"
        self._create = SessionScript(self._client, "create")
        self._open = SessionScript(self._client, "open")
        self._commit = SessionScript(self._client, "commit")
        self._prune = SessionScript(self._client, "prune")
        self._delete = SessionScript(self._client, "delete")

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """See `Store.create`."""
        keys, blobs = self._keys(session.id), self._blob_prefix(session.id)
        # listed first: a session that exists unseen would be worse than a listed one that does not exist
        self._client.run("ZADD", self._index, "NX", session.created_at, session.id)
        try:
            self._create(keys, blobs, encode(session), encode(cursor), *names_in(arena=session.conditions))
        except BlobsMissing:
            self._client.run("ZREM", self._index, session.id)
            raise

    def open(self, session_id: str) -> Fence:
        """See `Store.open`."""
        nonce = secrets.token_hex(16)
        (token,) = self._open(self._keys(session_id), self._blob_prefix(session_id), nonce)
        return Fence(int(token), nonce)

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """See `Store.read`."""
        keys = self._keys(session_id)
        fields = ("chunk", "revision", "cursor", "token", "nonce")
        replies = self._client.run_all([("GET", keys.session), ("HMGET", keys.head, *fields)])
        session, (chunk, revision, cursor, token, nonce) = cast("tuple[bytes | None, list[bytes]]", replies)
        if session is None or cursor is None:
            raise SessionNotFound("there is no such session")
        head = Head(chunk=int(chunk), revision=int(revision), cursor=decode(cursor, Cursor))
        fence = Fence(int(token), nonce.decode()) if nonce else None
        return decode(session, SessionRecord), head, fence

    def commit(self, commit: Commit) -> None:
        """See `Store.commit`."""
        request = commit.request
        self._commit(
            self._keys(commit.session_id),
            self._blob_prefix(commit.session_id),
            commit.fence.token,
            commit.fence.nonce,
            commit.revision,
            commit.expected_head,
            commit.head,
            encode(commit.cursor),
            _optional(commit.chunk),
            _optional(commit.snapshot),
            commit.key or "",
            request.fingerprint if request else "",
            _optional(request),
            *names_in(commit.chunk, commit.snapshot),
        )

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """See `Store.chunk`."""
        data = self._of_session(session_id, ("HGET", self._keys(session_id).chunks, index))
        if data is None:
            raise ChunkNotFound(f"the session has no chunk {index}")
        return decode(cast("bytes", data), ChunkRecord)

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """See `Store.chunks`."""
        keys = self._keys(session_id)
        last = cast("bytes", self._of_session(session_id, ("HGET", keys.head, "chunk")))
        indices = range(max(start, 0), min(stop, int(last) + 1))
        if not indices:
            return []
        found = cast("list[bytes | None]", self._client.run("HMGET", keys.chunks, *indices))
        return [decode(data, ChunkRecord) for data in found if data is not None]

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """See `Store.request`."""
        data = self._of_session(session_id, ("HGET", self._keys(session_id).requests, key))
        return None if data is None else decode(cast("bytes", data), RequestRecord)

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """See `Store.snapshots`."""
        reply = self._of_session(session_id, ("HGETALL", self._keys(session_id).snapshots))
        found = {int(index): data for index, data in cast("Mapping[bytes, bytes]", reply).items()}
        return {index: decode(found[index], Arena) for index in sorted(found)}

    def prune_snapshots(self, session_id: str, fence: Fence, keep: int) -> None:
        """See `Store.prune_snapshots`."""
        self._prune(self._keys(session_id), self._blob_prefix(session_id), fence.token, fence.nonce, keep)

    def put(self, session_id: str, data: Sequence[bytes | memoryview]) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        prefix = self._blob_prefix(session_id)
        refs = tuple(describe(blob) for blob in data)
        unseen = dict(zip([prefix + ref.name for ref in refs], data, strict=True))
        for key in self._present(list(unseen)):
            del unseen[key]
        keys, milliseconds = list(unseen), ORPHAN_SECONDS * 1000
        for window in _windows(keys):
            # NX: an equal blob that was committed meanwhile must not get a time to live again
            self._client.run_all([("SET", key, _flat(unseen[key]), "NX", "PX", milliseconds) for key in window])
        return refs

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """See `Store.get`."""
        prefix = self._blob_prefix(session_id)
        return [self._get(prefix, ref) for ref in refs]

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """See `Store.claim`."""
        pair, key = (fingerprint, session_id), self._claim_key(route_key)
        known = self._client.run("SET", key, msgspec.msgpack.encode(pair), "NX", "GET")
        return pair if known is None else _pair(known)

    def list(self, limit: int, after: str | None = None) -> list[str]:
        """See `Store.list`."""
        rank = 0 if after is None else self._rank(after) + 1
        found: list[str] = []
        while len(found) < limit:
            page = cast("list[bytes]", self._client.run("ZREVRANGE", self._index, rank, rank + limit - 1))
            if not page:
                break
            ids = [name.decode() for name in page]
            exist = self._client.run_all([("EXISTS", self._keys(name).session) for name in ids])
            found += [name for name, exists in zip(ids, exist, strict=True) if exists]
            rank += len(page)
        return found[:limit]

    def delete(self, session_id: str) -> None:
        """See `Store.delete`."""
        record = self.read(session_id)[0]
        if record.create_key is not None:
            self._unclaim(record.create_key, session_id)
        self._delete(self._keys(session_id), self._blob_prefix(session_id))
        self._client.run("ZREM", self._index, session_id)

    def check(self) -> StoreStatus:
        """See `Store.check`."""
        info = cast("Mapping[str, str | int]", self._client.run("INFO"))
        version = str(info["redis_version"])
        policy = str(info.get("maxmemory_policy", "unknown"))
        if int(version.split(".")[0]) < _OLDEST:
            raise StoreUnsuitable(f"the server is version {version}; {_OLDEST} or newer is needed")
        if policy != "noeviction":
            raise StoreUnsuitable(f"maxmemory-policy is {policy}: it must be noeviction, else sessions lose parts")
        if info.get("role") != "master":
            raise StoreUnsuitable("the server is a read-only replica")
        return StoreStatus(
            server="valkey" if "valkey_version" in info else "redis",
            version=str(info.get("valkey_version", version)),
            durability=self._durability(appends=info.get("aof_enabled") == 1),
            policy=policy,
            used_bytes=int(info.get("used_memory", 0)),
            limit_bytes=int(info.get("maxmemory", 0)),
        )

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _keys(self, session_id: str) -> _Keys:
        base = f"{self._prefix}:{{{lineage_of(session_id)}}}"
        return _Keys(
            session=f"{base}:s:{session_id}",
            head=f"{base}:h:{session_id}",
            chunks=f"{base}:c:{session_id}",
            snapshots=f"{base}:n:{session_id}",
            requests=f"{base}:q:{session_id}",
            held=f"{base}:r:{session_id}",
            kin=f"{base}:r",
        )

    def _blob_prefix(self, session_id: str) -> str:
        return f"{self._prefix}:{{{lineage_of(session_id)}}}:b:"

    def _claim_key(self, route_key: str) -> str:
        return f"{self._prefix}:claim:{hashlib.sha256(route_key.encode()).hexdigest()}"

    def _of_session(self, session_id: str, command: Sequence[Argument]) -> object:
        exists, reply = self._client.run_all([("EXISTS", self._keys(session_id).session), command])
        if not exists:
            raise SessionNotFound("there is no such session")
        return reply

    def _present(self, keys: Sequence[str]) -> Sequence[str]:
        present = []
        for window in _windows(keys):
            # the lifetime first: what is found afterwards stays long enough; GT leaves committed blobs without one
            prolong = [("PEXPIRE", key, ORPHAN_SECONDS * 1000, "GT") for key in window]
            replies = self._client.run_all([*prolong, *(("EXISTS", key) for key in window)])
            present += [key for key, exists in zip(window, replies[len(window) :], strict=True) if exists]
        return present

    def _get(self, prefix: str, ref: BlobRef) -> bytes:
        data = self._client.run("GET", prefix + ref.name)
        if data is None:
            raise BlobsMissing("a blob is not in the store")
        return verify(ref, cast("bytes", data))

    def _rank(self, session_id: str) -> int:
        rank = self._client.run("ZREVRANK", self._index, session_id)
        if rank is None:
            raise SessionNotFound("there is no such session to list from")
        return cast("int", rank)

    def _unclaim(self, route_key: str, session_id: str) -> None:
        key = self._claim_key(route_key)
        known = cast("bytes | None", self._client.run("GET", key))
        if known is not None and _pair(known)[1] == session_id:
            drop_claim(self._client, key, known)

    def _durability(self, *, appends: bool) -> Literal["strict", "relaxed", "none"]:
        if not appends:
            return "none"
        try:
            settings = cast("Mapping[str, str]", self._client.run("CONFIG GET", "appendfsync"))
        except StoreError:  # many hosted servers forbid CONFIG, and run everysec
            return "relaxed"
        return "strict" if settings.get("appendfsync") == "always" else "relaxed"


def _optional(record: msgspec.Struct | None) -> bytes:
    return b"" if record is None else encode(record)


def _pair(data: object) -> tuple[str, str]:
    return msgspec.msgpack.decode(cast("bytes", data), type=tuple[str, str])


def _flat(data: bytes | memoryview) -> memoryview:
    return memoryview(data).cast("B")


def _windows(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[start : start + _WINDOW] for start in range(0, len(keys), _WINDOW)]
