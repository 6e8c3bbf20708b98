"""Clients that leave, read slowly or never finish their request; a device that runs out of memory."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from faults.cluster import until
from faults.fixtures import MakeWorld, World, in_thread
from faults.players import Take
from faults.replica import Replica
from faults.test_commit_steps import begun
from faults.truth import Move, path


@contextmanager
def raw_request(replica: Replica, take: Take, body: object, key: str, accept: str) -> Iterator[socket.socket]:
    """A POST whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    head = (
        f"POST {take.path}/chunks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
        f"Idempotency-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with connected(replica) as client:
        client.sendall(head.encode() + data)
        yield client


@contextmanager
def connected(replica: Replica) -> Iterator[socket.socket]:
    """A TCP connection to a server."""
    with socket.create_connection(("127.0.0.1", urlsplit(replica.url).port or 0)) as client:
        client.settimeout(20)
        yield client


def free_places(world: World, place: int) -> int:
    """Requests that a replica would admit now."""
    text = world.cluster.send(world.cluster.replicas[place], "GET", "/metrics").content.decode()
    values = {line.split()[0]: float(line.split()[-1]) for line in text.splitlines() if line and line[0] != "#"}
    return int(values["longtake_queue_capacity"] - values["longtake_queue_depth"])


@pytest.mark.parametrize("accept", ["application/json", "video/mp4"])
@pytest.mark.parametrize("when", ["queued", "denoising", "streaming"])
def test_a_client_that_leaves(make_world: MakeWorld, when: str, accept: str) -> None:
    """Fault 27 (client gone while queued, denoising, streaming): its place is free within a second, the
    state is the last committed one, the retry goes on from there."""
    world = make_world(TOY_DELAY_S="0.2")
    take, blocker = begun(world), world.player.create()
    world.player.takes.append(blocker)
    replica, places = world.cluster.replicas[0], free_places(world, 0)
    move = Move(poses=path(108, 37))
    with ExitStack() as stack:
        if when == "queued":
            body = Move(poses=path(96)).body()
            stack.enter_context(raw_request(replica, blocker, body, "block", "application/json"))
            until(lambda: free_places(world, 0) < places)
        client = stack.enter_context(raw_request(replica, take, move.body(), "left", accept))
        until(lambda: free_places(world, 0) == places - (2 if when == "queued" else 1))
        if when == "streaming":
            until(lambda: world.cluster.send(replica, "GET", take.path).json["next_chunk"] > 1)
            if accept == "video/mp4":
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: free_places(world, 0) == places, 1.5, "the place being free")
    stands = world.cluster.send(replica, "GET", take.path).json["next_chunk"]
    before, take.truth = take.truth, take.truth.moved(move)
    assert before.next_chunk <= stands < take.truth.next_chunk
    moved = world.cluster.send(replica, "GET", blocker.path).json["next_chunk"]
    blocker.truth = blocker.truth.moved(Move(poses=path(24 * moved))) if moved else blocker.truth
    answer = world.player.post(take, move, "left", "application/json", None)
    world.player.check_advanced(take, answer, before)
    world.settle()


def test_a_slow_reader(make_world: MakeWorld) -> None:
    """Fault 28 (slow reader): a client that reads a byte now and then holds up nobody, and what the server
    keeps for it is bounded; a half-open connection neither."""
    world = make_world()
    take, other = begun(world), world.player.create()
    world.player.takes.append(other)
    replica = world.cluster.replicas[0]
    before = replica.resident_bytes()
    move = Move(poses=path(24 * 60, 37))
    with raw_request(replica, take, move.body(), "slow", "video/mp4") as client, connected(replica) as half_open:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        half_open.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        for _ in range(20):
            began = time.monotonic()
            world.another(only=0).advance(other, accept="application/json")
            assert time.monotonic() - began < 5
            client.recv(64)
        assert replica.resident_bytes() < before + 100e6
    before_truth, take.truth = take.truth, take.truth.moved(move)
    answer = world.player.post(take, move, "slow", "application/json", None)
    world.player.check_advanced(take, answer, before_truth)
    world.settle()


def test_idle_connections(world: World) -> None:
    """Fault 29: hundreds of connections that send half a request each: the others are served, and nothing stays
    behind."""
    take, replica = begun(world), world.cluster.replicas[0]
    before = replica.descriptors()
    with ExitStack() as stack:
        for n in range(300):
            client = stack.enter_context(connected(replica))
            client.sendall((b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"POST /v1", b"")[n % 3])
        world.another(only=0).advance(take, accept="application/json")
    until(lambda: replica.descriptors() <= before + 10, what="the connections being closed")
    world.settle()


def test_a_body_that_ends_early(world: World) -> None:
    """Fault 30: a client that dies in the middle of its body changes nothing."""
    take, replica = begun(world), world.cluster.replicas[0]
    body = json.dumps(Move(poses=path(24, 37)).body()).encode()
    with connected(replica) as client:
        head = f"POST {take.path}/chunks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-10])
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_device_without_memory(make_world: MakeWorld, chunk: int) -> None:
    """Fault 39 (GPU out of memory): the request fails with a problem that says how far it came; the retry
    goes on from the last commit, the same bits."""
    world = make_world()
    take = begun(world)
    replica = world.cluster.restart(0, TOY_FAIL_AT=str(chunk))
    move = Move(poses=path(60, 37))
    failed = world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="memory")
    assert failed.status >= 500, failed.content
    assert failed.code
    assert failed.json["next_chunk"] == chunk
    before, take.truth = take.truth, take.truth.moved(move)
    answer = world.another(only=0).post(take, move, "memory", "application/json", None)
    world.player.check_advanced(take, answer, before)
    world.cluster.restart(0)
    world.settle()


def test_the_same_key_while_it_runs(make_world: MakeWorld) -> None:
    """Duplicate POST, in flight and later: the first attempt still runs: 409 `in_progress`, later its
    answer."""
    world = make_world(TOY_DELAY_S="0.5")
    take, replica = begun(world), world.cluster.replicas[0]
    move = Move(poses=path(24, 37))
    running = in_thread(lambda: world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="one"))
    until(lambda: free_places(world, 0) < 32)
    again = world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="one")
    assert (again.status, again.code) in ((409, "in_progress"), (201, "")), again.content
    first = running.result(20)
    later = world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="one")
    assert (later.content, later.replayed) == (first.content, True)
    take.truth = take.truth.moved(move)
    world.settle()
