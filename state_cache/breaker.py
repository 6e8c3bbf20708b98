"""A circuit breaker: while the store does not answer, calls fail at once instead of queueing for a time-out each."""

import threading
import time
from collections.abc import Callable

from longtake.state_cache.errors import StoreUnavailable

PAUSE_SECONDS = 1.0
"""How long calls fail at once after one has found the store silent or gone."""


class Breaker:
    """Closed until a call fails; then open for a second; then one call at a time tries, and its success closes it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until: float | None = None
        self._probe: int | None = None

    def admit(self) -> None:
        """Let this thread's call through. Raises `StoreUnavailable` while the breaker is open."""
        if self._open_until is None:
            return
        with self._lock:
            if self._open_until is None or self._probe == threading.get_ident():
                return
            if self._probe is not None or self._clock() < self._open_until:
                raise StoreUnavailable("the store did not answer a moment ago")
            self._probe = threading.get_ident()

    def failed(self) -> None:
        """The store was silent or gone: open for a second."""
        with self._lock:
            self._open_until = self._clock() + PAUSE_SECONDS

    def answered(self) -> None:
        """The store has answered, be it with an error: close."""
        if self._open_until is not None:
            with self._lock:
                self._open_until = None

    def leave(self) -> None:
        """This thread's call is over, whatever came of it."""
        if self._probe == threading.get_ident():
            self._probe = None
