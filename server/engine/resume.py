"""Where a session's state comes from when a request begins: memory, else the store."""

import logging
import time

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.restore import Restored, restore
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.tiers import Live
from longtake.server.engine.workers import Workers
from longtake.server.model.world import WorldModel
from longtake.state_cache import Fence, Head, SessionRecord

log = logging.getLogger(__name__)


class Resumer:
    """Finds the state of sessions that this server holds the lease of."""

    def __init__(
        self,
        model: WorldModel,
        calls: StoreCalls,
        workers: Workers,
        metrics: Metrics,
        *,
        exact_required: bool,
    ) -> None:
        self._model = model
        self._calls = calls
        self._workers = workers
        self._metrics = metrics
        self._exact_required = exact_required

    async def live(self, session: SessionRecord, head: Head, fence: Fence, known: Live | None) -> Live:
        """The session ready to go on from its head; `known` is what memory has of it. Raises what `restore` does."""
        if known is not None and known.stands_at(fence, head):
            self._metrics.resumes.labels("memory").inc()
            return known
        if known is not None and known.fence == fence and (known.revision, known.chunk) > (head.revision, head.chunk):
            log.error("the store has lost chunks of a session that were acknowledged")
            self._metrics.rolled_back.inc()
        restored = await self._restore(session, head)
        self._metrics.resumes.labels("store").inc()
        return Live(
            fence,
            head.revision,
            head.chunk,
            restored.conditions,
            restored.state,
            restored.exact_until,
            snapshot=head.chunk - restored.replayed,
        )

    async def _restore(self, session: SessionRecord, head: Head) -> Restored:
        began = time.perf_counter()
        try:
            restored = await self._calls.slow(
                restore,
                self._calls.store,
                self._model,
                session,
                head,
                exact_required=self._exact_required,
                take_turn=self._workers.take_turn,
            )
        except ProblemError as problem:
            self._metrics.divergence.inc(problem.code == "state_diverged")
            raise
        self._metrics.restore_seconds.labels(restored.source).observe(time.perf_counter() - began)
        self._metrics.replayed_chunks.inc(restored.replayed)
        self._metrics.snapshots_discarded.inc(restored.discarded)
        return restored
