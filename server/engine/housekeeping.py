"""Collecting what sessions no longer need: soon after they have made litter, and again and again in the background."""

import asyncio
import logging
from collections import Counter

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.snapshots import Written
from longtake.server.engine.store_calls import StoreCalls
from longtake.state_cache import Retention, lineage_of

log = logging.getLogger(__name__)

_LARGE = 64 * 2**20
_SMALL_SNAPSHOTS = 8


class Housekeeper:
    """Collects the lineages that this server writes, and those that others have left.

    Args:
        calls: the store.
        retention: what sessions keep.
        metrics: hears of what was freed.
    """

    def __init__(self, calls: StoreCalls, retention: Retention, metrics: Metrics) -> None:
        self._calls = calls
        self._store = calls.store
        self._retention = retention
        self._metrics = metrics
        self._snapshots: Counter[str] = Counter()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def snapshot_ended(self, snapshot: Written) -> None:
        """A snapshot came to its end: after large ones their lineage is collected at once, after a few small ones."""
        self._metrics.snapshots.labels(snapshot.outcome).inc()
        if snapshot.outcome != "ok":
            return
        self._metrics.snapshot_seconds.observe(snapshot.seconds)
        self._metrics.snapshot_bytes.inc(snapshot.nbytes)
        lineage = lineage_of(snapshot.session_id)
        self._snapshots[lineage] += 1
        if snapshot.nbytes >= _LARGE or self._snapshots[lineage] >= _SMALL_SNAPSHOTS:
            self.collect_soon(snapshot.session_id)

    def collect_soon(self, session_id: str) -> None:
        """Collect the session's lineage in the background, once more if that is under way."""
        lineage = lineage_of(session_id)
        self._snapshots.pop(lineage, None)
        if lineage in self._running:
            self._again.add(lineage)
            return
        self._running[lineage] = task = asyncio.create_task(self._collect(lineage))
        task.add_done_callback(lambda _: self._ended(lineage, session_id))

    async def sweep(self) -> int:
        """Drop expired sessions and collect what others have left; returns how many sessions went."""
        removed = await self._calls.call(self._store.sweep)
        self._metrics.sessions_expired.inc(removed)
        for lineage in await self._calls.call(self._store.littered):
            await self._collect(lineage)
        return removed

    async def sweep_forever(self, pause_s: float = 60.0) -> None:
        """Sweep again and again; a store that does not answer is asked later."""
        while True:
            try:
                await self.sweep()
            except ProblemError as problem:
                log.info("not swept: %s", problem)
            except Exception:
                log.exception("a sweep failed; it is tried again")
            await asyncio.sleep(pause_s)

    async def finish(self) -> None:
        """Wait for what is under way."""
        self._again.clear()
        while self._running:
            await asyncio.wait(self._running.values())

    def _ended(self, lineage: str, session_id: str) -> None:
        self._running.pop(lineage, None)
        if lineage in self._again:
            self._again.discard(lineage)
            self.collect_soon(session_id)

    async def _collect(self, lineage: str) -> None:
        try:
            with self._metrics.collect_seconds.time():
                freed = await self._calls.slow(self._store.collect, lineage, self._retention)
        except ProblemError as problem:
            log.warning("a lineage could not be collected: %s", problem)
            return
        for kind in ("records", "expired", "snapshots", "blobs"):
            self._metrics.collected.labels(kind).inc(getattr(freed, kind))
