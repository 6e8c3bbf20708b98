"""Parameters that several routes share."""

from typing import Annotated

from fastapi import Depends, Header, Path, Request

from longtake.api_schemas.problems import Problem
from longtake.server.engine.engine import Engine


def engine_of(request: Request) -> Engine:
    """The engine of the running server."""
    engine = request.app.state.engine
    assert isinstance(engine, Engine)
    return engine


EngineOf = Annotated[Engine, Depends(engine_of)]
SESSION_PATTERN = r"^ses_[a-z2-7]{39}$"
SessionId = Annotated[str, Path(pattern=SESSION_PATTERN, description="Id of a session.")]
ChunkIndex = Annotated[int, Path(ge=0, le=2**31, description="Index of a chunk.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="A request repeated with its key is carried out once and answered alike.",
    ),
]

PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}


def problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """OpenAPI responses for these error statuses."""
    return {status: {"description": "A problem (RFC 9457).", **PROBLEM} for status in statuses}
