"""The client for async code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from os import PathLike
from pathlib import Path
from typing import Self, TypeVar, Unpack

import httpx

from longtake.api_schemas.resources import Advanced, Chunk, ModelList, Readiness, Session
from longtake.client import calls
from longtake.client.answers import offset
from longtake.client.calls import Call, Page
from longtake.client.events import Event, EventReader, broken_off
from longtake.client.inputs import Beginning, File, Frames, Move
from longtake.client.problems import ServerProblem
from longtake.client.replay import Replay
from longtake.client.retry import LOST, Attempts, Retry

T = TypeVar("T")


class AsyncClient:
    """`Client` for async code: the same methods, awaited; lists and streams are async iterators.

    Files that are given as paths are read when a call is made. Cancelling a call closes its connection, and the server
    then drops what it has not committed.

    Args:
        url: base URL, such as http://127.0.0.1:8000.
        api_key: one of the server's keys, sent as `Authorization: Bearer`.
        timeout: seconds without a byte after which an attempt has failed.
        retry: how patient to be.
        transport: what carries requests, for tests.
        sleep: waits for so many seconds; outside asyncio, that of the event loop in use.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = httpx.AsyncClient(**calls.http_options(url, api_key, timeout), transport=transport)
        self._retry = retry or Retry()
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def models(self) -> ModelList:
        return await self._do(calls.models())

    async def ready(self) -> Readiness:
        return await self._do(calls.ready())

    async def create(self, image: File, **beginning: Unpack[Beginning]) -> Session:
        return await self._do(calls.create(image, **beginning))

    async def session(self, session_id: str) -> Session:
        return await self._do(calls.session(session_id))

    def sessions(self) -> AsyncIterator[Session]:
        return self._listed(calls.sessions)

    async def delete(self, session_id: str) -> None:
        await self._do(calls.delete(session_id))

    async def fork(
        self, session_id: str, from_chunk: int, *, seed: int | None = None, key: str | None = None
    ) -> Session:
        return await self._do(calls.fork(session_id, from_chunk, seed, key))

    async def rewind(
        self, session_id: str, to_chunk: int, *, seed: int | None = None, key: str | None = None
    ) -> Session:
        return await self._do(calls.rewind(session_id, to_chunk, seed, key))

    async def generate(self, session_id: str, **move: Unpack[Move]) -> Advanced:
        return await self._do(calls.generate(session_id, **move))

    async def observe(self, session_id: str, frames: Frames, **move: Unpack[Move]) -> Advanced:
        return await self._do(calls.observe(session_id, frames, **move))

    def stream(
        self, session_id: str, frames: Frames | None = None, **move: Unpack[Move]
    ) -> AsyncGenerator[bytes, None]:
        return self._pieces(calls.stream(session_id, frames, **move))

    def chunks(self, session_id: str) -> AsyncIterator[Chunk]:
        return self._listed(lambda after: calls.chunks(session_id, after))

    async def chunk(self, session_id: str, index: int) -> Chunk:
        return await self._do(calls.chunk(session_id, index))

    async def chunk_video(self, session_id: str, index: int) -> bytes:
        return await self._do(calls.chunk_video(session_id, index))

    async def frames(self, session_id: str, index: int) -> bytes:
        return await self._do(calls.frames(session_id, index))

    async def latents(self, session_id: str, index: int) -> bytes:
        return await self._do(calls.latents(session_id, index))

    def video(self, session_id: str) -> AsyncGenerator[bytes, None]:
        return self._pieces(calls.video(session_id))

    async def save_video(self, session_id: str, path: str | PathLike[str]) -> None:
        async with aclosing(self.video(session_id)) as pieces:
            first = await anext(pieces, b"")
            with Path(path).open("wb") as file:
                file.write(first)
                async for piece in pieces:
                    file.write(piece)

    async def events(self, session_id: str, last_event_id: str | None = None) -> AsyncGenerator[Event, None]:
        attempts, reader = Attempts(self._retry), EventReader(last_event_id)
        while True:
            try:
                call = calls.events(session_id, reader.last_id)
                reader.begin()
                async with aclosing(await self._http.send(call.request(self._http), stream=True)) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    call.result(answer, attempts.failures)
                    async for line in answer.aiter_lines():
                        attempts.progressed()
                        if (event := reader.event(line)) is not None:
                            yield event
                            if event.name == "end":
                                return
                    raise broken_off()
            except (ServerProblem, *LOST) as error:
                pause = attempts.pause(error)
                if pause is None:
                    raise
            await self._sleep(pause)

    async def _do(self, call: Call[T]) -> T:
        attempts = Attempts(self._retry)
        while True:
            try:
                return call.result(await self._http.send(call.request(self._http)), attempts.failures)
            except (ServerProblem, *LOST) as error:
                pause = attempts.pause(error)
                if pause is None:
                    raise
            await self._sleep(pause)

    async def _listed(self, page: Callable[[str | None], Call[Page[T]]]) -> AsyncIterator[T]:
        after: str | None = None
        while True:
            found, after = await self._do(page(after))
            for each in found:
                yield each
            if after is None:
                return

    async def _pieces(self, call: Call[None]) -> AsyncGenerator[bytes, None]:
        attempts, replay = Attempts(self._retry), Replay()
        while True:
            try:
                request = call.resumed(replay.count).request(self._http)
                async with aclosing(await self._http.send(request, stream=True)) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    call.result(answer, attempts.failures)
                    replay.begin(offset(answer), answer.headers.get("etag"))
                    async for piece in answer.aiter_bytes():
                        if fresh := replay.new(piece):
                            attempts.progressed()
                            yield fresh
                    replay.end()
                    return
            except (ServerProblem, *LOST) as error:
                if replay.is_whole(error):
                    return
                pause = attempts.pause(error)
                if pause is None:
                    raise
            await self._sleep(pause)
