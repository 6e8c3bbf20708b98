"""The state cache on real servers: commits, log records, snapshots, event-loop stalls; rows for RESULTS.md.

Starts its own Redis and Valkey. Everything that is timed is read back afterwards and compared, bytes and digests.
"""

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import report, row
from longtake.state_cache import (
    ChunkRecord,
    Commit,
    Cursor,
    Fence,
    Fingerprint,
    Holder,
    RedisStore,
    Retention,
    SessionRecord,
    Store,
    StoreStatus,
    StoreUnavailable,
    lineage_of,
    load_file,
    load_tensors,
    new_session_id,
    packaged_binary,
    save_tensors,
    state_digest,
)
from longtake.state_cache.codec import save_both
from longtake.state_cache.records import Controller

MB = 10**6
CONTROLLER: Controller = {"name": "smooth", "pitch": 0.0}
START = Cursor(controller=CONTROLLER, seed=7)
PRINT = Fingerprint("weights", "numerics")


def main() -> None:
    """Measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=150, help="commits of each size")
    parser.add_argument("--snapshots", type=int, default=5, help="snapshots of 1 GB, after one that is not counted")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = [found for binary in servers() for found in measure(binary, arguments.commits, arguments.snapshots)]
    report(rows, record=arguments.record)


def servers() -> list[Path]:
    """Redis from the PATH and Valkey from its package, those that are there."""
    redis = shutil.which("redis-server")
    return [path for path in (Path(redis) if redis else None, packaged_binary()) if path is not None]


def measure(binary: Path, commits: int, snapshots: int) -> list[str]:
    """All rows of one server."""
    with running(binary, fsync=True) as (store, name):
        rows = [log_records(store, name, size, commits) for size in (64_000, 3 * MB)]
        rows += [commits_of_a_small_model(store, name, size, commits) for size in (2 * MB, 8 * MB)]
        rows.append(large_snapshots(store, f"{name}, AOF always", snapshots))
    with running(binary, fsync=False) as (store, name):
        rows.append(large_snapshots(store, f"{name}, no AOF", snapshots))
    return rows


@contextmanager
def running(binary: Path, *, fsync: bool) -> Iterator[tuple[Store, str]]:
    """A store on a server of its own on 127.0.0.1, and the server's name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = ["--appendonly", "yes", "--appendfsync", "always"] if fsync else ["--appendonly", "no"]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", "log", *log]
        server = subprocess.Popen([*command, "--save", "", "--auto-aof-rewrite-percentage", "0"])
        store = RedisStore(f"redis://127.0.0.1:{port}", timeout=10)
        try:
            status = wait_for(store)
            assert status.durability == ("strict" if fsync else "none")
            yield store, f"{status.server} {status.version}"
        finally:
            store.close()
            server.kill()
            server.wait()


def wait_for(store: Store) -> StoreStatus:
    """Its status, once it answers."""
    give_up = time.monotonic() + 20
    while True:
        try:
            return store.check()
        except StoreUnavailable:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


@dataclass
class Take:
    """A session that goes on chunk by chunk."""

    store: Store
    id: str
    fence: Fence
    chunk: int = -1

    @classmethod
    def begin(cls, store: Store) -> "Take":
        """A new session under a lease."""
        session_id = new_session_id()
        session = SessionRecord(
            id=session_id,
            model="benchmark",
            fingerprint=PRINT,
            prompt="",
            seed=7,
            created_at=time.time(),
            first_pose=torch.eye(4).flatten().tolist(),
            intrinsics=[1.0] * 4,
            intrinsics_size=(1280, 704),
            source_size=(1280, 704),
            conditions=save_tensors(store, session_id, {"first": torch.zeros(9)}),
            warnings=[],
        )
        store.create(session, START)
        return cls(store, session_id, store.acquire(session_id, Holder("benchmark"), 3600).fence)

    def commit(self, latents: Mapping[str, Tensor], segment: bytes) -> None:
        """The next chunk's log record."""
        arena, file = save_both(self.store, self.id, latents, segment, mend=True)
        chunk = ChunkRecord(
            index=self.chunk + 1,
            kind="generate",
            poses=bytes(24 * 16 * 8),
            intrinsics=bytes(24 * 4 * 8),
            controller=CONTROLLER,
            seed=7,
            fingerprint=PRINT,
            latents=arena,
            segment=file,
            init_size=0,
            frames_digest="sha256:",
            state_digest="",
            timings_ms={},
            warnings=[],
            created_at=time.time(),
        )
        step = Commit(
            session_id=self.id, fence=self.fence, revision=0, expected_head=self.chunk, cursor=START, chunk=chunk
        )
        self.store.commit(step)
        self.chunk += 1

    def attach(self, state: Mapping[str, Tensor]) -> None:
        """The snapshot after the last chunk."""
        self.store.attach(self.id, self.fence, 0, self.chunk, save_tensors(self.store, self.id, state))

    def load(self) -> dict[str, Tensor]:
        """The snapshot after the last chunk, from the store."""
        return load_tensors(self.store, self.id, self.store.snapshots(self.id)[self.chunk])

    def check(self, latents: Mapping[str, Tensor], segment: bytes, state: Mapping[str, Tensor] | None = None) -> None:
        """What was committed last comes back as it was."""
        record = self.store.chunk(self.id, self.chunk)
        assert load_file(self.store, self.id, record.segment) == segment
        assert state_digest(load_tensors(self.store, self.id, record.latents)) == state_digest(latents)
        if state is not None:
            assert state_digest(self.load()) == state_digest(state)

    def collect(self) -> None:
        """Free all but the newest snapshot."""
        self.store.collect(lineage_of(self.id), Retention(snapshots=1))


def random_state(size: int, tensors: int) -> dict[str, Tensor]:
    """Named float32 tensors of `size` bytes in all."""
    return {f"blocks.{n}.kv": torch.randn(size // tensors // 4) for n in range(tensors)}


def timed(call: Callable[[], None]) -> float:
    """Milliseconds that it takes."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def percentiles(times: list[float]) -> str:
    """Median and 99th percentile in ms."""
    return f"p50 {statistics.median(times):.2f} ms, p99 {statistics.quantiles(times, n=100)[-1]:.2f} ms"


def log_records(store: Store, name: str, size: int, count: int) -> str:
    """Commits of log records alone."""
    take, times = Take.begin(store), []
    for _ in range(count):
        latents, segment = random_state(size // 2, 1), os.urandom(size // 2)
        times.append(timed(partial(take.commit, latents, segment)))
        take.check(latents, segment)
    bar = "1.5 ms" if size < MB else "8 ms"
    return row(f"commit of a log record, {size / MB:g} MB; {name}, AOF always", percentiles(times), bar)


def commits_of_a_small_model(store: Store, name: str, size: int, count: int) -> str:
    """Commits of a log record and the snapshot after it."""
    take, times = Take.begin(store), []
    for index in range(count):
        latents, segment, state = random_state(32_000, 1), os.urandom(32_000), random_state(size, 20)
        times.append(timed(partial(take.commit, latents, segment)) + timed(partial(take.attach, state)))
        take.check(latents, segment, state)
        if index % 8 == 7:
            take.collect()
    return row(
        f"commit of a small model's chunk, {size / MB:g} MB state; {name}, AOF always", percentiles(times), "15 ms"
    )


@dataclass(frozen=True)
class Transfer:
    """Seconds of a snapshot's way to the store and back, and the longest gap of the event loop meanwhile, in ms."""

    write: float
    read: float
    stall: float


def large_snapshots(store: Store, name: str, count: int) -> str:
    """Snapshots of 1 GB, each in place of the one before, with an event loop beside."""
    take, state = Take.begin(store), random_state(1000 * MB, 40)
    found = [asyncio.run(transfer(take, state)) for _ in range(count + 1)][1:]
    write, read = (statistics.median([getattr(each, way) for each in found]) for way in ("write", "read"))
    best_write, best_read = min(each.write for each in found), min(each.read for each in found)
    stall = max(each.stall for each in found)
    number = (
        f"write {1 / write:.2f} GB/s (best {1 / best_write:.2f}), read {1 / read:.2f} GB/s (best {1 / best_read:.2f}), "
        f"longest event-loop stall {stall:.1f} ms"
    )
    bar = "1.5 GB/s each way, 15 ms" if "no AOF" in name else "the disk, 15 ms"
    return row(f"1 GB snapshot to a store and back; {name}", number, bar)


async def transfer(take: Take, state: Mapping[str, Tensor]) -> Transfer:
    """One chunk whose state is new, its snapshot, and back; checked, and older snapshots collected."""
    for tensor in state.values():
        tensor.view(torch.int32).add_(1)
    take.commit({"latents": torch.zeros(9)}, b"segment")
    take.collect()
    with ticking() as stalls:
        write = await asyncio.to_thread(timed, lambda: take.attach(state))
        loaded: dict[str, Tensor] = {}
        read = await asyncio.to_thread(timed, lambda: loaded.update(take.load()))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert state_digest(loaded) == state_digest(state)
    return Transfer(write / 1e3, read / 1e3, max(stalls) * 1e3)


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Seconds by which the running event loop was late for each of its appointments, one a millisecond."""
    late: list[float] = [0.0]

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)

    task = asyncio.get_running_loop().create_task(tick())
    try:
        yield late
    finally:
        task.cancel()


if __name__ == "__main__":
    main()
