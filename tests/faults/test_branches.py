"""Forks and rewinds while others write and garbage is collected; retention."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from faults.check import collect_all, fsck
from faults.cluster import until
from faults.fixtures import MakeWorld, World, in_thread
from faults.players import Player
from faults.test_commit_steps import begun
from faults.truth import Move, path
from longtake.state_cache import Retention, lineage_of


def test_forks_rewinds_and_deletes_race_with_garbage_collection(world: World) -> None:
    """Fault 36: fork, rewind, delete racing commits and collections of one lineage: what a session needs stays."""
    root = begun(world)
    world.player.advance(root, Move(poses=path(84, 37)), "application/json")
    players = [world.another() for _ in range(4)]
    for player in players:
        player.takes.append(world.player.fork(root, 2, 7))
        world.player.takes.remove(player.takes[0])
    over = threading.Event()
    collecting = [in_thread(lambda: _collect_until(world, root.id, over)) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_branch_out, players))
    over.set()
    assert sum(job.result(30) for job in collecting) > 10
    world.settle()


def _branch_out(player: Player) -> None:
    rng = random.Random(player.rng.random())
    for _ in range(25):
        take = rng.choice(player.takes)
        action = rng.choice([player.advance, player.fork_at_random, player.rewind_at_random, player.advance])
        action(take)
        if len(player.takes) > 3:
            player.delete(player.takes[-1])


def _collect_until(world: World, session_id: str, over: threading.Event) -> int:
    """Collects a lineage again and again, as any number of servers may."""
    books, count = world.cluster.store(world.store.url), 0
    while not over.is_set():
        books.collect(lineage_of(session_id), Retention())
        count += 1
    books.close()
    return count


def test_what_a_fork_needs_outlives_its_parent(world: World) -> None:
    """Fault 36: the parent is rewound, deleted and collected: its forks have every chunk they share with it."""
    parent = begun(world)
    world.player.advance(parent, Move(poses=path(84, 37)), "application/json")
    child = world.player.fork(parent, 3, 1)
    grandchild = world.player.fork(child, 1, 2)
    world.player.rewind(parent, 0, 3)
    world.player.advance(parent, Move(poses=path(48, 25, 0.02)), "application/json")
    books = world.cluster.store(world.store.url)
    collect_all(books, world.cluster.findings)
    for take in (parent, child, grandchild):
        fsck(books, take.id, world.cluster.findings, take.truth)
    world.player.delete(parent)
    world.player.delete(child)
    collect_all(books, world.cluster.findings)
    fsck(books, grandchild.id, world.cluster.findings, grandchild.truth)
    books.close()
    for place in (0, 1):
        world.cluster.restart(place)
    world.player.advance(grandchild)
    world.settle()


def test_a_key_whose_chunks_were_rewound_away(world: World) -> None:
    """Exactly once, across a rewind: the key answers 409 `rewound`, and nothing is made for it again."""
    take = begun(world)
    move = Move(poses=path(48, 37))
    take.truth = take.truth.moved(move)
    assert world.player.post(take, move, "then", "application/json", None).status == 201
    world.player.rewind(take, 1, 4)
    for place in (0, 1):
        answer = world.another(only=place).post(take, move, "then", "application/json", None)
        assert (answer.status, answer.code) == (409, "rewound"), answer.content
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


def test_actions_after_dropped_poses(world: World) -> None:
    """A fork or rewind drops pending poses: the camera stands where the last chunk left it, not where they did."""
    take = begun(world)
    child = world.player.fork(take, 0, 1)
    world.player.rewind(take, 0, 2)
    for each in (take, child):
        world.player.advance(each, Move(actions="w-12,dw-12"), "application/json")
    world.settle()


def test_a_rewind_while_a_chunk_is_made_elsewhere(make_world: MakeWorld) -> None:
    """Fault 36: a rewind waits for a request of the same server, and is refused or waits while another server works;
    the chunk is whole or not there."""
    world = make_world(TOY_DELAY_S="0.3")
    take = begun(world)
    move = Move(poses=path(60, 37))
    running = in_thread(
        lambda: world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/chunks", move.body(), key="slow")
    )
    head = next(iter(world.store.raw.keys(f"*:h:{take.id}")))
    until(lambda: world.store.raw.hget(head, "lease") not in (None, b"0"))
    refused = world.cluster.send(world.cluster.replicas[1], "POST", f"{take.path}/rewind", {"to_chunk": 0}, key="back")
    assert (refused.status, refused.code) == (409, "session_busy"), refused.content
    assert world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/rewind", {"to_chunk": 0}).status == 200
    assert running.result(20).status == 201
    take.truth = take.truth.moved(move).rewound(0, None)
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


def test_a_hundred_forks_cost_nothing(world: World) -> None:
    """Issue: a 100-way fork of a long session adds less than 1 % of its bytes."""
    take = begun(world)
    for _ in range(8):
        world.player.advance(take, Move(poses=path(24 * 8, take.truth.next_frame)), "application/json")
    books = world.cluster.store(world.store.url)
    collect_all(books, world.cluster.findings)
    before = _bytes(world)
    children = [world.player.fork(take, take.truth.next_chunk - 1, n) for n in range(100)]
    collect_all(books, world.cluster.findings)
    added = _bytes(world) - before
    assert added < 100 * 8192, f"{added} bytes for 100 forks"
    books.close()
    for child in children[3:]:
        world.player.takes.remove(child)
        world.player.caller.call("DELETE", child.path)
    for child in children[:3]:
        world.player.advance(child)
    world.settle()


def _bytes(world: World) -> int:
    return sum(world.store.raw.memory_usage(key) or 0 for key in world.store.raw.keys("*"))


def _blob_bytes(world: World) -> int:
    return sum(world.store.raw.strlen(key) for key in world.store.raw.keys("*:b:*"))


def test_bytes_stop_growing_behind_the_horizon(make_world: MakeWorld) -> None:
    """With `LONGTAKE_RETAIN_CHUNKS` the oldest chunks expire (410 `chunk_expired`, digests stay), what
    remains can be replayed, and blobs stop growing."""
    world = make_world(LONGTAKE_RETAIN_CHUNKS="8", LONGTAKE_SNAPSHOT_EVERY="3")
    take = begun(world)
    sizes = []
    for _ in range(6):
        for _ in range(4):
            world.player.advance(take, Move(poses=path(48, take.truth.next_frame)), "application/json")
        books = world.cluster.store(world.store.url)
        retention = Retention(2, 8)
        for _ in range(2):
            books.collect(lineage_of(take.id), retention)
        sizes.append(_blob_bytes(world))
        books.close()
    assert sizes[-1] < 1.3 * sizes[2], sizes
    stands = world.player.caller.call("GET", take.path).json
    assert take.truth.next_chunk - 8 - 6 <= stands["rewind_from"] + 1 <= take.truth.next_chunk - 8
    old = world.player.caller.call("GET", f"{take.path}/chunks/0")
    assert (old.status, old.json["state_digest"]) == (200, take.truth.log[0].state_digest)
    for what in ("video", "frames"):
        answer = world.player.caller.call("GET", f"{take.path}/chunks/0/{what}")
        assert (answer.status, answer.code) == (410, "chunk_expired"), answer.content
    for route, body in (("fork", {"from_chunk": 0}), ("rewind", {"to_chunk": 0})):
        assert world.player.caller.call("POST", f"{take.path}/{route}", body).code == "chunk_expired"
    for place in (0, 1):
        world.cluster.restart(place)
    world.player.rewind(take, stands["rewind_from"], 5)
    world.player.advance(take, Move(poses=path(24 * 5, take.truth.next_frame)), "application/json")
    world.settle()
