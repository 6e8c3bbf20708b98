"""The store that comes along: a Valkey or Redis server as a child process, on a unix socket, durable at every write."""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from longtake.state_cache import tether
from longtake.state_cache.binaries import NoServerBinary, ServerBinary, ServerVersion, find_binary, identify
from longtake.state_cache.errors import StoreError

_SILENCE_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02
_TURN_SECONDS = 0.5  # a server that was told to end mostly takes less: only a longer wait is worth a word
_LONGEST_SOCKET_PATH = 103  # bytes; macOS allows 103, Linux 107
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0

log = logging.getLogger(__name__)

SETTINGS: dict[str, str] = {
    "port": "0",
    "unixsocketperm": "700",
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "auto-aof-rewrite-percentage": "200",
    "auto-aof-rewrite-min-size": "256mb",
    "save": "",
    "maxmemory-policy": "noeviction",
    "maxmemory-clients": "10%",
    "client-output-buffer-limit": "normal 1gb 512mb 30",
    "lazyfree-lazy-user-del": "yes",
    "lazyfree-lazy-expire": "yes",
}
"""Server settings: nothing is acknowledged before it is on disk, nothing is ever evicted, no network port."""


class DataDirectoryBusy(StoreError):
    """Another server holds the data directory."""


class ServerFailed(StoreError):
    """The server ended or stayed silent instead of starting."""


class EmbeddedServer:
    """A server of this process on a data directory, which no other server can use meanwhile.

    The lock of the directory belongs to the child: it is free once the child has ended, whatever happens to this
    process. The child gets SIGTERM when this process dies in any way (Linux).

    Args:
        data_dir: made if need be, with access for this user alone.
        binary: server to run; by default the first of this machine that can read what is there.
        patience: seconds to wait for the lock, since a server that was told to end may take a while.
        url: where this process answers, to be told to those that find the directory in use.
    """

    def __init__(
        self, data_dir: Path, binary: Path | None = None, *, patience: float = 10.0, url: str | None = None
    ) -> None:
        self._data_dir = data_dir.resolve()
        self._binary = binary
        self._patience = patience
        self._url = url
        self._writer: ServerVersion | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._supervisor: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def start(self) -> str:
        """Start the server unless it runs, wait until it serves, and return its `unix://` URL.

        Raises:
            NoServerBinary, DataDirectoryBusy, ServerFailed
        """
        socket = _runtime_dir(self._data_dir) / "s"
        # a server that is just dying still has a process: then the first wait fails
        if self.pid is None or not self._serves(socket):
            self._launch(socket)
            if not self._serves(socket):
                self.stop()
                raise ServerFailed(f"the server ended while starting; its last words: {self._last_words()}")
            self._writer_path.write_text(f"{self._writer}\n", "utf-8")
        return f"unix://{socket}"

    def supervise(self) -> None:
        """From now until `stop`, start the server again whenever it ends, after pauses that double up to 5 s.

        It ends by itself when its disk is full, and starts with everything that was acknowledged.
        """
        self._stopping.clear()
        self._supervisor = threading.Thread(target=self._keep_running, name="embedded-supervisor", daemon=True)
        self._supervisor.start()

    def _keep_running(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.wait(pause):
            if self.pid is not None:
                pause = _FIRST_PAUSE_SECONDS
                continue
            log.warning("the embedded store has ended and is started again; its last words: %s", self._last_words())
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            try:
                self.start()
            except (StoreError, OSError) as error:
                log.warning("the embedded store does not start: %s", error)

    def stop(self) -> None:
        """End the server and wait for it; nothing acknowledged is lost."""
        if self._supervisor is not None and self._supervisor is not threading.current_thread():
            self._stopping.set()
            self._supervisor.join()
            self._supervisor = None
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None
        # under the lock, since the next server on this directory uses the same socket
        if (lock := _try_lock(self._lock_path)) is not None:
            shutil.rmtree(_runtime_dir(self._data_dir), ignore_errors=True)
            os.close(lock)

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    @property
    def _lock_path(self) -> Path:
        return self._data_dir / "lock"

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "server.log"

    @property
    def _writer_path(self) -> Path:
        return self._data_dir / "written-by"

    def _launch(self, socket: Path) -> None:
        _make_private(self._data_dir)
        lock = _lock(self._lock_path, self._patience)
        try:
            _make_private(socket.parent)
            socket.unlink(missing_ok=True)
            self._child = self._spawn(socket, lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {self._child.pid} {self._url or ''}\n".encode(), 0)
        finally:
            os.close(lock)

    def _command(self, socket: Path) -> list[str]:
        binary = self._reader()
        self._writer = binary.is_a
        options = ["--dir", str(self._data_dir), "--unixsocket", str(socket), "--maxmemory", str(_memory_limit())]
        for name, value in SETTINGS.items():
            options += [f"--{name}", *(value.split() or [""])]
        return [sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), str(binary.path), *options]

    def _reader(self) -> ServerBinary:
        """The server to run. Raises `NoServerBinary` when none can read what is there."""
        written = None
        if self._writer_path.exists():
            written = ServerVersion.parse(self._writer_path.read_text("utf-8", errors="replace"))
        if self._binary is None:
            return find_binary(written)
        if (binary := identify(self._binary)) is None:
            raise NoServerBinary(f"{self._binary} is no Valkey or Redis server")
        return binary

    def _spawn(self, socket: Path, lock: int) -> subprocess.Popen[bytes]:
        """Start the child from a thread that lives as long: its death signal follows the thread, not the process."""
        command, started = self._command(socket), Future[subprocess.Popen[bytes]]()

        def run() -> None:
            try:
                child = _popen(command, self._log_path, lock)
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(child)
            child.wait()

        threading.Thread(target=run, name="embedded-server", daemon=True).start()
        return started.result()

    def _serves(self, socket: Path) -> bool:
        """Wait until the server answers (True) or ends (False)."""
        with redis.Redis(unix_socket_path=str(socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            give_up = time.monotonic() + _SILENCE_SECONDS
            while (answer := _answer(client)) != "ready":
                if self.pid is None:
                    return False
                if answer == "loading":
                    give_up = time.monotonic() + _SILENCE_SECONDS
                elif time.monotonic() > give_up:
                    self.stop()
                    raise ServerFailed(f"the server stayed silent for {_SILENCE_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
        return True

    def _last_words(self) -> str:
        # without the advice to cut files: another version may be able to read them
        lines = [
            line.partition(": make a backup")[0] for line in self._log_path.read_text("utf-8", "replace").splitlines()
        ]
        return " | ".join(line.strip() for line in lines[-5:]) or "none"


def _popen(command: list[str], log_path: Path, lock: int) -> subprocess.Popen[bytes]:
    # a session of its own keeps the terminal's Ctrl-C from it: the server must outlive the last commit
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), start_new_session=True
        )


def _answer(client: redis.Redis) -> Literal["ready", "loading", "none"]:
    try:
        client.ping()
    except redis.BusyLoadingError:
        return "loading"
    except (redis.ConnectionError, redis.TimeoutError):
        return "none"
    return "ready"


def _lock(path: Path, patience: float) -> int:
    start, told = time.monotonic(), False
    while (lock := _try_lock(path)) is None:
        waited = time.monotonic() - start
        if waited > patience:
            raise DataDirectoryBusy(_in_use(path))
        if waited > _TURN_SECONDS and not told:
            log.warning("%s; waiting up to %.0f s for it to end", _in_use(path), patience)
            told = True
        time.sleep(_POLL_SECONDS)
    return lock


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None when somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _in_use(lock: Path) -> str:
    """Which data directory is in use by whom, and where that one answers if it said so."""
    said = lock.read_text("utf-8", errors="replace").split()
    name = f"process {said[0]} (its store is process {said[1]})" if len(said) > 1 else "another process"
    return f"the data directory {lock.parent} is in use by {name}" + (f", at {said[2]}" if len(said) > 2 else "")


def _runtime_dir(data_dir: Path) -> Path:
    """Where the socket lies: short, the same for every server on this data directory."""
    name = f"longtake-{hashlib.sha256(f'{os.getuid()} {data_dir}'.encode()).hexdigest()[:16]}"
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108
        if base and os.access(base, os.W_OK) and len(os.fsencode(f"{base}/{name}/s")) <= _LONGEST_SOCKET_PATH:
            return Path(base) / name
    raise ServerFailed("no writable directory with a path short enough for a socket: set XDG_RUNTIME_DIR")


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ServerFailed(f"{directory} belongs to somebody else")
    directory.chmod(0o700)


def _memory_limit() -> int:
    """60 % of the memory of this machine or container, in bytes: rewriting the log can need nearly as much again."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = Path("/sys/fs/cgroup/memory.max")
    limit = container.read_text("ascii").strip() if container.exists() else "max"
    return (physical if limit == "max" else min(physical, int(limit))) * 6 // 10
