"""Uploaded clips: which frames are read from them."""

import io
import struct
import tracemalloc
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
import pytest
from clip_fixtures import (
    FRAGMENTED,
    HEIGHT,
    LOSSLESS,
    ONE,
    QUIET,
    WIDTH,
    Frames,
    check_refused,
    corners,
    error,
    read,
    sound,
    steps,
    still,
    turned,
    video,
)
from PIL import Image

from longtake.server.camera.intrinsics import Crop
from longtake.server.video.clips import read_clip
from longtake.server.video.images import read_first_frame, resize_crop
from longtake.server.video.segments import encode_segment

KINDS = [
    pytest.param({}, id="h264"),
    pytest.param({"options": {"bf": "3", "g": "5"}}, id="h264-b-frames"),
    pytest.param({"muxer": FRAGMENTED}, id="h264-fragmented"),
    pytest.param({"muxer": {"movflags": "negative_cts_offsets"}, "options": {"bf": "2"}}, id="negative-times"),
    pytest.param({"codec": "libx265"}, id="hevc"),
    pytest.param({"codec": "libx265", "pixels": "yuv420p10le"}, id="hevc-10-bit"),
    pytest.param({"codec": "mpeg4", "options": {"qscale": "1"}}, id="mpeg4"),
    pytest.param({"codec": "libsvtav1", "options": {"crf": "5", "preset": "10"}}, id="av1"),
    pytest.param({"codec": "libsvtav1", "kind": "webm", "options": {"crf": "5", "preset": "10"}}, id="av1-webm"),
    pytest.param({"codec": "libvpx", "kind": "webm", "options": {"b": "4M"}}, id="vp8"),
    pytest.param({"codec": "libvpx-vp9", "kind": "webm", "options": {"crf": "5", "b": "0"}}, id="vp9"),
    pytest.param({"codec": "libvpx-vp9", "options": {"crf": "5", "b": "0"}}, id="vp9-mp4"),
    pytest.param({"kind": "matroska"}, id="h264-matroska"),
]


@pytest.mark.parametrize("how", KINDS)
def test_every_frame_comes_once_and_in_order(how: dict[str, str]) -> None:
    frames = steps(14)
    clip = read(video(frames, **how))
    assert clip.dtype == np.uint8
    assert clip.flags.c_contiguous
    assert clip.flags.writeable
    assert error(clip, frames) <= 6


@pytest.mark.parametrize("bframes", ["0", "3"])
def test_a_variable_frame_rate_changes_nothing(bframes: str) -> None:
    frames = steps(12)
    times = [0, 1, 2, 9, 10, 30, 31, 32, 60, 61, 90, 200]
    assert error(read(video(frames, options={"bf": bframes}, times=times)), frames) <= 4


def test_sound_beside_the_picture_is_left_aside() -> None:
    assert error(read(sound(beside=steps(6))), steps(6)) <= 4


@pytest.mark.parametrize("bframes", ["0", "2"])
def test_what_an_edit_list_cuts_away_is_no_frame(bframes: str) -> None:
    frames = steps(16)
    data = bytearray(video(frames, options={"bf": bframes}))
    at = data.index(b"elst") + 12
    _, begin = struct.unpack_from(">Ii", data, at)
    # movie time in milliseconds; 1024 ticks a frame
    struct.pack_into(">Ii", data, at, round(1000 * 5 / 16), begin + 4 * 1024)
    assert error(read(bytes(data)), frames[4:9]) <= 4


@pytest.mark.parametrize(
    ("pixels", "colours"),
    [
        pytest.param("yuv420p", (1, 1), id="bt709-limited"),
        pytest.param("yuv420p", (1, 2), id="bt709-full"),
        pytest.param("yuv420p", (6, 1), id="bt601-limited"),
        pytest.param("yuv422p", (6, 2), id="bt601-full-422"),
        pytest.param("yuv420p", (2, 0), id="untold"),
        pytest.param("yuv444p", (1, 1), id="444"),
        pytest.param("yuv420p10le", (9, 1), id="bt2020-10-bit"),
    ],
)
def test_colours_are_those_of_the_stream(pixels: str, colours: tuple[int, int]) -> None:
    palette = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [130, 60, 200]], np.uint8)
    frames = np.broadcast_to(palette[:, None, None], (6, HEIGHT, WIDTH, 3))
    assert error(read(video(frames, pixels=pixels, colours=colours, options={"qp": "1"})), frames) <= 3


@pytest.mark.parametrize(("size", "matrix"), [((WIDTH, HEIGHT), 6), ((320, 720), 1), ((1280, 64), 1)])
def test_without_a_matrix_the_size_decides(size: tuple[int, int], matrix: int) -> None:
    frame = np.broadcast_to(np.array([200, 60, 90], np.uint8), (2, size[1], size[0], 3))
    data = video(frame, colours=(matrix, 1), options=LOSSLESS, pixels="yuv444p")
    untold = video(frame, colours=(2, 0), options=LOSSLESS, pixels="yuv444p")
    assert error(read(data, *size), frame) <= 2
    assert (error(read(untold, *size), frame) <= 2) == (matrix == 6)


@pytest.mark.parametrize(("codec", "span"), [("libx264", 1), ("libx264", 2), ("libx265", 1), ("libx265", 2)])
def test_grey_is_rgb_of_equal_parts(codec: str, span: int) -> None:
    levels = np.array([16, 60, 128, 200, 235], np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=16, options=QUIET.get(codec, {}) | {"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "gray"
        stream.codec_context.color_range = span
        for level in levels:
            frame = av.VideoFrame.from_ndarray(np.full((HEIGHT, WIDTH), level), format="gray")
            frame.color_range = span
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    expected = levels if span == 2 else np.round((levels - 16.0) * 255 / 219).astype(np.uint8)
    assert error(read(file.getvalue()), np.broadcast_to(expected[:, None, None, None], (5, HEIGHT, WIDTH, 3))) <= 2


@pytest.mark.parametrize("size", [(97, 65), (33, 49), (1, 1)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    frames = steps(3, *size)
    data = video(frames, pixels="yuv444p", options=LOSSLESS)
    assert error(read(data, *size), frames) <= 2


TURNS = [
    pytest.param((ONE, 0, 0, ONE), lambda f: f, id="none"),
    pytest.param((0, ONE, -ONE, 0), lambda f: np.rot90(f, -1), id="clockwise"),
    pytest.param((-ONE, 0, 0, -ONE), lambda f: np.rot90(f, 2), id="half"),
    pytest.param((0, -ONE, ONE, 0), lambda f: np.rot90(f), id="counter-clockwise"),
    pytest.param((-ONE, 0, 0, ONE), lambda f: f[:, ::-1], id="mirrored"),
    pytest.param((ONE, 0, 0, -ONE), lambda f: f[::-1], id="upside-down"),
    pytest.param((0, ONE, ONE, 0), lambda f: f.swapaxes(0, 1), id="transposed"),
]


@pytest.mark.parametrize(("matrix", "turn"), TURNS)
def test_phones_are_held_upright(matrix: tuple[int, int, int, int], turn: Callable[[Frames], Frames]) -> None:
    frame = corners()
    expected = turn(frame)
    data = turned(video(frame[None], options=LOSSLESS, pixels="yuv444p"), matrix)
    assert error(read(data, expected.shape[1], expected.shape[0])[0], expected) <= 3


@pytest.mark.parametrize("matrix", [(46341, 46341, -46341, 46341), (0, 0, 0, 0)])
def test_other_turns_are_refused(matrix: tuple[int, int, int, int]) -> None:
    assert "quarter" in check_refused(turned(video(steps(2)), matrix)).detail


def test_wide_pixels_become_square() -> None:
    frame = corners()
    data = video(frame[None], options=LOSSLESS, pixels="yuv444p", aspect=Fraction(2))
    expected = resize_crop(frame, Crop(2 * WIDTH, HEIGHT, 2 * WIDTH, HEIGHT, 0, 0, 2 * WIDTH, HEIGHT))
    assert error(read(data, 2 * WIDTH, HEIGHT)[0], expected) <= 3
    upright = read(turned(data, (0, ONE, -ONE, 0)), HEIGHT, 2 * WIDTH)[0]
    assert error(upright, np.rot90(expected, -1)) <= 3


@pytest.mark.parametrize("size", [(48, 32), (64, 64), (40, 90)])
def test_frames_are_fitted_like_a_first_frame(size: tuple[int, int]) -> None:
    frame = corners()
    fitted = resize_crop(frame, Crop.fit(WIDTH, HEIGHT, *size))
    assert np.array_equal(read_clip([still(frame)], *size)[0], fitted)
    assert error(read(video(frame[None], options=LOSSLESS, pixels="yuv444p"), *size)[0], fitted) <= 3


def test_images_are_read_one_by_one_in_order() -> None:
    frames = [corners(), corners()[::-1].copy(), corners()[:, ::-1].copy()]
    files = [still(frames[0]), still(frames[1], "WEBP", lossless=True), still(frames[2], "JPEG", quality=100)]
    clip = read_clip(files, WIDTH, HEIGHT)
    assert clip.shape == (3, HEIGHT, WIDTH, 3)
    for index, data in enumerate(files):
        assert np.array_equal(clip[index], read_first_frame(data, "image"))


def test_images_are_turned_by_their_exif_before_their_sizes_are_compared() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [still(corners()), still(np.ascontiguousarray(np.rot90(corners())), exif=exif)]
    clip = read_clip(files, WIDTH, HEIGHT)
    assert np.array_equal(clip[0], clip[1])


@pytest.mark.parametrize("kind", ["video", "images"])
def test_memory_holds_the_small_frames_and_one_large_one(kind: str) -> None:
    frames = steps(40, 640, 480)
    large = frames[0].nbytes
    files = [video(frames)] if kind == "video" else [still(frame) for frame in frames]
    read_clip(files, 32, 24)
    tracemalloc.start()
    try:
        read_clip(files, 32, 24)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * large


def test_our_own_video_comes_back_as_it_was() -> None:
    t, y, x, c = np.ogrid[:24, :HEIGHT, :WIDTH, :3]
    waves = np.round(127.5 + 120 * np.sin(x / 30 + t / 4 + c) * np.cos(y / 25 - t / 6 + 2 * c)).astype(np.uint8)
    segment = encode_segment(waves, chunk_index=3)
    difference = read(segment.init + segment.media).astype(float) - waves
    assert 10 * np.log10(255**2 / np.mean(difference**2)) > 45
    assert np.abs(difference.mean(axis=(0, 1, 2))).max() < 0.2
