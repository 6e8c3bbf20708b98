"""Where work runs: one compute thread, a few threads for encoding and the store, and a bounded number of requests."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from longtake.api_schemas.problems import ProblemError

P = ParamSpec("P")
R = TypeVar("R")


class Workers:
    """Threads and admission. Chunks of different requests take turns on the compute thread, first come first served."""

    def __init__(self, queue_size: int, io_threads: int = 4) -> None:
        self._compute = ThreadPoolExecutor(1, "compute")
        self._io = ThreadPoolExecutor(io_threads, "io")
        self._slow = ThreadPoolExecutor(2, "slow")
        self._leases = ThreadPoolExecutor(1, "leases")
        self._pictures = ThreadPoolExecutor(1, "pictures")
        self._files = ThreadPoolExecutor(1, "files")
        self._places = queue_size
        self._open = True

    @property
    def free_places(self) -> int:
        """Requests that would be admitted now."""
        return self._places if self._open else 0

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place for one request while it waits and runs. Raises `queue_full` or `shutting_down`."""
        self.check_open()
        if self._places == 0:
            raise ProblemError("queue_full", "all places in the queue are taken", retry_after=2)
        self._places -= 1
        try:
            yield
        finally:
            self._places += 1

    def check_open(self) -> None:
        """Raises `shutting_down` once `drain` was called."""
        if not self._open:
            raise _shutting_down()

    def drain(self) -> None:
        """Admit nothing more; requests that run stop at their next chunk."""
        self._open = False

    async def compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, float]:
        """Run on the compute thread; also returns the milliseconds spent waiting for it."""
        asked = time.perf_counter()

        def timed() -> tuple[R, float]:
            waited = (time.perf_counter() - asked) * 1e3
            return function(*args, **kwargs), waited

        return await _run(self._compute, timed)

    def take_turn(self, function: Callable[[], R]) -> R:
        """Run on the compute thread, from one of the other threads. Raises `shutting_down` once draining began."""
        self.check_open()
        try:
            turn = self._compute.submit(function)
        except RuntimeError as error:
            raise _shutting_down() from error
        return turn.result()

    async def io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on one of the other threads."""
        return await _run(self._io, lambda: function(*args, **kwargs))

    async def slow(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on one of two threads for what may take long, so that no commit waits for it."""
        return await _run(self._slow, lambda: function(*args, **kwargs))

    async def lease(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the thread that renews leases, which has nothing else to do."""
        return await _run(self._leases, lambda: function(*args, **kwargs))

    async def read_picture(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the thread that decodes first frames: one at a time, since pictures are large."""
        return await _run(self._pictures, lambda: function(*args, **kwargs))

    async def read_files(self, function: Callable[[Callable[[], bool]], R]) -> R:
        """Run on the thread that reads clips and trajectories, one request at a time.

        The function is given a question to ask now and then: whether it was abandoned, since its client has left.
        """
        left = threading.Event()
        try:
            return await _run(self._files, lambda: function(left.is_set))
        finally:
            left.set()

    def close(self) -> None:
        """Drain, and wait for what runs."""
        self.drain()
        self._compute.shutdown()
        self._io.shutdown()
        self._slow.shutdown()
        self._leases.shutdown()
        self._pictures.shutdown()
        self._files.shutdown()


async def _run(executor: ThreadPoolExecutor, function: Callable[[], R]) -> R:
    try:
        future = asyncio.get_running_loop().run_in_executor(executor, function)
    except RuntimeError as error:
        raise _shutting_down() from error
    return await future


def _shutting_down() -> ProblemError:
    return ProblemError("shutting_down", "the server is shutting down", retry_after=5)
