"""Answers taken apart."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/", re.ASCII)


def model(kind: type[M]) -> Callable[[httpx.Response], M]:
    """A parser of JSON bodies."""
    return lambda answer: kind.model_validate_json(answer.content)


def content(answer: httpx.Response) -> bytes:
    """The body as it is."""
    return answer.content


def nothing(_: httpx.Response) -> None:
    """For answers whose status says everything."""


def offset(answer: httpx.Response) -> int:
    """Number of the first byte of an answer's body within the whole: 0 unless a range was answered."""
    found = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
    return int(found[1]) if found and answer.status_code == httpx.codes.PARTIAL_CONTENT else 0


def pngs(archive: bytes) -> Iterator[bytes]:
    """The PNG files, in order of their frames, of what `frames()` gives."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name in sorted(files.namelist()):
            yield files.read(name)
