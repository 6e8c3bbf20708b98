"""Sessions in the memory of this process, for tests and for those who ask for it: gone when the process ends."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from longtake.state_cache.blobs import describe, names_in
from longtake.state_cache.branches import branch_name, cut, spans, within
from longtake.state_cache.codec import load_tensors
from longtake.state_cache.digest import state_digest
from longtake.state_cache.errors import (
    BlobCorrupt,
    BlobsMissing,
    ChunkNotFound,
    HeadConflict,
    LeaseHeld,
    SchemaError,
    SessionExists,
    SessionNotFound,
)
from longtake.state_cache.ids import lineage_of
from longtake.state_cache.memory_blobs import MemoryBlobs
from longtake.state_cache.memory_log import MemoryLog
from longtake.state_cache.memory_sessions import Claim, Entry
from longtake.state_cache.protocol import CLAIM_SECONDS, Collected, Commit, Place, Rewind, StoreStatus
from longtake.state_cache.records import (
    Arena,
    BlobRef,
    ChunkRecord,
    Cursor,
    Fence,
    Head,
    Holder,
    Lease,
    RequestRecord,
    SessionRecord,
    decode,
    decode_session,
    encode,
)
from longtake.state_cache.retention import Retention, Root, needed, next_horizon


class MemoryStore:
    """A `Store` without any durability.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._lock = threading.RLock()
        self._sessions: dict[str, Entry] = {}
        self._log = MemoryLog()
        self._blobs = MemoryBlobs(clock)
        self._claims: dict[str, Claim] = {}
        self._litter: dict[str, None] = {}

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """See `Store.create`."""
        with self._lock:
            self._begin(session, Head(chunk=-1, revision=0, cursor=_copy(cursor)))

    def fork(self, child: SessionRecord, source: Head, cursor: Cursor) -> None:
        """See `Store.fork`."""
        assert child.parent is not None
        with self._lock:
            self._require_new(child.id)
            chunk, present = child.parent.chunk, self._entry(child.parent.session_id).head
            path = cut(spans(child.parent.session_id, source), chunk + 1)
            head = Head(
                chunk=chunk, revision=0, cursor=_copy(cursor), path=path, base=chunk + 1, horizon=present.horizon
            )
            moved = source.revision != present.revision or not present.horizon - 1 <= chunk <= present.chunk
            self._begin(child, head, HeadConflict(present.chunk, present.revision) if moved else None)

    def acquire(self, session_id: str, holder: Holder, lease_s: float, fence: Fence | None = None) -> Lease:
        """See `Store.acquire`."""
        with self._lock:
            entry, now = self._entry(session_id), self._clock()
            other = entry.holder if entry.holder and entry.holder.id != holder.id else None
            if other and entry.leased_until is not None and entry.leased_until > now:
                raise LeaseHeld(entry.leased_until - now, other.address)
            in_force = fence is not None and fence == entry.fence
            taken_over = other is not None and entry.leased_until is not None and not in_force
            if entry.fence is None or not in_force:
                entry.fence = Fence(entry.fence.token + 1 if entry.fence else 1, secrets.token_hex(16))
                self._litter[lineage_of(session_id)] = None
            entry.holder, entry.leased_until = holder, now + lease_s
            entry.prolong(now)
            return Lease(entry.fence, taken_over)

    def renew(self, session_id: str, fence: Fence, lease_s: float) -> None:
        """See `Store.renew`."""
        with self._lock:
            entry = self._fenced_entry(session_id, fence)
            entry.leased_until = self._clock() + lease_s
            entry.prolong(self._clock())

    def release(self, session_id: str, fence: Fence) -> None:
        """See `Store.release`."""
        with self._lock:
            self._fenced_entry(session_id, fence).leased_until = None

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """See `Store.read`."""
        with self._lock:
            entry = self._entry(session_id)
            expires_at = None if entry.expires is None else self._epoch + entry.expires
            head = msgspec.structs.replace(entry.head, cursor=_copy(entry.head.cursor), expires_at=expires_at)
            return decode_session(entry.record), head, entry.fence

    def commit(self, commit: Commit) -> None:
        """See `Store.commit`."""
        with self._lock:
            entry = self._entry(commit.session_id)
            entry.check_request(commit)
            entry.check_head(commit.fence, commit.expected_head, commit.revision)
            self._name(commit.session_id, set(names_in(commit.chunk, commit.cursor.text)))
            if commit.chunk is not None:
                self._log.write(branch_name(commit.session_id, commit.revision), commit.chunk)
            head = msgspec.structs.replace(entry.head, chunk=commit.head, cursor=_copy(commit.cursor))
            entry.move(commit, head, self._clock())

    def rewind(self, rewind: Rewind) -> None:
        """See `Store.rewind`."""
        with self._lock:
            entry, kept = self._entry(rewind.session_id), rewind.to_chunk
            entry.check_request(rewind)
            entry.check_head(rewind.fence, rewind.head.chunk, rewind.head.revision)
            if not entry.head.horizon - 1 <= kept <= entry.head.chunk:
                raise HeadConflict(entry.head.chunk, entry.head.revision)
            self._name(rewind.session_id, set(names_in(arena=rewind.cursor.text)))
            head = Head(
                chunk=kept,
                revision=entry.head.revision + 1,
                cursor=_copy(rewind.cursor),
                path=cut(spans(rewind.session_id, entry.head), kept + 1),
                base=kept + 1,
                horizon=entry.head.horizon,
                rewinds=(*entry.head.rewinds, kept),
            )
            entry.move(rewind, head, self._clock())
            self._litter[lineage_of(rewind.session_id)] = None

    def attach(self, session_id: str, fence: Fence, revision: int, index: int, snapshot: Arena) -> None:
        """See `Store.attach`."""
        with self._lock:
            head = self._fenced_entry(session_id, fence).head
            if revision != head.revision or not head.base <= index <= head.chunk:
                raise HeadConflict(head.chunk, head.revision)
            self._name(session_id, set(names_in(arena=snapshot)))
            self._log.attach(branch_name(session_id, revision), index, snapshot)

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """See `Store.chunk`."""
        if not (found := self.chunks(session_id, index, index + 1)):
            raise ChunkNotFound(f"the session has no chunk {index}")
        return found[0]

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """See `Store.chunks`."""
        with self._lock:
            return self._log.records(within(spans(session_id, self._entry(session_id).head), start, stop))

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """See `Store.request`."""
        with self._lock:
            data = self._entry(session_id).requests.get(key)
        return None if data is None else decode(data, RequestRecord)

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """See `Store.snapshots`."""
        with self._lock:
            return self._log.snapshots(spans(session_id, self._entry(session_id).head))

    def forks(self, session_id: str) -> dict[str, int]:
        """See `Store.forks`."""
        with self._lock:
            self._entry(session_id)
            kin = self._kin(lineage_of(session_id))
            parents = {name: entry.parent for name, entry in kin.items() if not self._has_expired(name)}
            return {
                name: parent.chunk for name, parent in parents.items() if parent and parent.session_id == session_id
            }

    def put(self, session_id: str, data: Sequence[bytes | memoryview], *, mend: bool = False) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        lineage = lineage_of(session_id)
        refs = tuple(describe(blob) for blob in data)
        with self._lock:
            self._blobs.put(lineage, refs, data, mend=mend)
        return refs

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """See `Store.get`."""
        with self._lock:
            return self._blobs.get(lineage_of(session_id), refs)

    def get_into(self, session_id: str, refs: Sequence[BlobRef], buffers: Sequence[memoryview]) -> None:
        """See `Store.get_into`."""
        for buffer, data in zip(buffers, self.get(session_id, refs), strict=True):
            buffer[:] = data

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """See `Store.claim`."""
        with self._lock:
            now = self._clock()
            self._claims = {key: claim for key, claim in self._claims.items() if not _is_over(claim.expires, now)}
            bound = self._claims.setdefault(route_key, Claim(fingerprint, session_id, now + CLAIM_SECONDS))
            if self._has_expired(bound.session_id):
                self._drop(bound.session_id)
                return self.claim(route_key, fingerprint, session_id)
            return bound.fingerprint, bound.session_id

    def claimed(self, route_key: str) -> bool:
        """See `Store.claimed`."""
        with self._lock:
            claim = self._claims.get(route_key)
            if claim is None or _is_over(claim.expires, self._clock()):
                return False
            return not self._has_expired(claim.session_id)

    def littered(self, limit: int = 100) -> list[str]:
        """See `Store.littered`."""
        with self._lock:
            return [*self._litter][:limit]

    def list(self, limit: int, after: Place | None = None, owner: str = "") -> list[Place]:
        """See `Store.list`."""
        with self._lock:
            there = [entry for name, entry in self._sessions.items() if not self._has_expired(name)]
            places = [entry.place for entry in there if entry.owner == owner]
            return sorted((place for place in places if after is None or place < after), reverse=True)[:limit]

    def owner(self, session_id: str) -> str:
        """See `Store.owner`."""
        with self._lock:
            return self._entry(session_id).owner

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
                try:
                    decode_session(self._sessions[session_id].record)
                except SchemaError:
                    continue
                self._drop(session_id)
            return before - len(self._sessions)

    def collect(self, lineage: str, retention: Retention) -> Collected:
        """See `Store.collect`."""
        with self._lock:
            self._litter.pop(lineage, None)
            kin, found = self._kin(lineage), self._log.snapshots_of(lineage)
            roots = [Root(decode_session(entry.record), entry.head) for entry in kin.values()]
            for root, entry in zip(roots, kin.values(), strict=True):
                is_sound = partial(self._is_sound, root.session.id)
                horizon = next_horizon(root, found, retention, is_sound)
                entry.head = msgspec.structs.replace(root.head, horizon=horizon)
            moved = [Root(root.session, entry.head) for root, entry in zip(roots, kin.values(), strict=True)]
            freed = self._log.sweep(lineage, needed(moved, found, retention))
            names = {name for root in moved for name in _names(root.session, root.head.cursor)}
            return replace(freed, blobs=self._blobs.free(lineage, names.union(self._log.names(lineage))))

    def check(self) -> StoreStatus:
        """See `Store.check`."""
        with self._lock:
            used = self._blobs.used_bytes()
        return StoreStatus(
            server="memory", version="", durability="none", policy="noeviction", used_bytes=used, limit_bytes=0
        )

    def close(self) -> None:
        """See `Store.close`."""

    def _require_new(self, session_id: str) -> None:
        if session_id in self._sessions:
            raise SessionExists("the session exists")

    def _begin(self, session: SessionRecord, head: Head, refusal: HeadConflict | None = None) -> None:
        self._require_new(session.id)
        if refusal is not None:
            raise refusal
        self._name(session.id, _names(session, head.cursor))
        self._sessions[session.id] = entry = Entry.of(session, head)
        entry.prolong(self._clock())
        if (claim := self._claim_of(entry)) is not None:
            claim.expires = None

    def _entry(self, session_id: str) -> Entry:
        if (entry := self._sessions.get(session_id)) is None or self._has_expired(session_id):
            raise SessionNotFound("there is no such session")
        return entry

    def _fenced_entry(self, session_id: str, fence: Fence) -> Entry:
        entry = self._entry(session_id)
        entry.check_fence(fence)
        return entry

    def _has_expired(self, session_id: str) -> bool:
        entry = self._sessions.get(session_id)
        return entry is not None and _is_over(entry.expires, self._clock())

    def _is_sound(self, session_id: str, index: int) -> bool:
        try:
            state = load_tensors(self, session_id, self.snapshots(session_id)[index])
            return state_digest(state) == self.chunk(session_id, index).state_digest
        except (BlobCorrupt, BlobsMissing, SchemaError):
            return False

    def _kin(self, lineage: str) -> dict[str, Entry]:
        return {name: entry for name, entry in self._sessions.items() if lineage_of(name) == lineage}

    def _name(self, session_id: str, names: set[str]) -> None:
        lineage = lineage_of(session_id)
        self._blobs.require(lineage, names)
        self._blobs.keep(lineage, names)

    def _drop(self, session_id: str) -> None:
        entry = self._sessions.pop(session_id)
        if entry.create_key is not None and self._claim_of(entry) is not None:
            del self._claims[entry.create_key]
        self._litter[lineage_of(session_id)] = None

    def _claim_of(self, entry: Entry) -> Claim | None:
        claim = None if entry.create_key is None else self._claims.get(entry.create_key)
        return claim if claim is not None and claim.session_id == entry.place.session_id else None


def _is_over(expires: float | None, now: float) -> bool:
    return expires is not None and expires <= now


def _copy(cursor: Cursor) -> Cursor:
    return decode(encode(cursor), Cursor)


def _names(session: SessionRecord, cursor: Cursor) -> set[str]:
    return {*names_in(arena=session.conditions), *names_in(arena=cursor.text)}
