"""Every error answer is an RFC 9457 problem with a stable code, and never repeats what the client sent."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtake.api_schemas.problems import MEDIA_TYPE, FieldProblem, Problem, ProblemError

log = logging.getLogger(__name__)

_STATUS_CODES = {400: "malformed_body", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_PLACES = {"body", "path", "query", "header"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}", re.ASCII)


Count = Callable[[str], None]
"""Hears of the code of every problem that is answered."""


class ProblemResponse(JSONResponse):
    """A problem as an HTTP answer."""

    def __init__(
        self, problem: Problem, retry_after: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        headers = dict(headers or {})
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        if problem.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(problem.model_dump(mode="json"), problem.status, headers, MEDIA_TYPE)
        self.code = problem.code


def render(error: ProblemError) -> ProblemResponse:
    """The answer to a request that failed with this problem."""
    headers = {"Content-Range": f"bytes */{error.extra['size']}"} if error.code == "range_not_satisfiable" else None
    return ProblemResponse(error.problem(), error.retry_after, headers)


def install(app: FastAPI, max_body_bytes: int, count: Count) -> None:
    """Answer every failure of `app` with a problem, and refuse bodies over the limit."""
    handlers = {
        ProblemError: _on_problem,
        RequestValidationError: _on_invalid,
        HTTPException: _on_http,
        Exception: _on_crash,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, _counted(handler, count))
    app.add_exception_handler(ClientDisconnect, _on_leaving)
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    app.add_middleware(LastWord)


class LastWord:
    """Answers requests that are cancelled before they were answered: only a server that stops does that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if answered or scope["type"] != "http":
                raise
            problem = ProblemError("shutting_down", "the server is shutting down", retry_after=5)
            await render(problem)(scope, receive, send)


def _counted(handler: Callable[[Exception], ProblemResponse], count: Count) -> Callable[[Request, Exception], Response]:
    def handle(_: Request, error: Exception) -> Response:
        response = handler(error)
        count(response.code)
        return response

    return handle


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


def _on_problem(error: Exception) -> ProblemResponse:
    assert isinstance(error, ProblemError)
    return render(error)


def _on_invalid(error: Exception) -> ProblemResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found and found[0]["type"] == "json_invalid":
        return render(ProblemError("malformed_json", "the body is not JSON"))
    problem = ProblemError("invalid_request", "some fields are not valid").problem()
    problem.errors = [
        FieldProblem(field=field_path(each["loc"]), detail=each["msg"].removeprefix("Value error, "))
        for each in found[:20]
    ]
    return ProblemResponse(problem)


def field_path(location: tuple[int | str, ...]) -> str:
    """A dotted path, `camera.poses[3]`; names that no schema of ours could hold are left out."""
    path = ""
    for part in location[1:] if location and location[0] in _PLACES else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path or "body"


def _on_http(error: Exception) -> ProblemResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ProblemError):
        return render(error.__cause__)
    code = _STATUS_CODES.get(error.status_code, "internal_error")
    return ProblemResponse(ProblemError(code, code.replace("_", " ")).problem(), headers=error.headers)


def _on_leaving(_: Request, error: Exception) -> Response:
    """Nobody reads this answer; the status is the one that proxies log for a client that left."""
    return Response(status_code=499)


def _on_crash(error: Exception) -> ProblemResponse:
    log.error("a request failed", exc_info=error)
    problem = ProblemError("internal_error", "the server failed").problem()
    return ProblemResponse(problem, headers={"Connection": "close"})
