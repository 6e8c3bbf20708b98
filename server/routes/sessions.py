"""`/v1/sessions`: create, list, read, delete, and the video so far."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from longtake.api_schemas.resources import CreateSession, Session, SessionList
from longtake.server.routes.bodies import body_schema, read_body
from longtake.server.routes.negotiation import byte_range
from longtake.server.routes.parameters import EngineOf, IdempotencyKey, OwnerOf, SessionId, problems

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


PARTS = {"image": "The first frame: PNG, JPEG or WebP."}


@router.post(
    "",
    status_code=201,
    operation_id="createSession",
    responses=problems(400, 404, 409, 413, 415, 422, 503, 507),
    openapi_extra=body_schema(CreateSession, PARTS),
)
async def create(
    request: Request, engine: EngineOf, owner: OwnerOf, response: Response, key: IdempotencyKey = None
) -> Session:
    """Begin a take from a first frame."""
    body = await read_body(request, frozenset(PARTS))
    params = await body.parsed(CreateSession)
    session, replayed = await engine.create(params, body.one("image"), key, owner)
    response.headers["Location"] = f"/v1/sessions/{session.id}"
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return session


@router.get("", operation_id="listSessions", responses=problems(404, 422, 503))
async def index(
    engine: EngineOf,
    owner: OwnerOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    after: Annotated[str | None, Query(description="Id of the last session of the page before.")] = None,
) -> SessionList:
    """Sessions, newest first."""
    return await engine.read.sessions(owner, limit, after)


@router.get("/{session_id}", operation_id="getSession", responses=problems(404, 422, 503))
async def show(session_id: SessionId, engine: EngineOf) -> Session:
    """Where a session stands."""
    return await engine.read.session(session_id)


@router.delete("/{session_id}", status_code=204, operation_id="deleteSession", responses=problems(404, 422, 503))
async def delete(session_id: SessionId, engine: EngineOf) -> None:
    """Drop a session with everything it holds."""
    await engine.delete(session_id)


@router.get(
    "/{session_id}/video",
    operation_id="getSessionVideo",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"video/mp4": {}}},
        206: {"description": "The part that `Range` asked for.", "content": {"video/mp4": {}}},
        **problems(404, 416, 422, 500, 503),
    },
)
async def video(session_id: SessionId, request: Request, engine: EngineOf) -> StreamingResponse:
    """Everything so far as one MP4; `Range` gives a part of it."""
    file = await engine.read.video(session_id)
    part = byte_range(request, file.size)
    start, stop = part or (0, file.size)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    return StreamingResponse(file.pieces(start, stop), 206 if part else 200, headers, "video/mp4")
