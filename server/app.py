"""The application: an engine in, an ASGI app out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from longtake.api_schemas.problems import MEDIA_TYPE
from longtake.api_schemas.resources import CreateSession, Fork, PostChunks, Rewind
from longtake.server import errors
from longtake.server.doors import Doors, HostGuard
from longtake.server.engine.engine import Engine
from longtake.server.routes import chunks, sessions, system


class App(FastAPI):
    """FastAPI, whose schema also says that errors are problems and what multipart bodies hold."""

    def openapi(self) -> dict[str, object]:
        """The OpenAPI document; made once."""
        if self.openapi_schema is None:
            schema = get_openapi(title=self.title, version=self.version, routes=self.routes)
            _, bodies = models_json_schema(
                [(model, "validation") for model in (CreateSession, PostChunks, Fork, Rewind)],
                ref_template="#/components/schemas/{model}",
            )
            schema["components"]["schemas"] |= bodies["$defs"]
            for methods in schema["paths"].values():
                for operation in methods.values():
                    _say_problem(operation["responses"])
            self.openapi_schema = schema
        return self.openapi_schema


def _say_problem(responses: dict[str, dict[str, dict[str, object]]]) -> None:
    """Move the schema of problems to their own media type, in place."""
    for response in responses.values():
        content = response.get("content", {})
        if MEDIA_TYPE in content:
            content[MEDIA_TYPE] = content.pop("application/json")


@asynccontextmanager
async def _housekeeping(app: FastAPI) -> AsyncIterator[None]:
    """Keep house for as long as the app runs, then wait for what is under way."""
    task = asyncio.create_task(app.state.engine.keep_house())
    yield
    task.cancel()
    await app.state.engine.settle()


def create_app(engine: Engine, max_body_bytes: int, doors: Doors) -> FastAPI:
    """HTTP in front of a running engine."""
    app = App(title="longtake", version=version("longtake"), docs_url="/docs", redoc_url=None, lifespan=_housekeeping)
    app.state.engine = engine
    app.state.keys = doors.keys
    errors.install(app, max_body_bytes, lambda code: engine.metrics.problems.labels(code).inc())
    app.add_middleware(HostGuard, doors=doors)
    for routes in (sessions, chunks, system):
        app.include_router(routes.router)
    return app
