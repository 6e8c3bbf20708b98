"""Run the HTTP server: one process, one event loop, an open port announced once it takes requests."""

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType

import uvicorn

from longtake.server.app import create_app
from longtake.server.doors import doors_of
from longtake.server.engine.engine import Engine
from longtake.server.engine.start import start_engine
from longtake.server.private import READY_PREFIX
from longtake.server.settings import Settings, StartError, unknown_variables

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, saying where it listens, and telling the engine when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then announce the address on standard output."""
        await super().startup(sockets)
        if self.started and sockets:
            print(f"{READY_PREFIX}{_url(sockets[0])}", flush=True)  # noqa: T201

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop: drain."""
        self._engine.drain()
        super().handle_exit(sig, frame)


def serve(settings: Settings, *, while_stdin_open: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; requests that run are finished first.

    Args:
        settings: the server's settings; port 0 takes a free one.
        while_stdin_open: also end when standard input closes, that is with the process that started this one.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for name in unknown_variables(os.environ):
        log.warning("%s is no setting of this version: it has no effect", name)
    if while_stdin_open:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    signal.signal(signal.SIGTERM, _exit)
    doors = doors_of(settings)
    with _bound(settings.host, settings.port) as listener, start_engine(settings, _url(listener)) as engine:
        app = create_app(engine, settings.max_body_bytes, doors)
        config = uvicorn.Config(app, log_config=None, server_header=False, timeout_graceful_shutdown=settings.grace_s)
        Server(config, engine).run([listener])


def _exit(*_: object) -> None:
    """Leave through the `with` blocks, which close everything: uvicorn drains, then raises the signal again."""
    raise SystemExit(0)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named: without it answers wait 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"can not listen on {host}, port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
