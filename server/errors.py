"""Every error answer is an RFC 9457 problem with a stable code, and never repeats what the client sent."""

import logging
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtake.api_schemas.problems import MEDIA_TYPE, FieldProblem, Problem, ProblemError

log = logging.getLogger(__name__)

_STATUS_CODES = {400: "malformed_json", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_PLACES = {"body", "path", "query", "header"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}", re.ASCII)


def install(app: FastAPI, max_body_bytes: int) -> None:
    """Answer every failure of `app` with a problem, and refuse bodies over the limit."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_crash)
    app.add_middleware(BodyLimit, limit=max_body_bytes)


class BodyLimit:
    """Refuses a request body as soon as it is known to be larger than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await render(self._too_large())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ProblemError:
        return ProblemError(
            "payload_too_large", f"a body may have {self._limit} bytes", extra={"limit_bytes": self._limit}
        )


def render(error: ProblemError) -> Response:
    """A problem as an HTTP answer."""
    return _answer(error.problem(), error.retry_after)


def _answer(problem: Problem, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(problem.model_dump(mode="json"), problem.status, headers, MEDIA_TYPE)


def _on_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return render(error)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found and found[0]["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        return render(ProblemError("unsupported_media_type", "send Content-Type: application/json"))
    if found and found[0]["type"] == "json_invalid":
        return render(ProblemError("malformed_json", "the body is not JSON"))
    problem = ProblemError("invalid_request", "some fields are not valid").problem()
    problem.errors = [
        FieldProblem(field=field_path(each["loc"]), detail=each["msg"].removeprefix("Value error, "))
        for each in found[:20]
    ]
    return _answer(problem)


def field_path(location: tuple[int | str, ...]) -> str:
    """A dotted path, `camera.poses[3]`; names that no schema of ours could hold are left out."""
    path = ""
    for part in location[1:] if location and location[0] in _PLACES else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path or "body"


def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ProblemError):
        return render(error.__cause__)
    code = _STATUS_CODES.get(error.status_code, "internal_error")
    return _answer(ProblemError(code, code.replace("_", " ")).problem())


def _on_crash(_: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return render(ProblemError("internal_error", "the server failed"))
