"""Server processes in tens of milliseconds: one process imports everything, then forks a real server for each request.

Run as a program, this is the process that forks. It must have one thread, since a fork keeps only the forking one.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

READY_SECONDS = 20.0
ANSWER_SECONDS = 60.0
_TESTS = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


_WARM = ("longtake.server.serve", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on", "encodings.idna")
"""Modules that a server imports, besides those imported here: half a second, which is spent once."""


class ReplicaDiedError(RuntimeError):
    """A server ended before it was ready; says what it wrote."""


@dataclass(eq=False)
class Replica:
    """A server process. `disturbed` counts what was done to it, so that a caller can tell whether it was left alone."""

    pid: int
    url: str
    log: Path
    pidfd: int
    zygote: "Zygote" = field(repr=False)
    disturbed: int = 0
    status: int | None = None
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def alive(self) -> bool:
        """Whether the process is there, frozen or not."""
        try:
            return self.status is None and not select.select([self.pidfd], [], [], 0)[0]
        except (OSError, ValueError):  # another thread has just seen its end
            return False

    @property
    def frozen(self) -> bool:
        """Whether a SIGSTOP holds it."""
        try:
            return self.alive and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def kill(self) -> int:
        """SIGKILL, and wait; returns the exit status as a shell would."""
        return self._end(signal.SIGKILL, 10.0)

    def stop(self, patience: float = 15.0) -> int:
        """SIGTERM, and wait until it has drained. Raises `TimeoutError`."""
        return self._end(signal.SIGTERM, patience)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.disturbed += 1
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.disturbed += 1
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def wait(self, patience: float = 15.0) -> int:
        """Until it has ended by itself; returns the exit status as a shell would. Raises `TimeoutError`."""
        with self._ending:
            if self.status is None:
                if not select.select([self.pidfd], [], [], patience)[0]:
                    raise TimeoutError(f"replica {self.pid} does not end: {self.last_words()}")
                self.disturbed += 1
                self.status = self.zygote.reap(self.pid)
                os.close(self.pidfd)
            return self.status

    def wait_frozen(self, patience: float = 15.0) -> None:
        """Until a failpoint has frozen it. Raises `TimeoutError`."""
        give_up = time.monotonic() + patience
        while not self.frozen:
            if time.monotonic() > give_up or not self.alive:
                raise TimeoutError(f"replica {self.pid} was not frozen: {self.last_words()}")
            time.sleep(0.002)
        self.disturbed += 1

    def last_words(self) -> str:
        """The end of what it logged."""
        return self.log.read_text("utf-8", errors="replace")[-2000:]

    def threads(self) -> int:
        """How many it runs."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        """Memory of its own: what it shares with the process that it was forked from is not counted."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))

    def _end(self, sig: int, patience: float) -> int:
        if self.status is None:
            self.disturbed += 1
            os.kill(self.pid, sig)
            os.kill(self.pid, signal.SIGCONT)
        return self.wait(patience)


class Zygote:
    """The forking process. `environment` is that of every server; `folder` gets their logs. Thread-safe."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        self._environment = environment
        self._lock = threading.Lock()
        self._count = 0
        self._replicas: list[Replica] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LONGTAKE_", "TOY_"))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.replica", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=inherited | _ONE_THREAD | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
            )
        self._socket.settimeout(ANSWER_SECONDS)
        if not self._socket.recv(16):
            raise ReplicaDiedError("the forking process did not start")

    def fork(self, failpoints: str = "", **environment: str) -> Replica:
        """A server that takes requests. Raises `ReplicaDiedError` when it ends first."""
        replica, said = self._fork(failpoints, environment)
        with said:
            replica.url = _announced(said, replica)
        return replica

    def fork_blindly(self, failpoints: str = "", **environment: str) -> Replica:
        """A server that may never get so far as to take requests; it has no URL."""
        replica, said = self._fork(failpoints, environment)
        said.close()
        return replica

    def reap(self, pid: int) -> int:
        """Exit status of a server that has ended."""
        status = self._ask({"reap": pid})
        return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 128 + os.WTERMSIG(status)

    @property
    def running(self) -> list[Replica]:
        """Servers that have not ended."""
        return [replica for replica in self._replicas if replica.alive]

    def close(self) -> None:
        """Kill every server and end."""
        for replica in self._replicas:
            if replica.status is None:
                replica.kill()
        self._socket.close()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fork(self, failpoints: str, environment: dict[str, str]) -> tuple[Replica, socket.socket]:
        self._count += 1
        log = self._folder / f"replica-{self._count}.log"
        said, says = socket.socketpair()
        with says, log.open("wb") as file:
            request = {"environment": self._environment | environment, "failpoints": failpoints}
            pid = self._ask(request, says.fileno(), file.fileno())
        replica = Replica(pid, "", log, os.pidfd_open(pid), self)
        self._replicas.append(replica)
        return replica, said

    def _ask(self, request: Mapping[str, object], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(64))


def _announced(said: socket.socket, replica: Replica) -> str:
    said.settimeout(READY_SECONDS)
    text = b""
    while b"\n" not in text.partition(b"longtake listens on ")[2]:
        if not (piece := said.recv(4096)):
            raise ReplicaDiedError(f"status {replica.wait()}: {replica.last_words()}")
        text += piece
    return text.partition(b"longtake listens on ")[2].split()[0].decode()


def _fork_on_request(control: socket.socket) -> None:
    """Until the other side is gone. Every server is killed with this process."""
    from faults.toy_model import ToyModel
    from longtake.server.model.registry import MODELS

    for name in _WARM:
        importlib.import_module(name)
    MODELS["toy"] = lambda _: ToyModel.from_environment()
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            control.send(str(os.waitpid(request["reap"], 0)[1]).encode())
            continue
        assert len(os.listdir("/proc/self/task")) == 1, "something that was imported has started a thread"  # noqa: PTH208
        if (pid := os.fork()) == 0:
            control.close()
            _become_server(request["environment"], request["failpoints"], *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


def _become_server(environment: dict[str, str], failpoints: str, out: int, log: int) -> None:
    from longtake.server.serve import serve
    from longtake.server.settings import Settings, StartError
    from longtake.state_cache import failpoints as armed

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(out, 1)
    os.dup2(log, 2)
    os.close(out)
    os.close(log)
    os.environ.update(environment)
    if skew := float(os.environ.get("TOY_CLOCK_SKEW_S", "0")):
        _skew_clock(skew)
    armed.arm(failpoints)
    code = 1
    try:
        serve(Settings())
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except StartError as error:
        os.write(2, f"error: {error}\n".encode())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _skew_clock(seconds: float) -> None:
    """This process's clock is wrong from now on."""
    right = time.time
    time.time = lambda: right() + seconds


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _fork_on_request(control)
