"""Sessions in the memory of this process, for tests and for those who ask for it: gone when the process ends."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from longtake.state_cache.blobs import ORPHAN_SECONDS, describe, names_in, verify
from longtake.state_cache.errors import (
    BlobsMissing,
    ChunkNotFound,
    Fenced,
    HeadConflict,
    KeyReused,
    RequestDone,
    SchemaError,
    SessionExists,
    SessionNotFound,
)
from longtake.state_cache.ids import lineage_of
from longtake.state_cache.protocol import CLAIM_SECONDS, Commit, StoreStatus
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


@dataclass
class _Session:
    """One session; records are kept encoded, so that nobody can change them through a reference."""

    record: bytes
    cursor: bytes
    ttl: float | None
    expires: float | None = None
    chunk: int = -1
    revision: int = 0
    fence: Fence | None = None
    chunks: dict[int, bytes] = field(default_factory=dict)
    snapshots: dict[int, bytes] = field(default_factory=dict)
    requests: dict[str, bytes] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)

    def prolong(self, now: float) -> None:
        if self.ttl is not None:
            self.expires = now + self.ttl

    def write(self, commit: Commit) -> None:
        if commit.chunk is not None:
            self.chunks[commit.head] = encode(commit.chunk)
        if commit.snapshot is not None:
            self.snapshots[commit.head] = encode(commit.snapshot)
        if commit.key is not None and commit.request is not None:
            self.requests[commit.key] = encode(commit.request)
        self.chunk, self.cursor = commit.head, encode(commit.cursor)


@dataclass
class _Blob:
    data: bytes
    expires: float | None


@dataclass
class _Claim:
    fingerprint: str
    session_id: str
    expires: float | None


class MemoryStore:
    """A `Store` without any durability.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._lock = threading.RLock()
        self._sessions: dict[str, _Session] = {}
        self._blobs: dict[tuple[str, str], _Blob] = {}
        self._claims: dict[str, _Claim] = {}

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """See `Store.create`."""
        with self._lock:
            lineage = lineage_of(session.id)
            if session.id in self._sessions:
                raise SessionExists("the session exists")
            names = names_in(arena=session.conditions)
            self._require(lineage, names)
            self._sessions[session.id] = entry = _Session(encode(session), encode(cursor), session.ttl_s)
            entry.prolong(self._clock())
            self._retain(lineage, entry, names)
            if (claim := self._claim_of(session)) is not None:
                claim.expires = None

    def open(self, session_id: str) -> Fence:
        """See `Store.open`."""
        with self._lock:
            entry = self._entry(session_id)
            entry.prolong(self._clock())
            entry.fence = Fence(entry.fence.token + 1 if entry.fence else 1, secrets.token_hex(16))
            return entry.fence

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """See `Store.read`."""
        with self._lock:
            entry = self._entry(session_id)
            head = Head(
                chunk=entry.chunk,
                revision=entry.revision,
                cursor=decode(entry.cursor, Cursor),
                expires_at=None if entry.expires is None else self._epoch + entry.expires,
            )
            return decode(entry.record, SessionRecord), head, entry.fence

    def commit(self, commit: Commit) -> None:
        """See `Store.commit`."""
        with self._lock:
            entry = self._entry(commit.session_id)
            _check_request(entry, commit)
            _check_head(entry, commit)
            lineage = lineage_of(commit.session_id)
            names = names_in(commit.chunk, commit.snapshot)
            self._require(lineage, names)
            # new names before old ones, so that a blob both have stays
            self._retain(lineage, entry, names)
            if commit.snapshot is not None:
                self._drop_snapshot(lineage, entry, commit.head)
            entry.write(commit)
            entry.prolong(self._clock())

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """See `Store.chunk`."""
        with self._lock:
            data = self._entry(session_id).chunks.get(index)
        if data is None:
            raise ChunkNotFound(f"the session has no chunk {index}")
        return decode(data, ChunkRecord)

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """See `Store.chunks`."""
        with self._lock:
            found = sorted((k, data) for k, data in self._entry(session_id).chunks.items() if start <= k < stop)
        return [decode(data, ChunkRecord) for _, data in found]

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """See `Store.request`."""
        with self._lock:
            data = self._entry(session_id).requests.get(key)
        return None if data is None else decode(data, RequestRecord)

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """See `Store.snapshots`."""
        with self._lock:
            found = sorted(self._entry(session_id).snapshots.items())
        return {index: decode(data, Arena) for index, data in found}

    def prune_snapshots(self, session_id: str, fence: Fence, keep: int) -> None:
        """See `Store.prune_snapshots`."""
        with self._lock:
            entry = self._entry(session_id)
            if entry.fence != fence:
                raise Fenced("another opener has taken the session over")
            for index in sorted(entry.snapshots, reverse=True)[keep:]:
                self._drop_snapshot(lineage_of(session_id), entry, index)

    def put(self, session_id: str, data: Sequence[bytes | memoryview]) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        lineage = lineage_of(session_id)
        refs = tuple(describe(blob) for blob in data)
        now = self._clock()
        with self._lock:
            self._drop_orphans(now)
            for ref, content in zip(refs, data, strict=True):
                blob = self._blobs.get((lineage, ref.name))
                if blob is None:
                    self._blobs[lineage, ref.name] = _Blob(bytes(content), now + ORPHAN_SECONDS)
                elif blob.expires is not None:
                    blob.expires = now + ORPHAN_SECONDS
        return refs

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """See `Store.get`."""
        lineage = lineage_of(session_id)
        with self._lock:
            self._require(lineage, [ref.name for ref in refs])
            found = [self._blobs[lineage, ref.name].data for ref in refs]
        return [verify(ref, data) for ref, data in zip(refs, found, strict=True)]

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """See `Store.claim`."""
        with self._lock:
            now = self._clock()
            self._claims = {key: claim for key, claim in self._claims.items() if not _is_over(claim.expires, now)}
            bound = self._claims.setdefault(route_key, _Claim(fingerprint, session_id, now + CLAIM_SECONDS))
            if self._has_expired(bound.session_id):
                self._drop(bound.session_id)
                return self.claim(route_key, fingerprint, session_id)
            return bound.fingerprint, bound.session_id

    def list(self, limit: int, after: str | None = None, owner: str = "") -> list[str]:
        """See `Store.list`."""
        with self._lock:
            records = [decode(entry.record, SessionRecord) for entry in self._sessions.values()]
            newest = [name for _, name in sorted((r.created_at, r.id) for r in records if r.owner == owner)][::-1]
            if after is not None and after not in newest:
                raise SessionNotFound("there is no such session to list from")
            start = 0 if after is None else newest.index(after) + 1
            return [name for name in newest[start:] if not self._has_expired(name)][:limit]

    def delete(self, session_id: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._entry(session_id)
            self._drop(session_id)

    def sweep(self, limit: int = 100) -> int:
        """See `Store.sweep`."""
        with self._lock:
            before = len(self._sessions)
            for session_id in [name for name in self._sessions if self._has_expired(name)][:limit]:
                with suppress(SchemaError):
                    self._drop(session_id)
            return before - len(self._sessions)

    def check(self) -> StoreStatus:
        """See `Store.check`."""
        with self._lock:
            used = sum(len(blob.data) for blob in self._blobs.values())
        return StoreStatus(
            server="memory", version="", durability="none", policy="noeviction", used_bytes=used, limit_bytes=0
        )

    def close(self) -> None:
        """See `Store.close`."""

    def _entry(self, session_id: str) -> _Session:
        if (entry := self._sessions.get(session_id)) is None or self._has_expired(session_id):
            raise SessionNotFound("there is no such session")
        return entry

    def _has_expired(self, session_id: str) -> bool:
        entry = self._sessions.get(session_id)
        return entry is not None and _is_over(entry.expires, self._clock())

    def _drop(self, session_id: str) -> None:
        entry = self._sessions[session_id]
        record = decode(entry.record, SessionRecord)
        if record.create_key is not None and self._claim_of(record) is not None:
            del self._claims[record.create_key]
        self._release(lineage_of(session_id), entry, list(entry.names.elements()))
        del self._sessions[session_id]

    def _claim_of(self, session: SessionRecord) -> _Claim | None:
        claim = None if session.create_key is None else self._claims.get(session.create_key)
        return claim if claim is not None and claim.session_id == session.id else None

    def _require(self, lineage: str, names: Sequence[str]) -> None:
        self._drop_orphans(self._clock())
        if missing := [name for name in names if (lineage, name) not in self._blobs]:
            raise BlobsMissing(f"{len(missing)} blobs are not in the store")

    def _drop_orphans(self, now: float) -> None:
        for key in [key for key, blob in self._blobs.items() if _is_over(blob.expires, now)]:
            del self._blobs[key]

    def _retain(self, lineage: str, entry: _Session, names: Sequence[str]) -> None:
        entry.names.update(names)
        for name in names:
            self._blobs[lineage, name].expires = None

    def _release(self, lineage: str, entry: _Session, names: Sequence[str]) -> None:
        entry.names = entry.names - Counter(names)
        kin = [other.names for session_id, other in self._sessions.items() if lineage_of(session_id) == lineage]
        for name in set(names):
            if not any(name in held for held in kin):
                del self._blobs[lineage, name]

    def _drop_snapshot(self, lineage: str, entry: _Session, index: int) -> None:
        if (data := entry.snapshots.pop(index, None)) is not None:
            self._release(lineage, entry, names_in(arena=decode(data, Arena)))


def _is_over(expires: float | None, now: float) -> bool:
    return expires is not None and expires <= now


def _check_request(entry: _Session, commit: Commit) -> None:
    if commit.key is None or commit.request is None or (data := entry.requests.get(commit.key)) is None:
        return
    known = decode(data, RequestRecord)
    if known.fingerprint != commit.request.fingerprint:
        raise KeyReused("the key belongs to another request")
    if known.done:
        raise RequestDone("the request of this key has finished")


def _check_head(entry: _Session, commit: Commit) -> None:
    if entry.fence != commit.fence:
        raise Fenced("another opener has taken the session over")
    if (entry.chunk, entry.revision) != (commit.expected_head, commit.revision):
        raise HeadConflict(entry.chunk, entry.revision)
