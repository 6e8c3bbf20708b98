"""Clients that go away: what was done for them stops, and what it held is freed."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

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


class ClosingResponse(StreamingResponse):
    """A streamed answer that closes its generator when the client leaves."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(pieces, media_type=media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()
