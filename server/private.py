"""A server of one's own on a free port, in a process of its own, for as long as it is needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_PREFIX = "longtake listens on "
"""What `longtake serve` prints, with its URL, once it takes requests."""


class ServerDiedError(RuntimeError):
    """The private server ended before it was ready."""


@dataclass(frozen=True)
class PrivateServer:
    """A running server; it ends by itself when the process that started it is gone."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End it at once, as a power cut would (SIGKILL)."""
        self.process.kill()
        self._ended()

    def stop(self) -> None:
        """Let it finish what it does, then end it."""
        if self.process.poll() is None:
            self.process.terminate()
        self._ended()

    def _ended(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_private_server(data_dir: Path | None, *options: str, api_key: str | None = None) -> PrivateServer:
    """Start `longtake serve` with these further options and wait until it takes requests.

    It listens on loopback, and takes the given key or none: its sessions are those of that key. With a data directory
    it uses the embedded store there, otherwise the store of the environment's settings. Raises `ServerDiedError` with
    what the server said.
    """
    command = [sys.executable, "-m", "longtake.server", "serve", "--host", "127.0.0.1", "--port", "0"]
    command += ["--log-level", "warning", "--while-stdin-open", *options]
    theirs = {"LONGTAKE_API_KEYS", "LONGTAKE_ALLOWED_HOSTS"}
    if data_dir is not None:
        command += ["--data-dir", str(data_dir)]
        theirs |= {"LONGTAKE_STATE_URL"}
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    if api_key:
        environment["LONGTAKE_API_KEYS"] = api_key
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        if line.startswith(READY_PREFIX):
            return PrivateServer(line.removeprefix(READY_PREFIX).strip(), process)
        said += line
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    reason = said.strip().removeprefix("error: ") or f"status {status}"
    raise ServerDiedError(f"a server of our own could not start ({reason}); give --server URL to use one that runs")


@contextmanager
def private_server(data_dir: Path | None, *options: str, api_key: str | None = None) -> Iterator[PrivateServer]:
    """A private server inside a `with` block."""
    server = start_private_server(data_dir, *options, api_key=api_key)
    try:
        yield server
    finally:
        server.stop()
