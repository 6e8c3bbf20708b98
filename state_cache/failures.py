"""What a server's failure means to a store. Messages never repeat the server's words, which may quote keys or URLs."""

import redis
from redis.sentinel import MasterNotFoundError

from longtake.state_cache.errors import StoreError, StoreFull, StoreUnavailable, StoreUnsuitable

_DENIED = (StoreUnavailable, "the store's user may not run a command or touch a key that is needed")
_MEANINGS: dict[str, tuple[type[StoreError], str]] = {
    "OOM": (StoreFull, "the store has no memory left"),
    "LOADING": (StoreUnavailable, "the store is still loading its data"),
    "MISCONF": (StoreUnavailable, "the store can not write to its disk, which may be full"),
    "BUSY": (StoreUnavailable, "the store is busy with a script that takes too long"),
    "READONLY": (StoreUnavailable, "the store is a read-only replica"),
    "MASTERDOWN": (StoreUnavailable, "the store is a replica that has lost its primary"),
    "NOREPLICAS": (StoreUnavailable, "the store has fewer replicas than it was told to need"),
    "CLUSTERDOWN": (StoreUnavailable, "the store's cluster is down"),
    "NOAUTH": (StoreUnavailable, "the store asks for a password"),
    "WRONGPASS": (StoreUnavailable, "the store refused the user name or password"),
    "NOPERM": _DENIED,
}
_TEXTS: dict[str, tuple[type[StoreError], str]] = {
    "unknown command": (StoreUnsuitable, "the server does not know a command: Redis 7 or newer or Valkey is needed"),
    "max number of clients": (StoreUnavailable, "the store takes no more connections"),
    "No connection available": (StoreUnavailable, "every connection to the store is in use"),
    "ACL failure in script": _DENIED,
    "The user executing the script": _DENIED,
    "without any password configured": (StoreUnavailable, "a password was given, but the store has none"),
}


def named(error: redis.RedisError | OSError) -> StoreError:
    """The error of a store that stands for one of the client library or of a socket."""
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreUnavailable("the store did not answer in time")
    if isinstance(error, MasterNotFoundError):
        return StoreUnavailable("no sentinel knows a primary of this name that is up")
    code = _code(error)
    if code in _MEANINGS:
        kind, message = _MEANINGS[code]
        return kind(message)
    for text, (kind, message) in _TEXTS.items():
        if text in str(error):
            return kind(message)
    if isinstance(error, redis.ConnectionError | OSError):
        return StoreUnavailable(f"the store can not be reached ({_reason(error)})")
    return StoreError(f"the store refused a command: {code}")


def is_silence(error: BaseException) -> bool:
    """Whether no server was there to answer in time; one that hangs up or refuses with an error is there."""
    if isinstance(error, redis.TimeoutError | TimeoutError | MasterNotFoundError):
        return True
    hung_up = isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError)
    if isinstance(error, OSError):
        return not hung_up
    return isinstance(error, redis.ConnectionError) and error.__context__ is not None and is_silence(error.__context__)


def _code(error: Exception) -> str:
    """The first word of an error reply, such as `OOM`; the client library cuts some off."""
    code = getattr(error, "status_code", None) or str(error).split(" ", 1)[0]
    return code if isinstance(code, str) and code.isalpha() and code.isupper() else type(error).__name__


def _reason(error: BaseException) -> str:
    """The operating system's words for it where there are some, else the kind of error."""
    while not (isinstance(error, OSError) and error.strerror) and error.__context__ is not None:
        error = error.__context__
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
