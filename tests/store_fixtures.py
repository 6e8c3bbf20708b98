"""Stores to test against: memory, Debian's Redis and the embedded Valkey, always real servers."""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import redis
import torch

from longtake.state_cache import (
    Arena,
    BlobRef,
    ChunkRecord,
    Commit,
    Cursor,
    EmbeddedServer,
    Fence,
    File,
    Fingerprint,
    MemoryStore,
    RedisStore,
    RequestRecord,
    SessionRecord,
    Store,
    new_session_id,
    packaged_binary,
    save_file,
    save_tensors,
)

_prefixes = (f"t{n}" for n in itertools.count())


class Probe(Protocol):
    """A store, and hands inside it."""

    store: Store

    def keys(self) -> set[str]: ...
    def blobs(self) -> set[str]: ...
    def lifetime(self, session_id: str, ref: BlobRef) -> float | None: ...
    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None: ...
    def set_expiry(self, session_id: str, seconds: float) -> None: ...
    def claim_lifetime(self, route_key: str) -> float | None: ...
    def set_claim_lifetime(self, route_key: str, seconds: float) -> None: ...
    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None: ...
    def overwrite_session(self, session_id: str, data: bytes) -> None: ...


class MemoryProbe:
    def __init__(self) -> None:
        self.store = MemoryStore()

    def keys(self) -> set[str]:
        return {*self.store._sessions, *self.blobs(), *self.store._claims}

    def blobs(self) -> set[str]:
        return {name for _, name in self.store._blobs}

    def lifetime(self, session_id: str, ref: BlobRef) -> float | None:
        expires = self.store._blobs[session_id[4:17], ref.name].expires
        return None if expires is None else expires - self.store._clock()

    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None:
        self.store._blobs[session_id[4:17], ref.name].expires = self.store._clock() + seconds

    def set_expiry(self, session_id: str, seconds: float) -> None:
        self.store._sessions[session_id].expires = self.store._clock() + seconds

    def claim_lifetime(self, route_key: str) -> float | None:
        expires = self.store._claims[route_key].expires
        return None if expires is None else expires - self.store._clock()

    def set_claim_lifetime(self, route_key: str, seconds: float) -> None:
        self.store._claims[route_key].expires = self.store._clock() + seconds

    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None:
        self.store._blobs[session_id[4:17], ref.name].data = data

    def overwrite_session(self, session_id: str, data: bytes) -> None:
        self.store._sessions[session_id].record = data


class RedisProbe:
    def __init__(self, url: str) -> None:
        self.prefix = next(_prefixes)
        self.store = RedisStore(url, self.prefix)
        self.raw = redis.Redis.from_url(url)

    def close(self) -> None:
        self.store.close()
        self.raw.close()

    def keys(self) -> set[str]:
        return {key.decode() for key in self.raw.keys(f"{self.prefix}:*")}

    def blobs(self) -> set[str]:
        return {key.rsplit(":", 1)[1] for key in self.keys() if ":b:" in key}

    def lifetime(self, session_id: str, ref: BlobRef) -> float | None:
        left = self.raw.pttl(self._blob(session_id, ref))
        assert left != -2, "the blob is not there"
        return None if left == -1 else left / 1000

    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None:
        assert self.raw.pexpire(self._blob(session_id, ref), int(seconds * 1000))

    def set_expiry(self, session_id: str, seconds: float) -> None:
        expires = self.milliseconds() + int(seconds * 1000)
        assert self.raw.hset(self.head(session_id), "expires", expires) == 0, "the session never expires"
        self.set_due(session_id, expires)

    def set_due(self, session_id: str, milliseconds: float) -> None:
        assert self.raw.zadd(f"{self.prefix}:expiries", {session_id: milliseconds}) == 0, "the session is never due"

    def due(self, session_id: str) -> float | None:
        return self.raw.zscore(f"{self.prefix}:expiries", session_id)

    def milliseconds(self) -> int:
        seconds, microseconds = self.raw.time()
        return seconds * 1000 + microseconds // 1000

    def claim_lifetime(self, route_key: str) -> float | None:
        left = self.raw.pttl(self.store._directory._claim_key(route_key))
        assert left != -2, "the claim is not there"
        return None if left == -1 else left / 1000

    def set_claim_lifetime(self, route_key: str, seconds: float) -> None:
        assert self.raw.pexpire(self.store._directory._claim_key(route_key), int(seconds * 1000))

    def head(self, session_id: str) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:h:{session_id}"

    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None:
        self.raw.set(self._blob(session_id, ref), data, keepttl=True)

    def overwrite_session(self, session_id: str, data: bytes) -> None:
        self.raw.set(f"{self.prefix}:{{{session_id[4:17]}}}:s:{session_id}", data)

    def _blob(self, session_id: str, ref: BlobRef) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:b:{ref.name}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a `redis-server` from the PATH."""
    if (binary := shutil.which("redis-server")) is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="lt-") as folder:
        places = ["--port", "0", "--unixsocket", f"{folder}/s", "--dir", folder, "--logfile", "log"]
        command = [binary, *places, "--save", ""]
        with subprocess.Popen(command) as server:
            _wait_for_socket(Path(folder) / "s")
            yield f"unix://{folder}/s"
            server.terminate()


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The embedded server, running, on the Valkey that comes as a dependency."""
    with EmbeddedServer(tmp_path_factory.mktemp("embedded"), packaged_binary()) as server:
        yield server


@pytest.fixture(params=["memory", "redis", "valkey"])
def probe(request: pytest.FixtureRequest) -> Iterator[Probe]:
    """An empty store of each kind."""
    if request.param == "memory":
        yield MemoryProbe()
        return
    fixture = request.getfixturevalue("redis_server" if request.param == "redis" else "embedded")
    found = RedisProbe(fixture if isinstance(fixture, str) else fixture.start())
    yield found
    found.close()


@pytest.fixture
def any_store(probe: Probe) -> Store:
    """The store of `probe`."""
    return probe.store


def make_session(
    store: Store,
    session_id: str | None = None,
    *,
    created_at: float = 0.0,
    key: str | None = None,
    owner: str = "",
    ttl_s: int | None = None,
) -> str:
    """A new session whose condition is one small tensor; returns its id."""
    session_id = session_id or new_session_id()
    record = SessionRecord(
        id=session_id,
        model="tiny",
        fingerprint=Fingerprint("weights", "numerics"),
        prompt="a beach",
        seed=7,
        created_at=created_at,
        first_pose=torch.eye(4, dtype=torch.float64).flatten().tolist(),
        intrinsics=[100.0, 100.0, 64.0, 32.0],
        intrinsics_size=(129, 65),
        source_size=(129, 65),
        conditions=save_tensors(store, session_id, {"first": torch.arange(9.0)}),
        warnings=[],
        create_key=key,
        owner=owner,
        ttl_s=ttl_s,
    )
    store.create(record, make_cursor())
    return session_id


def make_cursor(controller: str = "smooth") -> Cursor:
    """A cursor to tell apart by its controller's name."""
    return Cursor(controller={"name": controller, "pitch": 0.25, "velocity": [0.0, 1.0]})


def make_chunk(store: Store, session_id: str, index: int, *, seed: int | None = None) -> ChunkRecord:
    """A log record with real blobs that depend on `seed`."""
    seed = index if seed is None else seed
    return ChunkRecord(
        index=index,
        kind="generated",
        poses=bytes(24 * 16 * 8),
        intrinsics=bytes(24 * 4 * 8),
        seed=seed,
        fingerprint=Fingerprint("weights", "numerics"),
        latents=save_tensors(store, session_id, {"latents": torch.full((3, 5), float(seed))}),
        segment=save_file(store, session_id, b"segment %d" % seed) if seed >= 0 else File(0, ()),
        init_size=3,
        frames_digest="sha256:0",
        state_digest="sha256:1",
        timings_ms={"denoise": 1.5},
        warnings=[],
        created_at=1.0,
    )


def make_snapshot(store: Store, session_id: str, value: float) -> Arena:
    """A full state of one tensor."""
    return save_tensors(store, session_id, {"blocks.0.kv": torch.full((2, 3), value)})


def _wait_for_socket(path: Path) -> None:
    for _ in range(500):
        if path.is_socket():
            return
        time.sleep(0.01)
    raise TimeoutError("redis-server did not start")


def make_step(store: Store, session_id: str, fence: Fence, index: int, *, seed: int | None = None) -> Commit:
    """A commit of chunk `index`, whose blobs are in the store."""
    return Commit(
        session_id=session_id,
        fence=fence,
        revision=0,
        expected_head=index - 1,
        cursor=make_cursor(f"after {index}"),
        chunk=make_chunk(store, session_id, index, seed=seed),
    )


def make_request(fingerprint: str, *, done: bool) -> RequestRecord:
    return RequestRecord(
        fingerprint=fingerprint, first_chunk=0, chunks=1, frames_used=24, done=done, revision=0, pending_poses=0
    )


def furnish(store: Store, session_id: str | None = None, *, owner: str = "", ttl_s: int | None = None) -> str:
    """A session with all that one can have: a claim, chunks, snapshots and requests; returns its id."""
    session_id = session_id or new_session_id()
    store.claim(session_id, "print", session_id)
    make_session(store, session_id, key=session_id, owner=owner, ttl_s=ttl_s)
    fence = store.open(session_id)
    for index in range(3):
        commit = replace(
            make_step(store, session_id, fence, index), snapshot=make_snapshot(store, session_id, float(index))
        )
        store.commit(replace(commit, key=f"key {index}", request=make_request("print", done=True)))
    return session_id


CALLS: dict[str, Callable[[Store, str], object]] = {
    "open": lambda store, session_id: store.open(session_id),
    "read": lambda store, session_id: store.read(session_id),
    "chunk": lambda store, session_id: store.chunk(session_id, 0),
    "chunks": lambda store, session_id: store.chunks(session_id, 0, 9),
    "request": lambda store, session_id: store.request(session_id, "key"),
    "snapshots": lambda store, session_id: store.snapshots(session_id),
    "prune": lambda store, session_id: store.prune_snapshots(session_id, Fence(1, ""), 1),
    "delete": lambda store, session_id: store.delete(session_id),
}
