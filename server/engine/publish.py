"""From a computed chunk to a committed one: encode, digest, upload, then one atomic step."""

import time
from dataclasses import dataclass, replace

from longtake.server.engine.plan import ChunkPlan
from longtake.server.engine.prompts import save_text
from longtake.server.model.timing import timed
from longtake.server.model.world import ChunkOutput, Conditions
from longtake.server.video.images import frames_digest
from longtake.server.video.segments import Segment, encode_segment
from longtake.state_cache import (
    BlobsMissing,
    ChunkRecord,
    Commit,
    Fingerprint,
    Store,
    save_both,
    state_digest,
)


@dataclass(frozen=True)
class Making:
    """How a chunk was made: the model's fingerprint and warnings, frames a second, wait for the compute thread."""

    fingerprint: Fingerprint
    fps: int
    queue_ms: float
    warnings: list[str]


@dataclass(frozen=True)
class Published:
    """A committed chunk, and what its commit took."""

    record: ChunkRecord
    commit_ms: float


def publish(
    store: Store, step: Commit, plan: ChunkPlan, output: ChunkOutput, making: Making, conditions: Conditions
) -> Published:
    """Make the chunk after `step.expected_head` durable: its blobs, then `step` with it, which is whole or nothing."""
    timings = {"queue": making.queue_ms, **output.timings_ms}
    with timed(timings, "encode"):
        segment = encode_segment(output.frames, step.expected_head + 1, making.fps)
        shown = frames_digest(output.frames)
    with timed(timings, "digest"):
        digest = state_digest(output.state)
    try:
        return _commit(store, step, plan, output, making, segment, (shown, digest), timings)
    except BlobsMissing:  # one that was there already has been collected meanwhile, or the text has lapsed
        save_text(store, step.session_id, conditions.text, conditions.text_mask)
        return _commit(store, step, plan, output, making, segment, (shown, digest), timings)


def commit_cursor(store: Store, step: Commit, conditions: Conditions) -> None:
    """Carry out a step without a chunk."""
    try:
        store.commit(step)
    except BlobsMissing:
        save_text(store, step.session_id, conditions.text, conditions.text_mask)
        store.commit(step)


def _commit(
    store: Store,
    step: Commit,
    plan: ChunkPlan,
    output: ChunkOutput,
    making: Making,
    segment: Segment,
    digests: tuple[str, str],
    timings: dict[str, float],
) -> Published:
    with timed(timings, "upload"):
        tensors, file = {"latents": output.latents}, segment.init + segment.media
        latents, video = save_both(store, step.session_id, tensors, file, mend=True)
    record = ChunkRecord(
        index=step.expected_head + 1,
        kind="generate" if plan.clip is None else "observe",
        poses=plan.poses.astype("<f8").tobytes(),
        intrinsics=plan.intrinsics.astype("<f8").tobytes(),
        controller=plan.controller,
        seed=plan.cursor.seed,
        prompt=plan.cursor.prompt,
        text=plan.cursor.text,
        exact_until=plan.cursor.exact_until,
        fingerprint=making.fingerprint,
        latents=latents,
        segment=video,
        init_size=len(segment.init),
        frames_digest=digests[0],
        state_digest=digests[1],
        timings_ms={stage: round(ms, 3) for stage, ms in timings.items()},
        warnings=[*plan.warnings, *making.warnings],
        created_at=time.time(),
    )
    with timed(timings, "commit"):
        store.commit(replace(step, chunk=record))
    return Published(record, timings["commit"])
