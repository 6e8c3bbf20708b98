"""A short fixed series of faults, each aimed at one promise, then a little chaos: quick proof that the suite bites.

As a program: `python -m faults.drill`; its exit status says whether a promise was broken, its output which.
"""

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch

import longtake.state_cache
from faults.chaos import Plan, run, settle
from faults.check import collect_all, fsck
from faults.cluster import Answer, Cluster, Findings, until, zygote_for
from faults.players import Player, Take
from faults.stores import StoreServer, losing
from faults.truth import Move, path

LEASE_S = 1.0
PATIENCE = 6.0


class Drill:
    """A store, two replicas and a client; every exercise leaves them running."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.store = stack.enter_context(StoreServer("valkey", folder / "store"))
        zygote = stack.enter_context(zygote_for(folder, LONGTAKE_LEASE_S=str(LEASE_S)))
        self.cluster = Cluster(zygote, [self.store.url] * 2)
        stack.callback(self._end)
        self.findings = self.cluster.findings
        self.players = [Player(self.cluster, seed, only) for seed, only in ((1, None), (2, 0), (3, 1))]
        for player in self.players:
            player.caller.patience = PATIENCE
        self.player, self.here, self.there = self.players

    def exercises(self) -> list[Callable[[], None]]:
        """In order."""
        return [
            self.power_cuts,
            self.reused_key,
            self.zombie,
            self.hopping,
            self.dead_holder,
            self.long_chunk,
            self.store_killed,
            self.store_rolled_back,
            self.snapshots,
            self.rewinds,
            self.forks_and_garbage,
        ]

    def begun(self) -> Take:
        """A session with a chunk and a half."""
        take = self.player.create()
        self.player.takes.append(take)
        self.player.advance(take, Move(poses=path(36)), "application/json")
        return take

    def power_cuts(self) -> None:
        """A replica dies after a commit, and before an answer; the client asks again with its key."""
        for failpoint in ("commit.after", "reply.before"):
            take = self.begun()
            self.cluster.restart(0, f"{failpoint}=exit")
            move = Move(poses=path(48, take.truth.next_frame))
            with contextlib.suppress(httpx.TransportError):
                self.send(0, take, move, "cut")
            self.cluster.restart(0)
            before, take.truth = take.truth, take.truth.moved(move)
            answer = self.player.post(take, move, "cut", "application/json", None)
            self.findings.expect(answer.status == 201, f"after {failpoint}: {answer.content!r}")
            if answer.status == 201:
                self.player.check_advanced(take, answer, before)

    def reused_key(self) -> None:
        """One key for two requests."""
        take = self.begun()
        self.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
        self.player.repeat(take)

    def zombie(self) -> None:
        """A replica freezes before its commit, past its lease; another one goes on; the first one wakes."""
        take = self.begun()
        replica = self.cluster.restart(0, "commit.before=stop")
        stale = threading.Thread(target=self._quietly, args=(0, take, Move(poses=path(24, 37, 0.004)), "stale"))
        stale.start()
        replica.wait_frozen()
        self.there.advance(take, Move(poses=path(36, 37, 0.005)), "application/json")
        replica.thaw()
        stale.join()
        self.cluster.restart(0)
        self.player.check_session(take, self.player.caller.call("GET", take.path))
        self.player.check_log(take)

    def hopping(self) -> None:
        """A client that asks another replica each time."""
        take = self.begun()
        for n in range(6):
            player = (self.here, self.there)[n % 2]
            player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")

    def dead_holder(self) -> None:
        """A replica dies with a lease; another one takes over within that lease."""
        take = self.begun()
        self.cluster.restart(0, "lease.acquired=exit", LONGTAKE_REPLICA_ID="somebody-else")
        self._quietly(0, take, Move(poses=path(24, 37)), "dead")
        began = time.monotonic()
        self.there.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
        self.findings.expect(time.monotonic() - began < LEASE_S + 2, "a dead replica's lease did not lapse")
        self.cluster.restart(0)

    def long_chunk(self) -> None:
        """A chunk takes longer than a lease while somebody else asks: it is renewed, nobody gets in between."""
        take = self.begun()
        self.cluster.restart(0, TOY_DELAY_S=str(2 * LEASE_S))
        answers: list[Answer] = []
        move, other = Move(poses=path(24, take.truth.next_frame)), Move(pad=True)
        slow = threading.Thread(target=lambda: answers.append(self.send(0, take, move, "slow")))
        slow.start()
        until(lambda: self._held(take) or not slow.is_alive(), PATIENCE)
        got_in = False
        while slow.is_alive() and not got_in:
            got_in = self.send(1, take, other, "other").status == 201
            time.sleep(0.1)
        slow.join()
        made = answers[0].status == 201
        self.findings.expect(made, f"another replica got in while a chunk was made: {answers[0].content[:300]!r}")
        take.truth = take.truth.moved(move) if made else take.truth
        take.truth = take.truth.moved(other) if got_in else take.truth
        self.cluster.restart(0)

    def store_killed(self) -> None:
        """The store dies right after an answer, again and again: what was answered is there."""
        take = self.begun()
        for _ in range(4):
            self.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
            self.store.kill()
            self.store.start()
            self.player.check_session(take, self.player.caller.call("GET", take.path))

    def store_rolled_back(self) -> None:
        """The store loses a chunk that a replica has in memory: it goes on from where the store stands."""
        take = self.begun()
        self.here.advance(take, Move(pad=True), "application/json")
        kept = take.truth
        with losing(self.store):
            self.here.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
        take.truth = kept
        self.here.advance(take, Move(poses=path(24, take.truth.next_frame, 0.006)), "application/json")

    def snapshots(self) -> None:
        """Every snapshot is the state of its chunk."""
        take = self.begun()
        self.player.advance(take, Move(poses=path(108, take.truth.next_frame)), "application/json")
        for place in (0, 1):
            self.cluster.replicas[place].stop()  # which waits for snapshots under way
            self.cluster.restart(place)
        self._fsck(take)
        self.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")

    def rewinds(self) -> None:
        """A rewind, while another replica has the later chunks in memory."""
        take = self.begun()
        self.here.advance(take, Move(poses=path(60, take.truth.next_frame)), "application/json")
        self.there.rewind(take, 0, 11)
        self.player.check_session(take, self.player.caller.call("GET", take.path))
        self.here.advance(take, Move(poses=path(60, take.truth.next_frame)), "application/json")
        self.here.repeat(take)

    def forks_and_garbage(self) -> None:
        """Forks outlive their parent's chunks, and its end."""
        parent = self.begun()
        self.player.advance(parent, Move(poses=path(60, parent.truth.next_frame)), "application/json")
        child = self.player.fork(parent, 1, 5)
        self.player.advance(child, Move(poses=path(24, child.truth.next_frame)), "application/json")
        self.player.rewind(parent, 0, 6)
        books = self.cluster.store(self.store.url)
        collect_all(books, self.findings)
        self._fsck(child)
        self.player.delete(parent)
        collect_all(books, self.findings)
        books.close()
        self._fsck(child)

    def send(self, place: int, take: Take, move: Move, key: str) -> Answer:
        """One attempt at one replica."""
        return self.cluster.send(self.cluster.replicas[place], "POST", f"{take.path}/chunks", move.body(), key=key)

    def _quietly(self, place: int, take: Take, move: Move, key: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            self.send(place, take, move, key)

    def _held(self, take: Take) -> bool:
        (head,) = self.store.raw.keys(f"*:h:{take.id}")
        return self.store.raw.hget(head, "lease") not in (None, b"0")

    def _fsck(self, take: Take) -> None:
        books = self.cluster.store(self.store.url)
        fsck(books, take.id, self.findings, take.truth)
        books.close()

    def _end(self) -> None:
        for replica in self.cluster.replicas:
            replica.kill()
        self.cluster.close()


def drill(folder: Path, chaos_seconds: float = 0.0, only: str | None = None) -> Findings:
    """Exercise by exercise, or only one, until a promise is broken; then chaos, if none was."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        exercise = Drill(folder, stack)
        for each in exercise.exercises():
            if only not in (None, each.__name__):
                continue
            try:
                each()
            except (TimeoutError, RuntimeError, KeyError, IndexError, httpx.TransportError) as error:
                exercise.findings.add(f"{each.__name__}: {type(error).__name__}: {error}")
            if exercise.findings.found:
                exercise.findings.add(f"found by {each.__name__}")
                return exercise.findings
        settle(exercise.cluster, exercise.store, [exercise.player], [])
        if exercise.findings.found or not chaos_seconds:
            return exercise.findings
    return run(Plan(7, chaos_seconds, pause_s=0.3), folder / "chaos")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chaos-seconds", type=float, default=0.0)
    parser.add_argument("--package", help="Where the package must have been imported from.")
    parser.add_argument("--only", help="Name of the only exercise.")
    options = parser.parse_args()
    if options.package and not longtake.state_cache.__file__.startswith(options.package):
        parser.error(f"the package comes from {longtake.state_cache.__file__}")
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        findings = drill(Path(folder), options.chaos_seconds, options.only)
    print("\n".join(findings.found) or "nothing was found")  # noqa: T201
    return bool(findings.found)


if __name__ == "__main__":
    sys.exit(main())
