"""Sessions, chunks and models as they travel over HTTP."""

from datetime import datetime
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from longtake.api_schemas.camera import Camera, Intrinsics, Pose
from longtake.api_schemas.strict import RequestModel, Whole
from longtake.api_schemas.trajectory import Convention, ResolvedTrajectory

MAX_SEED = 2**63 - 1
MAX_CHUNK = 2**31
"""Indices of chunks end here."""

CHUNK_FRAMES = 24
"""Video frames a chunk: chunk k holds frames 24k+1 … 24k+24, frame 0 is the uploaded image."""

LATENT_FRAMES = 3
"""Latent frames a chunk."""


class ChunkShape(BaseModel):
    """What one chunk of a model holds."""

    frames: int = Field(description="Video frames a chunk.", examples=[24])
    latent_frames: int = Field(
        description="Latent frames a chunk; chunk 0 also holds that of the first frame.", examples=[3]
    )
    fps: int = Field(examples=[16])
    width: int = Field(description="Pixels.", examples=[320])
    height: int = Field(description="Pixels.", examples=[192])


class Model(BaseModel):
    """A model that this server runs."""

    id: str
    description: str
    chunk: ChunkShape
    weights: str = Field(description="Fingerprint of checkpoint and configuration.")
    numerics: str = Field(description="Fingerprint of device, libraries and threads: equal ones give equal bits.")


class ModelList(BaseModel):
    """All models of this server."""

    data: list[Model]


class CreateSession(RequestModel):
    """A new take: a first frame, a prompt and how the camera stands."""

    image: str | None = Field(
        None,
        description="First frame as a data URL (PNG, JPEG or WebP), base64; or the part `image` of a multipart body.",
        examples=["data:image/png;base64,…"],
    )
    prompt: str = Field("", max_length=4000)
    model: str | None = Field(None, description="Id from `/v1/models`; the server's only one when left out.")
    seed: Whole | None = Field(None, ge=0, le=MAX_SEED, description="Drawn by the server when left out.")
    intrinsics: Intrinsics | None = Field(None, description="fx, fy, cx, cy; a 60° wide centred camera when left out.")
    intrinsics_size: tuple[Annotated[Whole, Field(gt=0, le=65536)], Annotated[Whole, Field(gt=0, le=65536)]] | None = (
        Field(None, description="[width, height] that `intrinsics` belong to, when not those of the image.")
    )
    ttl_s: Whole | None = Field(
        None,
        ge=60,
        le=10 * 365 * 86400,
        description="Seconds without a new chunk or pose after which the session goes.",
    )
    first_pose: Pose | None = Field(
        None, description="Camera-to-world matrix of the first frame; identity when left out."
    )
    convention: Convention = Field("opencv", description="Camera axes of `first_pose`.")

    @model_validator(mode="after")
    def _size_needs_intrinsics(self) -> Self:
        if self.intrinsics_size is not None and self.intrinsics is None:
            raise ValueError("intrinsics_size needs intrinsics")
        return self


class ForkLink(BaseModel):
    """A session that was forked from this one."""

    id: str
    from_chunk: int = Field(description="The last chunk that both share; -1: the first frame only.")


class Session(BaseModel):
    """A take: where it stands and how to go on."""

    id: str
    model: str
    prompt: str = Field(description="In force for the next chunk.")
    seed: int = Field(description="In force for the next chunk.")
    created_at: datetime
    expires_at: datetime | None = Field(description="Null: never.")
    first_pose: Pose = Field(
        description="Camera-to-world matrix of frame 0, OpenCV axes: the world that poses are given in."
    )
    intrinsics: Intrinsics = Field(description="fx, fy, cx, cy of frames that are given no others.")
    intrinsics_size: tuple[int, int] = Field(description="[width, height] that all `intrinsics` belong to.")
    revision: int = Field(description="Raised by every rewind.")
    rewind_from: int = Field(
        description="Smallest possible `to_chunk` and `from_chunk`: -1, or the chunk before the oldest whole one."
    )
    parent: str | None = Field(description="The session that this one was forked from.")
    forked_at: int | None = Field(description="The last chunk shared with the parent; -1: the first frame only.")
    forks: list[ForkLink] = Field(description="Sessions forked from this one, as long as they are there.")
    next_chunk: int = Field(description="Index that the next chunk will have.")
    next_frame: int = Field(description="Number of the video frame that the next pose belongs to.")
    pending_poses: int = Field(description="Poses that wait for a whole chunk.")
    exact_until: int | None = Field(
        description="The last chunk up to which the state was restored to the bit; null: all of it was."
    )
    chunk: ChunkShape
    links: dict[str, str]
    warnings: list[str]


class SessionList(BaseModel):
    """Sessions, newest first."""

    data: list[Session]
    next: str | None = Field(
        description="Value of `after` for the next page, whatever is deleted meanwhile; null on the last one."
    )


class Fork(RequestModel):
    """A second session that begins where this one stood after a chunk."""

    from_chunk: Whole = Field(ge=-1, le=MAX_CHUNK, description="The last chunk that both share; -1: none.")
    seed: Whole | None = Field(None, ge=0, le=MAX_SEED, description="From there on; the one in force when left out.")


class Rewind(RequestModel):
    """Back to where the session stood after a chunk; later chunks are given up."""

    to_chunk: Whole = Field(ge=-1, le=MAX_CHUNK, description="The last chunk that stays; -1: none.")
    seed: Whole | None = Field(None, ge=0, le=MAX_SEED, description="From there on; the one in force when left out.")


class PostChunks(RequestModel):
    """Go on with a session: camera of the new frames."""

    camera: Camera | None = Field(
        None, description="May be left out when `pad` fills the pending poses, or beside a `prompt`."
    )
    prompt: str | None = Field(
        None, max_length=4000, description="From the next generated chunk on; the one in force when left out."
    )
    pad: bool = Field(False, description="Hold the last pose until the last chunk is whole.")
    discard_pending: bool = Field(False, description="Drop pending poses before frames are observed.")
    expected_chunk: Whole | None = Field(
        None, ge=0, description="409 `chunk_conflict` unless this is the session's `next_chunk`."
    )
    expected_frame: Whole | None = Field(
        None, ge=1, description="409 `chunk_conflict` unless this is the session's `next_frame`."
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.camera is None and self.prompt is None and not self.pad:
            raise ValueError("give a camera, a prompt, or pad to fill the pending poses")
        return self


class Chunk(BaseModel):
    """24 video frames of a session, committed."""

    index: int
    kind: str = Field(description="`generate`: made by the model; `observe`: absorbed from uploaded frames.")
    frame_start: int = Field(description="Number of the first video frame; frame 0 is the uploaded image.")
    frame_count: int
    seed: int = Field(description="In force for this chunk.")
    prompt: str | None = Field(description="In force for this chunk; null: the one that the session began with.")
    frames_digest: str = Field(description="SHA-256 of the raw RGB frames in order.")
    state_digest: str = Field(description="Hash of every state tensor after this chunk.")
    timings_ms: dict[str, float]
    expired: bool = Field(description="Behind the retention horizon: digests are left, frames and latents are not.")
    links: dict[str, str]
    warnings: list[str]


class ChunkList(BaseModel):
    """Chunks in order."""

    data: list[Chunk]
    next: int | None = Field(description="Value of `after` for the next page; null on the last one.")


class Advanced(BaseModel):
    """What a request added to its session: the chunks that became whole, and where the session stands now."""

    data: list[Chunk]
    pending_poses: int
    next_chunk: int
    next_frame: int
    frames_used: int | None = Field(None, description="Uploaded frames that were observed.")
    frames_unused: int | None = Field(None, description="Uploaded frames past whole chunks, which were not kept.")
    resolved: ResolvedTrajectory | None = Field(None, description="What was understood of the uploaded trajectory.")


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether sessions can be served now."""

    ready: bool
    model: str
    store: str = Field(description="What keeps the sessions, with its version.")
    durability: str = Field(description="strict: survives a crash of the store; relaxed: may lose a second; none.")
    detail: str | None = None
