"""Clients that go away: what was done for them stops, and what it held is freed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.engine import Engine

log = logging.getLogger(__name__)

R = TypeVar("R")


async def while_connected(request: Request, work: Coroutine[object, object, R]) -> R:
    """Carry out `work` for as long as the client of `request`, whose body has been read, is there.

    Raises `ClientDisconnect` after cancelling the work when the client leaves first.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def begun(request: Request, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None] | None:
    """Wait for the first piece, so that what fails before it is a problem; then all of them, or None for none."""
    first = await while_connected(request, anext(pieces, b""))
    if not first:
        return None

    async def all_pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return all_pieces()


def cut_by(engine: Engine, what: str) -> Callable[[ProblemError], None]:
    """Counts the problem that cuts an answer, and logs it with what was cut."""

    def say(problem: ProblemError) -> None:
        engine.metrics.problems.labels(problem.code).inc()
        log.warning("%s was cut: %s", what, problem)

    return say


class CutResponse(StreamingResponse):
    """A streamed answer that closes its generator when the client leaves, and is cut, not ended, by a problem.

    Args:
        pieces: the body.
        media_type: its type.
        on_problem: hears of the problem that cuts it.
        headers: further headers.
        status: of the answer.
        patience_s: seconds within which the client must take a piece, else the answer is cut; None for any time.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str,
        on_problem: Callable[[ProblemError], None] = lambda _: None,
        headers: Mapping[str, str] | None = None,
        status: int = 200,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(pieces, status, headers, media_type)
        self._pieces = pieces
        self._on_problem = on_problem
        self._patience_s = patience_s

    async def stream_response(self, send: Send) -> None:
        """Send the pieces. Without a last message the connection is closed, and no client takes the rest for whole."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                async with asyncio.timeout(self._patience_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            return
        except ProblemError as problem:
            self._on_problem(problem)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()
