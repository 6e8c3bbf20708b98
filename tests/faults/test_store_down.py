"""A store that is killed, frozen, cut off or full: nothing acknowledged is lost, and nobody has to restart a server."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.check import fsck
from faults.cluster import until
from faults.fixtures import MakeWorld, World, in_thread
from faults.players import Player
from faults.proxy import FaultProxy
from faults.stores import StoreServer, losing, small_disk
from faults.test_commit_steps import begun
from faults.truth import Move, path

KINDS = ("redis", "valkey")
COMMIT = b"frames_digest"
"""Stands in the log record that a commit sends, and nowhere else."""


@contextmanager
def busy(players: list[Player]) -> Iterator[None]:
    """Clients at work meanwhile."""
    over = threading.Event()
    workers = [in_thread(lambda p=player: _work(p, over)) for player in players]  # type: ignore[misc]
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.result(90)


def _work(player: Player, over: threading.Event) -> None:
    while not over.is_set():
        player.step()


@pytest.mark.parametrize("kind", KINDS)
def test_kill_the_store_under_load(make_world: MakeWorld, kind: str) -> None:
    """Fault 4 (kill -9 of Redis, AOF always): ×20 under load: everything acknowledged is there, 503 while
    down, no replica is restarted."""
    world = make_world(kind=kind)
    players = [world.another() for _ in range(3)]
    pids = [replica.pid for replica in world.cluster.replicas]
    with busy(players):
        for _ in range(20):
            time.sleep(0.2)
            world.store.kill()
            world.store.start()
    assert [replica.pid for replica in world.cluster.replicas if replica.alive] == pids
    assert world.cluster.findings.counts.get("store_unavailable", 0) > 0
    assert all(len(player.takes) > 0 for player in players)
    world.settle()


def test_a_store_that_writes_every_second_loses_and_says_so(make_world: MakeWorld) -> None:
    """Fault 5 (AOF everysec): the server calls its durability `relaxed`; what a crash loses is reported as
    `state_rolled_back`, and never replaced by a silent fork."""
    world = make_world(kind="redis", fsync="everysec")
    replica = world.cluster.replicas[0]
    ready = world.cluster.send(replica, "GET", "/readyz").json
    assert (ready["durability"], ready["ready"]) == ("relaxed", True)
    assert "a crash of the store may lose" in replica.log.read_text()
    take = begun(world)
    kept = take.truth
    with losing(world.store):
        world.player.advance(take, Move(poses=path(60, 37)), "application/json")
    assert take.truth.next_chunk > kept.next_chunk
    for each in world.cluster.replicas:  # those that have the lost chunks in memory, too
        body = Move(poses=path(24, 97)).body() | {"expected_chunk": take.truth.next_chunk}
        answer = world.cluster.send(each, "POST", f"{take.path}/chunks", body, key=f"more-{each.pid}")
        assert (answer.status, answer.code) == (409, "state_rolled_back")
        assert answer.json["next_chunk"] == kept.next_chunk
    take.truth = kept
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    for place in (0, 1):
        move = Move(poses=path(24, take.truth.next_frame, 0.02))
        world.another(only=place).advance(take, move, "application/json")
    world.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_frozen_for_a_moment(make_world: MakeWorld, kind: str) -> None:
    """Fault 6: SIGSTOP of the store for 1.5 s: slower, no failure, nothing twice."""
    world = make_world(kind=kind, LONGTAKE_LEASE_S="5")
    take = begun(world)
    world.store.freeze()
    began = time.monotonic()
    running = in_thread(lambda: world.another(only=0).advance(take, Move(poses=path(60, 37)), "application/json"))
    until(lambda: time.monotonic() > began + 1.5)
    world.store.thaw()
    answer = running.result(20)
    assert (answer.status, answer.attempts) == (201, 1)
    world.settle()


def test_a_store_frozen_for_long(world: World) -> None:
    """Fault 6 (SIGSTOP of Redis): longer than the time-out: 503 within the deadline, /readyz red, no pile of
    requests or threads, no double apply once it goes on, no restart."""
    take = begun(world)
    replica, move = world.cluster.replicas[0], Move(poses=path(24, 37))
    threads = replica.threads()
    world.store.freeze()
    jobs = [
        in_thread(lambda n=n: world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key=f"long-{n}"))  # type: ignore[misc]
        for n in range(10)
    ]
    ready = world.cluster.send(replica, "GET", "/readyz")
    assert ready.status == 503
    assert not ready.json["ready"]
    assert world.cluster.send(replica, "GET", "/healthz").status == 200
    answers = [job.result(40) for job in jobs]
    assert {answer.code for answer in answers} == {"store_unavailable"}, [answer.content for answer in answers]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert replica.threads() <= threads + 16
    world.store.thaw()
    until(lambda: world.cluster.send(replica, "GET", "/readyz").status == 200)
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("when", ["before", "during"])
def test_the_store_is_away_while_a_chunk_is_made(make_world: MakeWorld, when: str) -> None:
    """Fault 4: a chunk that is being made while the store goes fails cleanly or is committed when it comes back; the
    retry goes on from what was committed."""
    world = make_world(TOY_DELAY_S="0.3")
    take = begun(world)
    move = Move(poses=path(84, 37))
    replica = world.cluster.replicas[0]
    running = in_thread(lambda: world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="away"))
    until(lambda: world.store.raw.hlen(_branch(world, take.id)) >= (2 if when == "during" else 1))
    world.store.kill()
    failed = running.result(30)
    assert failed.code == "store_unavailable", failed.content
    world.store.start()
    before, take.truth = take.truth, take.truth.moved(move)
    answer = world.player.post(take, move, "away", "application/json", None)
    world.player.check_advanced(take, answer, before)
    world.settle()


def _branch(world: World, session_id: str) -> bytes:
    """Key of the log of a session that was never rewound."""
    return next(iter(world.store.raw.keys(f"*:c:{session_id}*")))


@pytest.mark.parametrize("mark", [b"\r\nSET\r\n", COMMIT, b"EVALSHA"], ids=["upload", "commit", "any script"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swallowed_reply(make_world: MakeWorld, kind: str, mark: bytes) -> None:
    """Fault 12: the reply to an upload, a commit, a script is lost after it was applied: nothing is applied twice, and
    the final answer is right."""
    world = make_world(kind=kind)
    take = begun(world)
    player = world.another(only=0)
    for _ in range(3):
        world.proxies[0].swallow_reply(mark)
        player.advance(take, Move(poses=path(60, take.truth.next_frame)), "application/json")
        assert world.proxies[0].fired.wait(5), "nothing was swallowed"
        assert world.player.caller.call("GET", take.path).json["next_chunk"] == take.truth.next_chunk
    world.settle()


@pytest.mark.parametrize("count", [0, 1, 40, 100_000])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_cut_in_the_middle_of_a_value(make_world: MakeWorld, way: str, count: int) -> None:
    """Fault 13 (connection cut mid-value): after N bytes of a blob's SET, or of the answer to a GET: not
    applied, or read again on a new connection; a short blob is never taken for a whole one."""
    world = make_world(TOY_STATE_BYTES=str(2 * 2**20))
    take = begun(world)
    player = world.another(only=0)
    for _ in range(2):
        if way == "up":
            world.proxies[0].cut_after("up", count, b"\r\nSET\r\n")
            player.advance(take, Move(poses=path(48, take.truth.next_frame)), "application/json")
        else:
            world.cluster.restart(0)  # so that the state is read from the store
            world.proxies[0].cut_after("down", count, b"$")
            player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
        assert world.proxies[0].fired.wait(5), "nothing was cut"
    world.settle()


def test_a_partition_between_a_replica_and_the_store(world: World) -> None:
    """Fault 14: one replica loses the store for longer than its lease: it answers 503 in time, the other one goes on,
    and when it is over the first one writes nothing that is stale."""
    take = begun(world)
    lost, fine = world.another(only=0), world.another(only=1)
    world.proxies[0].partition()
    running = in_thread(lambda: lost.caller.call("POST", f"{take.path}/chunks", {"prompt": "rain"}, again=frozenset()))
    fine.advance(take, Move(poses=path(60, 37)), "application/json")
    answer = running.result(25)
    assert (answer.status, answer.code) == (503, "store_unavailable")
    world.proxies[0].heal()
    stands = fine.caller.call("GET", take.path)
    if stands.json["prompt"] == "rain":  # it reached the store after all, when the line was mended
        take.truth = take.truth.moved(Move(prompt="rain"))
    fine.check_session(take, stands)
    lost.advance(take, accept="application/json")
    world.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_without_memory_left(make_world: MakeWorld, kind: str) -> None:
    """Fault 15 (Redis at maxmemory): reached mid-upload: 507 `store_full`, head intact; deleting makes room
    and so does a larger limit; then the retry succeeds."""
    world = make_world(kind=kind, TOY_STATE_BYTES=str(2 * 2**20))
    take = begun(world)
    victim = world.player.create()
    world.player.advance(victim, Move(poses=path(72)), "application/json")
    world.store.set("maxmemory", str(int(world.store.raw.info("memory")["used_memory"]) + 400_000))
    move = Move(poses=path(24 * 8, 37))
    answer = world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/chunks", move.body(), key="full")
    before, take.truth = take.truth, take.truth.moved(move)
    if answer.status != 201:
        assert (answer.status, answer.code) == (507, "store_full"), answer.content
        stands = world.player.caller.call("GET", take.path).json["next_chunk"]
        assert stands == before.next_chunk + answer.json.get("committed", 0)
    assert world.player.caller.call("GET", f"{take.path}/chunks/0").status == 200
    assert world.player.caller.call("DELETE", victim.path).status == 204, "deleting must work when memory is short"
    world.store.set("maxmemory", "0")
    answer = world.player.post(take, move, "full", "application/json", None)
    world.player.check_advanced(take, answer, before)
    world.settle()


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_full_disk(make_world: MakeWorld, tmp_path: Path, fsync: str) -> None:
    """Fault 17 (disk full): under the AOF, both ways of syncing: 503 or 507 with a reason; with room again,
    everything acknowledged is there."""
    with small_disk(tmp_path / "disk", 24) as disk:
        world = make_world(kind="redis", fsync=fsync, options={"dir": str(disk)}, TOY_STATE_BYTES=str(2**20))
        take = begun(world)
        filler = disk / "filler"
        filler.write_bytes(bytes(1))
        free = shutil.disk_usage(disk).free
        filler.write_bytes(bytes(max(1, free - 3 * 2**20)))
        codes: set[str] = set()
        for n in range(40):
            move = Move(poses=path(24, take.truth.next_frame))
            answer = world.cluster.send(
                world.cluster.replicas[0], "POST", f"{take.path}/chunks", move.body(), key=f"disk-{n}"
            )
            codes.add(answer.code)
            if answer.status != 201:
                break
            take.truth = take.truth.moved(move)
        assert codes & {"store_unavailable", "store_full"}, codes
        filler.unlink()
        if world.store.ended:  # with fsync always the server ends by itself
            world.store.start()
        before, take.truth = take.truth, take.truth.moved(move)
        answer = world.player.post(take, move, f"disk-{n}", "application/json", None)
        world.player.check_advanced(take, answer, before)
        world.settle()
        world.store.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_append_only_file(make_world: MakeWorld, kind: str) -> None:
    """Fault 18: the AOF's tail is torn: the store starts with everything that was acknowledged before the torn
    command."""
    world = make_world(kind=kind)
    take = begun(world)
    world.player.advance(take, Move(poses=path(60, 37)), "application/json")
    world.store.stop()
    with world.store.append_only_files()[-1].open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$1000\r\nhalf of it")
    world.store.start()
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_append_only_file(make_world: MakeWorld, kind: str) -> None:
    """Fault 18: a flipped byte in the middle: the store refuses to start and says why; servers answer 503 meanwhile."""
    world = make_world(kind=kind)
    take = begun(world)
    world.store.stop()
    file = world.store.append_only_files()[-1]
    sound = file.read_bytes()
    place = sound.index(b"\r\n*", len(sound) // 2) + 2
    file.write_bytes(sound[:place] + b"!" + sound[place + 1 :])
    with pytest.raises(RuntimeError, match="Bad file format"):
        world.store.start()
    ready = world.cluster.send(world.cluster.replicas[0], "GET", "/readyz")
    assert (ready.status, ready.json["ready"]) == (503, False)
    file.write_bytes(sound)
    world.store.start()
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.settle()


def test_a_store_that_forgets_its_scripts(world: World) -> None:
    """Fault 25: SCRIPT FLUSH between any two steps: nobody notices."""
    take = begun(world)
    for _ in range(4):
        world.store.raw.script_flush()
        world.player.advance(take, accept="application/json")
        world.store.raw.script_flush()
        world.player.read(take)
    world.settle()


@pytest.mark.parametrize("how", ["flushall", "restarted empty"])
def test_a_store_that_comes_back_empty(world: World, how: str) -> None:
    """Fault 25: FLUSHALL, or a start on an empty directory: sessions are not there (404), never new ones under old
    ids."""
    take = begun(world)
    if how == "flushall":
        world.store.raw.flushall()
    else:
        world.store.kill()
        shutil.rmtree(world.store.folder)
        world.store.start()
    for place in (0, 1):
        player = world.another(only=place)
        for method, address in (("GET", take.path), ("DELETE", take.path), ("GET", f"{take.path}/chunks/0")):
            assert player.caller.call(method, address).code == "session_not_found"
        answer = player.caller.call("POST", f"{take.path}/chunks", Move(poses=path(24, 37)).body(), key="gone")
        assert (answer.status, answer.code) == (404, "session_not_found")
    world.player.takes.clear()
    world.player.advance(begun(world))
    world.settle()


def test_a_failover_to_a_replica_that_lags(make_world: MakeWorld, tmp_path: Path) -> None:
    """Fault 23: the store fails over to a replica of its own that lacks the last chunks: `state_rolled_back` for
    whoever expects them, and the takes go on from where the new primary stands: never a silent fork."""
    world = make_world()
    take = begun(world)
    with StoreServer("valkey", tmp_path / "lagging") as other, FaultProxy(world.store.port) as link:
        other.raw.execute_command("REPLICAOF", "127.0.0.1", str(link.port))
        until(lambda: in_step(world.store, other), what="replication")
        kept = take.truth
        link.partition()
        world.player.advance(take, Move(poses=path(60, 37)), "application/json")
        lost = take.truth.next_chunk
        world.store.kill()
        link.refuse()
        other.raw.execute_command("REPLICAOF", "NO", "ONE")
        for proxy in world.proxies:
            proxy.redirect(other.port)
        take.truth = kept
        body = Move(poses=path(24, 97)).body() | {"expected_chunk": lost}
        until(lambda: world.cluster.send(world.cluster.replicas[0], "GET", "/readyz").status == 200)
        answer = world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/chunks", body, key="after")
        assert (answer.status, answer.code) == (409, "state_rolled_back"), answer.content
        for place in (0, 1):
            world.another(only=place).advance(take, accept="application/json")
        world.store.close()
        world.store = other
        world.settle()


def in_step(primary: StoreServer, other: StoreServer) -> bool:
    """Whether a replica of a store has all that was written."""
    there = other.raw.info("replication")
    offset = primary.raw.info("replication")["master_repl_offset"]
    return there.get("master_link_status") == "up" and there["slave_repl_offset"] == offset


def test_a_stalled_replica_of_the_store(make_world: MakeWorld, tmp_path: Path) -> None:
    """Fault 24: a replica of the store that stalls while more is written than its buffer holds: the primary goes on,
    and the replica becomes whole again by itself."""
    limits = {"client-output-buffer-limit": "replica 4mb 4mb 1", "repl-backlog-size": "1mb"}
    world = make_world(options=limits, TOY_STATE_BYTES=str(2**20))
    take = begun(world)
    with StoreServer("valkey", tmp_path / "stalled") as other:
        other.raw.execute_command("REPLICAOF", "127.0.0.1", str(world.store.port))
        until(lambda: in_step(world.store, other), what="replication")
        other.freeze()
        for _ in range(16):
            world.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
        other.thaw()
        until(lambda: in_step(world.store, other), 30, "a resynchronisation")
        assert other.raw.info("replication")["master_link_status"] == "up"
        books = world.cluster.store(other.url)  # what the replica has is the whole truth
        world.player.settle(books)
        books.close()
    world.settle()


def test_sessions_are_left_alone_while_the_store_is_down(world: World) -> None:
    """Fault 4: reads fail with a problem as well, and a stream is cut, not ended."""
    take = begun(world)
    world.player.advance(take, Move(poses=path(60, 37)), "application/json")
    world.store.kill()
    replica = world.cluster.replicas[0]
    for address in (take.path, f"{take.path}/chunks", f"{take.path}/chunks/0/video", "/v1/sessions"):
        assert world.cluster.send(replica, "GET", address).code == "store_unavailable"
    assert world.cluster.send(replica, "POST", f"{take.path}/chunks", {"pad": True}).code == "store_unavailable"
    world.store.start()
    answer = world.cluster.send(replica, "GET", f"{take.path}/video")
    assert answer.status == 200
    assert answer.content
    books = world.cluster.store(world.store.url)
    fsck(books, take.id, world.cluster.findings, take.truth)
    books.close()
    world.settle()
