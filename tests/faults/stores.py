"""Redis and Valkey to hurt: started on a directory of their own, killed, frozen, filled and started again."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from longtake.state_cache import packaged_binary

START_SECONDS = 20.0


def binary_of(kind: str) -> str:
    """Path of `redis` (that of the PATH) or `valkey` (that of the package); skips the test when it is not there."""
    found = shutil.which("redis-server") if kind == "redis" else packaged_binary()
    if found is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"there is no {kind}-server")
    return str(found)


class StoreServer:
    """A store on 127.0.0.1, on the same port and directory after every start.

    Args:
        kind: `redis` or `valkey`.
        folder: its directory, made if need be.
        fsync: `always`, `everysec`, or `off` for no append-only file at all.
        options: further settings by name.
    """

    def __init__(self, kind: str, folder: Path, fsync: str = "always", **options: str) -> None:
        self.kind = kind
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.disturbed = 0
        self._options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "no" if fsync == "off" else "yes",
            "appendfsync": "everysec" if fsync == "off" else fsync,
            **options,
        }
        self._binary = binary_of(kind)
        self._process: subprocess.Popen[bytes] | None = None
        self.raw = self._connected()

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        """What it writes to standard output."""
        return self.folder.with_name(self.folder.name + ".log")

    def start(self, *, ready: bool = True) -> Self:
        """Start, and wait until everything is loaded unless told not to. Raises `RuntimeError` when it ends instead."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self._binary]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until it answers. Raises `RuntimeError` when it ends or stays silent."""
        give_up = time.monotonic() + START_SECONDS
        while True:
            with suppress(redis.RedisError):
                if self.raw.ping():
                    return
            if self.ended or time.monotonic() > give_up:
                raise RuntimeError(f"{self.kind} does not start: {self.last_words()}")
            time.sleep(0.01)

    @property
    def ended(self) -> bool:
        """Whether it is down."""
        return self._process is None or self._process.poll() is not None

    def wait_ended(self, patience: float = 15.0) -> int:
        """Until it has ended by itself."""
        assert self._process is not None
        return self._process.wait(patience)

    def kill(self) -> None:
        """SIGKILL: what is only in its memory is lost."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.disturbed += 1
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.disturbed += 1
        os.kill(self.pid, signal.SIGCONT)

    def set(self, name: str, value: str) -> None:
        """Change a setting while it runs, and for the next start."""
        self._options[name] = value
        self.raw.config_set(name, value)

    def option(self, name: str, value: str) -> None:
        """Change a setting for the next start."""
        self._options[name] = value

    def calls(self, command: str) -> int:
        """How often the server has run a command since its start or `reset_calls`."""
        stats = self.raw.info("commandstats").get(f"cmdstat_{command}", {})
        return int(stats.get("calls", 0))

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", errors="replace")[-1500:]

    def append_only_files(self) -> list[Path]:
        """Its log files, the newest increment last."""
        return sorted((self.folder / "appendonlydir").glob("*.incr.aof"))

    def close(self) -> None:
        """Kill it and let go of the connection."""
        self.raw.close()
        if not self.ended:
            self.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, sig: int) -> None:
        assert self._process is not None
        self.disturbed += 1
        if self._process.poll() is None:
            os.kill(self.pid, sig)
            os.kill(self.pid, signal.SIGCONT)
        self._process.wait(15)

    def _connected(self) -> "redis.Redis":
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            username=None,
            password=self._options.get("requirepass"),
            socket_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
        )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own of so many megabytes; skips the test where mounting is not permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def losing(store: StoreServer) -> Iterator[None]:
    """What is written meanwhile is lost, as by a crash before it was on disk."""
    store.stop()
    kept = store.folder.with_name("kept")
    shutil.copytree(store.folder, kept)
    store.start()
    yield
    store.kill()
    shutil.rmtree(store.folder)
    kept.rename(store.folder)
    store.start()
