"""Multipart bodies: taken apart whole or not at all, their text as the bytes that came."""

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser

BYTES_AS_TEXT = "latin-1"
"""What the text of a `WholeParser` has to be encoded with: it gives every byte back."""


class WholeParser(MultiPartParser):
    """Refuses a body that ends before its closing boundary, and passes over the charset that a request may name."""

    _ended = False

    def on_part_begin(self) -> None:
        """A part begins."""
        super().on_part_begin()
        self._charset = BYTES_AS_TEXT

    def on_end(self) -> None:
        """The closing boundary was read."""
        self._ended = True

    async def parse(self) -> FormData:
        """The parts. Raises `MultiPartException`."""
        form = await super().parse()
        if not self._ended:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("the body ends before its closing boundary")
        return form
