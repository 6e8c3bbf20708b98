"""`/v1/sessions`: create, list, read, delete, and the video so far."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from longtake.api_schemas.resources import CreateSession, Fork, Rewind, Session, SessionList
from longtake.server.routes.bodies import body_schema, read_body
from longtake.server.routes.leaving import CutResponse, begun, cut_by, while_connected
from longtake.server.routes.negotiation import byte_range
from longtake.server.routes.parameters import EngineOf, IdempotencyKey, OwnerOf, SessionId, problems

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


PARTS = {"image": "The first frame: PNG, JPEG or WebP."}
SEND_PATIENCE_S = 30.0
"""How long a listener may take for one event."""


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
    _say_replayed(response, replayed=replayed)
    return session


@router.get("", operation_id="listSessions", responses=problems(404, 422, 503))
async def index(
    engine: EngineOf,
    owner: OwnerOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    after: Annotated[str | None, Query(description="`next` of the page before, or a session's id.")] = None,
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


@router.post(
    "/{session_id}/fork",
    status_code=201,
    operation_id="forkSession",
    responses=problems(400, 404, 409, 410, 413, 415, 422, 503, 507),
    openapi_extra=body_schema(Fork, {}),
)
async def fork(
    session_id: SessionId,
    request: Request,
    engine: EngineOf,
    owner: OwnerOf,
    response: Response,
    key: IdempotencyKey = None,
) -> Session:
    """Begin a second session where this one stood after a chunk; both go on, and neither sees the other again."""
    params = await (await read_body(request, frozenset())).parsed(Fork)
    session, replayed = await engine.fork(session_id, params, key, owner)
    response.headers["Location"] = f"/v1/sessions/{session.id}"
    _say_replayed(response, replayed=replayed)
    return session


@router.post(
    "/{session_id}/rewind",
    operation_id="rewindSession",
    responses=problems(400, 404, 409, 410, 413, 415, 422, 503, 507),
    openapi_extra=body_schema(Rewind, {}),
)
async def rewind(
    session_id: SessionId, request: Request, engine: EngineOf, response: Response, key: IdempotencyKey = None
) -> Session:
    """Go back to where the session stood after a chunk; later chunks and pending poses are given up."""
    params = await (await read_body(request, frozenset())).parsed(Rewind)
    session, replayed = await while_connected(request, engine.rewind(session_id, params, key))
    _say_replayed(response, replayed=replayed)
    return session


@router.get(
    "/{session_id}/events",
    operation_id="getSessionEvents",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **problems(404, 422, 503)},
)
async def events(
    session_id: SessionId,
    request: Request,
    engine: EngineOf,
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", description="Go on behind this event instead of with the next one.")
    ] = None,
    begin_behind: Annotated[
        str | None, Query(alias="last_event_id", description="The same, where no header can be sent.")
    ] = None,
) -> Response:
    """Server-sent events: each chunk once it is committed, rewinds, progress and errors."""
    pieces = engine.events.listen(session_id, last_event_id or begin_behind)
    all_pieces = await begun(request, pieces)
    assert all_pieces is not None
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return CutResponse(all_pieces, "text/event-stream", headers=headers, patience_s=SEND_PATIENCE_S)


@router.head("/{session_id}/video", include_in_schema=False)
@router.get(
    "/{session_id}/video",
    operation_id="getSessionVideo",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"video/mp4": {}}},
        206: {"description": "The part that `Range` asked for.", "content": {"video/mp4": {}}},
        **problems(404, 410, 416, 422, 500, 503),
    },
)
async def video(session_id: SessionId, request: Request, engine: EngineOf) -> Response:
    """Everything so far as one MP4, from the oldest whole chunk on; `Range` gives a part of it."""
    file = await engine.read.video(session_id)
    part = byte_range(request, file.size)
    start, stop = part or (0, file.size)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(stop - start), "ETag": file.tag}
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    status = 206 if part else 200
    if request.method == "HEAD":
        return Response(None, status, headers, "video/mp4")
    pieces = await begun(request, file.pieces(start, stop))
    assert pieces is not None
    return CutResponse(pieces, "video/mp4", cut_by(engine, "a video"), headers, status)


def _say_replayed(response: Response, *, replayed: bool) -> None:
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
