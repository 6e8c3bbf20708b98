"""What the server is and how it is: models, liveness, readiness."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Health, ModelList, Readiness
from longtake.server.routes.parameters import EngineOf, OwnerOf, problems

router = APIRouter(tags=["system"])


@router.get("/v1/models", operation_id="listModels", responses=problems(401))
async def models(engine: EngineOf, _: OwnerOf) -> ModelList:
    """The models of this server."""
    return ModelList(data=[engine.served_model])


@router.get("/metrics", operation_id="metrics", response_class=Response)
async def metrics(engine: EngineOf) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(engine.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz", operation_id="health")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", operation_id="readiness", responses={503: {"model": Readiness, "description": "Not now."}})
async def readyz(engine: EngineOf, response: Response) -> Readiness:
    """Whether sessions can be served now: the model is loaded and the store answers."""
    model = engine.served_model.id
    try:
        status = await engine.read.status()
    except ProblemError as problem:
        response.status_code = 503
        return Readiness(ready=False, model=model, store="", durability="none", detail=problem.detail)
    store = f"{status.server} {status.version}".strip()
    weak = status.durability == "relaxed"
    detail = "a crash of the store may lose the last seconds: set appendfsync always" if weak else None
    return Readiness(ready=True, model=model, store=store, durability=status.durability, detail=detail)
