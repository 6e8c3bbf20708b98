"""Sessions in Redis or Valkey: blobs go up first as plain values, then one script makes the step."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec

from longtake.state_cache.blobs import ORPHAN_SECONDS, describe, names_in, verify
from longtake.state_cache.client import Argument, Client, milliseconds
from longtake.state_cache.directory import Directory
from longtake.state_cache.errors import (
    BlobsMissing,
    ChunkNotFound,
    SchemaError,
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
from longtake.state_cache.scripts import SessionScript

_WINDOW = 32  # blobs in flight on one connection
_OLDEST = 7
_UNREADABLE_MS = 3_600_000  # until a sweep looks again at a session that it can not read


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
        self._directory = Directory(self._client, prefix)
        self._create = SessionScript(self._client, "create")
        self._open = SessionScript(self._client, "open")
        self._commit = SessionScript(self._client, "commit")
        self._prune = SessionScript(self._client, "prune")
        self._delete = SessionScript(self._client, "delete")
        self._sweep = SessionScript(self._client, "sweep")

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """See `Store.create`."""
        keys, blobs = self._keys(session.id), self._blob_prefix(session.id)
        ttl = "" if session.ttl_s is None else session.ttl_s * 1000
        arguments = (encode(session), encode(cursor), session.owner, ttl, *names_in(arena=session.conditions))
        # listed first: a session that exists unseen would be worse than a listed one that does not exist
        self._directory.add(session)
        try:
            self._create(keys, blobs, *arguments)
        except BlobsMissing:
            self._directory.remove(session)
            raise
        self._directory.keep_claim(session)

    def open(self, session_id: str) -> Fence:
        """See `Store.open`."""
        nonce = secrets.token_hex(16)
        (token,) = self._open(self._keys(session_id), self._blob_prefix(session_id), nonce)
        return Fence(int(token), nonce)

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """See `Store.read`."""
        keys = self._keys(session_id)
        fields = ("chunk", "revision", "cursor", "token", "nonce", "expires")
        replies = self._of_session(session_id, ("GET", keys.session), ("HMGET", keys.head, *fields))
        session, (chunk, revision, cursor, token, nonce, expires) = cast("tuple[bytes, list[bytes]]", replies)
        head = Head(
            chunk=int(chunk),
            revision=int(revision),
            cursor=decode(cursor, Cursor),
            expires_at=float(expires) / 1000 if expires else None,
        )
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
        (data,) = self._of_session(session_id, ("HGET", self._keys(session_id).chunks, index))
        if data is None:
            raise ChunkNotFound(f"the session has no chunk {index}")
        return decode(cast("bytes", data), ChunkRecord)

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """See `Store.chunks`."""
        keys = self._keys(session_id)
        (last,) = self._of_session(session_id, ("HGET", keys.head, "chunk"))
        indices = range(max(start, 0), min(stop, int(cast("bytes", last)) + 1))
        if not indices:
            return []
        found = cast("list[bytes | None]", self._client.run("HMGET", keys.chunks, *indices))
        return [decode(data, ChunkRecord) for data in found if data is not None]

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """See `Store.request`."""
        (data,) = self._of_session(session_id, ("HGET", self._keys(session_id).requests, key))
        return None if data is None else decode(cast("bytes", data), RequestRecord)

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """See `Store.snapshots`."""
        (reply,) = self._of_session(session_id, ("HGETALL", self._keys(session_id).snapshots))
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
        bound = self._directory.claim(route_key, fingerprint, session_id)
        if self._drop_expired(bound[1]):
            bound = self._directory.claim(route_key, fingerprint, session_id)
        return bound

    def list(self, limit: int, after: str | None = None, owner: str = "") -> list[str]:
        """See `Store.list`."""
        rank = 0 if after is None else self._directory.rank(owner, after) + 1
        found: list[str] = []
        while len(found) < limit and (page := self._directory.page(owner, rank, limit)):
            found += self._those_of(owner, page)
            rank += len(page)
        return found[:limit]

    def delete(self, session_id: str) -> None:
        """See `Store.delete`."""
        record = self.read(session_id)[0]
        self._directory.drop_claim(record)
        self._delete(self._keys(session_id), self._blob_prefix(session_id))
        self._directory.remove(record)

    def sweep(self, limit: int = 100) -> int:
        """See `Store.sweep`."""
        now = milliseconds(self._client.run("TIME"))
        return sum(self._drop_or_postpone(session_id, now) for session_id in self._directory.due(now, limit))

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

    def _of_session(self, session_id: str, *commands: Sequence[Argument]) -> Sequence[object]:
        # whether it is there comes last: then it was there for all of them
        *replies, head, time = self._client.run_all([*commands, self._standing(session_id), ("TIME",)])
        if not _is_there(head, time):
            raise SessionNotFound("there is no such session")
        return replies

    def _those_of(self, owner: str, ids: Sequence[str]) -> Sequence[str]:
        *heads, time = self._client.run_all([*map(self._standing, ids), ("TIME",)])
        found = zip(ids, cast("list[list[bytes | None]]", heads), strict=True)
        # sessions older than owners have none
        return [name for name, head in found if _is_there(head, time) and (head[2] or b"").decode() == owner]

    def _standing(self, session_id: str) -> Sequence[Argument]:
        return "HMGET", self._keys(session_id).head, "chunk", "expires", "owner"

    def _drop_expired(self, session_id: str) -> bool:
        """Drop a session if its time is up; whether this call did."""
        keys = self._keys(session_id)
        commands = [("GET", keys.session), ("HGET", keys.head, "expires"), ("TIME",)]
        data, expires, time = cast("list[bytes | None]", self._client.run_all(commands))
        if data is None or not _is_over(expires, time):
            return False
        record = decode(data, SessionRecord)
        self._directory.drop_claim(record)
        (dropped,) = self._sweep(keys, self._blob_prefix(session_id))
        if dropped:
            self._directory.remove(record)
        return bool(dropped)

    def _drop_or_postpone(self, session_id: str, now: int) -> bool:
        try:
            if self._drop_expired(session_id):
                return True
        except SchemaError:
            self._directory.postpone(session_id, now + _UNREADABLE_MS)
            return False
        expires = cast("bytes | None", self._client.run("HGET", self._keys(session_id).head, "expires"))
        self._directory.postpone(session_id, None if expires is None else float(expires))
        return False

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


def _is_there(head: object, time: object) -> bool:
    chunk, expires, _ = cast("list[bytes | None]", head)
    return chunk is not None and not _is_over(expires, time)


def _is_over(expires: bytes | None, time: object) -> bool:
    return expires is not None and float(expires) <= milliseconds(time)


def _flat(data: bytes | memoryview) -> memoryview:
    return memoryview(data).cast("B")


def _windows(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[start : start + _WINDOW] for start in range(0, len(keys), _WINDOW)]
