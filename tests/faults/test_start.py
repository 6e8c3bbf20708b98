"""Stores that a server must not start with, or that change under it: distinct errors, no half-started server."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.cluster import until
from faults.fixtures import MakeWorld
from faults.replica import ReplicaDiedError, Zygote
from faults.stores import StoreServer, free_port
from faults.test_commit_steps import begun
from faults.truth import Move, path

KINDS = ("redis", "valkey")


def refused(zygote: Zygote, url: str, **environment: str) -> str:
    """What a server says that does not start."""
    with pytest.raises(ReplicaDiedError) as error:
        zygote.fork(LONGTAKE_STATE_URL=url, **environment)
    said = str(error.value)
    assert "error: " in said, f"no reason is given: {said}"
    assert "Traceback" not in said
    return said.partition("error: ")[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_store_that_evicts(zygote: Zygote, tmp_path: Path, kind: str, policy: str) -> None:
    """Fault 16: an eviction policy would destroy sessions in part: the start-up check refuses."""
    with StoreServer(kind, tmp_path / "store", **{"maxmemory-policy": policy}) as store:
        assert policy in refused(zygote, store.url)


def test_a_store_that_begins_to_evict(make_world: MakeWorld) -> None:
    """Fault 16: the policy is changed while a server runs: it is not ready any more, and says why."""
    world = make_world()
    world.store.set("maxmemory-policy", "allkeys-lru")
    replica = world.cluster.replicas[0]
    until(lambda: world.cluster.send(replica, "GET", "/readyz").status == 503)
    assert "allkeys-lru" in world.cluster.send(replica, "GET", "/readyz").json["detail"]
    world.store.set("maxmemory-policy", "noeviction")
    until(lambda: world.cluster.send(replica, "GET", "/readyz").status == 200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fsync", "durability", "starts"),
    [
        ("always", "strict", True),
        ("everysec", "strict", False),
        ("everysec", "relaxed", True),
        ("off", "relaxed", False),
        ("off", "none", True),
    ],
)
def test_a_store_that_is_less_durable_than_asked(
    zygote: Zygote,
    tmp_path: Path,
    kind: str,
    fsync: str,
    durability: str,
    starts: bool,
) -> None:
    """Fault 5: the durability class is stated, and refused below the configured minimum."""
    with StoreServer(kind, tmp_path / "store", fsync) as store:
        if starts:
            zygote.fork(LONGTAKE_STATE_URL=store.url, LONGTAKE_DURABILITY=durability).stop()
        else:
            said = refused(zygote, store.url, LONGTAKE_DURABILITY=durability)
            assert "LONGTAKE_DURABILITY" in said
            assert durability in said


def test_a_wrong_password(zygote: Zygote, tmp_path: Path) -> None:
    """Fault 26: none or a wrong password: an error of its own, which does not repeat the one that was given."""
    with StoreServer("valkey", tmp_path / "store", requirepass="right") as store:
        for url in (store.url, store.url.replace("//", "//:wrong@")):
            said = refused(zygote, url)
            assert "authenticat" in said.lower() or "password" in said.lower(), said
            assert "wrong@" not in said
        right = zygote.fork(LONGTAKE_STATE_URL=store.url.replace("//", "//:right@"))
        assert right.stop() == 0


def test_nobody_listens(zygote: Zygote) -> None:
    """Fault 26: no store at that address: an error that names it."""
    port = free_port()
    assert str(port) in refused(zygote, f"redis://127.0.0.1:{port}/0")


def test_a_store_that_is_a_replica(make_world: MakeWorld, tmp_path: Path) -> None:
    """Fault 26: READONLY: refused at the start; a store that becomes a replica makes servers unready until it is
    not."""
    world = make_world()
    take = begun(world)
    with StoreServer("valkey", tmp_path / "primary") as primary:
        world.store.raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert "replica" in refused(world.cluster.zygote, world.store.url)
        replica = world.cluster.replicas[0]
        assert world.cluster.send(replica, "GET", "/readyz").status == 503
        answer = world.cluster.send(replica, "POST", f"{take.path}/chunks", Move(poses=path(24, 37)).body())
        assert (answer.status, answer.code) == (503, "store_unavailable"), answer.content
        world.store.raw.execute_command("REPLICAOF", "NO", "ONE")
        assert not primary.ended
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("command", ["evalsha", "set", "get"])
def test_a_store_that_denies_a_command(make_world: MakeWorld, command: str) -> None:
    """Fault 26: an ACL that denies a command: 503 with a reason while it does, nothing is half done."""
    world = make_world()
    take = begun(world)
    world.store.raw.execute_command("ACL", "SETUSER", "default", f"-{command}")
    world.cluster.restart(0) if command == "get" else None
    replica = world.cluster.replicas[0]
    answer = world.cluster.send(replica, "POST", f"{take.path}/chunks", Move(poses=path(24, 37)).body(), key="denied")
    assert (answer.status, answer.code) == (503, "store_unavailable"), answer.content
    world.store.raw.execute_command("ACL", "SETUSER", "default", f"+{command}")
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


def test_a_store_that_is_loading(make_world: MakeWorld) -> None:
    """Fault 26: LOADING after a restart: 503 meanwhile, and everything is there once it has loaded."""
    world = make_world(kind="valkey")
    take = begun(world)
    for n in range(30):
        world.store.raw.set(f"ballast:{n}", bytes(4 * 2**20))
    world.store.option("key-load-delay", "20000")
    world.store.option("loading-process-events-interval-bytes", "1024")
    world.store.kill()
    world.store.start(ready=False)
    seen: set[str] = set()
    until(lambda: seen.add(world.cluster.send(world.cluster.replicas[0], "GET", take.path).code) or "" in seen, 30)
    assert seen <= {"", "store_unavailable"}, seen
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.settle()


def test_a_store_that_is_too_old(zygote: Zygote) -> None:
    """Fault 26: a server without what is needed (Redis 6): refused, naming both versions."""
    with fake_store("6.2.14") as port:
        said = refused(zygote, f"redis://127.0.0.1:{port}/0")
    assert "6.2.14" in said
    assert "7" in said


@contextmanager
def fake_store(version: str) -> Iterator[int]:
    """A port where somebody says to be a Redis of this version."""
    info = f"redis_version:{version}\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n".encode()

    class Talk(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                words = [self.rfile.readline() and self.rfile.readline().strip().upper() for _ in range(int(line[1:]))]
                known = {b"INFO": b"$%d\r\n%s\r\n" % (len(info), info), b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n"}
                self.wfile.write(known.get(words[0], b"+OK\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()
