"""Uploaded real frames: one MP4 or WebM video, or still images, as the model's frames.

A video is opened from memory with its demuxer forced and few decoders allowed, and nothing that it refers to is opened.
Every picture is brought to the model's size as it comes: memory holds the small frames and one large one.
"""

import io
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Never

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.intrinsics import Crop
from longtake.server.video.containers import check_mp4, check_webm, video_format
from longtake.server.video.images import DECODER_ERRORS, FORMATS, read_first_frame, resize_crop

DECODERS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "mpeg4")
"""FFmpeg's names of the decoders that may see an upload; libdav1d is the one for AV1."""

MAX_STREAMS = 16
PADDING = 64

# FFmpeg's default path from YUV darkens by a level and repeats chroma samples
YUV_FILTER = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND

STRICT = "crccheck+bitstream+buffer+explode"
"""What a decoder would conceal is an error; arithmetic-coded damage may still decode to some picture."""

UNSPECIFIED_COLORSPACE = 2
KNOWN_COLORSPACES = frozenset({0, 1, UNSPECIFIED_COLORSPACE, 4, 5, 6, 7, 9})
"""Matrices swscale converts from: code points of ITU-T H.273, table 4."""


@dataclass(frozen=True)
class ClipLimits:
    """What an upload may cost.

    Attributes:
        frames: most frames of a clip.
        side: most pixels along a side of a frame.
        frame_pixels: most pixels of a frame.
        pixels: most pixels of all frames together.
        seconds: most time for reading, looked at between packets and between frames.
    """

    frames: int = 240
    side: int = 4096
    frame_pixels: int = 16_000_000
    pixels: int = 2_500_000_000
    seconds: float = 30.0


@dataclass(frozen=True)
class _Picture:
    """An upright RGB picture [H, W, 3] with the width of its pixels over their height, and the upload it is from."""

    image: NDArray[np.uint8]
    pixel_aspect: Fraction
    field: str


def read_clip(
    files: Sequence[bytes],
    width: int,
    height: int,
    limits: ClipLimits | None = None,
    field: str = "frames",
    abandoned: Callable[[], bool] = lambda: False,
) -> NDArray[np.uint8]:
    """Decode an uploaded clip: upright RGB frames in order of presentation, resized and cut like a first frame.

    Frames are taken as they are, whatever their times: one file gives one frame for each that a player would show.
    A video that names no colour matrix is BT.709 when at least 1280 wide or over 576 high, else BT.601, as in players.

    Args:
        files: one MP4 or WebM (H.264, HEVC, VP8, VP9, AV1 or MPEG-4 part 2), or PNG, JPEG and WebP images of one size.
        width: of the model's frame.
        height: of the model's frame.
        limits: what the upload may cost.
        field: path of the uploads in the request, for errors; images are `field[0]`, `field[1]` …
        abandoned: asked between packets and frames; once it says yes, reading ends with `frames_invalid`.

    Returns:
        uint8 [T, height, width, 3], T ≥ 1.

    Raises:
        ProblemError: `frames_invalid` for what can not be read whole or is ambiguous; `frames_too_large` beyond limits.
    """
    if not files:
        raise ProblemError("frames_invalid", "a clip has at least one frame", field)
    videos = sum(video_format(data) is not None for data in files)
    if videos and len(files) > 1:
        raise ProblemError("frames_invalid", "send one video, or images, and not both", field)
    budget = _Budget(limits or ClipLimits(), field, abandoned)
    pictures = _video(files[0], budget) if videos else _stills(files, budget)
    with closing(pictures):
        return _fitted(pictures, width, height, budget)


class _Budget:
    """Raises as soon as an upload costs more than it may."""

    def __init__(self, limits: ClipLimits, field: str, abandoned: Callable[[], bool]) -> None:
        self.limits = limits
        self.field = field
        self.abandoned = abandoned
        self.deadline = time.monotonic() + limits.seconds

    def check_time(self) -> None:
        if self.abandoned():
            raise ProblemError("frames_invalid", "nobody waits for the clip any more", self.field)
        if time.monotonic() > self.deadline:
            raise self._exceeded(f"the clip takes more than {self.limits.seconds:g} s to read")

    def check_size(self, width: int, height: int) -> None:
        limits = self.limits
        if max(width, height) > limits.side or width * height > limits.frame_pixels:
            most = f"{limits.side} pixels a side or {limits.frame_pixels} in all"
            raise self._exceeded(f"a frame has more than {most}")

    def check_frames(self, count: int, width: int, height: int) -> None:
        if count > self.limits.frames:
            raise self._exceeded(f"the clip has more than {self.limits.frames} frames")
        if count * width * height > self.limits.pixels:
            raise self._exceeded(f"the frames have more than {self.limits.pixels} pixels together")

    def _exceeded(self, detail: str) -> ProblemError:
        return ProblemError("frames_too_large", detail, self.field)


def _fitted(pictures: Iterator[_Picture], width: int, height: int, budget: _Budget) -> NDArray[np.uint8]:
    """All pictures at the model's size; each is dropped before the next is decoded."""
    pixels = bytearray()
    crop: Crop | None = None
    for count, picture in enumerate(pictures, 1):
        if crop is None:
            crop, shape = _crop(picture, width, height), picture.image.shape
        if picture.image.shape != shape:
            raise ProblemError("frames_invalid", "the frames are not all of one size", picture.field)
        budget.check_frames(count, shape[1], shape[0])
        budget.check_time()
        pixels += resize_crop(picture.image, crop).tobytes()
        del picture
    if not pixels:
        raise ProblemError("frames_invalid", "the video has no frames", budget.field)
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3)


def _crop(picture: _Picture, width: int, height: int) -> Crop:
    """How all pictures of the clip become the model's frames."""
    source_height, source_width, _ = picture.image.shape
    shown_width = max(1, round(source_width * picture.pixel_aspect))
    try:
        return Crop.fit(shown_width, source_height, width, height, picture.field)
    except ProblemError as error:
        detail = "the clip is too long and narrow for the model's frame"
        raise ProblemError("frames_invalid", detail, picture.field) from error


def _stills(files: Sequence[bytes], budget: _Budget) -> Generator[_Picture]:
    budget.check_frames(len(files), 1, 1)
    for index, data in enumerate(files):
        field = f"{budget.field}[{index}]"
        budget.check_size(*_declared_size(data))
        try:
            image = read_first_frame(data, field)
        except ProblemError as error:
            code = "frames_too_large" if error.code == "image_too_large" else "frames_invalid"
            raise ProblemError(code, error.detail, field) from error
        yield _Picture(image, Fraction(1), field)
        del image


def _declared_size(data: bytes) -> tuple[int, int]:
    """Width and height in an image's header; nothing for what `read_first_frame` will refuse."""
    refusals = (*DECODER_ERRORS, Image.DecompressionBombError, Image.DecompressionBombWarning)
    with suppress(*refusals), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.size
    return 0, 0


class _DamagedError(Exception):
    """The file ends or breaks where the next frame should be."""


def _video(data: bytes, budget: _Budget) -> Generator[_Picture]:
    demuxer = video_format(data)
    (check_mp4 if demuxer == "mp4" else check_webm)(data, budget.field)
    # decoders count the padding of their rows
    most = budget.limits.frame_pixels + PADDING * budget.limits.side
    limits = {"codec_whitelist": ",".join(DECODERS), "max_pixels": str(most)}
    options = limits | {"protocol_whitelist": "", "max_streams": str(MAX_STREAMS)}
    done = 0
    try:
        with av.open(
            io.BytesIO(data),
            "r",
            format=demuxer,
            options=options,
            metadata_errors="replace",
            timeout=budget.limits.seconds,
            io_open=_open_nothing,
        ) as container:
            stream = _only_stream(container, budget)
            stream.codec_context.options = limits | {"err_detect": STRICT}
            stream.codec_context.thread_count = 1
            aspect = stream.sample_aspect_ratio or Fraction(1)
            convert = VideoReformatter()
            for frame in _frames(container, stream, budget):
                yield _picture(frame, aspect, convert, budget.field)
                done += 1
    except (av.FFmpegError, _DamagedError, PermissionError) as error:
        detail = f"the video can not be decoded after its first {done} frames"
        raise ProblemError("frames_invalid", detail, budget.field) from error


def _open_nothing(*_: object) -> Never:
    raise PermissionError("an upload refers to another file")


def _only_stream(container: InputContainer, budget: _Budget) -> VideoStream:
    """The one moving picture in a file; covers and thumbnails of players are none."""
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if len(streams) != 1:
        count = "several video streams" if streams else "no video stream"
        raise ProblemError("frames_invalid", f"the file has {count}", budget.field)
    (stream,) = streams
    if stream.codec_context is None or stream.codec_context.name not in DECODERS:
        raise ProblemError("frames_invalid", "the video is not H.264, HEVC, VP8, VP9, AV1 or MPEG-4", budget.field)
    if any(name.lower() == "alpha_mode" for name in stream.metadata):
        raise _transparent(budget.field)
    budget.check_size(stream.codec_context.width, stream.codec_context.height)
    return stream


def _frames(container: InputContainer, stream: VideoStream, budget: _Budget) -> Iterator[VideoFrame]:
    """Frames in order of presentation, without those that an edit list cuts away."""
    packets = 0
    for packet in container.demux(stream):
        budget.check_time()
        if packet.is_corrupt:
            raise _DamagedError
        packets += packet.size > 0
        for frame in packet.decode():
            if frame.is_corrupt:
                raise _DamagedError
            budget.check_size(frame.width, frame.height)
            yield frame
    # the demuxer ends in silence where the file does
    if packets < len(stream.index_entries):
        raise _DamagedError


def _picture(frame: VideoFrame, aspect: Fraction, convert: VideoReformatter, field: str) -> _Picture:
    """The frame upright in RGB, by its own matrix and range; 10 and 12 bits are rounded to 8."""
    if any(component.is_alpha for component in frame.format.components):
        raise _transparent(field)
    if frame.color_trc in (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67):
        raise ProblemError("frames_invalid", "the video is HDR (PQ or HLG): convert it to BT.709", field)
    if frame.colorspace not in KNOWN_COLORSPACES:
        raise ProblemError("frames_invalid", "the video has an unusual colour matrix: convert it to BT.709", field)
    image, transposed = _upright(_rgb(frame, convert), frame, field)
    return _Picture(image, 1 / aspect if transposed else aspect, field)


def _rgb(frame: VideoFrame, convert: VideoReformatter) -> NDArray[np.uint8]:
    source = None
    if frame.colorspace == UNSPECIFIED_COLORSPACE:
        source = Colorspace.ITU709 if frame.width >= 1280 or frame.height > 576 else Colorspace.ITU601
    converted = convert.reformat(
        frame,
        format="rgb24",
        src_colorspace=source,
        dst_color_range=ColorRange.JPEG,
        interpolation=YUV_FILTER,
        threads=1,
    )
    image = np.asarray(converted.to_ndarray(), np.uint8)
    if frame.format.name.startswith("gray") and frame.color_range != ColorRange.JPEG:
        # swscale takes every grey picture for full range
        image = np.clip((image.astype(np.float32) - 16) * (255 / 219) + 0.5, 0, 255).astype(np.uint8)
    return image


def _upright(image: NDArray[np.uint8], frame: VideoFrame, field: str) -> tuple[NDArray[np.uint8], bool]:
    """Apply the display matrix (ISO/IEC 14496-12, 6.2.2): the image, and whether rows have become columns."""
    a, b, c, d = _display_matrix(frame)
    if a and d and not (b or c):
        return image[:: _sign(d), :: _sign(a)], False
    if b and c and not (a or d):
        return image.swapaxes(0, 1)[:: _sign(b), :: _sign(c)], True
    raise ProblemError("frames_invalid", "the video is turned by less than a quarter", field)


def _display_matrix(frame: VideoFrame) -> tuple[int, int, int, int]:
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError as error:
        # side data of a kind that PyAV has no name for
        raise _DamagedError from error
    if not isinstance(matrix, SideData):
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    return a, b, c, d


def _sign(value: int) -> int:
    return 1 if value > 0 else -1


def _transparent(field: str) -> ProblemError:
    return ProblemError("frames_invalid", "the video has transparent parts", field)
