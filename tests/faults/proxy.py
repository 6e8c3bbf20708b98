"""A TCP connection that fails on request: cut, frozen, slow, ended after so many bytes, or with one reply swallowed."""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar

R = TypeVar("R")

Way = Literal["up", "down"]
"""`up` to the server, `down` to the client."""

_PIECE = 1 << 16


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    swallowing: bool = False
    last_up: bytes = field(default=b"", repr=False)

    def abort(self) -> None:
        for side in (self.client, self.server):
            side.transport.abort()


@dataclass
class _Plan:
    """What happens next on any connection; None and empty for nothing."""

    cut_after: tuple[Way, bytes, int] | None = None
    swallow: bytes = b""
    delay_s: float = 0.0
    refuse: bool = False


class FaultProxy:
    """Passes TCP on from a port of its own to `port` on 127.0.0.1. Its methods may be called from any thread."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._plan = _Plan()
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.fired = threading.Event()

    @property
    def url(self) -> str:
        """As the URL of a store."""
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Abort every connection; new ones are taken."""
        self._call(self._cut)

    def partition(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._call(self._open.clear)

    def heal(self) -> None:
        """Everything passes again, what was held back first."""
        self._call(self._heal)

    def refuse(self) -> None:
        """Abort every connection, and new ones as well, until `heal`."""
        self._plan.refuse = True
        self.cut()

    def delay(self, seconds: float) -> None:
        """Each piece waits so long, either way."""
        self._plan.delay_s = seconds

    def cut_after(self, way: Way, count: int, mark: bytes = b"") -> None:
        """Abort one connection `count` bytes behind the next piece that holds `mark`, that is once."""
        self.fired.clear()
        self._plan.cut_after = (way, mark, count)

    def swallow_reply(self, mark: bytes) -> None:
        """Let the next request that holds `mark` reach the server, drop its reply, and abort the connection: once."""
        self.fired.clear()
        self._plan.swallow = mark

    def redirect(self, port: int) -> None:
        """Abort every connection; new ones go to another port."""
        self._target = port
        self.cut()

    def close(self) -> None:
        """Abort everything and end."""
        self._call(self._cut)
        self._server.close()
        self._call(self._open.set)
        self._run(asyncio.sleep(0.01))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[object, object, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _call(self, function: "object") -> None:
        async def call() -> None:
            function()  # type: ignore[operator]

        self._run(call())

    def _cut(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def _heal(self) -> None:
        self._plan = _Plan()
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._plan.refuse:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, to_server)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pass(connection, "up", reader, to_server), self._pass(connection, "down", from_server, writer)
            )
        except (OSError, _CutError):
            pass
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pass(
        self, connection: _Connection, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._open.wait()
            if self._plan.delay_s:
                await asyncio.sleep(self._plan.delay_s)
            if way == "up":
                self._look_for_mark(connection, piece)
            elif connection.swallowing:
                self.fired.set()
                raise _CutError
            left = self._left_before_cut(way, piece)
            writer.write(piece if left is None else piece[:left])
            await writer.drain()
            if left is not None:
                await asyncio.sleep(0.05)  # so that what was sent is read before the connection breaks
                self.fired.set()
                raise _CutError
        raise _CutError

    def _look_for_mark(self, connection: _Connection, piece: bytes) -> None:
        seen = connection.last_up[-64:] + piece
        connection.last_up = piece
        if self._plan.swallow and self._plan.swallow in seen:
            self._plan.swallow = b""
            connection.swallowing = True

    def _left_before_cut(self, way: Way, piece: bytes) -> int | None:
        """How many bytes of this piece still pass, when the cut falls into it."""
        if self._plan.cut_after is None or self._plan.cut_after[0] != way:
            return None
        _, mark, count = self._plan.cut_after
        if (place := piece.find(mark)) < 0:
            return None
        if place + count >= len(piece):
            self._plan.cut_after = (way, b"", place + count - len(piece))
            return None
        self._plan.cut_after = None
        return place + count


class _CutError(Exception):
    """The connection ends here."""
