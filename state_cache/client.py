"""Commands to a Redis or Valkey server: big values without copies, time limits, and no second attempts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import redis

from longtake.state_cache.breaker import Breaker
from longtake.state_cache.bulk import Bulk
from longtake.state_cache.connections import Argument, Server, restart, time_limit
from longtake.state_cache.failures import is_silence, named

_BULK_CONNECTIONS = 4
_BULK_PATIENCE = 10  # time-outs to wait for a bulk connection, each of which is held for seconds

__all__ = ["Argument", "Client", "ServerScript", "milliseconds"]


class Client:
    """Thread-safe pools of connections to one server: one for commands, one for bulk transfers, which take longer.

    A command is sent once: after `StoreUnavailable` nobody knows whether it happened. redis-py by itself would repeat
    it ten times, applying writes twice and waiting a minute for a frozen server. After a call that found the server
    silent or gone, further ones fail at once for a second, then one tries again.

    Args:
        url: see `Server`.
        timeout: seconds that a call may take in all; a bulk transfer, each of its steps.
        connections: most connections for commands at a time; further callers wait.
    """

    def __init__(self, url: str, timeout: float, connections: int) -> None:
        self._timeout = timeout
        self._server = Server(url, timeout)
        self._pool = self._server.pool(connections, timeout)
        self._bulk_pool = self._server.pool(min(connections, _BULK_CONNECTIONS), timeout * _BULK_PATIENCE)
        self._breaker = Breaker()
        self._redis = redis.Redis(connection_pool=self._pool)
        self._redis.set_response_callback("SET", lambda reply, **_: reply)  # as it is: SET … GET answers with a value

    def run(self, *command: Argument) -> object:
        """Reply to one command. Raises `StoreUnavailable`, `StoreFull`."""
        with self._call():
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    def run_all(self, commands: Iterable[Sequence[Argument]]) -> list[object]:
        """Replies to commands sent together, not as one atomic step. Raises the first failure among them."""
        with self._call(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            replies: list[object] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, redis.RedisError):
                    raise reply
            return replies

    def script(self, text: str) -> "ServerScript":
        """A Lua script that is sent whole only when the server does not have it yet."""
        return ServerScript(self._redis, text, self._call)

    @contextmanager
    def bulk(self) -> Iterator[Bulk]:
        """A connection for a bulk transfer. Raises `StoreUnavailable`, `StoreFull`, also from inside."""
        with self._call():
            restart(self._timeout * (_BULK_PATIENCE + 1))
            connection = self._bulk_pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                self._breaker.admit()  # those that held the connections meanwhile may have found the server gone
                yield Bulk(connection, self._timeout)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._bulk_pool.release(connection)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()
        self._bulk_pool.disconnect()
        self._server.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._breaker.admit()
        try:
            with time_limit(self._timeout):
                yield
            self._breaker.answered()
        except (redis.RedisError, OSError) as error:
            if is_silence(error):
                self._breaker.failed()
            elif isinstance(error, redis.ResponseError):
                self._breaker.answered()
            raise named(error) from error
        finally:
            self._breaker.leave()


class ServerScript:
    """A Lua script of the server; called with keys and arguments, it returns what the script returns."""

    def __init__(self, connection: redis.Redis, text: str, call: Callable[[], AbstractContextManager[None]]) -> None:
        self._connection = connection
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._call = call

    def __call__(self, keys: Sequence[str], arguments: Sequence[Argument]) -> object:
        """Run it, as one atomic step of the server. Raises `StoreUnavailable`, `StoreFull`."""
        with self._call():
            try:
                return self._connection.evalsha(self._digest, len(keys), *keys, *arguments)
            except redis.exceptions.NoScriptError:  # refused before it ran; sent whole, it can not be refused again
                return self._connection.eval(self._text, len(keys), *keys, *arguments)


def milliseconds(time: object) -> int:
    """The server's clock in unix ms, from its reply to TIME."""
    seconds, microseconds = cast("tuple[int, int]", time)
    return seconds * 1000 + microseconds // 1000
