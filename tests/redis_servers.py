"""Redis servers of a test's own, to be frozen, killed and set up as it likes."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class OwnServer:
    """A server process.

    Args:
        folder: its working directory.
        options: of its command line.
        address: of a client, which waits until it answers.
    """

    def __init__(self, folder: Path, *options: str, **address: str | int | bool) -> None:
        if (binary := shutil.which("redis-server")) is None:
            (pytest.fail if "CI" in os.environ else pytest.skip)("redis-server is not installed")
        self.folder = folder
        self.raw = redis.Redis(**address, retry=Retry(NoBackoff(), 0))  # type: ignore[arg-type]
        self._command = [binary, *options, "--dir", str(folder), "--logfile", str(folder / "log")]

    def start(self) -> None:
        """Start it, and wait until it answers, be it with an error."""
        self.process = subprocess.Popen(self._command)
        pause = threading.Event()
        for _ in range(1000):
            with contextlib.suppress(redis.ConnectionError):
                with contextlib.suppress(redis.AuthenticationError, redis.BusyLoadingError):
                    self.raw.ping()
                return
            pause.wait(0.01)
        raise TimeoutError("redis-server did not start")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def own_server(*options: str) -> Iterator[tuple[str, OwnServer]]:
    """URL of a server on a unix socket that nobody else uses, and its process."""
    with tempfile.TemporaryDirectory(prefix="lt-") as folder:
        places = ("--port", "0", "--unixsocket", f"{folder}/s", "--save", "")
        with OwnServer(Path(folder), *places, *options, unix_socket_path=f"{folder}/s") as server:
            yield f"unix://{folder}/s", server


def free_port() -> int:
    """A TCP port that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
