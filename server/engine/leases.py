"""Holding a session's lease while a request runs on it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.store_calls import StoreCalls
from longtake.state_cache import Fence, Holder, failpoint

log = logging.getLogger(__name__)


class Leases:
    """Leases of this server.

    Args:
        calls: the store.
        holder: who this server is.
        lease_s: seconds that a lease lasts unless it is renewed; others wait as long when this server dies.
        metrics: hears of takeovers.
    """

    def __init__(self, calls: StoreCalls, holder: Holder, lease_s: float, metrics: Metrics) -> None:
        self._calls = calls
        self._store = calls.store
        self._holder = holder
        self._lease_s = lease_s
        self._metrics = metrics

    @asynccontextmanager
    async def held(self, session_id: str, fence: Fence | None = None) -> AsyncIterator[Fence]:
        """The session's lease, renewed until the block ends and given up then.

        Yields `fence` where it is still in force, else a new one. Raises `session_busy` while another server holds it.
        """
        lease = await self._calls.call(self._store.acquire, session_id, self._holder, self._lease_s, fence)
        failpoint("lease.acquired")
        if lease.taken_over:
            log.warning("a lease has lapsed and is taken over")
            self._metrics.lease_takeovers.inc()
        renewing = asyncio.create_task(self._renew(session_id, lease.fence))
        try:
            yield lease.fence
        finally:
            renewing.cancel()
            await asyncio.shield(self._release(session_id, lease.fence))

    async def _renew(self, session_id: str, fence: Fence) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._calls.call(self._store.renew, session_id, fence, self._lease_s)
            except ProblemError as problem:
                if problem.code != "store_unavailable":
                    log.warning("a lease was lost: %s", problem)
                    return

    async def _release(self, session_id: str, fence: Fence) -> None:
        with suppress(ProblemError):  # then it lapses by itself
            await self._calls.call(self._store.release, session_id, fence)
