"""One connection in one caller's hands: commands sent ahead of their replies, and values received in place."""

import socket
from collections.abc import Iterable, Sequence

import redis
from redis.connection import AbstractConnection

from longtake.state_cache.connections import Argument, restart, time_left

_SHORTEST = 3  # bytes of a reply, `_\r\n`


class UnexpectedReply(Exception):
    """Something else arrived than a value of the expected size: nothing, another size, or an error."""


class Bulk:
    """A connection to send and receive on, for as long as its caller holds it. Every step begins the time limit anew.

    After any error the connection can not be used again, since replies may still be under way.
    """

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout

    def send(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Send commands together. Their replies wait to be received."""
        restart(self._timeout)
        packed = self._connection.pack_commands(commands)  # type: ignore[no-untyped-call]
        # a health check would read the reply that comes first, which may be another one's
        self._connection.send_packed_command(packed, check_health=False)  # type: ignore[no-untyped-call]

    def receive(self) -> object:
        """The next reply; an error, or one of a transaction, is raised."""
        restart(self._timeout)
        reply: object = self._connection.read_response()
        for part in reply if isinstance(reply, list) else ():
            if isinstance(part, redis.RedisError):
                raise part
        return reply

    def receive_into(self, buffer: memoryview) -> None:
        """The next reply, a value of the buffer's size, straight into it. Raises `UnexpectedReply`."""
        restart(self._timeout)
        # redis-py copies every value twice, and its socket is its own affair: without it there is no way but that
        if not isinstance(found := getattr(self._connection, "_sock", None), socket.socket):
            raise UnexpectedReply
        header = b"$%d\r\n" % len(buffer)
        _expect(found, header[:_SHORTEST])
        _expect(found, header[_SHORTEST:])
        _fill(found, buffer)
        _expect(found, b"\r\n")


def _expect(source: socket.socket, expected: bytes) -> None:
    received = bytearray(len(expected))
    _fill(source, memoryview(received))
    if received != expected:
        raise UnexpectedReply


def _fill(source: socket.socket, buffer: memoryview) -> None:
    while buffer:
        time_left()
        if not (count := source.recv_into(buffer)):
            raise redis.ConnectionError("the server hung up")
        buffer = buffer[count:]
