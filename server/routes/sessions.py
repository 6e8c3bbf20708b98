"""`/v1/sessions`: create, list, read, delete, and the video so far."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from longtake.api_schemas.resources import CreateSession, Session, SessionList
from longtake.server.routes.parameters import SESSION_PATTERN, EngineOf, IdempotencyKey, SessionId, problems

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.post("", status_code=201, operation_id="createSession", responses=problems(400, 404, 409, 413, 422, 503, 507))
async def create(body: CreateSession, engine: EngineOf, response: Response, key: IdempotencyKey = None) -> Session:
    """Begin a take from a first frame."""
    session, replayed = await engine.create(body, key)
    response.headers["Location"] = f"/v1/sessions/{session.id}"
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return session


@router.get("", operation_id="listSessions", responses=problems(404, 422, 503))
async def index(
    engine: EngineOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    after: Annotated[str | None, Query(pattern=SESSION_PATTERN)] = None,
) -> SessionList:
    """Sessions, newest first."""
    return await engine.read.sessions(limit, after)


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
    responses={200: {"content": {"video/mp4": {}}}, **problems(404, 422, 500, 503)},
)
async def video(session_id: SessionId, engine: EngineOf) -> StreamingResponse:
    """Everything so far as one MP4."""
    size, pieces = await engine.read.video(session_id)
    return StreamingResponse(pieces, media_type="video/mp4", headers={"Content-Length": str(size)})
