"""How long the stages of a chunk take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Write to `timings[stage]` the milliseconds that the block takes; nothing when it fails."""
    started = time.perf_counter()
    yield
    timings[stage] = (time.perf_counter() - started) * 1e3
