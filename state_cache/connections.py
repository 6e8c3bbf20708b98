"""Connections to the server that a URL names, directly or through sentinels, and the time limit of a call."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from redis._parsers import _HiredisParser
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    PythonRespSerializer,
    SSLConnection,
    parse_url,
)
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

Argument = bytes | memoryview | str | int | float

_JOIN_LIMIT = 6000  # arguments up to this size are joined into one buffer, larger ones are sent as they are
_CONNECT_SECONDS = 1.0
_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
_FORMS = "redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/service"


class _Limit(threading.local):
    until = float("inf")


_limit = _Limit()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """What this thread reads from servers inside must arrive within `seconds`, else `TimeoutError`."""
    restart(seconds)
    try:
        yield
    finally:
        _limit.until = float("inf")


def restart(seconds: float) -> None:
    """Begin the time limit of this thread anew."""
    _limit.until = time.monotonic() + seconds


def time_left() -> float:
    """Seconds until the limit. Raises `TimeoutError` when it has passed."""
    if (left := _limit.until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


class TimedParser(_HiredisParser):
    """redis-py's parser under the time limit of the whole call: its own one begins anew at every piece that arrives."""

    def on_connect(self, connection: AbstractConnection, **kwargs: object) -> None:
        """Begin to read from a new connection."""
        self._longest = connection.socket_timeout or float("inf")
        super().on_connect(connection, **kwargs)  # type: ignore[no-untyped-call]

    def read_from_socket(self, *args: object, **kwargs: object) -> bool:
        """Wait for the next piece."""
        kwargs["timeout"] = min(time_left(), self._longest)
        return bool(super().read_from_socket(*args, **kwargs))  # type: ignore[no-untyped-call]


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whichever server is a service's primary; callers wait for a free one."""


class Server:
    """Makes pools of connections to the server that a URL names.

    Args:
        url: `redis://`, `rediss://`, `unix://`, or `redis+sentinel://[user:password@]host:port,host:port/service[/db]`
            and its `rediss+sentinel://`. The query takes redis-py's options, such as `ssl_ca_certs`, and
            `sentinel_username` and `sentinel_password`.
        timeout: seconds to wait for the server to take or give the next bytes.

    Raises:
        ValueError: the URL is none of these. The message does not repeat it.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._sentinel: Sentinel | None = None
        self._service = ""
        try:
            parts = urlsplit(url)
            options = self._watch(parts) if parts.scheme.endswith(_SENTINEL) else _parse(url)
            self._options = {**options, **_patience(timeout), **_transport()}
            self.pool(1, timeout).make_connection()  # type: ignore[no-untyped-call]
        except (TypeError, ValueError):
            raise ValueError(f"the store's URL is not {_FORMS}, or has an unknown option") from None

    def pool(self, connections: int, patience: float) -> BlockingConnectionPool:
        """A pool of at most so many connections, for one of which callers wait up to `patience` seconds."""
        options = {**self._options, "max_connections": connections, "timeout": patience}
        if self._sentinel is None:
            return BlockingConnectionPool(**options)  # type: ignore[no-untyped-call]
        return _SentinelPool(self._service, self._sentinel, **options)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the connections to sentinels."""
        if self._sentinel is not None:
            self._sentinel.close()

    def _watch(self, parts: SplitResult) -> dict[str, object]:
        """Ask the sentinels of a URL for the server; returns the options of connections to that."""
        user, at, hosts = parts.netloc.rpartition("@")
        _, self._service, *database = parts.path.split("/")
        if not self._service:
            raise ValueError("the URL names no service")
        plain = parts._replace(
            scheme=parts.scheme.removesuffix(_SENTINEL), netloc=f"{user}{at}service", path="/".join(["", *database])
        )
        options = _parse(plain.geturl())
        del options["host"]
        options["ssl"] = options.pop("connection_class", None) is SSLConnection
        shared = {name: value for name, value in options.items() if name.startswith("ssl")}
        login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
            [_address(host) for host in hosts.split(",")],
            sentinel_kwargs={**shared, **login, **_patience(_CONNECT_SECONDS)},
        )
        return options


def _parse(url: str) -> dict[str, object]:
    options: dict[str, object] = parse_url(url)  # type: ignore[no-untyped-call]
    return options


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("the URL has a sentinel without a name")
    return parts.hostname, parts.port or _SENTINEL_PORT


def _patience(timeout: float) -> dict[str, object]:
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": min(timeout, _CONNECT_SECONDS),
        "retry": Retry(NoBackoff(), 0),
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def _transport() -> dict[str, object]:
    return {
        "socket_read_size": 1 << 20,
        "decode_responses": False,
        "parser_class": TimedParser,
        "command_packer": PythonRespSerializer(_JOIN_LIMIT, to_bytes),
    }


def to_bytes(value: Argument) -> bytes | memoryview:
    """An argument as the server gets it; bytes and memory are not copied."""
    if isinstance(value, bytes | memoryview):
        return value
    return (value if isinstance(value, str) else repr(value)).encode()
