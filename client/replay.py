"""Streams that go on where they broke: bytes that were handed out are not handed out again."""

import hashlib

from longtake.client.problems import ReplayError, ServerProblem


class Replay:
    """What was handed out of a stream over all attempts at it; each calls `begin`, `new` for every piece, and `end`."""

    def __init__(self) -> None:
        self.count = 0
        self._handed_out = hashlib.sha256()
        self._again = hashlib.sha256()
        self._missing = 0
        self._tag: str | None = None

    def begin(self, offset: int, tag: str | None = None) -> None:
        """An attempt whose first byte is number `offset` of the stream: all that came before, or 0.

        Raises `ReplayError` when it begins elsewhere, or when its entity tag says that it is of another file.
        """
        if offset not in (0, self.count):
            raise ReplayError(f"the stream goes on at byte {offset} instead of {self.count}")
        if self.count and tag != self._tag:
            raise ReplayError("the session was rewound, or its oldest chunks have expired: the video is another one")
        self._tag = tag
        self._again = hashlib.sha256()
        self._missing = self.count - offset

    def new(self, piece: bytes) -> bytes:
        """The part of a piece that was not handed out yet. Raises `ReplayError` if what came before it differs."""
        old, fresh = piece[: self._missing], piece[self._missing :]
        if old:
            self._again.update(old)
            self._missing -= len(old)
            if not self._missing and self._again.digest() != self._handed_out.digest():
                raise ReplayError("the repeated stream differs from the one that broke")
        self._handed_out.update(fresh)
        self.count += len(fresh)
        return fresh

    def end(self) -> None:
        """The attempt came to its end. Raises `ReplayError` if that is before where an earlier one broke."""
        if self._missing:
            raise ReplayError(f"the repeated stream ends {self._missing} bytes before the one that broke")

    def is_whole(self, error: Exception) -> bool:
        """Whether a refused rest means that all had come: the file ends where the stream broke."""
        if not isinstance(error, ServerProblem) or error.code != "range_not_satisfiable":
            return False
        return (error.problem.model_extra or {}).get("size") == self.count
