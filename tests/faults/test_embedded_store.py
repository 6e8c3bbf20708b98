"""The store that a server runs by itself: orphans, two servers on one directory, a child that is killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.cluster import Cluster, until
from faults.fixtures import in_thread
from faults.players import Player
from faults.replica import ReplicaDiedError, Zygote
from faults.truth import Move, path


class Embedded:
    """A server with a store of its own in a folder."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.folder = folder
        self.environment = {"LONGTAKE_DATA_DIR": str(folder)}
        self.cluster = Cluster(zygote, [None], **self.environment)
        self.player = Player(self.cluster, 1, only=0)

    def store_pid(self) -> int:
        """Of the store's process; 0 while it is being started."""
        pids = (self.folder / "lock").read_text().split()
        return int(pids[1]) if len(pids) > 1 else 0


def running(pid: int) -> bool:
    """Whether the process is there and not a zombie; 0 is none."""
    if not pid:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def embedded(zygote: Zygote, tmp_path: Path) -> Iterator[Embedded]:
    """One, with a take."""
    made = Embedded(zygote, tmp_path / "data")
    take = made.player.create()
    made.player.takes.append(take)
    made.player.advance(take, Move(poses=path(60)), "application/json")
    yield made
    for replica in zygote.running:
        replica.kill()
    made.cluster.close()


def test_kill_the_server_of_an_embedded_store(embedded: Embedded) -> None:
    """Fault 38 (kill -9 of the server): its store ends with it, and the next server has everything."""
    for _ in range(3):
        store = embedded.store_pid()
        embedded.cluster.replicas[0].kill()
        until(lambda: not running(store), what="the store's end")  # noqa: B023
        embedded.cluster.restart(0)
        embedded.player.advance(embedded.player.takes[0])
    _end(embedded)


def test_two_servers_on_one_data_directory(embedded: Embedded) -> None:
    """Fault 38: a second server on the directory waits, then refuses and names the holder: two never write."""
    began = time.monotonic()
    with pytest.raises(ReplicaDiedError, match=str(embedded.store_pid())):
        embedded.cluster.zygote.fork(**embedded.environment)
    assert time.monotonic() - began > 5
    embedded.player.advance(embedded.player.takes[0])
    _end(embedded)


def test_a_rolling_restart_of_an_embedded_store(embedded: Embedded) -> None:
    """Fault 37: the next server starts while the last one drains: it waits for the directory, then goes on."""
    old = embedded.cluster.replicas[0]
    coming = in_thread(lambda: embedded.cluster.zygote.fork(**embedded.environment))
    time.sleep(0.3)
    assert old.stop() == 0
    embedded.cluster.replicas[0] = coming.result(30)
    embedded.player.advance(embedded.player.takes[0])
    _end(embedded)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_kill_the_embedded_store(embedded: Embedded, sig: signal.Signals) -> None:
    """Fault 39: the store's process is killed (by the kernel, for memory): it is started again, sessions go on."""
    take = embedded.player.takes[0]
    for _ in range(3):
        store = embedded.store_pid()
        os.kill(store, sig)
        embedded.player.advance(take)
        until(lambda: embedded.store_pid() != store and running(embedded.store_pid()))  # noqa: B023
    _end(embedded)


def _end(embedded: Embedded) -> None:
    take = embedded.player.takes[0]
    embedded.player.check_session(take, embedded.player.caller.call("GET", take.path))
    embedded.player.check_log(take)
    store = embedded.store_pid()
    embedded.cluster.close()
    until(lambda: not running(store), what="the store's end")
    assert not embedded.cluster.findings.found, embedded.cluster.findings.found
