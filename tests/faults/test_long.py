"""Long takes and many of them: the same truth at the end, and nothing that grows with either."""

import time
from dataclasses import dataclass

from faults.cluster import until
from faults.fixtures import MakeWorld, World
from faults.players import Take
from faults.replica import Replica
from faults.truth import Move, path

GROWTH_BYTES = 24e6
"""What a server's own memory may grow by after it has warmed up: caches of fixed size and a fragmented heap."""


@dataclass(frozen=True)
class Size:
    """What a server holds on to."""

    resident: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, replica: Replica) -> "Size":
        """Its present size."""
        return cls(replica.resident_bytes(), replica.descriptors(), replica.threads())

    def check(self, replica: Replica) -> None:
        """That the server has not grown since."""
        until(lambda: replica.descriptors() <= self.descriptors + 8, what="descriptors being closed")
        now = Size.of(replica)
        assert now.threads <= self.threads + 2, (self, now)
        assert now.resident <= self.resident + GROWTH_BYTES, (self, now)


def post(world: World, place: int, take: Take, chunks: int) -> None:
    """Chunks, compared with the truth."""
    move = Move(poses=path(24 * chunks, take.truth.next_frame))
    before, take.truth = take.truth, take.truth.moved(move)
    key = f"from-{before.next_chunk}"
    answer = world.cluster.send(world.cluster.replicas[place], "POST", f"{take.path}/chunks", move.body(), key=key)
    assert answer.status == 201, answer.content
    world.player.check_advanced(take, answer, before)


def test_a_thousand_chunks(make_world: MakeWorld) -> None:
    """Fault 40, 1,000 chunks in one session: two servers with a client hopping between them, retention
    on: memory, descriptors and threads flat, the time of a chunk as at the beginning."""
    world = make_world(proxied=False, LONGTAKE_RETAIN_CHUNKS="64", LONGTAKE_DEVICE_STATE_BYTES="1000000")
    take = world.player.create()
    world.player.takes.append(take)
    for n in range(20):
        post(world, n % 2, take, 10)
    sizes = [Size.of(replica) for replica in world.cluster.replicas]
    blobs = world.store.raw.dbsize()
    seconds = []
    for n in range(80):
        began = time.perf_counter()
        post(world, n % 2, take, 10)
        seconds.append(time.perf_counter() - began)
    assert take.truth.next_chunk == 1000
    for size, replica in zip(sizes, world.cluster.replicas, strict=True):
        size.check(replica)
    assert sorted(seconds[-20:])[10] < 3 * sorted(seconds[:20])[10] + 0.05, seconds
    assert world.store.raw.dbsize() < 2 * blobs + 500, "the store grows by more than a record a chunk"
    world.player.check_log(take)
    assert not world.cluster.findings.found, world.cluster.findings.found


def test_a_thousand_sessions(make_world: MakeWorld) -> None:
    """Fault 40, 1,000 sessions: each begun, advanced on one server, gone on with on the other: memory,
    descriptors and threads flat, every state the right one."""
    world = make_world(proxied=False, LONGTAKE_DEVICE_STATE_BYTES="200000", LONGTAKE_HOST_STATE_BYTES="200000")
    takes: list[Take] = []
    sizes: list[Size] = []
    for n in range(1000):
        take = world.player.create()
        post(world, n % 2, take, 1)
        takes.append(take)
        if n == 250:
            sizes = [Size.of(replica) for replica in world.cluster.replicas]
    for n in range(0, 1000, 5):
        post(world, (n + 1) % 2, takes[n], 1)
    for size, replica in zip(sizes, world.cluster.replicas, strict=True):
        size.check(replica)
    assert not world.cluster.findings.found, world.cluster.findings.found
    after, listed = "", 0
    while page := world.player.caller.call("GET", f"/v1/sessions?limit=100{after}").json["data"]:
        listed += len(page)
        after = f"&after={page[-1]['id']}"
    assert listed == 1000
