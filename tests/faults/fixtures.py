"""Worlds to hurt: a store and replicas of their own for every test."""

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from faults.chaos import settle
from faults.cluster import Cluster, zygote_for
from faults.players import Player
from faults.proxy import FaultProxy
from faults.replica import Zygote
from faults.stores import StoreServer

R = TypeVar("R")

STUCK_SECONDS = 300.0
"""Longer than any test of the short form takes on a busy machine."""


@dataclass
class World:
    """A store, a proxy in front of it for each replica, and a client. `settle` checks every promise at the end."""

    folder: Path
    store: StoreServer
    proxies: list[FaultProxy]
    cluster: Cluster
    player: Player
    others: list[Player] = field(default_factory=list)

    def another(self, only: int | None = None) -> Player:
        """A further client."""
        self.others.append(Player(self.cluster, 100 + len(self.others), only))
        return self.others[-1]

    def settle(self) -> None:
        """Compare with the truth, delete everything, see that nothing is left. Fails the test for anything found."""
        if not self.cluster.findings.found:
            settle(self.cluster, self.store, [self.player, *self.others], [])
        assert not self.cluster.findings.found, "\n".join(self.cluster.findings.found)


class MakeWorld(Protocol):
    """Makes worlds, which end with the test."""

    def __call__(
        self,
        replicas: int = 2,
        kind: str = "valkey",
        fsync: str = "always",
        options: dict[str, str] | None = None,
        *,
        proxied: bool = True,
        **environment: str,
    ) -> World: ...


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What forks the servers of all tests."""
    with zygote_for(tmp_path_factory.mktemp("replicas"), LONGTAKE_LEASE_S="1") as zygote:
        yield zygote


@pytest.fixture
def make_world(zygote: Zygote, tmp_path: Path) -> Iterator[MakeWorld]:
    """See `MakeWorld`."""
    with ExitStack() as stack:
        count = 0

        def make(
            replicas: int = 2,
            kind: str = "valkey",
            fsync: str = "always",
            options: dict[str, str] | None = None,
            *,
            proxied: bool = True,
            **environment: str,
        ) -> World:
            nonlocal count
            count += 1
            server = StoreServer(kind, tmp_path / f"store-{count}", fsync, **(options or {}))
            store = stack.enter_context(server)
            proxies = [stack.enter_context(FaultProxy(store.port)) for _ in range(replicas if proxied else 0)]
            urls = [proxy.url for proxy in proxies] or [store.url] * replicas
            cluster = Cluster(zygote, urls, **environment)
            stack.callback(_end, cluster)
            return World(tmp_path, store, proxies, cluster, Player(cluster, count))

        yield make
    assert not zygote.running, "a replica outlived its test"


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """Two replicas on a Valkey that writes every step to disk."""
    return make_world()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """I8: no thread outlives the tests."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not left, f"threads are left: {left}"


@pytest.fixture(autouse=True)
def _no_test_hangs() -> Iterator[None]:
    """A test that takes this long is stuck: say where, and end everything."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def in_thread(function: Callable[[], R]) -> "Future[R]":
    """Run beside the test; `result()` raises what it raises."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _end(cluster: Cluster) -> None:
    for replica in cluster.replicas:
        replica.kill()
    cluster.close()
