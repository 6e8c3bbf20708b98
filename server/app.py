"""The application: an engine in, an ASGI app out."""

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from longtake.api_schemas.problems import MEDIA_TYPE
from longtake.server import errors
from longtake.server.engine.engine import Engine
from longtake.server.routes import chunks, sessions, system


class App(FastAPI):
    """FastAPI, whose schema says that errors are problems."""

    def openapi(self) -> dict[str, object]:
        """The OpenAPI document; made once."""
        if self.openapi_schema is None:
            schema = get_openapi(title=self.title, version=self.version, routes=self.routes)
            for methods in schema["paths"].values():
                for operation in methods.values():
                    for response in operation["responses"].values():
                        content = response.get("content", {})
                        if MEDIA_TYPE in content:
                            content[MEDIA_TYPE] = content.pop("application/json")
            self.openapi_schema = schema
        return self.openapi_schema


def create_app(engine: Engine, max_body_bytes: int) -> FastAPI:
    """HTTP in front of a running engine."""
    app = App(title="longtake", version=version("longtake"), docs_url="/docs", redoc_url=None)
    app.state.engine = engine
    errors.install(app, max_body_bytes)
    for routes in (sessions, chunks, system):
        app.include_router(routes.router)
    return app
