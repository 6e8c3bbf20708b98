"""Sessions in Redis or Valkey: blobs go up first as plain values, then one script makes the step."""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import cast

from longtake.state_cache.blobs import names_in
from longtake.state_cache.branches import branch_name, cut, spans, within
from longtake.state_cache.client import Argument, Client, milliseconds
from longtake.state_cache.codec import load_tensors
from longtake.state_cache.digest import state_digest
from longtake.state_cache.directory import Directory
from longtake.state_cache.errors import (
    BlobCorrupt,
    BlobsMissing,
    ChunkNotFound,
    HeadConflict,
    SchemaError,
    SessionExists,
    SessionNotFound,
)
from longtake.state_cache.failpoints import failpoint
from longtake.state_cache.ids import lineage_of
from longtake.state_cache.protocol import Collected, Commit, Place, Rewind, StoreStatus
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
    Span,
    decode,
    decode_chunk,
    decode_session,
    encode,
)
from longtake.state_cache.redis_blobs import RedisBlobs
from longtake.state_cache.redis_collect import Collector
from longtake.state_cache.redis_heads import (
    FIELDS,
    STANDING,
    encode_parent,
    encode_path,
    encode_rewinds,
    is_over,
    is_there,
    read_expiry,
    read_fence,
    read_head,
    read_parents,
)
from longtake.state_cache.redis_status import check
from longtake.state_cache.retention import Retention
from longtake.state_cache.scripts import Keys, SessionScript

log = logging.getLogger(__name__)

_UNREADABLE_MS = 3_600_000  # until a sweep looks again at a session that it can not read
_NO_FENCE = Fence(0, "")


class RedisStore:
    """A `Store` on a Redis (7 or newer) or Valkey server.

    Args:
        url: `redis://`, `rediss://`, `unix://`, or `redis+sentinel://` and `rediss+sentinel://`.
        prefix: of every key, so that several services can share a server.
        timeout: seconds after which a silent server is `StoreUnavailable`.
        connections: most connections at a time; further callers wait.
    """

    def __init__(self, url: str, prefix: str = "lt", *, timeout: float = 3.0, connections: int = 8) -> None:
        self._client = Client(url, timeout, connections)
        self._prefix = prefix
        self._directory = Directory(self._client, prefix)
        self._blobs = RedisBlobs(self._client)
        self._collector = Collector(self._client, self._is_sound)
        self._create = SessionScript(self._client, "create")
        self._fork = SessionScript(self._client, "fork")
        self._acquire = SessionScript(self._client, "acquire")
        self._lease = SessionScript(self._client, "lease")
        self._commit = SessionScript(self._client, "commit")
        self._rewind = SessionScript(self._client, "rewind")
        self._attach = SessionScript(self._client, "attach")
        self._delete = SessionScript(self._client, "delete")

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """See `Store.create`."""
        arguments = (*_beginning(session, cursor), encode_path(()), *_names(session, cursor))
        with self._listed(session):
            self._create(self._keys(session.id), *arguments)

    def fork(self, child: SessionRecord, source: Head, cursor: Cursor) -> None:
        """See `Store.fork`."""
        assert child.parent is not None
        parent = self._keys(child.parent.session_id)
        path = cut(spans(child.parent.session_id, source), child.parent.chunk + 1)
        with self._listed(child):
            self._fork(
                self._keys(child.id),
                *_beginning(child, cursor),
                encode_path(path),
                child.parent.chunk,
                source.revision,
                encode_parent(child.parent),
                *_names(child, cursor),
                more=(parent.session, parent.head),
            )

    def acquire(self, session_id: str, holder: Holder, lease_s: float, fence: Fence | None = None) -> Lease:
        """See `Store.acquire`."""
        known = fence or _NO_FENCE
        reply = self._acquire(
            self._keys(session_id),
            holder.id,
            holder.address,
            round(lease_s * 1000),
            known.token,
            known.nonce,
            secrets.token_hex(16),
        )
        token, nonce, taken_over = cast("tuple[bytes, bytes, int]", reply)
        granted = Fence(int(token), nonce.decode())
        if granted != fence:
            self._directory.litter(lineage_of(session_id))
        return Lease(granted, bool(taken_over))

    def renew(self, session_id: str, fence: Fence, lease_s: float) -> None:
        """See `Store.renew`."""
        self._lease(self._keys(session_id), fence.token, fence.nonce, round(lease_s * 1000))

    def release(self, session_id: str, fence: Fence) -> None:
        """See `Store.release`."""
        self._lease(self._keys(session_id), fence.token, fence.nonce, 0)

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """See `Store.read`."""
        keys = self._keys(session_id)
        session, fields = self._of_session(session_id, ("GET", keys.session), ("HMGET", keys.head, *FIELDS))
        found = cast("list[bytes | None]", fields)
        return decode_session(cast("bytes | None", session)), read_head(found), read_fence(found)

    def commit(self, commit: Commit) -> None:
        """See `Store.commit`."""
        failpoint("commit.before")
        self._commit(
            self._keys(commit.session_id),
            commit.fence.token,
            commit.fence.nonce,
            commit.revision,
            commit.expected_head,
            commit.head,
            encode(commit.cursor),
            branch_name(commit.session_id, commit.revision),
            b"" if commit.chunk is None else encode(commit.chunk),
            *_request(commit.key, commit.request),
            *names_in(commit.chunk, commit.cursor.text),
        )
        failpoint("commit.after")

    def rewind(self, rewind: Rewind) -> None:
        """See `Store.rewind`."""
        self._directory.litter(lineage_of(rewind.session_id))
        self._rewind(
            self._keys(rewind.session_id),
            rewind.fence.token,
            rewind.fence.nonce,
            rewind.head.revision,
            rewind.head.chunk,
            rewind.to_chunk,
            encode(rewind.cursor),
            encode_path(cut(spans(rewind.session_id, rewind.head), rewind.to_chunk + 1)),
            encode_rewinds((*rewind.head.rewinds, rewind.to_chunk)),
            *_request(rewind.key, rewind.request),
            *names_in(arena=rewind.cursor.text),
        )
        # and once more: a collection in between would have taken the note for done
        self._directory.litter(lineage_of(rewind.session_id))

    def attach(self, session_id: str, fence: Fence, revision: int, index: int, snapshot: Arena) -> None:
        """See `Store.attach`."""
        self._attach(
            self._keys(session_id),
            fence.token,
            fence.nonce,
            revision,
            index,
            branch_name(session_id, revision),
            encode(snapshot),
            *names_in(arena=snapshot),
        )

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """See `Store.chunk`."""
        if not (found := self.chunks(session_id, index, index + 1)):
            raise ChunkNotFound(f"the session has no chunk {index}")
        return found[0]

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """See `Store.chunks`."""
        path = within(self._path(session_id), start, stop)
        while True:
            try:
                return list(self._records(self._keys(session_id), path))
            except SchemaError:
                # unless a rewind has led away from them since, and a collection followed
                if (present := within(self._path(session_id), start, stop)) == path:
                    raise
                path = present

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """See `Store.request`."""
        (data,) = self._of_session(session_id, ("HGET", self._keys(session_id).requests, key))
        return None if data is None else decode(cast("bytes", data), RequestRecord)

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """See `Store.snapshots`."""
        keys, path = self._keys(session_id), self._path(session_id)
        replies = self._client.run_all([("HGETALL", keys.snapshots(span.branch)) for span in path])
        found: dict[int, bytes] = {}
        for span, reply in zip(path, cast("list[Mapping[bytes, bytes]]", replies), strict=True):
            found |= {int(i): data for i, data in reply.items() if span.start <= int(i) < span.stop}
        return {index: decode(found[index], Arena) for index in sorted(found)}

    def forks(self, session_id: str) -> dict[str, int]:
        """See `Store.forks`."""
        (reply,) = self._of_session(session_id, ("HGETALL", self._keys(session_id).family))
        parents = read_parents(cast("Mapping[bytes, bytes]", reply))
        children = [child for child, parent in parents.items() if parent.session_id == session_id]
        return {child: parents[child].chunk for child in self._those_there(children)}

    def put(self, session_id: str, data: Sequence[bytes | memoryview], *, mend: bool = False) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        return self._blobs.put(self._keys(session_id).blobs, data, mend=mend)

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """See `Store.get`."""
        return self._blobs.get(self._keys(session_id).blobs, refs)

    def get_into(self, session_id: str, refs: Sequence[BlobRef], buffers: Sequence[memoryview]) -> None:
        """See `Store.get_into`."""
        self._blobs.get_into(self._keys(session_id).blobs, refs, buffers)

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """See `Store.claim`."""
        bound = self._directory.claim(route_key, fingerprint, session_id)
        if self._drop_expired(bound[1]):
            return self._directory.claim(route_key, fingerprint, session_id)
        if bound[1] != session_id:
            self._keep_claim(bound[1])
        return bound

    def claimed(self, route_key: str) -> bool:
        """See `Store.claimed`."""
        bound = self._directory.claimed(route_key)
        return bound is not None and not self._drop_expired(bound[1])

    def list(self, limit: int, after: Place | None = None, owner: str = "") -> list[Place]:
        """See `Store.list`."""
        found: list[Place] = []
        while len(found) < limit and (page := self._directory.page(owner, after, limit)):
            owners = self._those_there([place.session_id for place in page])
            found += [place for place in page if owners.get(place.session_id) == owner]
            after = page[-1]
        return found[:limit]

    def owner(self, session_id: str) -> str:
        """See `Store.owner`."""
        if (owner := self._those_there([session_id]).get(session_id)) is None:
            raise SessionNotFound("there is no such session")
        return owner

    def delete(self, session_id: str) -> None:
        """See `Store.delete`."""
        owner, session = self.owner(session_id), None
        try:
            session = decode_session(cast("bytes | None", self._client.run("GET", self._keys(session_id).session)))
        except SchemaError as error:
            log.warning("a session goes that can not be read, without its claim: %s", error)
        if not self._drop(session_id, owner, session, when_over=False):
            raise SessionNotFound("there is no such session")

    def sweep(self, limit: int = 100) -> int:
        """See `Store.sweep`."""
        now = milliseconds(self._client.run("TIME"))
        return sum(self._drop_or_postpone(session_id, now) for session_id in self._directory.due(now, limit))

    def collect(self, lineage: str, retention: Retention) -> Collected:
        """See `Store.collect`."""
        mark = self._directory.litter_mark(lineage)
        collected = self._collector.collect(Keys(self._prefix, lineage), retention)
        if mark is not None and collected.complete:
            self._directory.tidied(lineage, mark)
        return collected

    def littered(self, limit: int = 100) -> Sequence[str]:
        """See `Store.littered`."""
        return self._directory.littered(limit)

    def check(self) -> StoreStatus:
        """See `Store.check`."""
        return check(self._client)

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    @contextmanager
    def _listed(self, session: SessionRecord) -> Iterator[None]:
        """List a session that the script within begins, and keep its claim once it is there."""
        # listed first: a session that exists unseen would be worse than a listed one that does not exist
        self._directory.add(session)
        try:
            yield
        except SessionExists:
            self._directory.keep_claim(session)
            raise
        except (BlobsMissing, HeadConflict, SessionNotFound):
            self._directory.remove(session.id, session.owner)
            raise
        failpoint("claim.keep")
        self._directory.keep_claim(session)

    def _keep_claim(self, session_id: str) -> None:
        """Keep the claim of a session that is there: the server that began it may have died before it did."""
        with suppress(SchemaError, SessionNotFound):
            self._directory.keep_claim(self.read(session_id)[0])

    def _keys(self, session_id: str) -> Keys:
        return Keys(self._prefix, lineage_of(session_id), session_id)

    def _path(self, session_id: str) -> tuple[Span, ...]:
        (fields,) = self._of_session(session_id, ("HMGET", self._keys(session_id).head, *FIELDS))
        return spans(session_id, read_head(cast("list[bytes | None]", fields)))

    def _of_session(self, session_id: str, *commands: Sequence[Argument]) -> Sequence[object]:
        # whether it is there comes last: then it was there for all of them
        *replies, head, time = self._client.run_all([*commands, self._standing(session_id), ("TIME",)])
        if not is_there(head, time):
            raise SessionNotFound("there is no such session")
        return replies

    def _those_there(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Those of the sessions that are there, with their owners."""
        *heads, time = self._client.run_all([*map(self._standing, ids), ("TIME",)])
        found = zip(ids, cast("list[list[bytes | None]]", heads), strict=True)
        return {name: (head[2] or b"").decode(errors="replace") for name, head in found if is_there(head, time)}

    def _standing(self, session_id: str) -> Sequence[Argument]:
        return "HMGET", self._keys(session_id).head, *STANDING

    def _records(self, keys: Keys, path: Sequence[Span]) -> Iterator[ChunkRecord]:
        commands = [("HMGET", keys.chunks(span.branch), *range(span.start, span.stop)) for span in path]
        replies = cast("list[list[bytes | None]]", self._client.run_all(commands) if commands else [])
        indices = (index for span in path for index in range(span.start, span.stop))
        found = (data for reply in replies for data in reply)
        return map(decode_chunk, found, indices)

    def _drop(self, session_id: str, owner: str, session: SessionRecord | None, *, when_over: bool) -> bool:
        """Drop a session, its listing, and its claim if its record says which; whether this call did."""
        self._directory.litter(lineage_of(session_id))
        if session is not None:
            self._directory.drop_claim(session)
        (dropped,) = self._delete(self._keys(session_id), int(when_over))
        if dropped:
            self._directory.litter(lineage_of(session_id))
            self._directory.remove(session_id, owner)
        return bool(dropped)

    def _is_sound(self, session_id: str, index: int, snapshot: Arena) -> bool:
        try:
            state = load_tensors(self, session_id, snapshot)
            return state_digest(state) == self.chunk(session_id, index).state_digest
        except (BlobCorrupt, BlobsMissing, ChunkNotFound, SchemaError, SessionNotFound):
            return False

    def _drop_expired(self, session_id: str) -> bool:
        """Drop a session if its time is up; whether this call did."""
        keys = self._keys(session_id)
        commands = [("GET", keys.session), ("HGET", keys.head, "expires"), ("TIME",)]
        data, expires, time = cast("list[bytes | None]", self._client.run_all(commands))
        if not is_over(expires, time):
            return False
        session = decode_session(data)
        return self._drop(session_id, session.owner, session, when_over=True)

    def _drop_or_postpone(self, session_id: str, now: int) -> bool:
        try:
            if self._drop_expired(session_id):
                return True
            expires = cast("bytes | None", self._client.run("HGET", self._keys(session_id).head, "expires"))
            self._directory.postpone(session_id, None if expires is None else read_expiry(expires))
        except SchemaError:
            self._directory.postpone(session_id, now + _UNREADABLE_MS)
        return False


def _beginning(session: SessionRecord, cursor: Cursor) -> tuple[Argument, ...]:
    return encode(session), encode(cursor), session.owner, "" if session.ttl_s is None else session.ttl_s * 1000


def _names(session: SessionRecord, cursor: Cursor) -> Sequence[str]:
    return [*names_in(arena=session.conditions), *names_in(arena=cursor.text)]


def _request(key: str | None, request: RequestRecord | None) -> tuple[Argument, ...]:
    return (key, request.fingerprint, encode(request)) if key is not None and request is not None else ("", "", b"")
