"""Camera input as clients send it: explicit poses or a string of actions."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from longtake.api_schemas.strict import Finite, RequestModel
from longtake.api_schemas.trajectory import Convention, TrajectoryOptions

MAX_POSES = 4096
"""Poses a request may carry."""


def _four(value: object) -> tuple[object, ...] | None:
    """The entries of a list of four; a tuple, which strict models want."""
    return tuple(value) if isinstance(value, list | tuple) and len(value) == 4 else None


def _matrix(value: object) -> tuple[object, ...]:
    """One error for another shape, in place of one for each row that is missing."""
    rows = tuple(map(_four, _four(value) or ()))
    if not rows or None in rows:
        raise ValueError("a camera-to-world matrix is four rows of four numbers, and poses are a list of them")
    return rows


def _lens(value: object) -> tuple[object, ...]:
    if (numbers := _four(value)) is None:
        raise ValueError("intrinsics are four numbers: fx, fy, cx, cy")
    return numbers


Row = tuple[Finite, Finite, Finite, Finite]
Pose = Annotated[tuple[Row, Row, Row, Row], BeforeValidator(_matrix)]
"""Camera-to-world matrix, 4x4, row by row."""

Intrinsics = Annotated[tuple[Finite, Finite, Finite, Finite], BeforeValidator(_lens)]
"""fx, fy, cx, cy in pixels of the uploaded first frame (or of `intrinsics_size` if the session was created with it)."""

Controls = Literal["sana-smooth", "sana-legacy"]
"""Meaning of the action keys: sana-smooth eases and turns with a/d, sana-legacy strafes with a/d at constant speed."""


class Camera(RequestModel):
    """Camera of the new frames, one pose a frame: `poses`, `actions`, or the `trajectory` of an uploaded file."""

    poses: Annotated[list[Pose], Field(min_length=1, max_length=MAX_POSES, fail_fast=True)] | None = Field(
        None, description="Camera-to-world matrices of the new frames, in the world of the session's `first_pose`."
    )
    actions: Annotated[str, Field(min_length=1, max_length=65_536)] | None = Field(
        None, description="Comma-separated `keys-frames`, for example `w-24,dw-12,none-12`.", examples=["w-48"]
    )
    trajectory: TrajectoryOptions | None = Field(
        None, description="How to read the file in the part `trajectory` of a multipart request."
    )
    convention: Convention = Field("opencv", description="Camera axes of `poses`.")
    controls: Controls = Field("sana-smooth", description="Meaning of the keys in `actions`.")
    intrinsics: (
        Intrinsics | Annotated[list[Intrinsics], Field(min_length=1, max_length=MAX_POSES, fail_fast=True)] | None
    ) = Field(None, description="One for all new frames or one a frame; the session's own when left out.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(each is not None for each in (self.poses, self.actions, self.trajectory)) != 1:
            raise ValueError("give one of poses, actions and trajectory")
        return self
