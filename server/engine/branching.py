"""Fork and rewind: a second session that goes on from a chunk, or the same one back at it. No chunk is copied."""

import hashlib
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Fork, Session
from longtake.api_schemas.resources import Rewind as RewindRequest
from longtake.server.engine.command import request_fingerprint
from longtake.server.engine.create import claimed_id
from longtake.server.engine.events import Events
from longtake.server.engine.keys import RunningKeys
from longtake.server.engine.leases import Leases
from longtake.server.engine.plan import start_cursor
from longtake.server.engine.reads import read_view
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.tiers import Tiers
from longtake.server.engine.views import session_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import ModelSpec
from longtake.state_cache import (
    ChunkNotFound,
    Commit,
    Cursor,
    Fence,
    Head,
    HeadConflict,
    Parent,
    RequestRecord,
    Rewind,
    SessionExists,
    SessionNotFound,
    SessionRecord,
    Store,
    StoreError,
    failpoint,
    lineage_of,
    new_session_id,
)

R = TypeVar("R")

ATTEMPTS = 3
"""How often a step is tried while the session moves under it."""


class Brancher:
    """Forks and rewinds sessions.

    Args:
        spec: the served model.
        calls: the store.
        workers: admission.
        tiers: sessions in memory.
        leases: the right to write.
        events: who listens to sessions.
    """

    def __init__(
        self, spec: ModelSpec, calls: StoreCalls, workers: Workers, tiers: Tiers, leases: Leases, events: Events
    ) -> None:
        self._spec = spec
        self._calls = calls
        self._store = calls.store
        self._workers = workers
        self._tiers = tiers
        self._leases = leases
        self._events = events
        self._keys = RunningKeys()

    async def fork(self, session_id: str, request: Fork, key: str | None, owner: str) -> tuple[Session, bool]:
        """A session that goes on from a chunk of this one, or the one that an earlier request with this key made.

        Returns it as it was made, and whether that was earlier. The parent may go on meanwhile. Raises `ProblemError`.
        """
        self._workers.check_open()
        child_id = new_session_id(lineage_of(session_id))
        if key is None:
            await self._calls.call(self._fork, session_id, request, child_id, None)
            return await self._calls.call(read_view, self._store, child_id, self._spec), False
        with self._keys.claim(f"fork {session_id}", key):
            claim = hashlib.sha256(f"fork\n{owner}\n{session_id}\n{key}".encode()).hexdigest()
            mine = request_fingerprint(request)
            await self._calls.call(self._check, session_id, request, claim)
            child_id = await claimed_id(self._calls, claim, mine, child_id)
            named = f"fork:{key}"
            if (made := await self._calls.call(self._answer, child_id, named, mine)) is not None:
                return made, True
            await self._calls.call(self._fork, session_id, request, child_id, claim)
            async with self._leases.held(child_id) as fence:
                return await self._calls.call(self._keep_answer, child_id, fence, named, mine), False

    async def rewind(self, session_id: str, request: RewindRequest, key: str | None) -> tuple[Session, bool]:
        """Take a session back to where it stood after a chunk, once nothing else runs on it here.

        Returns it as it stands then, and whether an earlier request with this key did it. Raises `ProblemError`.
        """
        named, mine = None if key is None else f"rewind:{key}", request_fingerprint(request)
        with self._keys.claim(f"rewind {session_id}", key), self._workers.admitted():
            async with self._tiers.exclusive(session_id):
                if named and (done := await self._calls.call(self._answer, session_id, named, mine)) is not None:
                    return done, True
                try:
                    async with self._leases.held(session_id) as fence:
                        return await self._calls.call(self._rewind, session_id, request, fence, named, mine), False
                finally:
                    self._tiers.drop(session_id)
                    self._events.moved(session_id)

    def _answer(self, session_id: str, key: str, fingerprint: str) -> Session | None:
        """What an earlier request with this key was answered. Raises `idempotency_key_reused`."""
        try:
            record = self._store.request(session_id, key)
        except SessionNotFound:
            return None
        if record is None:
            return None
        if record.fingerprint != fingerprint:
            raise ProblemError("idempotency_key_reused", "this key was used with another request", "Idempotency-Key")
        return Session.model_validate_json(record.answer)

    def _check(self, session_id: str, request: Fork, claim: str) -> None:
        """Refuse a fork that can not be made before its key is bound."""
        try:
            _insist(lambda: self._start(session_id, request))
        except (ProblemError, StoreError):
            # in this order: while a key is free, nobody has made a fork under it
            if not self._store.claimed(claim):
                raise

    def _start(self, session_id: str, request: Fork) -> tuple[SessionRecord, Head, Cursor]:
        """The parent as it stands, and the cursor that its child begins with. Raises as `cursor_after` does."""
        parent, head, _ = self._store.read(session_id)
        cursor = cursor_after(self._store, parent, head, request.from_chunk, "from_chunk")
        if request.seed is not None:
            cursor = msgspec.structs.replace(cursor, seed=request.seed)
        return parent, head, cursor

    def _fork(self, session_id: str, request: Fork, child_id: str, claim: str | None) -> None:
        """Make the child, unless an earlier attempt has."""

        def step() -> None:
            if claim is not None and self._is_there(child_id):
                return  # whatever has become of the parent since
            parent, head, cursor = self._start(session_id, request)
            child = msgspec.structs.replace(
                parent,
                id=child_id,
                seed=cursor.seed,
                created_at=time.time(),
                create_key=claim,
                parent=Parent(session_id, request.from_chunk),
            )
            failpoint("fork.before")
            try:
                self._store.fork(child, head, cursor)
            except SessionExists:
                return
            failpoint("fork.after")

        _insist(step)

    def _is_there(self, session_id: str) -> bool:
        try:
            self._store.read(session_id)
        except SessionNotFound:
            return False
        return True

    def _keep_answer(self, child_id: str, fence: Fence, key: str, fingerprint: str) -> Session:
        """Keep with the child what its fork is answered: as it stands, where it began unless others were quicker."""
        session, head, _ = self._store.read(child_id)
        view = read_view(self._store, child_id, self._spec)
        request = _done(fingerprint, head.chunk, head.revision, view)
        self._store.commit(
            Commit(
                session_id=session.id,
                fence=fence,
                revision=head.revision,
                expected_head=head.chunk,
                cursor=head.cursor,
                key=key,
                request=request,
            )
        )
        return view

    def _rewind(
        self, session_id: str, request: RewindRequest, fence: Fence, key: str | None, fingerprint: str
    ) -> Session:
        def step() -> Session:
            session, head, _ = self._store.read(session_id)
            cursor = cursor_after(self._store, session, head, request.to_chunk, "to_chunk")
            if request.seed is not None:
                cursor = msgspec.structs.replace(cursor, seed=request.seed)
            after = msgspec.structs.replace(head, chunk=request.to_chunk, revision=head.revision + 1, cursor=cursor)
            view = session_view(session, after, self._store.forks(session_id), self._spec)
            record = None if key is None else _done(fingerprint, after.chunk, after.revision, view)
            failpoint("rewind.before")
            self._store.rewind(
                Rewind(
                    session_id=session_id,
                    fence=fence,
                    head=head,
                    to_chunk=request.to_chunk,
                    cursor=cursor,
                    key=key,
                    request=record,
                )
            )
            failpoint("rewind.after")
            return view

        return _insist(step)


def cursor_after(store: Store, session: SessionRecord, head: Head, chunk: int, field: str) -> Cursor:
    """Where a session stood right after a chunk, nothing pending; at its head, prompt and seed are those in force now.

    Raises `chunk_not_found` beyond the head, `chunk_expired` behind the retention horizon, naming `field`.
    """
    if chunk > head.chunk:
        raise ProblemError("chunk_not_found", f"the session's last chunk is {head.chunk}", field)
    if chunk < head.horizon - 1:
        oldest = head.horizon - 1
        detail = f"{oldest} is the oldest chunk to go back to"
        raise ProblemError("chunk_expired", detail, field, extra={"rewind_from": oldest})
    cursor = store.chunk(session.id, chunk).cursor() if chunk >= 0 else _before_chunk_0(store, session, head)
    if chunk == head.chunk:
        return msgspec.structs.replace(head.cursor, poses=b"", intrinsics=b"", controller=cursor.controller)
    return cursor


def _before_chunk_0(store: Store, session: SessionRecord, head: Head) -> Cursor:
    """The start, with the seed and the prompt that chunk 0 was made with, if it was made."""
    start = start_cursor(session)
    if head.chunk < 0:
        return start
    first = store.chunk(session.id, 0)
    return msgspec.structs.replace(start, seed=first.seed, prompt=first.prompt, text=first.text)


def rewound(record: RequestRecord, head: Head) -> bool:
    """Whether a rewind has since taken away chunks that this request made."""
    last = record.first_chunk + record.chunks - 1
    return record.chunks > 0 and any(kept < last for kept in head.rewinds[record.revision :])


def _done(fingerprint: str, chunk: int, revision: int, view: Session) -> RequestRecord:
    """Record of a request that added no chunk, with its answer."""
    return RequestRecord(
        fingerprint=fingerprint,
        first_chunk=chunk + 1,
        chunks=0,
        frames_used=0,
        done=True,
        revision=revision,
        pending_poses=0,
        answer=view.model_dump_json(),
    )


def _insist(step: Callable[[], R]) -> R:
    """Try a step again when the session has moved since it was read."""
    for _ in range(ATTEMPTS - 1):
        try:
            return step()
        except (HeadConflict, ChunkNotFound):
            continue
    return step()
