"""From a computed chunk to a committed one: encode, digest, upload, then one atomic step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from longtake.server.engine.plan import ChunkPlan
from longtake.server.model.world import ChunkOutput
from longtake.server.video.images import frames_digest
from longtake.server.video.segments import encode_segment
from longtake.state_cache import (
    Arena,
    ChunkRecord,
    Commit,
    Cursor,
    Fence,
    Fingerprint,
    RequestRecord,
    Store,
    save_file,
    save_tensors,
    state_digest,
)


@dataclass(frozen=True)
class Position:
    """What a commit checks and records besides the chunk itself."""

    session_id: str
    fence: Fence
    revision: int
    head: int
    cursor: Cursor
    key: str | None
    request: RequestRecord | None


@dataclass(frozen=True)
class Making:
    """How a chunk was made: noise seed, the model's fingerprint, frames a second, wait for the compute thread."""

    seed: int
    fingerprint: Fingerprint
    fps: int
    queue_ms: float


@dataclass(frozen=True)
class Published:
    """A committed chunk, and what its commit took."""

    record: ChunkRecord
    commit_ms: float


def publish(store: Store, position: Position, plan: ChunkPlan, output: ChunkOutput, making: Making) -> Published:
    """Make chunk `position.head + 1` durable. Blobs first, then one commit that moves the head or changes nothing."""
    index, session_id = position.head + 1, position.session_id
    timings = {"queue": making.queue_ms, **output.timings_ms}
    with _timed(timings, "encode"):
        segment = encode_segment(output.frames, index, making.fps)
        shown = frames_digest(output.frames)
    with _timed(timings, "snapshot"):
        latents = save_tensors(store, session_id, {"latents": output.latents})
        video = save_file(store, session_id, segment.init + segment.media)
        snapshot = save_tensors(store, session_id, output.state)
        digest = state_digest(output.state)
    record = ChunkRecord(
        index=index,
        kind="generate" if plan.clip is None else "observe",
        poses=plan.poses.astype("<f8").tobytes(),
        intrinsics=plan.intrinsics.astype("<f8").tobytes(),
        seed=making.seed,
        fingerprint=making.fingerprint,
        latents=latents,
        segment=video,
        init_size=len(segment.init),
        frames_digest=shown,
        state_digest=digest,
        timings_ms={stage: round(ms, 3) for stage, ms in timings.items()},
        warnings=plan.warnings,
        created_at=time.time(),
    )
    with _timed(timings, "commit"):
        store.commit(_commit(position, record, snapshot))
    return Published(record, timings["commit"])


def _commit(position: Position, record: ChunkRecord, snapshot: Arena) -> Commit:
    return Commit(
        session_id=position.session_id,
        fence=position.fence,
        revision=position.revision,
        expected_head=position.head,
        cursor=position.cursor,
        chunk=record,
        snapshot=snapshot,
        key=position.key,
        request=position.request,
    )


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[stage] = (time.perf_counter() - started) * 1e3
