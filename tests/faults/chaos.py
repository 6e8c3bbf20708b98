"""A seeded run of clients against replicas and a store that are killed, frozen and cut off while they work.

As a program: `python -m faults.chaos --seed 1 --seconds 30`; its exit status says whether anything was violated.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from faults.check import collect_all, lasting
from faults.cluster import LEASE_S, Cluster, Findings, until, zygote_for
from faults.players import Contest, Player
from faults.proxy import FaultProxy
from faults.replica import Replica, ReplicaDiedError, Zygote
from faults.stores import StoreServer

FAILPOINTS = (
    "put.middle",
    "commit.before",
    "commit.after",
    "reply.before",
    "lease.acquired",
    "snapshot.before",
    "snapshot.uploaded",
    "snapshot.attached",
    "fork.before",
    "fork.after",
    "rewind.before",
    "rewind.after",
    "create.before",
    "create.after",
    "collect.marked",
    "collect.swept",
    "toy.compute",
)


@dataclass(frozen=True)
class Plan:
    """What a run is made of. `pause_s` is the mean time between faults, `store_faults`: whether the store is hurt."""

    seed: int
    seconds: float
    kind: str = "valkey"
    replicas: int = 3
    players: int = 4
    contests: int = 2
    pause_s: float = 0.6
    store_faults: bool = True


class Nemesis:
    """Hurts a cluster at random, and heals it at the end."""

    def __init__(self, cluster: Cluster, store: StoreServer, proxies: list[FaultProxy], plan: Plan) -> None:
        self._cluster = cluster
        self._store = store
        self._proxies = proxies
        self._plan = plan
        self._rng = random.Random(plan.seed ^ 0x5EED)
        self._frozen_since: dict[Replica, float] = {}

    def step(self) -> None:
        """One fault."""
        faults: list[tuple[float, Callable[[], None]]] = [
            (3, self._arm),
            (2, self._kill_replica),
            (1, self._drain_replica),
            (2, self._freeze_replica),
            (1, self._cut_proxy),
            (0.5, self._partition),
        ]
        if self._plan.store_faults:
            faults += [(1, self._kill_store), (1, self._freeze_store)]
        weights, choices = zip(*faults, strict=True)
        self._rng.choices(choices, weights)[0]()

    def tend(self) -> None:
        """Replicas that failpoints ended start again, those that were frozen go on once their leases have lapsed."""
        for place, replica in enumerate(self._cluster.replicas):
            if not replica.alive:
                self._cluster.findings.count("a replica ended")
                replica.wait()
                self._restart(place, "")
            elif replica.frozen:
                since = self._frozen_since.setdefault(replica, time.monotonic())
                if time.monotonic() > since + LEASE_S + 0.5:
                    replica.thaw()
            else:
                self._frozen_since.pop(replica, None)

    def heal(self) -> None:
        """Everything runs again."""
        if self._store.ended:
            self._store.start()
        for proxy in self._proxies:
            proxy.heal()
        for replica in self._cluster.replicas:
            if replica.frozen:
                replica.thaw()
        for place in range(len(self._cluster.replicas)):
            self._restart(place, "")

    def _restart(self, place: int, failpoints: str) -> None:
        try:
            self._cluster.restart(place, failpoints)
        except ReplicaDiedError:  # the store may be down, or the failpoint came first
            if self._store.ended:
                self._store.start()
            self._proxies[place].heal()
            self._cluster.restart(place)

    def _place(self) -> int:
        return self._rng.randrange(len(self._cluster.replicas))

    def _arm(self) -> None:
        """A replica that will die or freeze at a step of its own."""
        action = self._rng.choice(["exit", "exit", "exit", "stop", f"sleep:{LEASE_S + 0.5}"])
        name = self._rng.choice(FAILPOINTS)
        self._count(f"{name}={action.partition(':')[0]}")
        self._restart(self._place(), f"{name}={action}@{self._rng.randrange(1, 4)}")

    def _kill_replica(self) -> None:
        self._count("replica killed")
        self._restart(self._place(), "")

    def _drain_replica(self) -> None:
        self._count("replica drained")
        replica = self._cluster.replicas[self._place()]
        if replica.alive and not replica.frozen:
            replica.stop()

    def _freeze_replica(self) -> None:
        """Past its leases, as `tend` thaws it: a zombie."""
        self._count("replica frozen")
        replica = self._cluster.replicas[self._place()]
        if replica.alive:
            replica.freeze()

    def _kill_store(self) -> None:
        self._count("store killed")
        self._store.kill()
        time.sleep(self._rng.choice([0.0, 0.3]))
        self._store.start()

    def _freeze_store(self) -> None:
        self._count("store frozen")
        self._store.freeze()
        time.sleep(self._rng.choice([0.2, 1.0, 4.0]))
        self._store.thaw()

    def _cut_proxy(self) -> None:
        self._count("connections cut")
        proxy = self._rng.choice(self._proxies)
        way, count = self._rng.choice(["up", "down"]), self._rng.choice([0, 10, 500, 5000])
        self._rng.choice(
            [
                proxy.cut,
                lambda: proxy.cut_after(way, count),  # type: ignore[arg-type]
                lambda: proxy.swallow_reply(b"EVALSHA"),
                lambda: proxy.swallow_reply(b"frames_digest"),
                lambda: proxy.swallow_reply(b"\r\nSET\r\n"),
            ]
        )()

    def _partition(self) -> None:
        self._count("replica partitioned")
        proxy = self._rng.choice(self._proxies)
        proxy.partition()
        time.sleep(self._rng.choice([0.5, LEASE_S + 1.0]))
        proxy.heal()

    def _count(self, name: str) -> None:
        self._cluster.findings.count(f"fault: {name}")


def run(plan: Plan, folder: Path) -> Findings:
    """Carry a plan out; what it found."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        store = stack.enter_context(StoreServer(plan.kind, folder / "store"))
        zygote = stack.enter_context(zygote_for(folder, LONGTAKE_SNAPSHOT_EVERY=str(1 + plan.seed % 4)))
        proxies = [stack.enter_context(FaultProxy(store.port)) for _ in range(plan.replicas)]
        return _run(plan, store, zygote, proxies)


def _run(plan: Plan, store: StoreServer, zygote: Zygote, proxies: list[FaultProxy]) -> Findings:
    cluster = Cluster(zygote, [proxy.url for proxy in proxies])
    nemesis = Nemesis(cluster, store, proxies, plan)
    players = [Player(cluster, plan.seed * 1000 + n) for n in range(plan.players)]
    contests = [Contest(cluster, plan.seed * 1000 + 100 * n) for n in range(1, plan.contests + 1)]
    steps: list[Callable[[], None]] = [player.step for player in players]
    steps += [lambda c=c, n=n: c.step(n) for c in contests for n in range(c.rivals)]  # type: ignore[misc]
    over = threading.Event()
    threads = [threading.Thread(target=_repeat, args=(step, over, cluster.findings)) for step in steps]
    for thread in threads:
        thread.start()
    try:
        _hurt(nemesis, plan, cluster.findings)
    finally:
        over.set()
        nemesis.heal()
        while any(thread.is_alive() for thread in threads):
            nemesis.tend()
            time.sleep(0.05)
    settle(cluster, store, players, contests)
    return cluster.findings


def _repeat(step: Callable[[], None], over: threading.Event, findings: Findings) -> None:
    """Until the run is over, or something has gone wrong for this client."""
    try:
        while not over.is_set():
            step()
    except TimeoutError:
        pass  # noted where it was raised
    except Exception:
        findings.add(f"a client failed: {traceback.format_exc(limit=-4)}")


def _hurt(nemesis: Nemesis, plan: Plan, findings: Findings) -> None:
    rng, end = random.Random(plan.seed), time.monotonic() + plan.seconds
    for _ in itertools.takewhile(lambda _: time.monotonic() < end and len(findings.found) < 20, itertools.count()):
        nemesis.step()
        wake = time.monotonic() + rng.expovariate(1 / plan.pause_s)
        while time.monotonic() < wake:
            nemesis.tend()
            time.sleep(0.02)


def settle(cluster: Cluster, store: StoreServer, players: Iterable[Player], contests: Iterable[Contest]) -> None:
    """Check every promise, then delete everything and see that nothing is left, in the store or of the processes."""
    books = cluster.store(store.url)
    try:
        for player in players:
            player.settle(books)
        for contest in contests:
            contest.settle(books)
        _delete_all(cluster, store)
    finally:
        books.close()
    replicas = [replica for replica in cluster.replicas if replica.alive]
    until(lambda: all(replica.threads() < 40 for replica in replicas), what="threads ending")
    for replica in replicas:
        cluster.findings.expect(replica.stop() == 0, f"a replica did not end well: {replica.last_words()[-500:]}")
        before, found, after = replica.log.read_text().partition("Traceback")
        cluster.findings.expect(not found, f"in a log: {before[-300:]}{found}{after[:6000]}")
    cluster.close()


def _delete_all(cluster: Cluster, store: StoreServer) -> None:
    """I7: after deletion and a collection, what is left goes by itself."""
    books = cluster.store(store.url)
    for _, session_id in books.list(1 << 20):
        books.delete(session_id)
    collect_all(books, cluster.findings)
    left = lasting(books, store.raw.keys(f"{cluster.prefix}:*"))
    cluster.findings.expect(not left, f"left after everything was deleted: {len(left)} keys such as {left[:5]}")
    books.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(Plan(1, 30.0)).items():
        kind = (lambda text: text != "False") if isinstance(value, bool) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        findings = run(plan, Path(folder))
    print(json.dumps({"plan": vars(plan), "counts": findings.counts, "found": findings.found}, indent=1))  # noqa: T201
    return bool(findings.found)


if __name__ == "__main__":
    sys.exit(main())
