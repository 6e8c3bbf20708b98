"""What `GET /v1/sessions/{id}/events` tells: the data of each kind of server-sent event."""

from typing import Literal

from pydantic import BaseModel, Field

from longtake.api_schemas.resources import Chunk

EventName = Literal["chunk", "rewound", "progress", "error", "end"]
Stage = Literal["queued", "computing", "committing"]


class Rewound(BaseModel):
    """`rewound`: chunks after `to_chunk` have left the session."""

    revision: int = Field(description="That of the session from here on.")
    to_chunk: int = Field(description="The last chunk that stayed, -1 for none.")


class Progress(BaseModel):
    """`progress`: what happens to a chunk that is not committed yet."""

    chunk: int
    stage: Stage


class Failure(BaseModel):
    """`error`: a request on the session failed."""

    code: str = Field(description="As in problems.")


class End(BaseModel):
    """`end`: the session is gone."""


EventData = Chunk | Rewound | Progress | Failure | End

EVENT_DATA: dict[EventName, type[EventData]] = {
    "chunk": Chunk,
    "rewound": Rewound,
    "progress": Progress,
    "error": Failure,
    "end": End,
}
"""What the data of an event is, by its name."""
