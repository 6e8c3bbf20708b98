"""H.264 in fragmented MP4, one encoder and one muxer a chunk.

A long-lived muxer holds frames back until the next chunk comes, so every chunk has its own; its fragment is then moved
to its place in the take by rewriting two numbers (ISO/IEC 14496-12, 8.8.5 `mfhd` and 8.8.12 `tfdt`). The initialisation
bytes are the same for every chunk of a size, so init + media_0 + media_1 + … is one playable file, and so is
init + media_k.
"""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

TICKS_PER_FRAME = 1000
"""Units of the media time scale in a frame, for every frame rate."""

MUXER_OPTIONS = {
    "movflags": "empty_moov+default_base_moof+frag_keyframe+skip_trailer",
    "fflags": "bitexact",
}

# constant quantiser across a frame, finer for chroma: detail as busy as noise keeps 36 dB where the defaults give 24;
# one keyframe, so one fragment; a fixed number of slices, so the same bytes whatever the machine
X264_PARAMS = "aq-mode=0:psy=0:chroma-qp-offset=-6:8x8dct=0:chromaloc=1:keyint=infinite:scenecut=0:threads=4"
ENCODER_OPTIONS = {"preset": "veryfast", "tune": "zerolatency", "crf": "16", "x264-params": X264_PARAMS}

# each chroma sample is the mean of its four pixels; swscale's default filter smears it over sixteen
CHROMA_FILTER = Interpolation.AREA | Interpolation.ACCURATE_RND

H273_BT709 = 1
"""Code point of BT.709 for primaries, transfer and matrix alike (ITU-T H.273)."""


@dataclass(frozen=True)
class Segment:
    """A chunk's video.

    Attributes:
        init: `ftyp` and `moov`, the same bytes for every chunk of a take.
        media: one `moof` and its `mdat`.
    """

    init: bytes
    media: bytes


def encode_segment(frames: NDArray[np.uint8], chunk_index: int, fps: int = 16) -> Segment:
    """Encode the frames of chunk `chunk_index` as yuv420p H.264 in BT.709, limited range.

    Args:
        frames: RGB [T, H, W, 3] uint8, H and W even; T ≥ 1 is the same for every chunk of a take. Not mutated.
        chunk_index: k ≥ 0; frame i of the chunk is shown at (k·T + i)/fps seconds.
        fps: frames a second.

    Raises:
        ValueError: another dtype or shape, an odd side, a negative index.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(f"frames are {frames.dtype} {frames.shape}, not uint8 [T, H, W, 3]")
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise ValueError(f"frames of {frames.shape[2]}x{frames.shape[1]} have an odd side")
    if chunk_index < 0:
        raise ValueError(f"chunk index {chunk_index} is negative")
    data = bytearray(_mux(frames, fps))
    _place(data, sequence=chunk_index + 1, ticks=chunk_index * len(frames) * TICKS_PER_FRAME)
    cut = next(box.start for box in _boxes(data) if box.kind == b"moof")
    return Segment(bytes(data[:cut]), bytes(data[cut:]))


def from_zero(file: bytes) -> bytes:
    """`init + media` of one chunk with its time set back to zero, so that players show it from its start."""
    data = bytearray(file)
    _place(data, sequence=1, ticks=0)
    return bytes(data)


def _mux(frames: NDArray[np.uint8], fps: int) -> bytes:
    """The frames as a fragmented MP4 of their own, starting at zero."""
    _, height, width, _ = frames.shape
    file = io.BytesIO()
    options = MUXER_OPTIONS | {"video_track_timescale": str(fps * TICKS_PER_FRAME)}
    with av.open(file, "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=fps, options=ENCODER_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.color_primaries = H273_BT709
        stream.codec_context.color_trc = H273_BT709
        stream.codec_context.colorspace = Colorspace.ITU709
        stream.codec_context.color_range = ColorRange.MPEG
        for frame in _yuv_frames(frames, fps):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _yuv_frames(frames: NDArray[np.uint8], fps: int) -> Iterator[av.VideoFrame]:
    convert = VideoReformatter().reformat
    for index, rgb in enumerate(frames):
        frame = convert(
            av.VideoFrame.from_ndarray(rgb, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=CHROMA_FILTER,
            threads=1,
        )
        frame.pts, frame.time_base = index, Fraction(1, fps)
        yield frame


@dataclass(frozen=True)
class _Box:
    kind: bytes
    start: int
    body: int
    end: int


def _boxes(data: bytes | bytearray, start: int = 0, end: int | None = None) -> Iterator[_Box]:
    """The boxes that lie in a row in data[start:end]; the muxer writes 32-bit sizes only."""
    end = len(data) if end is None else end
    while start < end:
        size, kind = struct.unpack_from(">I4s", data, start)
        assert 8 <= size <= end - start, "box size"
        yield _Box(kind, start, start + 8, start + size)
        start += size


def _find(data: bytearray, *path: bytes) -> _Box:
    """The only box at `path`, such as (b"moof", b"traf")."""
    start, end = 0, len(data)
    for kind in path:
        (box,) = (box for box in _boxes(data, start, end) if box.kind == kind)
        start, end = box.body, box.end
    return box


def _place(data: bytearray, sequence: int, ticks: int) -> None:
    """Give the only fragment in `data` its sequence number and its absolute decode time, in place."""
    mfhd, tfdt = _find(data, b"moof", b"mfhd"), _find(data, b"moof", b"traf", b"tfdt")
    assert data[tfdt.body] == 1, "tfdt with a 64-bit time"
    struct.pack_into(">I", data, mfhd.body + 4, sequence)
    struct.pack_into(">Q", data, tfdt.body + 4, ticks)
