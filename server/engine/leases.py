"""Holding a session's lease while a request runs on it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.store_calls import StoreCalls
from longtake.state_cache import Fence, Holder, Lease, failpoint

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
        lease = await self._acquired(session_id, fence)
        failpoint("lease.acquired")
        if lease.taken_over:
            log.warning("a lease has lapsed and is taken over")
            self._metrics.lease_takeovers.inc()
        over = asyncio.Event()
        renewing = asyncio.create_task(self._renew(session_id, lease.fence, over))
        try:
            yield lease.fence
        finally:
            over.set()
            await asyncio.shield(self._release(session_id, lease.fence, renewing))

    async def _acquired(self, session_id: str, fence: Fence | None) -> Lease:
        """The lease. Cancelled meanwhile, it is given up as soon as it is there."""
        acquiring = asyncio.ensure_future(
            self._calls.call(self._store.acquire, session_id, self._holder, self._lease_s, fence)
        )
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            await asyncio.wait([acquiring])
            if not acquiring.cancelled() and acquiring.exception() is None:
                await self._release(session_id, acquiring.result().fence)
            raise

    async def _renew(self, session_id: str, fence: Fence, over: asyncio.Event) -> None:
        """Renew until it is over. Never cancelled: a renewal under way would come after the release."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await over.wait()
                return
            try:
                await self._calls.lease(self._store.renew, session_id, fence, self._lease_s)
            except ProblemError as problem:
                if problem.code != "store_unavailable":
                    log.warning("a lease was lost: %s", problem)
                    return

    async def _release(self, session_id: str, fence: Fence, renewing: asyncio.Task[None] | None = None) -> None:
        if renewing is not None:
            await renewing
        with suppress(ProblemError):  # then it lapses by itself
            await self._calls.call(self._store.release, session_id, fence)
