"""Clips made in the test, and how they are read."""

import io
import os
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from longtake.api_schemas.problems import ProblemError
from longtake.server.video.clips import ClipLimits, read_clip

os.environ.setdefault("SVT_LOG", "-1")  # the AV1 encoder talks otherwise

Frames = NDArray[np.uint8]

WIDTH, HEIGHT = 96, 64
QUIET = {"libx265": {"x265-params": "log-level=none:pools=none"}}
LOSSLESS = {"qp": "0"}
FRAGMENTED = {"movflags": "empty_moov+default_base_moof+frag_keyframe"}
ONE = 1 << 16


def steps(count: int, width: int = WIDTH, height: int = HEIGHT) -> Frames:
    """Flat frames, each brighter than the one before."""
    levels = np.linspace(20, 230, count).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def corners(height: int = HEIGHT, width: int = WIDTH) -> Frames:
    """One frame with another colour in each quarter."""
    frame = np.empty((height, width, 3), np.uint8)
    top, left = height // 2, width // 2
    frame[:top, :left], frame[:top, left:] = (220, 40, 40), (40, 200, 60)
    frame[top:, :left], frame[top:, left:] = (50, 60, 210), (230, 220, 90)
    return frame


def video(
    frames: Frames,
    codec: str = "libx264",
    kind: str = "mp4",
    pixels: str = "yuv420p",
    colours: tuple[int, int] = (6, 1),
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
    times: list[int] | None = None,
    aspect: Fraction | None = None,
    transfer: int = 2,
) -> bytes:
    """A clip of RGB frames; `colours` are matrix and range (2, 0: not told, and then BT.601, limited)."""
    matrix, span = colours
    source = {"dst_colorspace": {2: Colorspace.ITU601, 6: Colorspace.ITU601}.get(matrix, matrix)}
    file, convert = io.BytesIO(), VideoReformatter().reformat
    with av.open(file, "w", format=kind, options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=16, options=QUIET.get(codec, {}) | (options or {}))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, span
        stream.codec_context.color_trc = transfer
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        for index, rgb in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame = convert(picture, format=pixels, dst_color_range=span or ColorRange.MPEG, **source)
            frame.pts, frame.time_base = times[index] if times else index, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def sound(*, beside: Frames | None = None, videos: int = 1) -> bytes:
    """An MP4 with a second of silence, and the frames as so many video streams."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        audio = container.add_stream("aac", rate=8000, layout="mono")
        pictures = [container.add_stream("libx264", rate=16) for _ in range(videos if beside is not None else 0)]
        for stream in pictures:
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        silence.rate = 8000
        container.mux(audio.encode(silence))
        container.mux(audio.encode())
        for stream in pictures:
            for rgb in beside if beside is not None else []:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
            container.mux(stream.encode())
    return file.getvalue()


def still(frame: Frames, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind, **options)
    return file.getvalue()


def read(data: bytes, width: int = WIDTH, height: int = HEIGHT, limits: ClipLimits | None = None) -> Frames:
    return read_clip([data], width, height, limits)


def check_refused(*files: bytes, limits: ClipLimits | None = None, code: str = "frames_invalid") -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        read_clip(files, WIDTH, HEIGHT, limits)
    assert caught.value.code == code
    assert (caught.value.field or "").startswith("frames")
    return caught.value


def error(read: Frames, expected: Frames) -> int:
    assert read.shape == expected.shape
    return int(np.abs(read.astype(int) - expected).max())


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """The same MP4 as a phone held otherwise would write it: another matrix in `tkhd`."""
    a, b, c, d = matrix
    changed = bytearray(data)
    struct.pack_into(">5i", changed, changed.index(b"tkhd") + 44, a, b, 0, c, d)
    return bytes(changed)


def noise(count: int = 12) -> Frames:
    return np.random.default_rng(3).integers(0, 256, (count, HEIGHT, WIDTH, 3), dtype=np.uint8)
