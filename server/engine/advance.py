"""Carry one request through: plan its chunks, compute each, and commit them in order while the next one computes.

A request may be cancelled at any point: chunks not yet committed are dropped, a commit under way is waited for.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import PostChunks
from longtake.server.engine.command import Command, Uploads, read_command
from longtake.server.engine.events import Events
from longtake.server.engine.keys import RunningKeys
from longtake.server.engine.leases import Leases
from longtake.server.engine.limits import Limits
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.plan import Plan, pending_count, plan_request
from longtake.server.engine.prompts import changed_prompt_warnings, load_text, with_prompt
from longtake.server.engine.publish import Making, Published, commit_cursor, publish
from longtake.server.engine.resume import Resumer
from longtake.server.engine.snapshots import Snapshot, Snapshots
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.task import Delivery, Outcome, Task, check_position, request_key
from longtake.server.engine.tiers import Live, Tiers
from longtake.server.engine.track import SessionCamera
from longtake.server.engine.views import advanced_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import ChunkCamera, ChunkOutput, State, WorldModel
from longtake.state_cache import ChunkRecord, Fingerprint, Head, RequestRecord, SessionRecord, failpoint

log = logging.getLogger(__name__)


@dataclass
class Run:
    """A task being carried out: what it began with, the state after its last computed chunk, what it has committed.

    `snapshot` is the last chunk with a snapshot.
    """

    task: Task
    live: Live
    earlier: list[ChunkRecord]
    delivery: Delivery
    state: State
    snapshot: int
    published: list[Published] = field(default_factory=list)

    @property
    def records(self) -> list[ChunkRecord]:
        """Every chunk of the request so far."""
        return self.earlier + [chunk.record for chunk in self.published]


class Advancer:
    """Advances sessions, one request at a time each."""

    def __init__(
        self,
        model: WorldModel,
        store: StoreCalls,
        workers: Workers,
        tiers: Tiers,
        leases: Leases,
        resumer: Resumer,
        snapshots: Snapshots,
        events: Events,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._calls = store
        self._store = store.store
        self._workers = workers
        self._tiers = tiers
        self._leases = leases
        self._resumer = resumer
        self._snapshots = snapshots
        self._events = events
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
            try:
                command = await self._read(request, uploads)
                async with self._tiers.exclusive(session_id):
                    outcome = await self._advance(session_id, command, request_key(key), delivery)
            except ProblemError as problem:
                self._events.failed(session_id, problem.code)
                raise
        failpoint("reply.before")
        return outcome

    async def _read(self, request: PostChunks, uploads: Uploads) -> Command:
        """The request with its files; one without any never waits for those of others."""

        def read(abandoned: Callable[[], bool]) -> Command:
            return read_command(request, uploads, self._model.spec, self._limits.clip, abandoned)

        return await (self._workers.read_files(read) if uploads else self._workers.io(read, lambda: False))

    async def _advance(self, session_id: str, command: Command, key: str | None, delivery: Delivery) -> Outcome:
        task = await self._task(session_id, command, key)
        if task.done:
            return self._replay(task, await self._earlier(task, delivery))
        known = await self._tiers.get(session_id)
        async with self._leases.held(session_id, known.fence if known else None) as fence:
            if known is None or not known.stands_at(fence, task.head):
                # somebody else may have been here since
                task = await self._task(session_id, command, key)
            earlier = await self._earlier(task, delivery)
            if task.done:
                return self._replay(task, earlier)
            live = await self._resumer.live(task.session, task.head, fence, known)
            task, live = await self._prepared(task, live)
            try:
                return await self._run(Run(task, live, earlier, delivery, live.state, live.snapshot))
            except BaseException:
                self._tiers.drop(session_id)
                raise

    async def _task(self, session_id: str, command: Command, key: str | None) -> Task:
        """Read where the session stands and plan the request from there; refuses without having changed anything."""
        session, head, _ = await self._calls.call(self._store.read, session_id)
        progress = None if key is None else await self._calls.call(self._store.request, session_id, key)
        if progress is not None and progress.fingerprint != command.fingerprint:
            raise ProblemError("idempotency_key_reused", "this key was used with another request", "Idempotency-Key")
        check_position(command.request, head, progress)
        return await self._planned(session, head, command, key, progress)

    async def _planned(
        self, session: SessionRecord, head: Head, command: Command, key: str | None, progress: RequestRecord | None
    ) -> Task:
        camera = SessionCamera.of(session, self._model.spec)
        used = 0 if progress is None else progress.frames_used
        plan = (
            Plan([], head.cursor, used)
            if progress is not None and progress.done
            else await self._workers.io(plan_request, command, head, camera, used)
        )
        return Task(session, head, camera, command, plan, key, progress)

    async def _prepared(self, task: Task, live: Live) -> tuple[Task, Live]:
        """The task planned from what it really begins with: the prompt asked for, and how exact the state is."""
        cursor = msgspec.structs.replace(task.head.cursor, exact_until=live.exact_until)
        if task.command.request.prompt is not None:
            cursor = await self._calls.call(
                with_prompt,
                self._store,
                self._model,
                task.session,
                cursor,
                task.command.request.prompt,
                self._workers.take_turn,
            )
        if cursor.text != task.head.cursor.text:
            text = await self._calls.call(load_text, self._store, task.session, cursor.text)
            live = replace(live, conditions=live.conditions.with_text(*text))
        if cursor != task.head.cursor:
            head = msgspec.structs.replace(task.head, cursor=cursor)
            task = await self._planned(task.session, head, task.command, task.key, task.progress)
        return task, live

    def _replay(self, task: Task, records: list[ChunkRecord]) -> Outcome:
        assert task.progress is not None
        next_chunk = task.first_chunk + task.progress.chunks
        answer = advanced_view(task.session.id, task.command, records, next_chunk, task.progress.pending_poses)
        return Outcome(answer, replayed=True)

    async def _earlier(self, task: Task, delivery: Delivery) -> list[ChunkRecord]:
        """Chunks of this request that earlier attempts committed, handed out once more."""
        if task.progress is None:
            return []
        stop = task.first_chunk + task.progress.chunks
        records = await self._calls.call(self._store.chunks, task.session.id, task.first_chunk, stop)
        for record in records:
            delivery.on_commit(record)
        return records

    async def _run(self, run: Run) -> Outcome:
        task = run.task
        try:
            await self._make(run)
            if not task.plan.chunks:
                await self._calls.call(commit_cursor, self._store, task.step(run.live.fence, 0), run.live.conditions)
        except Exception as error:
            raise await self._with_progress(error, task, len(run.records)) from error
        head = task.head.chunk + len(run.published)
        self._tiers.put(task.session.id, replace(run.live, chunk=head, state=run.state, snapshot=run.snapshot))
        answer = advanced_view(task.session.id, task.command, run.records, head + 1, pending_count(task.plan.cursor))
        return Outcome(answer, commit_ms=sum(chunk.commit_ms for chunk in run.published))

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
        error.extra = {"committed": committed, "next_chunk": task.first_chunk + committed, **error.extra}
        return error

    async def _make(self, run: Run) -> None:
        """Compute the planned chunks one after the other, committing each while the next one computes.

        When a step fails, the commit under way is still waited for, so that `run.published` tells the truth.
        """
        committing: asyncio.Task[Published] | None = None
        for offset in range(len(run.task.plan.chunks)):
            try:
                self._workers.check_open()
                output, making = await self._compute(run, offset)
            finally:
                if committing is not None:
                    run.published.append(await _finished(committing))
            run.state = output.state
            committing = asyncio.create_task(self._publish(run, offset, output, making))
            self._snapshot(run, offset, output, committing)
            if run.delivery.hurry and offset == 0:
                run.published.append(await _finished(committing))
                committing = None
        if committing is not None:
            run.published.append(await _finished(committing))

    async def _compute(self, run: Run, offset: int) -> tuple[ChunkOutput, Making]:
        task, conditions, state = run.task, run.live.conditions, run.state
        step, index = task.plan.chunks[offset], task.head.chunk + 1 + offset
        camera = ChunkCamera(step.poses, step.intrinsics, task.camera.intrinsics)
        loop = asyncio.get_running_loop()

        def compute() -> tuple[ChunkOutput, list[str]]:
            loop.call_soon_threadsafe(self._events.progress, task.session.id, index, "computing")
            warnings = changed_prompt_warnings(self._model, step.cursor)
            if step.clip is not None:
                return self._model.observe(conditions, state, index, camera, step.clip), warnings
            return self._model.generate(conditions, state, index, camera, step.cursor.seed), warnings

        self._events.progress(task.session.id, index, "queued")
        (output, warnings), queue_ms = await self._workers.compute(compute)
        return output, Making(self._fingerprint, self._model.spec.fps, queue_ms, warnings)

    async def _publish(self, run: Run, offset: int, output: ChunkOutput, making: Making) -> Published:
        step, plan = run.task.step(run.live.fence, offset), run.task.plan.chunks[offset]
        self._events.progress(step.session_id, step.head + 1, "committing")
        try:
            published = await self._calls.call(publish, self._store, step, plan, output, making, run.live.conditions)
        except ProblemError as problem:
            self._metrics.commits.labels(problem.code).inc()
            raise
        self._metrics.commits.labels("ok").inc()
        record = published.record
        self._metrics.chunk(record.kind, len(output.frames), record.timings_ms, published.commit_ms)
        self._snapshots.replayed((output.timings_ms["absorb"] + output.timings_ms["decode"]) / 1e3)
        self._events.moved(step.session_id)
        run.delivery.on_commit(record)
        return published

    def _snapshot(self, run: Run, offset: int, output: ChunkOutput, committing: asyncio.Task[Published]) -> None:
        """Begin a snapshot of the state, if one is due, that is stored once its chunk is committed."""
        task = run.task
        snapshot = Snapshot(
            task.session.id, run.live.fence, task.head.revision, task.head.chunk + 1 + offset, output.state
        )
        if self._snapshots.offer(snapshot, run.snapshot, committing):
            run.snapshot = snapshot.index


async def _finished(committing: asyncio.Task[Published]) -> Published:
    """The commit under way: waited for even when the request is cancelled meanwhile."""
    try:
        return await asyncio.shield(committing)
    except asyncio.CancelledError:
        await asyncio.wait([committing])
        if not committing.cancelled():
            committing.exception()  # looked at here: the request has ended, and nobody else does
        raise
