"""Real servers that are full, evict, vanish or lose an answer."""

import contextlib
import select
import socket
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.connection import PythonRespSerializer
from store_fixtures import make_cursor, make_rewind, make_session, make_snapshot, make_step, take
from store_probes import RedisProbe

from longtake.state_cache import (
    Commit,
    RedisStore,
    Retention,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    lineage_of,
    new_session_id,
)
from longtake.state_cache.connections import to_bytes


class LosesAnswers(socketserver.BaseRequestHandler):
    """Passes everything on, but closes the connection in place of a script's answer."""

    target: str

    def handle(self) -> None:
        asked = False
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.target)
            while data := (source := select.select([self.request, server], [], [])[0][0]).recv(1 << 16):
                asked = asked or (source is self.request and b"EVALSHA" in data)
                if source is server and asked:
                    return
                (server if source is self.request else self.request).sendall(data)


@contextlib.contextmanager
def lossy_proxy(target: str) -> Iterator[str]:
    """Path of a socket that leads to the server at `target`, losing what scripts answer."""
    handler = type("Handler", (LosesAnswers,), {"target": target})
    with (
        tempfile.TemporaryDirectory(prefix="lt-") as folder,
        socketserver.ThreadingUnixStreamServer(f"{folder}/s", handler) as proxy,
    ):
        threading.Thread(target=proxy.serve_forever, args=(0.01,)).start()
        yield f"{folder}/s"
        proxy.shutdown()


def test_a_full_server_refuses_writes_and_still_frees(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    store = probe.store
    session_id = make_session(store)
    fence = take(store, session_id)
    commit = make_step(store, session_id, fence, 0)
    store.commit(commit)
    snapshot = make_snapshot(store, session_id, 1.0)
    store.attach(session_id, fence, 0, 0, snapshot)
    expired, alive = (make_session(store, ttl_s=60) for _ in range(2))
    probe.set_expiry(expired, -1)
    probe.set_due(alive, 1)
    try:
        probe.raw.config_set("maxmemory", 1)
        assert store.sweep() == 1
        store.delete(alive)
        with pytest.raises(StoreFull):
            store.put(session_id, [b"more"])
        with pytest.raises(StoreFull):
            store.commit(Commit(session_id=session_id, fence=fence, revision=0, expected_head=0, cursor=make_cursor()))
        assert store.chunk(session_id, 0) == commit.chunk
        with pytest.raises(StoreFull):
            store.attach(session_id, fence, 0, 0, snapshot)
        with pytest.raises(StoreFull):
            store.rewind(make_rewind(store, session_id, fence, -1))
        store.renew(session_id, fence, 60)
        store.release(session_id, fence)
        store.delete(session_id)
        for name in (session_id, expired, alive):
            store.collect(lineage_of(name), Retention())
    finally:
        probe.raw.config_set("maxmemory", 0)
    assert probe.keys() == set()
    probe.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_unsuitable(redis_server: str, policy: str) -> None:
    probe = RedisProbe(redis_server)
    try:
        probe.raw.config_set("maxmemory-policy", policy)
        with pytest.raises(StoreUnsuitable, match=policy):
            probe.store.check()
    finally:
        probe.raw.config_set("maxmemory-policy", "noeviction")
    assert probe.store.check().server == "redis"
    probe.close()


@pytest.mark.parametrize(
    ("appendonly", "fsync", "durability"),
    [("yes", "always", "strict"), ("yes", "everysec", "relaxed"), ("no", "always", "none")],
)
def test_durability_is_told_as_it_is(redis_server: str, appendonly: str, fsync: str, durability: str) -> None:
    probe = RedisProbe(redis_server)
    try:
        probe.raw.config_set("appendonly", appendonly)
        probe.raw.config_set("appendfsync", fsync)
        assert probe.store.check().durability == durability
    finally:
        probe.raw.config_set("appendonly", "no")
    probe.close()


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    store = RedisStore(f"unix://{tmp_path}/none", timeout=0.5)
    with pytest.raises(StoreUnavailable):
        store.read(new_session_id())
    with pytest.raises(StoreUnavailable):
        store.put(new_session_id(), [b"data"])


def test_scripts_survive_being_flushed(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store)
    probe.raw.script_flush()
    probe.store.commit(make_step(probe.store, session_id, take(probe.store, session_id), 0))
    assert probe.store.read(session_id)[1].chunk == 0
    probe.close()


def test_a_closed_connection_is_replaced(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store)
    probe.raw.client_kill_filter(_type="normal", skipme=True)
    assert probe.store.read(session_id)[0].id == session_id
    probe.close()


def test_a_step_whose_answer_is_lost_is_not_repeated(redis_server: str) -> None:
    direct = RedisProbe(redis_server)
    session_id = make_session(direct.store)
    assert take(direct.store, session_id).token == 1
    with lossy_proxy(redis_server.removeprefix("unix://")) as proxy:
        store = RedisStore(f"unix://{proxy}", direct.prefix)
        with pytest.raises(StoreUnavailable):
            take(store, session_id)
        store.close()
    assert take(direct.store, session_id).token == 3
    direct.close()


def test_large_values_are_sent_without_a_copy() -> None:
    data = memoryview(bytearray(10_000))
    packed = PythonRespSerializer(6000, to_bytes).pack("SET", "key", data, "PX", 600)
    assert any(part is data for part in packed)
    assert b"".join(packed).startswith(b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$10000\r\n")
