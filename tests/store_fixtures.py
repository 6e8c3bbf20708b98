"""Stores to test against: memory, Debian's Redis and the embedded Valkey, always real servers."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from store_probes import MemoryProbe, Probe, RedisProbe

from longtake.state_cache import (
    Arena,
    ChunkRecord,
    Commit,
    Cursor,
    EmbeddedServer,
    Fence,
    File,
    Fingerprint,
    Head,
    Holder,
    Parent,
    Place,
    RequestRecord,
    Rewind,
    SessionRecord,
    Store,
    lineage_of,
    load_file,
    load_tensors,
    new_session_id,
    packaged_binary,
    save_file,
    save_tensors,
    state_digest,
)
from longtake.state_cache.records import Controller

HOLDER, RIVAL = Holder("replica 1", "http://one:8000"), Holder("replica 2", "http://two:8000")


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
    return Cursor(controller=make_controller(controller), seed=7)


def make_controller(name: str) -> Controller:
    return {"name": name, "pitch": 0.25, "velocity": [0.0, 1.0]}


def make_text(store: Store, session_id: str, value: float) -> Arena:
    """The embedding of a prompt."""
    return save_tensors(store, session_id, {"text": torch.full((2, 4), value)})


def make_chunk(
    store: Store, session_id: str, index: int, *, seed: int | None = None, text: Arena | None = None
) -> ChunkRecord:
    """A log record with real blobs that depend on `seed`."""
    seed = index if seed is None else seed
    return ChunkRecord(
        index=index,
        kind="generated",
        poses=bytes(24 * 16 * 8),
        intrinsics=bytes(24 * 4 * 8),
        controller=make_controller(f"after {index}"),
        seed=seed,
        prompt=None if text is None else "a forest",
        text=text,
        fingerprint=Fingerprint("weights", "numerics"),
        latents=save_tensors(store, session_id, {"latents": torch.full((3, 5), float(seed))}),
        segment=save_file(store, session_id, b"segment %d" % seed) if seed >= 0 else File(0, ()),
        init_size=3,
        frames_digest=f"sha256:frames {seed}",
        state_digest=state_digest(state_of(float(seed))),
        timings_ms={"denoise": 1.5},
        warnings=[],
        created_at=1.0,
    )


def state_of(value: float) -> dict[str, torch.Tensor]:
    """A full state of one tensor; that of a chunk has its seed as value."""
    return {"blocks.0.kv": torch.full((2, 3), value)}


def make_snapshot(store: Store, session_id: str, value: float) -> Arena:
    """A full state of one tensor."""
    return save_tensors(store, session_id, state_of(value))


def take(store: Store, session_id: str) -> Fence:
    """The fence of a lease that runs for a minute."""
    return store.acquire(session_id, HOLDER, 60).fence


def make_step(
    store: Store,
    session_id: str,
    fence: Fence,
    index: int,
    *,
    seed: int | None = None,
    revision: int = 0,
    text: Arena | None = None,
) -> Commit:
    """A commit of chunk `index`, whose blobs are in the store."""
    chunk = make_chunk(store, session_id, index, seed=seed, text=text)
    return Commit(
        session_id=session_id,
        fence=fence,
        revision=revision,
        expected_head=index - 1,
        cursor=chunk.cursor(),
        chunk=chunk,
    )


def write(
    store: Store,
    session_id: str,
    fence: Fence,
    count: int,
    *,
    seeds: int = 0,
    text: Arena | None = None,
    snapshots: bool = True,
) -> None:
    """Commit the next chunks of a session, of seeds `seeds` + index, each with its snapshot."""
    head = store.read(session_id)[1]
    for index in range(head.chunk + 1, head.chunk + 1 + count):
        seed = seeds + index
        store.commit(make_step(store, session_id, fence, index, seed=seed, revision=head.revision, text=text))
        if snapshots:
            store.attach(session_id, fence, head.revision, index, make_snapshot(store, session_id, float(seed)))


def make_fork(
    store: Store,
    parent: str,
    chunk: int,
    session_id: str | None = None,
    *,
    key: str | None = None,
    ttl_s: int | None = None,
) -> str:
    """A fork of a session behind its chunk `chunk`; returns its id."""
    session, head, _ = store.read(parent)
    child = msgspec.structs.replace(
        session,
        id=session_id or new_session_id(lineage_of(parent)),
        parent=Parent(parent, chunk),
        create_key=key,
        ttl_s=ttl_s,
    )
    store.fork(child, head, cursor_after(store, parent, chunk))
    return child.id


def make_rewind(store: Store, session_id: str, fence: Fence, to_chunk: int) -> Rewind:
    """A rewind of a session as it stands."""
    return Rewind(
        session_id=session_id,
        fence=fence,
        head=store.read(session_id)[1],
        to_chunk=to_chunk,
        cursor=cursor_after(store, session_id, to_chunk),
    )


def cursor_after(store: Store, session_id: str, chunk: int) -> Cursor:
    return make_cursor() if chunk < 0 else store.chunk(session_id, chunk).cursor()


def listed(store: Store, limit: int, after: Place | None = None, owner: str = "") -> list[str]:
    """Ids of an owner's sessions, newest first."""
    return [place.session_id for place in store.list(limit, after, owner)]


def seeds(store: Store, session_id: str) -> list[int]:
    """Seeds of every log record of a session: what `make_chunk` tells them apart by."""
    return [record.seed for record in store.chunks(session_id, 0, 1 << 40)]


def check_whole(store: Store, session_id: str) -> None:
    """A session can be read, played and restored from its horizon on: nothing that it needs is missing or damaged."""
    session, head, _ = store.read(session_id)
    assert load_tensors(store, session_id, session.conditions)
    records = store.chunks(session_id, 0, 1 << 40)
    assert [record.index for record in records] == list(range(head.chunk + 1))
    for record in records[head.horizon :]:
        assert not record.expired
        assert load_file(store, session_id, record.segment) == b"segment %d" % record.seed
        assert load_tensors(store, session_id, record.latents)["latents"][0, 0] == record.seed
    texts = [record.text for record in (*records, head.cursor)]
    assert all(load_tensors(store, session_id, text) for text in texts if text is not None)
    snapshots = store.snapshots(session_id)
    for index, snapshot in snapshots.items():
        assert load_tensors(store, session_id, snapshot)["blocks.0.kv"][0, 0] == records[index].seed
    assert head.horizon == 0 or head.horizon - 1 in snapshots


def make_request(fingerprint: str, *, done: bool) -> RequestRecord:
    return RequestRecord(
        fingerprint=fingerprint, first_chunk=0, chunks=1, frames_used=24, done=done, revision=0, pending_poses=0
    )


def furnish(store: Store, session_id: str | None = None, *, owner: str = "", ttl_s: int | None = None) -> str:
    """A session with all that one can have: a claim, a lease, chunks, snapshots and requests; returns its id."""
    session_id = session_id or new_session_id()
    store.claim(session_id, "print", session_id)
    make_session(store, session_id, key=session_id, owner=owner, ttl_s=ttl_s)
    fence = take(store, session_id)
    for index in range(3):
        commit = make_step(store, session_id, fence, index)
        store.commit(replace(commit, key=f"key {index}", request=make_request("print", done=True)))
        store.attach(session_id, fence, 0, index, make_snapshot(store, session_id, float(index)))
    return session_id


def _rewind_anywhere(store: Store, session_id: str) -> None:
    head = Head(chunk=0, revision=0, cursor=make_cursor())
    store.rewind(
        Rewind(session_id=session_id, fence=Fence(1, ""), head=head, to_chunk=-1, cursor=make_cursor()),
    )


CALLS: dict[str, Callable[[Store, str], object]] = {
    "acquire": lambda store, session_id: store.acquire(session_id, HOLDER, 60),
    "renew": lambda store, session_id: store.renew(session_id, Fence(1, ""), 60),
    "release": lambda store, session_id: store.release(session_id, Fence(1, "")),
    "read": lambda store, session_id: store.read(session_id),
    "chunk": lambda store, session_id: store.chunk(session_id, 0),
    "chunks": lambda store, session_id: store.chunks(session_id, 0, 9),
    "request": lambda store, session_id: store.request(session_id, "key"),
    "snapshots": lambda store, session_id: store.snapshots(session_id),
    "forks": lambda store, session_id: store.forks(session_id),
    "attach": lambda store, session_id: store.attach(session_id, Fence(1, ""), 0, 0, Arena((), ())),
    "rewind": _rewind_anywhere,
    "delete": lambda store, session_id: store.delete(session_id),
}


def _wait_for_socket(path: Path) -> None:
    for _ in range(500):
        if path.is_socket():
            return
        time.sleep(0.01)
    raise TimeoutError("redis-server did not start")
