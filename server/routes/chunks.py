"""`/v1/sessions/{id}/chunks`: go on with a take, and read what was made."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Advanced, Chunk, ChunkList, PostChunks
from longtake.server.engine.command import Uploads
from longtake.server.engine.engine import Engine
from longtake.server.routes.bodies import body_schema, read_body
from longtake.server.routes.leaving import CutResponse, begun, cut_by, while_connected
from longtake.server.routes.negotiation import wants_video
from longtake.server.routes.parameters import ChunkIndex, EngineOf, IdempotencyKey, SessionId, problems

router = APIRouter(prefix="/v1/sessions/{session_id}/chunks", tags=["chunks"])


PARTS = {
    "trajectory": "A camera path; `camera.trajectory` says how to read it.",
    "cameras": "COLMAP's cameras.txt, when the trajectory is an images.txt.",
    "frames": "One MP4 or WebM, or a picture a frame: real frames to observe instead of generating.",
}


@router.post(
    "",
    status_code=201,
    operation_id="postChunks",
    response_model=Advanced,
    responses={
        200: {"description": "With `Accept: video/mp4`: each chunk as it is committed.", "content": {"video/mp4": {}}},
        204: {"description": "With `Accept: video/mp4`: no chunk became whole."},
        **problems(400, 404, 406, 409, 410, 413, 415, 422, 500, 503, 507),
    },
    openapi_extra=body_schema(PostChunks, PARTS),
)
async def post(session_id: SessionId, request: Request, engine: EngineOf, key: IdempotencyKey = None) -> Response:
    """Add poses; every 24 of them become a chunk, committed before it is answered."""
    video = wants_video(request)
    body = await read_body(request, frozenset(PARTS))
    params = await body.parsed(PostChunks)
    uploads = Uploads(body.one("trajectory"), body.one("cameras"), body.files.get("frames", ()))
    if video:
        if request.scope["http_version"] == "1.0":
            raise ProblemError("not_acceptable", "a stream needs HTTP/1.1, where its end can be told from a cut")
        return await _streamed(request, engine, engine.stream(session_id, params, uploads, key))
    outcome = await while_connected(request, engine.advance(session_id, params, uploads, key))
    headers = {"Server-Timing": f"commit;dur={outcome.commit_ms:.3f}"}
    if outcome.replayed:
        headers["Idempotent-Replayed"] = "true"
    return Response(outcome.answer.model_dump_json(), 201, headers, "application/json")


async def _streamed(request: Request, engine: Engine, pieces: AsyncGenerator[bytes, None]) -> Response:
    """Wait for the first chunk, so that what fails before it is a problem, then stream."""
    all_pieces = await begun(request, pieces)
    if all_pieces is None:
        return Response(status_code=204)

    return CutResponse(all_pieces, "video/mp4", cut_by(engine, "a stream"))


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
    responses={200: {"content": {"video/mp4": {}}}, **problems(404, 410, 422, 500, 503)},
)
async def video(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Response:
    """One chunk as an MP4 that plays by itself."""
    return Response(await engine.read.chunk_video(session_id, index), media_type="video/mp4")


@router.get(
    "/{index}/frames",
    operation_id="getChunkFrames",
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}}, **problems(404, 409, 410, 422, 500, 503)},
)
async def frames(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Response:
    """One chunk's frames as PNG, lossless."""
    return Response(await engine.read.frames(session_id, index), media_type="application/zip")


@router.get(
    "/{index}/latents",
    operation_id="getChunkLatents",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, **problems(404, 410, 422, 500, 503)},
)
async def latents(session_id: SessionId, index: ChunkIndex, engine: EngineOf) -> Response:
    """One chunk's clean latents [1, C, 3, h, w] as a safetensors file."""
    return Response(await engine.read.latents(session_id, index), media_type="application/octet-stream")
