"""What the server is and how it is: models, liveness, readiness."""

from fastapi import APIRouter, Response

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Health, ModelList, Readiness
from longtake.server.routes.parameters import EngineOf, problems

router = APIRouter(tags=["system"])


@router.get("/v1/models", operation_id="listModels", responses=problems(503))
async def models(engine: EngineOf) -> ModelList:
    """The models of this server."""
    return ModelList(data=[engine.served_model])


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
    return Readiness(
        ready=True, model=model, store=f"{status.server} {status.version}".strip(), durability=status.durability
    )
