"""Carry one request through: plan its chunks, compute each, and commit them in order while the next one computes.

A request may be cancelled at any point: chunks not yet committed are dropped, a commit under way is waited for.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Advanced, PostChunks
from longtake.server.engine.command import Command, Uploads, read_command
from longtake.server.engine.keys import RunningKeys
from longtake.server.engine.limits import Limits
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.plan import Plan, next_frame, pending_count, plan_request
from longtake.server.engine.publish import Making, Published, publish
from longtake.server.engine.restore import restore
from longtake.server.engine.sessions import HotSessions, Live
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.track import SessionCamera
from longtake.server.engine.views import advanced_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import ChunkRecord, Commit, Cursor, Fence, Fingerprint, Head, RequestRecord, SessionRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """How a client wants its chunks.

    Attributes:
        on_commit: called with every chunk of the request, in order, as soon as it is durable.
        hurry: let nothing else compute for the request until its first chunk is committed.
    """

    on_commit: Callable[[ChunkRecord], None]
    hurry: bool


AT_THE_END = Delivery(on_commit=lambda _: None, hurry=False)
"""All chunks in one answer."""


@dataclass(frozen=True)
class Outcome:
    """The answer to a request; `commit_ms` is what this attempt spent in commits."""

    answer: Advanced
    replayed: bool = False
    commit_ms: float = 0.0


@dataclass(frozen=True)
class Task:
    """One request against one session as it stands, with what earlier attempts at the request have done."""

    session: SessionRecord
    head: Head
    camera: SessionCamera
    command: Command
    plan: Plan
    key: str | None
    progress: RequestRecord | None

    @property
    def done(self) -> bool:
        """Whether an earlier attempt carried the whole request through."""
        return self.progress is not None and self.progress.done

    @property
    def first_chunk(self) -> int:
        """Index of the request's first chunk."""
        return self.head.chunk + 1 if self.progress is None else self.progress.first_chunk

    def request_record(self, chunk: int, frames_used: int, *, done: bool) -> RequestRecord | None:
        """Progress once `chunk` is the last committed one; nothing without a key."""
        if self.key is None:
            return None
        return RequestRecord(
            fingerprint=self.command.fingerprint,
            first_chunk=self.first_chunk,
            chunks=chunk + 1 - self.first_chunk,
            frames_used=frames_used,
            done=done,
            revision=self.head.revision,
            pending_poses=pending_count(self.plan.cursor) if done else 0,
        )


class Advancer:
    """Advances sessions, one request at a time each."""

    def __init__(
        self,
        model: WorldModel,
        store: StoreCalls,
        workers: Workers,
        hot: HotSessions,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._calls = store
        self._store = store.store
        self._workers = workers
        self._hot = hot
        self._limits = limits
        self._metrics = metrics
        self._fingerprint = Fingerprint(model.weights_fingerprint, model.numerics_fingerprint)
        self._keys = RunningKeys()

    async def advance(
        self, session_id: str, request: PostChunks, uploads: Uploads, key: str | None, delivery: Delivery
    ) -> Outcome:
        """Make and commit every chunk that the request makes whole.

        Args:
            session_id: the session.
            request: what to do.
            uploads: the files that belong to it.
            key: its idempotency key.
            delivery: how its chunks are handed out.

        Raises `ProblemError`. Chunks committed before a failure stay; the problem then says how many (`committed`).
        """
        with self._keys.claim(session_id, key), self._workers.admitted():
            command = await self._read(request, uploads)
            async with self._hot.exclusive(session_id):
                return await self._advance(session_id, command, key, delivery)

    async def _read(self, request: PostChunks, uploads: Uploads) -> Command:
        """The request with its files; one without any never waits for those of others."""

        def read(abandoned: Callable[[], bool]) -> Command:
            return read_command(request, uploads, self._model.spec, self._limits.clip, abandoned)

        return await (self._workers.read_files(read) if uploads else self._workers.io(read, lambda: False))

    async def _advance(self, session_id: str, command: Command, key: str | None, delivery: Delivery) -> Outcome:
        task, fence = await self._task(session_id, command, key)
        live = self._hot.get(session_id)
        if not task.done and (live is None or not live.stands_at(fence, task.head)):
            mine = await self._calls.call(self._store.open, session_id)
            task, _ = await self._task(session_id, command, key)
            live = None if task.done else await self._restore(task, mine)
            self._metrics.resumes.labels("store").inc(live is not None)
        elif live is not None:
            self._metrics.resumes.labels("memory").inc()
        earlier = await self._earlier(task)
        for record in earlier:
            delivery.on_commit(record)
        if task.done or live is None:
            return self._replay(task, earlier)
        try:
            return await self._run(task, live, earlier, delivery)
        except BaseException:
            self._hot.drop(session_id)
            raise

    async def _task(self, session_id: str, command: Command, key: str | None) -> tuple[Task, Fence | None]:
        """Read where the session stands and plan the request from there; refuses without having changed anything."""
        session, head, fence = await self._calls.call(self._store.read, session_id)
        progress = None if key is None else await self._calls.call(self._store.request, session_id, key)
        if progress is not None and progress.fingerprint != command.fingerprint:
            raise ProblemError("idempotency_key_reused", "this key was used with another request", "Idempotency-Key")
        _check_position(command.request, head, progress)
        camera = SessionCamera.of(session, self._model.spec)
        used = 0 if progress is None else progress.frames_used
        plan = (
            Plan([], head.cursor, used)
            if progress is not None and progress.done
            else await self._workers.io(plan_request, command, head, camera, used)
        )
        return Task(session, head, camera, command, plan, key, progress), fence

    async def _restore(self, task: Task, fence: Fence) -> Live:
        conditions, state = await self._calls.call(restore, self._store, self._model, task.session, task.head)
        return Live(fence, task.head.revision, task.head.chunk, conditions, state)

    def _replay(self, task: Task, records: list[ChunkRecord]) -> Outcome:
        assert task.progress is not None
        next_chunk = task.first_chunk + task.progress.chunks
        answer = advanced_view(task.session.id, task.command, records, next_chunk, task.progress.pending_poses)
        return Outcome(answer, replayed=True)

    async def _earlier(self, task: Task) -> list[ChunkRecord]:
        """Chunks of this request that earlier attempts committed."""
        if task.progress is None:
            return []
        stop = task.first_chunk + task.progress.chunks
        return await self._calls.call(self._store.chunks, task.session.id, task.first_chunk, stop)

    async def _run(self, task: Task, live: Live, earlier: list[ChunkRecord], delivery: Delivery) -> Outcome:
        published: list[Published] = []
        try:
            state = await self._make(task, live, published, delivery)
            if not task.plan.chunks:
                request = task.request_record(task.head.chunk, task.plan.frames_used, done=True)
                step = _step(task, live.fence, task.head.chunk, task.plan.cursor, request)
                await self._calls.call(self._store.commit, step)
        except Exception as error:
            raise await self._with_progress(error, task, len(earlier) + len(published)) from error
        head = task.head.chunk + len(published)
        self._hot.put(task.session.id, replace(live, chunk=head, state=state))
        records = earlier + [chunk.record for chunk in published]
        pending = pending_count(task.plan.cursor)
        answer = advanced_view(task.session.id, task.command, records, head + 1, pending)
        return Outcome(answer, commit_ms=sum(chunk.commit_ms for chunk in published))

    async def _with_progress(self, error: Exception, task: Task, committed: int) -> ProblemError:
        """The failure as a problem that says how far the request came, if that is known.

        A commit whose answer was lost may have happened: then only the store knows.
        """
        if not isinstance(error, ProblemError):
            log.error("a request failed", exc_info=error)
            error = ProblemError("internal_error", "the server failed; chunks committed before stay")
        if error.code == "store_unavailable":
            try:
                _, head, _ = await self._calls.call(self._store.read, task.session.id)
            except ProblemError:
                return error
            committed = head.chunk + 1 - task.first_chunk
        error.extra = {"committed": committed, "next_chunk": task.first_chunk + committed} | error.extra
        return error

    async def _make(self, task: Task, live: Live, published: list[Published], delivery: Delivery) -> State:
        """Compute the planned chunks one after the other, committing each while the next one computes.

        Appends to `published` in order and returns the state after the last. When a step fails, the commit under way
        is still waited for, so that `published` tells the truth.
        """
        state = live.state
        committing: asyncio.Task[Published] | None = None
        for offset in range(len(task.plan.chunks)):
            try:
                self._workers.check_open()
                output, queue_ms = await self._compute(task, live.conditions, state, offset)
            finally:
                if committing is not None:
                    published.append(await _finished(committing))
            state = output.state
            publishing = self._publish(task, live.fence, offset, output, queue_ms, delivery)
            committing = asyncio.create_task(publishing)
            if delivery.hurry and offset == 0:
                published.append(await _finished(committing))
                committing = None
        if committing is not None:
            published.append(await _finished(committing))
        return state

    async def _compute(
        self, task: Task, conditions: Conditions, state: State, offset: int
    ) -> tuple[ChunkOutput, float]:
        step, index = task.plan.chunks[offset], task.head.chunk + 1 + offset
        camera = ChunkCamera(step.poses, step.intrinsics, task.camera.intrinsics)
        if step.clip is not None:
            return await self._workers.compute(self._model.observe, conditions, state, index, camera, step.clip)
        return await self._workers.compute(self._model.generate, conditions, state, index, camera, task.session.seed)

    async def _publish(
        self, task: Task, fence: Fence, offset: int, output: ChunkOutput, queue_ms: float, delivery: Delivery
    ) -> Published:
        plan, head = task.plan.chunks[offset], task.head.chunk + offset
        request = task.request_record(head + 1, plan.frames_used, done=plan is task.plan.chunks[-1])
        step = _step(task, fence, head, plan.cursor, request)
        making = Making(task.session.seed, self._fingerprint, self._model.spec.fps, queue_ms)
        try:
            published = await self._calls.call(publish, self._store, step, plan, output, making)
        except ProblemError as problem:
            self._metrics.commits.labels(problem.code).inc()
            raise
        self._metrics.commits.labels("ok").inc()
        record = published.record
        self._metrics.chunk(record.kind, len(output.frames), record.timings_ms, published.commit_ms)
        delivery.on_commit(record)
        with suppress(ProblemError):  # the chunk is committed; the next one prunes again
            await self._calls.call(self._store.prune_snapshots, task.session.id, fence, self._limits.keep_snapshots)
        return published


async def _finished(committing: asyncio.Task[Published]) -> Published:
    """The commit under way: waited for even when the request is cancelled meanwhile."""
    try:
        return await asyncio.shield(committing)
    except asyncio.CancelledError:
        await asyncio.wait([committing])
        raise


def _check_position(request: PostChunks, head: Head, progress: RequestRecord | None) -> None:
    """Refuse a request that expects the session elsewhere, or a retry whose session has moved on since."""
    next_chunk, pending = head.chunk + 1, pending_count(head.cursor)
    if progress is not None:
        if not progress.done and (progress.first_chunk + progress.chunks, progress.revision) != (
            next_chunk,
            head.revision,
        ):
            raise _conflict("the session has moved on since this request was cut short", next_chunk, pending)
        return
    if request.expected_chunk not in (None, next_chunk):
        raise _conflict("expected_chunk is not the session's next chunk", next_chunk, pending)
    if request.expected_frame not in (None, next_frame(next_chunk, pending)):
        raise _conflict("expected_frame is not the session's next frame", next_chunk, pending)


def _conflict(detail: str, next_chunk: int, pending: int) -> ProblemError:
    counters = {"next_chunk": next_chunk, "next_frame": next_frame(next_chunk, pending), "pending_poses": pending}
    return ProblemError("chunk_conflict", detail, extra=counters)


def _step(task: Task, fence: Fence, head: int, cursor: Cursor, request: RequestRecord | None) -> Commit:
    """The commit after chunk `head` that moves only the cursor, and the request's progress."""
    return Commit(
        session_id=task.session.id,
        fence=fence,
        revision=task.head.revision,
        expected_head=head,
        cursor=cursor,
        key=task.key,
        request=request,
    )
