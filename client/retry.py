"""When to try again. Every call may be repeated: reads change nothing, and posts carry an `Idempotency-Key`."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from longtake.client.problems import ServerProblem

log = logging.getLogger("longtake.client")

LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
"""No whole answer came: the request may have been carried out, or not."""

BUSY_STATUSES = frozenset({502, 503, 504})
BUSY_CODES = frozenset({"in_progress", "session_busy", "session_fenced"})
MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class Retry:
    """How patient a client is.

    Attributes:
        attempts: attempts in a row that may fail, the first one included; 1 never tries again.
        deadline_s: seconds after the first of them within which the last must begin.
        first_delay_s: pause after the first failure; it doubles with each further one.
        max_delay_s: longest pause, before what the server asks for with `Retry-After` is added.
        jitter: a number in [0, 1); a pause is between half and the whole of what the doubling says.
        clock: seconds that only grow.
    """

    attempts: int = 10
    deadline_s: float = 60.0
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def delay(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        full = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return full * (0.5 + 0.5 * self.jitter())


class Attempts:
    """The attempts at one call. `failures` counts those in a row that failed."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._first_failure = 0.0
        self.failures = 0

    def progressed(self) -> None:
        """Something new arrived: failures are counted from here."""
        self.failures = 0

    def pause(self, error: Exception) -> float | None:
        """Seconds to wait before the next attempt, or None when `error` is to be raised."""
        now = self._retry.clock()
        if self.failures == 0:
            self._first_failure = now
        self.failures += 1
        asked = error.retry_after if isinstance(error, ServerProblem) else None
        delay = self._retry.delay(self.failures) + (asked or 0.0)
        late = now + delay > self._first_failure + self._retry.deadline_s
        if not may_pass(error) or self.failures >= self._retry.attempts or late:
            return None
        log.warning("%s; trying again in %.1f s", str(error) or type(error).__name__, delay)
        return delay


def may_pass(error: Exception) -> bool:
    """Whether the same request, sent again, may succeed."""
    if isinstance(error, ServerProblem):
        return error.problem.status in BUSY_STATUSES or error.code in BUSY_CODES
    return isinstance(error, LOST)
