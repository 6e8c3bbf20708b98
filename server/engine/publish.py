"""From a computed chunk to a committed one: encode, digest, upload, then one atomic step."""

import time
from dataclasses import dataclass, replace

from longtake.server.engine.plan import ChunkPlan
from longtake.server.model.timing import timed
from longtake.server.model.world import ChunkOutput
from longtake.server.video.images import frames_digest
from longtake.server.video.segments import encode_segment
from longtake.state_cache import (
    ChunkRecord,
    Commit,
    Fingerprint,
    Store,
    save_file,
    save_tensors,
    state_digest,
)


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


def publish(store: Store, step: Commit, plan: ChunkPlan, output: ChunkOutput, making: Making) -> Published:
    """Make the chunk after `step.expected_head` durable: its blobs, then `step` with it, which is whole or nothing."""
    index, session_id = step.expected_head + 1, step.session_id
    timings = {"queue": making.queue_ms, **output.timings_ms}
    with timed(timings, "encode"):
        segment = encode_segment(output.frames, index, making.fps)
        shown = frames_digest(output.frames)
    with timed(timings, "snapshot"):
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
    with timed(timings, "commit"):
        store.commit(replace(step, chunk=record, snapshot=snapshot))
    return Published(record, timings["commit"])
