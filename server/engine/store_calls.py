"""The store as the engine uses it: from a thread, its failures turned into problems."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.copies import InThread
from longtake.server.engine.errors import store_problems
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.workers import Workers
from longtake.state_cache import Store

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class StoreCalls:
    """`await call(store.read, …)` keeps the event loop free, and counts."""

    def __init__(self, store: Store, workers: Workers, metrics: Metrics) -> None:
        self.store = store
        self._workers = workers
        self._metrics = metrics

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that uses the store. Raises `ProblemError`."""
        return await self._counted(self._workers.io, function, *args, **kwargs)

    async def slow(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for one that may take long, such as a restore: apart from commits and reads."""
        return await self._counted(self._workers.slow, function, *args, **kwargs)

    async def lease(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for the renewal of a lease: whatever else runs, it is in time."""
        return await self._counted(self._workers.lease, function, *args, **kwargs)

    async def _counted(self, run: InThread, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        def translated() -> R:
            with store_problems():
                return function(*args, **kwargs)

        try:
            with self._metrics.store_seconds.labels(function.__name__.lstrip("_")).time():
                result = await run(translated)
        except ProblemError as problem:
            self._metrics.store_up.set(problem.code != "store_unavailable")
            if problem.code in ("store_unavailable", "store_full", "state_corrupt"):
                log.warning("%s: %s", function.__name__, problem.__cause__)
            raise
        self._metrics.store_up.set(1)
        return result
