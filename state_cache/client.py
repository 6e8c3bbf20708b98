"""Commands to a Redis or Valkey server: big values without copies, time limits, and no second attempts."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool, PythonRespSerializer
from redis.retry import Retry

from longtake.state_cache.errors import StoreError, StoreFull, StoreUnavailable

Argument = bytes | memoryview | str | int | float

_UNAVAILABLE = ("MISCONF", "LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "NOAUTH", "NOPERM")
_JOIN_LIMIT = 6000  # arguments up to this size are joined into one buffer, larger ones are sent as they are


class Client:
    """A thread-safe pool of connections to one server.

    A command is sent once: after `StoreUnavailable` nobody knows whether it happened. redis-py by itself would repeat
    it ten times, applying writes twice and waiting a minute for a frozen server.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        timeout: seconds to wait for the server to take or give the next bytes, and for a free connection.
        connections: most connections at a time; further callers wait.
    """

    def __init__(self, url: str, timeout: float, connections: int) -> None:
        self._pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=min(timeout, 1.0),
            socket_read_size=1 << 20,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 0),
            command_packer=PythonRespSerializer(_JOIN_LIMIT, _to_bytes),
        )
        self._redis = redis.Redis(connection_pool=self._pool)
        self._redis.set_response_callback("SET", lambda reply, **_: reply)  # as it is: SET … GET answers with a value

    def run(self, *command: Argument) -> object:
        """Reply to one command. Raises `StoreUnavailable`, `StoreFull`."""
        with _named_errors():
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    def run_all(self, commands: Iterable[Sequence[Argument]]) -> list[object]:
        """Replies to commands sent together, not as one atomic step. Raises the first failure among them."""
        with _named_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            replies: list[object] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, redis.RedisError):
                    raise reply
            return replies

    def script(self, text: str) -> "ServerScript":
        """A Lua script that is sent whole only when the server does not have it yet."""
        return ServerScript(self._redis, text)

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()


class ServerScript:
    """A Lua script of the server; called with keys and arguments, it returns what the script returns."""

    def __init__(self, connection: redis.Redis, text: str) -> None:
        self._script = connection.register_script(text)

    def __call__(self, keys: Sequence[str], arguments: Sequence[Argument]) -> object:
        """Run it, as one atomic step of the server. Raises `StoreUnavailable`, `StoreFull`."""
        with _named_errors():
            return self._script(list(keys), list(arguments))


def milliseconds(time: object) -> int:
    """The server's clock in unix ms, from its reply to TIME."""
    seconds, microseconds = cast("tuple[int, int]", time)
    return seconds * 1000 + microseconds // 1000


def _to_bytes(value: Argument) -> bytes | memoryview:
    if isinstance(value, bytes | memoryview):
        return value
    return (value if isinstance(value, str) else repr(value)).encode()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        raise _named(error) from error


def _named(error: redis.RedisError) -> StoreError:
    if isinstance(error, redis.OutOfMemoryError):
        return StoreFull("the store has no memory left")
    lost = isinstance(error, redis.ConnectionError | redis.TimeoutError | redis.ReadOnlyError)
    code = str(error).split(" ", 1)[0]
    if lost or isinstance(error, redis.exceptions.NoPermissionError) or code in _UNAVAILABLE:
        return StoreUnavailable(f"the store can not serve now: {type(error).__name__}")
    return StoreError(f"the store refused a command: {code}")
