"""A server that speaks just enough of the protocol to misbehave as it is told."""

import contextlib
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"
Answer = Callable[[list[bytes], BinaryIO], bool | None]
"""Writes what it likes in answer to a command; when it returns True the connection is closed."""


class _Handler(socketserver.StreamRequestHandler):
    answer: Answer
    seen: list[list[bytes]]

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while command := self._command():
                if command[0] in (b"HELLO", b"CLIENT"):
                    self.wfile.write(HELLO if command[0] == b"HELLO" else b"+OK\r\n")
                    continue
                self.seen.append(command)
                if type(self).answer(command, self.wfile):
                    return

    def _command(self) -> list[bytes]:
        if not (head := self.rfile.readline()):
            return []
        parts = []
        for _ in range(int(head[1:])):
            size = int(self.rfile.readline()[1:])
            parts.append(self.rfile.read(size + 2)[:-2])
        return parts


@contextlib.contextmanager
def scripted(answer: Answer) -> Iterator[tuple[str, list[list[bytes]]]]:
    """URL of a server that answers so, and the commands that it has seen."""
    seen: list[list[bytes]] = []
    handler = type("Handler", (_Handler,), {"answer": staticmethod(answer), "seen": seen})
    with (
        tempfile.TemporaryDirectory(prefix="lt-") as folder,
        socketserver.ThreadingUnixStreamServer(f"{folder}/s", handler) as server,
    ):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"unix://{folder}/s", seen
        server.shutdown()


def says(reply: bytes) -> Answer:
    """Answers every command so."""

    def answer(_: list[bytes], out: BinaryIO) -> None:
        out.write(reply)

    return answer
