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
    """A server process; `raw` is a client of its own."""

    def __init__(self, folder: Path, *options: str, sentinel: bool = False) -> None:
        if (binary := shutil.which("redis-server")) is None:
            (pytest.fail if "CI" in os.environ else pytest.skip)("redis-server is not installed")
        self.folder = folder
        command = [binary, *options, "--dir", str(folder), "--logfile", str(folder / "log")]
        self.process = subprocess.Popen([*command, "--sentinel"] if sentinel else command)

    def wait(self, raw: "redis.Redis") -> Self:
        """Until it answers, with an error or not."""
        pause = threading.Event()
        for _ in range(1000):
            with contextlib.suppress(redis.ConnectionError):
                with contextlib.suppress(redis.AuthenticationError, redis.BusyLoadingError):
                    raw.ping()
                return self
            pause.wait(0.01)
        raise TimeoutError("redis-server did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def own_server(*options: str) -> Iterator[tuple[str, OwnServer]]:
    """URL of a server on a unix socket that nobody else uses, and its process."""
    with tempfile.TemporaryDirectory(prefix="lt-") as folder:
        places = ("--port", "0", "--unixsocket", f"{folder}/s", "--save", "")
        with (
            OwnServer(Path(folder), *places, *options) as server,
            redis.Redis(unix_socket_path=f"{folder}/s", retry=Retry(NoBackoff(), 0)) as raw,
        ):
            server.wait(raw)
            yield f"unix://{folder}/s", server


def free_port() -> int:
    """A TCP port that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
