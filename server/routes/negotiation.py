"""What the client wants: the media type of an answer, the range of a file."""

import re

from fastapi import Request

from longtake.api_schemas.problems import ProblemError

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def wants_video(request: Request) -> bool:
    """Whether the answer should be an MP4 stream rather than JSON.

    Weights (`q`) are not compared: the first type in the list that this route can produce wins.

    Raises `not_acceptable` when there is none.
    """
    accepted = [part.split(";")[0].strip().lower() for part in request.headers.get("accept", "*/*").split(",")]
    for kind in accepted:
        if kind in ("application/json", "application/*", "*/*", ""):
            return False
        if kind in ("video/mp4", "video/*"):
            return True
    raise ProblemError("not_acceptable", "this route answers application/json or video/mp4")


def byte_range(request: Request, size: int) -> tuple[int, int] | None:
    """The part of a file of `size` bytes that `Range` asks for, as (start, stop); None for all of it.

    Several ranges, and forms that RFC 9110 does not define for bytes, are ignored, as it allows; so is a range under
    `If-Range`, since no answer carries a validator that could match.

    Raises `range_not_satisfiable` for a part that lies outside.
    """
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or match.groups() == ("", "") or "if-range" in request.headers:
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if first and last and int(last) < start:
        return None
    if start >= size or start == stop:
        raise ProblemError("range_not_satisfiable", "the range lies outside the file", extra={"size": size})
    return start, stop
