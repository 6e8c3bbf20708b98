"""Stored records as the resources that clients see."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import cast

from longtake.api_schemas.camera import Intrinsics, Pose
from longtake.api_schemas.resources import (
    CHUNK_FRAMES,
    LATENT_FRAMES,
    Advanced,
    Chunk,
    ChunkShape,
    ForkLink,
    Model,
    Session,
)
from longtake.server.engine.command import Command
from longtake.server.engine.plan import next_frame, pending_count, start_cursor
from longtake.server.engine.prompts import prompt_in_force
from longtake.server.model.world import ModelSpec, WorldModel
from longtake.state_cache import ChunkRecord, Head, SessionRecord


def chunk_shape(spec: ModelSpec) -> ChunkShape:
    """What one chunk of a model holds."""
    return ChunkShape(
        frames=CHUNK_FRAMES, latent_frames=LATENT_FRAMES, fps=spec.fps, width=spec.width, height=spec.height
    )


def model_view(model: WorldModel) -> Model:
    """A served model."""
    return Model(
        id=model.spec.id,
        description=model.spec.description,
        chunk=chunk_shape(model.spec),
        weights=model.weights_fingerprint,
        numerics=model.numerics_fingerprint,
    )


def new_session_view(session: SessionRecord, spec: ModelSpec) -> Session:
    """A session as it was created; also what a repeated creation is answered with."""
    expires_at = None if session.ttl_s is None else session.created_at + session.ttl_s
    head = Head(chunk=-1, revision=0, cursor=start_cursor(session), expires_at=expires_at)
    return session_view(session, head, {}, spec)


def session_view(session: SessionRecord, head: Head, forks: Mapping[str, int], spec: ModelSpec) -> Session:
    """A session where it stands; `forks` are the ids of its forks, each with the last chunk that both share."""
    link, pending = f"/v1/sessions/{session.id}", pending_count(head.cursor)
    return Session(
        id=session.id,
        model=session.model,
        prompt=prompt_in_force(session, head.cursor),
        seed=head.cursor.seed,
        created_at=datetime.fromtimestamp(session.created_at, UTC),
        expires_at=None if head.expires_at is None else datetime.fromtimestamp(head.expires_at, UTC),
        first_pose=_pose(session.first_pose),
        intrinsics=cast(Intrinsics, tuple(session.intrinsics)),
        intrinsics_size=session.intrinsics_size,
        revision=head.revision,
        rewind_from=head.horizon - 1,
        parent=None if session.parent is None else session.parent.session_id,
        forked_at=None if session.parent is None else session.parent.chunk,
        forks=[ForkLink(id=fork, from_chunk=chunk) for fork, chunk in sorted(forks.items(), key=_by_chunk)],
        next_chunk=head.chunk + 1,
        next_frame=next_frame(head.chunk + 1, pending),
        pending_poses=pending,
        exact_until=head.cursor.exact_until,
        chunk=chunk_shape(spec),
        links={
            "self": link,
            "chunks": f"{link}/chunks",
            "video": f"{link}/video",
            "events": f"{link}/events",
            "fork": f"{link}/fork",
            "rewind": f"{link}/rewind",
        },
        warnings=session.warnings,
    )


def chunk_view(session_id: str, record: ChunkRecord) -> Chunk:
    """A committed chunk."""
    link = f"/v1/sessions/{session_id}/chunks/{record.index}"
    return Chunk(
        index=record.index,
        kind=record.kind,
        frame_start=next_frame(record.index, 0),
        frame_count=CHUNK_FRAMES,
        seed=record.seed,
        prompt=record.prompt,
        frames_digest=record.frames_digest,
        state_digest=record.state_digest,
        timings_ms=record.timings_ms,
        expired=record.expired,
        links={"self": link, "video": f"{link}/video", "frames": f"{link}/frames", "latents": f"{link}/latents"},
        warnings=record.warnings,
    )


def advanced_view(
    session_id: str, command: Command, records: list[ChunkRecord], next_chunk: int, pending: int
) -> Advanced:
    """What a request added, and where the session stands then."""
    given = None if command.clip is None else len(command.clip)
    used = CHUNK_FRAMES * len(records)
    return Advanced(
        frames_used=None if given is None else used,
        frames_unused=None if given is None else given - used,
        resolved=None if command.trajectory is None else command.trajectory.resolved,
        data=[chunk_view(session_id, record) for record in records],
        pending_poses=pending,
        next_chunk=next_chunk,
        next_frame=next_frame(next_chunk, pending),
    )


def _by_chunk(fork: tuple[str, int]) -> tuple[int, str]:
    return fork[1], fork[0]


def _pose(values: list[float]) -> Pose:
    """Sixteen numbers, row by row, as a matrix."""
    return cast(Pose, tuple(tuple(values[row : row + 4]) for row in range(0, 16, 4)))
