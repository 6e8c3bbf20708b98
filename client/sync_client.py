"""The client for blocking code."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
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


class Client:
    """Talks to one server; a call that fails for a while is repeated, and nothing is done twice.

    Every method raises `ServerProblem` when the server refuses, `httpx.HTTPError` when none answers for as long as
    `retry` is patient, and `pydantic.ValidationError` for arguments that no server would take.

    Args:
        url: base URL, such as http://127.0.0.1:8000.
        api_key: one of the server's keys, sent as `Authorization: Bearer`.
        timeout: seconds without a byte after which an attempt has failed.
        retry: how patient to be.
        transport: what carries requests, for tests.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retry: Retry | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = httpx.Client(**calls.http_options(url, api_key, timeout), transport=transport)
        self._retry = retry or Retry()
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def models(self) -> ModelList:
        """The models of the server."""
        return self._do(calls.models())

    def ready(self) -> Readiness:
        """Whether the server can serve sessions now."""
        return self._do(calls.ready())

    def create(self, image: File, **beginning: Unpack[Beginning]) -> Session:
        """Begin a session from a first frame: a path, the bytes of a PNG, JPEG or WebP, or a data URL."""
        return self._do(calls.create(image, **beginning))

    def session(self, session_id: str) -> Session:
        """Where a session stands."""
        return self._do(calls.session(session_id))

    def sessions(self) -> Iterator[Session]:
        """All sessions, newest first."""
        return self._listed(calls.sessions)

    def delete(self, session_id: str) -> None:
        """Drop a session with everything it holds."""
        self._do(calls.delete(session_id))

    def fork(self, session_id: str, from_chunk: int, *, seed: int | None = None, key: str | None = None) -> Session:
        """A second session that goes on from where this one stood after chunk `from_chunk`; -1: from the first frame.

        A seed that is not given stays the one in force there. `key` is an `Idempotency-Key` of one's own.
        """
        return self._do(calls.fork(session_id, from_chunk, seed, key))

    def rewind(self, session_id: str, to_chunk: int, *, seed: int | None = None, key: str | None = None) -> Session:
        """Back to where the session stood after chunk `to_chunk`; what came later is given up. Otherwise as `fork`."""
        return self._do(calls.rewind(session_id, to_chunk, seed, key))

    def generate(self, session_id: str, **move: Unpack[Move]) -> Advanced:
        """Go on along a camera, and wait for the chunks that become whole."""
        return self._do(calls.generate(session_id, **move))

    def observe(self, session_id: str, frames: Frames, **move: Unpack[Move]) -> Advanced:
        """Go on with real frames, a pose each: one MP4 or WebM, or a picture a frame."""
        return self._do(calls.observe(session_id, frames, **move))

    def stream(
        self, session_id: str, frames: Frames | None = None, **move: Unpack[Move]
    ) -> Generator[bytes, None, None]:
        """Go on as `generate` or, with `frames`, `observe`, and get each chunk as soon as it is committed.

        The pieces make one fragmented MP4. Nothing is sent before the first is asked for; closing the generator early
        drops what is not committed. A stream that breaks goes on where it broke; `ReplayError` if it can not.
        """
        return self._pieces(calls.stream(session_id, frames, **move))

    def chunks(self, session_id: str) -> Iterator[Chunk]:
        """All chunks of a session, in order."""
        return self._listed(lambda after: calls.chunks(session_id, after))

    def chunk(self, session_id: str, index: int) -> Chunk:
        """One chunk."""
        return self._do(calls.chunk(session_id, index))

    def chunk_video(self, session_id: str, index: int) -> bytes:
        """One chunk as an MP4 that plays by itself."""
        return self._do(calls.chunk_video(session_id, index))

    def frames(self, session_id: str, index: int) -> bytes:
        """One chunk's frames, lossless: a zip that `pngs` opens."""
        return self._do(calls.frames(session_id, index))

    def latents(self, session_id: str, index: int) -> bytes:
        """One chunk's clean latents [1, C, 3, h, w]: a safetensors file."""
        return self._do(calls.latents(session_id, index))

    def video(self, session_id: str) -> Generator[bytes, None, None]:
        """Everything so far as one MP4, piece by piece; goes on where it broke."""
        return self._pieces(calls.video(session_id))

    def save_video(self, session_id: str, path: str | PathLike[str]) -> None:
        """Write everything so far to an MP4 file, which is opened once the first bytes are there."""
        pieces = self.video(session_id)
        first = next(pieces, b"")
        with Path(path).open("wb") as file:
            file.write(first)
            file.writelines(pieces)

    def events(self, session_id: str, last_event_id: str | None = None) -> Generator[Event, None, None]:
        """What happens to a session, as it happens: behind the event with this id, or from now on.

        Goes on where it broke, so that no chunk is missed; ends with the session. A position that was read elsewhere
        is an id too: `revision`, a hyphen, and the last chunk that is known (-1 for none).
        """
        attempts, reader = Attempts(self._retry), EventReader(last_event_id)
        while True:
            try:
                call = calls.events(session_id, reader.last_id)
                reader.begin()
                with closing(self._http.send(call.request(self._http), stream=True)) as answer:
                    if not answer.is_success:
                        answer.read()
                    call.result(answer, attempts.failures)
                    for line in answer.iter_lines():
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
            self._sleep(pause)

    def _do(self, call: Call[T]) -> T:
        attempts = Attempts(self._retry)
        while True:
            try:
                return call.result(self._http.send(call.request(self._http)), attempts.failures)
            except (ServerProblem, *LOST) as error:
                pause = attempts.pause(error)
                if pause is None:
                    raise
            self._sleep(pause)

    def _listed(self, page: Callable[[str | None], Call[Page[T]]]) -> Iterator[T]:
        after: str | None = None
        while True:
            found, after = self._do(page(after))
            yield from found
            if after is None:
                return

    def _pieces(self, call: Call[None]) -> Generator[bytes, None, None]:
        attempts, replay = Attempts(self._retry), Replay()
        while True:
            try:
                request = call.resumed(replay.count).request(self._http)
                with closing(self._http.send(request, stream=True)) as answer:
                    if not answer.is_success:
                        answer.read()
                    call.result(answer, attempts.failures)
                    replay.begin(offset(answer), answer.headers.get("etag"))
                    for piece in answer.iter_bytes():
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
            self._sleep(pause)
