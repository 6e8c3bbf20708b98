"""Named points at which a test can make this process die, freeze or wait; nothing happens unless asked for.

`LONGTAKE_FAILPOINTS="commit.before=exit@2,put.middle=stop"`: at the second commit the process ends as a power cut would
end it, in the middle of the first upload it freezes (SIGSTOP). `sleep:SECONDS` waits. Each fires once.
"""

import os
import signal
import threading
import time

VARIABLE = "LONGTAKE_FAILPOINTS"
POWER_CUT = 137
"""Exit status, that of SIGKILL."""


class _Armed:
    """What is still to happen, by name: the hit at which it happens, and the action."""

    def __init__(self, text: str) -> None:
        self._lock = threading.Lock()
        self._plans: dict[str, tuple[int, str]] = {}
        for item in filter(None, text.split(",")):
            name, _, action = item.partition("=")
            kind, _, hit = action.partition("@")
            self._plans[name] = (int(hit or 1), kind)

    def hit(self, name: str) -> str | None:
        """The action of this hit, if it is the one asked for."""
        with self._lock:
            if (plan := self._plans.get(name)) is None:
                return None
            left, action = plan
            if left > 1:
                self._plans[name] = (left - 1, action)
                return None
            del self._plans[name]
            return action


_armed = _Armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def arm(text: str) -> None:
    """Replace what is armed, in the form of the variable."""
    global _armed
    _armed = _Armed(text) if text else None


def failpoint(name: str) -> None:
    """Where a test may make this process fail."""
    if _armed is None or (action := _armed.hit(name)) is None:
        return
    kind, _, seconds = action.partition(":")
    if kind == "exit":
        os._exit(POWER_CUT)
    if kind == "stop":
        # to this thread, which then can not run on before the process has stopped
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(float(seconds))
    else:
        raise ValueError(f"{VARIABLE}: there is no action {kind!r}")
