"""What a video file claims, checked before FFmpeg believes it.

FFmpeg builds its table of samples from what a file declares: an MP4 of two kilobytes can make it fill gigabytes for
half a minute before the first packet, which no time limit of ours interrupts. It also takes a file cut short for one
that ends there. Both show before a demuxer is asked.
"""

import struct
from collections.abc import Iterator

from longtake.api_schemas.problems import ProblemError

MAX_SAMPLES = 100_000
"""Samples that all tracks of an MP4 together may declare: half an hour of film with sound."""

MAX_EDITS = 64
"""Entries that all edit lists of an MP4 together may have; each may repeat every sample."""

_SAMPLE_COUNTS = {b"stsz": 12, b"stz2": 12, b"trun": 8}
_EDIT_COUNTS = {b"elst": 8}
_REFUSED = {b"cmov": "compressed movie headers", b"iinf": "HEIF and AVIF pictures"}

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def video_format(data: bytes) -> str | None:
    """The FFmpeg demuxer for a file with this beginning: `mp4`, `matroska` (WebM is a subset), or None for no video."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(_EBML) else None


def check_mp4(data: bytes, field: str) -> None:
    """Refuse an MP4 whose boxes do not fill it exactly or that declares more than it could be worth reading.

    Counts are looked for in every byte outside of the media data, wherever a parser may come to believe in a box
    (ISO/IEC 14496-12: 4.2 for boxes, 8.7.3 `stsz` and `stz2`, 8.8.8 `trun`, 8.6.6 `elst`).

    Raises:
        ProblemError: `frames_invalid` for a file that ends within a box, has a compressed header or holds HEIF items;
            `frames_too_large` beyond `MAX_SAMPLES` or `MAX_EDITS`.
    """
    samples = edits = 0
    for kind, start, end in _boxes(data, field):
        if kind == b"mdat":
            continue
        header = data[start:end]
        for box, what in _REFUSED.items():
            if box in header:
                raise ProblemError("frames_invalid", f"{what} are not taken", field)
        samples += _declared(header, _SAMPLE_COUNTS)
        edits += _declared(header, _EDIT_COUNTS)
    if samples > MAX_SAMPLES or edits > MAX_EDITS:
        detail = f"the file declares more than {MAX_SAMPLES} samples or {MAX_EDITS} edits"
        raise ProblemError("frames_too_large", detail, field)


def check_webm(data: bytes, field: str) -> None:
    """Refuse a WebM or Matroska file that is shorter than its segment says (RFC 8794, 6; RFC 9559, 5.1).

    Raises:
        ProblemError: `frames_invalid`.
    """
    head_start, head_size, _ = _element_size(data, len(_EBML), field)
    segment = head_start + head_size
    if data[segment : segment + len(_SEGMENT)] != _SEGMENT:
        raise _cut_short(field)
    start, size, known = _element_size(data, segment + len(_SEGMENT), field)
    if known and start + size > len(data):
        raise _cut_short(field)


def _boxes(data: bytes, field: str) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of the outermost boxes, which fill the file exactly."""
    start = 0
    while start < len(data):
        head = data[start : start + 16].ljust(16, b"\0")
        size, kind, large = struct.unpack(">I4sQ", head)
        # 0: to the end of the file; 1: a 64-bit size follows
        size = {0: len(data) - start, 1: large}.get(size, size)
        if not 8 <= size <= len(data) - start:
            raise _cut_short(field)
        yield kind, start, start + size
        start += size


def _declared(header: bytes, counts: dict[bytes, int]) -> int:
    """Sum of the 32-bit counts that lie at these distances from every occurrence of these box names."""
    total = 0
    for kind, distance in counts.items():
        at = header.find(kind)
        while at >= 0:
            total += int.from_bytes(header[at + distance : at + distance + 4])
            at = header.find(kind, at + 1)
    return total


def _element_size(data: bytes, at: int, field: str) -> tuple[int, int, bool]:
    """Where the body of the element with its size at `at` starts, the size, and whether it is known."""
    first = data[at] if at < len(data) else 0
    length = 9 - first.bit_length()
    if first == 0 or at + length > len(data):
        raise _cut_short(field)
    ones = (1 << 7 * length) - 1
    size = int.from_bytes(data[at : at + length]) & ones
    return at + length, size, size != ones


def _cut_short(field: str) -> ProblemError:
    return ProblemError("frames_invalid", "the file is damaged or cut short", field)
