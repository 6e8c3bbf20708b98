"""Which idempotency keys belong to requests that are running now."""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.api_schemas.problems import ProblemError


class RunningKeys:
    """Keys of the requests that this server works on."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()

    @contextmanager
    def claim(self, scope: str, key: str | None) -> Iterator[None]:
        """Hold a key for as long as its request runs. Raises `in_progress` when it is held; without a key, nothing."""
        if key is None:
            yield
            return
        if (scope, key) in self._running:
            raise ProblemError("in_progress", "the first request with this key is still running", retry_after=1)
        self._running.add((scope, key))
        try:
            yield
        finally:
            self._running.discard((scope, key))
