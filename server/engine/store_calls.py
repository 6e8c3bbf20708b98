"""The store as the engine uses it: from a thread, its failures turned into problems."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from longtake.server.engine.errors import store_problems
from longtake.server.engine.workers import Workers
from longtake.state_cache import Store

P = ParamSpec("P")
R = TypeVar("R")


class StoreCalls:
    """`await call(store.read, …)` keeps the event loop free."""

    def __init__(self, store: Store, workers: Workers) -> None:
        self.store = store
        self._workers = workers

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that uses the store. Raises `ProblemError`."""

        def translated() -> R:
            with store_problems():
                return function(*args, **kwargs)

        return await self._workers.io(translated)
