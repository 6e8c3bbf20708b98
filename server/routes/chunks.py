"""`/v1/sessions/{id}/chunks`: go on with a take, and read what was made."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from longtake.api_schemas.resources import Advanced, Chunk, ChunkList, PostChunks
from longtake.server.routes.parameters import ChunkIndex, EngineOf, IdempotencyKey, SessionId, problems

router = APIRouter(prefix="/v1/sessions/{session_id}/chunks", tags=["chunks"])


@router.post("", status_code=201, operation_id="postChunks", responses=problems(400, 404, 409, 413, 422, 500, 503, 507))
async def post(
    session_id: SessionId, body: PostChunks, engine: EngineOf, response: Response, key: IdempotencyKey = None
) -> Advanced:
    """Add poses; every 24 of them become a chunk, committed before it is answered."""
    outcome = await engine.advance(session_id, body, key)
    response.headers["Server-Timing"] = f"commit;dur={outcome.commit_ms:.3f}"
    if outcome.replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return outcome.answer


@router.get("", operation_id="listChunks", responses=problems(404, 422, 503))
async def index(
    session_id: SessionId,
    engine: EngineOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    after: Annotated[int, Query(ge=-1, le=2**31)] = -1,
) -> ChunkList:
    """Chunks in order."""
    return await engine.read.chunks(session_id, limit, after)


@router.get("/{index}", operation_id="getChunk", responses=problems(404, 422, 503))
async def show(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Chunk:
    """One chunk."""
    return await engine.read.chunk(session_id, index)


@router.get(
    "/{index}/video",
    operation_id="getChunkVideo",
    response_class=Response,
    responses={200: {"content": {"video/mp4": {}}}, **problems(404, 422, 500, 503)},
)
async def video(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Response:
    """One chunk as an MP4 that plays by itself."""
    return Response(await engine.read.chunk_video(session_id, index), media_type="video/mp4")


@router.get(
    "/{index}/frames",
    operation_id="getChunkFrames",
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}}, **problems(404, 409, 422, 500, 503)},
)
async def frames(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Response:
    """One chunk's frames as PNG, lossless."""
    return Response(await engine.read.frames(session_id, index), media_type="application/zip")
