"""Who may come in: API keys, and the hosts and origins that requests may name."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from longtake.api_schemas.problems import ProblemError
from longtake.server.errors import render
from longtake.server.settings import Settings, StartError

LOOPBACK_NAMES: frozenset[str] = frozenset({"localhost", "127.0.0.1", "::1"})


class ApiKeys:
    """The keys that open this server, kept as hashes. Without any, everyone is let in as the same owner."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: str | None) -> str:
        """The owner that an `Authorization` header stands for: "" without keys. Raises `unauthorized`."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise ProblemError("unauthorized", "send Authorization: Bearer with one of the server's keys")
        return given.hex()[:32]


@dataclass(frozen=True)
class Doors:
    """Who may come in: keys, names that `Host` may have (None: any), origins of other pages."""

    keys: ApiKeys = field(default_factory=lambda: ApiKeys([]))
    hosts: frozenset[str] | None = LOOPBACK_NAMES
    origins: frozenset[str] = frozenset()


class HostGuard:
    """Refuses requests whose `Host` or `Origin` names another server: a page elsewhere can not reach a local one.

    Args:
        app: what is guarded.
        doors: names and origins that requests may use, besides pages of the server's own; ports are not compared.
    """

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self._app = app
        self._hosts = doors.hosts
        self._origins = doors.origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and not self._welcome(Headers(scope=scope)):
            refusal = ProblemError("forbidden", "this server does not answer to that host or origin")
            await render(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _welcome(self, headers: Headers) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and _hostname(f"//{host}") not in self._hosts:
            return False
        return origin is None or origin in self._origins or origin.partition("//")[2] == host


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(listening: str, configured: Iterable[str]) -> frozenset[str] | None:
    """Names that `Host` may have: those configured; else, for a loopback server, its own; else any."""
    names = frozenset(name.lower() for name in configured)
    if names:
        return names | LOOPBACK_NAMES
    return LOOPBACK_NAMES | {listening} if is_loopback(listening) else None


def doors_of(settings: Settings) -> Doors:
    """The doors that the settings ask for. Raises `StartError` when they would let in anyone."""
    keys = ApiKeys(_listed("" if settings.api_keys is None else settings.api_keys.get_secret_value()))
    if not (keys or settings.insecure or is_loopback(settings.host)):
        raise StartError(
            f"{settings.host} can be reached from the network: set LONGTAKE_API_KEYS, or allow it with --insecure"
        )
    hosts = allowed_hosts(settings.host, _listed(settings.allowed_hosts))
    return Doors(keys, hosts, frozenset(_listed(settings.allowed_origins)))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
