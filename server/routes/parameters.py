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


def owner_of(request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None) -> str:
    """Whose key the request carries; "" on a server without keys. Raises `unauthorized`."""
    owner = request.app.state.keys.owner(authorization)
    assert isinstance(owner, str)
    return owner


OwnerOf = Annotated[str, Depends(owner_of)]


async def own_session(
    session_id: Annotated[str, Path(description="Id of a session.")],
    engine: EngineOf,
    owner: OwnerOf,
) -> str:
    """The session of the address, if it is the caller's; anyone else's is not there. Raises `session_not_found`."""
    await engine.read.check_owner(session_id, owner)
    return session_id


SessionId = Annotated[str, Depends(own_session)]
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
