"""Uploaded clips: what is refused, and what an upload can not do."""

import io
import itertools
import os
import random
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
import pytest
from clip_fixtures import (
    FRAGMENTED,
    HEIGHT,
    WIDTH,
    check_refused,
    corners,
    noise,
    read,
    sound,
    steps,
    still,
    video,
)

from longtake.api_schemas.problems import ProblemError
from longtake.server.video import clips
from longtake.server.video.clips import ClipLimits, read_clip
from longtake.server.video.containers import MAX_EDITS, MAX_SAMPLES, check_mp4
from longtake.server.video.segments import encode_segment


def test_images_of_two_sizes_are_refused() -> None:
    problem = check_refused(still(corners()), still(corners(HEIGHT + 2)))
    assert problem.field == "frames[1]"


def test_a_damaged_image_is_named() -> None:
    problem = check_refused(still(corners()), still(corners())[:-30])
    assert problem.field == "frames[1]"


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([], id="nothing"),
        pytest.param([b""], id="empty"),
        pytest.param([random.Random(0).randbytes(4096)], id="garbage"),
        pytest.param([video(steps(2)), video(steps(2))], id="two-videos"),
        pytest.param([video(steps(2)), still(corners())], id="video-and-image"),
        pytest.param([sound()], id="sound-only"),
        pytest.param([sound(beside=steps(3), videos=2)], id="two-video-streams"),
        pytest.param([still(corners(4, 400))], id="long-and-narrow"),
        pytest.param([b"\0\0\0\x10ftypisom\0\0\0\0"], id="mp4-without-movie"),
        pytest.param([b"\x1a\x45\xdf\xa3"], id="ebml-only"),
        pytest.param([b"\x1a\x45\xdf\xa3" + bytes(60)], id="ebml-zeros"),
        pytest.param([b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff"], id="webm-of-unknown-length-without-tracks"),
        pytest.param([still(corners(), "AVIF")], id="avif"),
        pytest.param([still(corners(), "GIF")], id="gif"),
        pytest.param([video(steps(2), "mjpeg", pixels="yuvj420p", colours=(6, 2))], id="codec-not-taken"),
        pytest.param([video(steps(2), "libx264", "mpegts")], id="container-not-taken"),
        pytest.param([video(steps(2), transfer=16)], id="hdr-pq"),
        pytest.param([video(steps(2), transfer=18)], id="hdr-hlg"),
        pytest.param([video(steps(2), colours=(8, 1))], id="matrix-not-known"),
        pytest.param([video(np.empty((0, HEIGHT, WIDTH, 3), np.uint8))], id="no-frames"),
    ],
)
def test_what_is_no_clip_is_refused(files: list[bytes]) -> None:
    check_refused(*files)


def test_transparent_video_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx-vp9", rate=16)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuva420p"
        stream.metadata["alpha_mode"] = "1"
        picture = av.VideoFrame.from_ndarray(np.full((HEIGHT, WIDTH, 4), 90, np.uint8), format="rgba")
        container.mux(stream.encode(picture.reformat(format="yuva420p")))
        container.mux(stream.encode())
    assert "transparent" in check_refused(file.getvalue()).detail


CONTAINERS = [
    pytest.param({}, id="mp4"),
    pytest.param({"muxer": FRAGMENTED, "options": {"g": "4"}}, id="fragmented"),
    pytest.param({"codec": "libvpx", "kind": "webm"}, id="webm"),
    pytest.param({"codec": "libx265"}, id="hevc"),
]


@pytest.mark.parametrize("how", CONTAINERS)
@pytest.mark.parametrize("part", [0.3, 0.7, 0.99])
def test_a_file_cut_short_is_refused(how: dict[str, str], part: float) -> None:
    data = video(noise(), **how)
    check_refused(data[: int(len(data) * part)])


def test_a_file_whose_header_comes_first_is_refused_when_cut_short() -> None:
    segment = encode_segment(noise(24), 0)
    assert len(read(segment.init + segment.media)) == 24
    check_refused(segment.init + segment.media[:-1])
    check_refused(segment.init)


def test_a_sample_beyond_the_end_is_missed() -> None:
    data = bytearray(video(noise()))
    at = data.index(b"stco") + 12
    struct.pack_into(">I", data, at, len(data) - 200)
    check_refused(bytes(data))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"options": {"bf": "0"}}, id="h264"),
        pytest.param({"options": {"bf": "0", "coder": "cavlc"}}, id="h264-cavlc"),
        pytest.param({"codec": "libx265", "options": {"x265-params": "log-level=none:hash=1"}}, id="hevc-with-hashes"),
        pytest.param({"codec": "mpeg4"}, id="mpeg4"),
    ],
)
def test_damage_in_the_middle_is_refused_with_the_frame(how: dict[str, str]) -> None:
    data = bytearray(video(noise(), **how))
    with av.open(io.BytesIO(data), format="mp4") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    middle = packets[6].pos + packets[6].size // 2
    data[middle : middle + 400] = random.Random(1).randbytes(400)
    done = re.search(r"after its first (\d+) frames", check_refused(bytes(data)).detail)
    assert done
    assert 3 <= int(done[1]) <= 6


def test_a_size_that_changes_within_a_clip_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        for part, height in enumerate([HEIGHT, HEIGHT - 16]):
            segment = encode_segment(steps(4, WIDTH, height), 0)
            with av.open(io.BytesIO(segment.init + segment.media), format="mp4") as source:
                template = source.streams.video[0]
                stream = container.streams.video[0] if part else container.add_stream_from_template(template)
                in_band = av.BitStreamFilterContext("h264_mp4toannexb", template)
                packets = [packet for packet in source.demux(template) if packet.size]
                for index, packet in enumerate(itertools.chain.from_iterable(map(in_band.filter, packets))):
                    packet.stream = stream
                    packet.pts = packet.dts = 4000 * part + 1000 * index
                    container.mux(packet)
    assert "one size" in check_refused(file.getvalue()).detail


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(ClipLimits(frames=7), id="frames"),
        pytest.param(ClipLimits(side=WIDTH - 1), id="side"),
        pytest.param(ClipLimits(frame_pixels=WIDTH * HEIGHT - 1), id="frame-pixels"),
        pytest.param(ClipLimits(pixels=8 * WIDTH * HEIGHT - 1), id="all-pixels"),
        pytest.param(ClipLimits(seconds=-1), id="seconds"),
    ],
)
def test_limits_hold_for_videos_and_images(limits: ClipLimits) -> None:
    check_refused(video(steps(8)), limits=limits, code="frames_too_large")
    check_refused(video(steps(8), "libvpx", "webm"), limits=limits, code="frames_too_large")
    check_refused(*[still(corners())] * 8, limits=limits, code="frames_too_large")


def test_limits_are_inclusive() -> None:
    limits = ClipLimits(8, WIDTH, WIDTH * HEIGHT, 8 * WIDTH * HEIGHT)
    assert len(read(video(steps(8)), limits=limits)) == 8
    assert len(read_clip([still(corners())] * 8, WIDTH, HEIGHT, limits)) == 8


def test_an_image_that_declares_too_much_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "read_first_frame", lambda *_: pytest.fail("decoded"))
    check_refused(still(corners()), limits=ClipLimits(side=WIDTH - 1), code="frames_too_large")


def overwritten(name: bytes, distance: int, *values: int) -> bytes:
    muxer = FRAGMENTED if name == b"trun" else {}
    data = bytearray(video(steps(10), muxer=muxer))
    struct.pack_into(f">{len(values)}I", data, data.index(name) + distance, *values)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(overwritten(b"stsz", 8, 1, 80_000_000), id="samples"),
        pytest.param(overwritten(b"trun", 4, 0, 80_000_000), id="fragment"),
        pytest.param(overwritten(b"elst", 8, MAX_EDITS + 1), id="edits"),
    ],
)
def test_a_small_file_can_not_claim_millions_of_samples(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "open", lambda *_, **__: pytest.fail("opened"))
    check_refused(data, code="frames_too_large")


def test_counts_of_all_tracks_and_fragments_add_up() -> None:
    count = MAX_SAMPLES // 3 + 1
    trun = struct.pack(">I4sII", 16, b"trun", 0, count)
    moof = struct.pack(">I4s", 8 + len(trun), b"moof") + trun
    check_mp4(2 * moof, "frames")
    with pytest.raises(ProblemError, match="samples"):
        check_mp4(3 * moof, "frames")


def listener() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    return server


def test_no_playlist_is_followed(tmp_path: Path) -> None:
    canary = tmp_path / "canary.mp4"
    canary.write_bytes(video(steps(3)))
    with listener() as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/canary.mp4"
        texts = [
            f"ffconcat version 1.0\nfile '{canary}'\n",
            f"ffconcat version 1.0\nfile '{url}'\n",
            f"#EXTM3U\n#EXTINF:1,\n{canary}\n",
            f"#EXTM3U\n#EXTINF:1,\n{url}\n",
            f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{url}'/></svg>",
        ]
        # what FFmpeg does with the first of them when it may guess
        (tmp_path / "upload.mp4").write_text(texts[0])
        with av.open(str(tmp_path / "upload.mp4"), options={"safe": "0"}) as container:
            assert len(list(container.decode(video=0))) == 3
        for text in texts:
            check_refused(text.encode())
            check_refused(b"\0\0\0\x10ftypisom\0\0\0\0" + text.encode())
            check_refused(b"\0\0\0\0ftyp" + text.encode())
        with pytest.raises(BlockingIOError):
            server.accept()


def with_alias(data: bytes, target: str) -> bytes:
    """The MP4 with its samples said to lie in another file (QuickTime `alis` data reference)."""
    path = target.encode() + bytes(len(target) % 2)
    alias = bytes(10) + b"\x01v" + bytes(26) + bytes(12) + b"\x01f" + bytes(62) + bytes(16)
    alias += struct.pack(">HH", 0xFFFF, 0xFFFF) + bytes(16) + struct.pack(">HH", 2, len(path)) + path + b"\xff\xff"
    entry = struct.pack(">I4sI", 12 + len(alias), b"alis", 0) + alias
    reference = struct.pack(">I4sII", 16 + len(entry), b"dref", 0, 1) + entry
    changed = bytearray(data)
    at = changed.index(b"dref") - 4
    (size,) = struct.unpack_from(">I", changed, at)
    changed[at : at + size] = reference
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
        place = changed.index(box) - 4
        (old,) = struct.unpack_from(">I", changed, place)
        struct.pack_into(">I", changed, place, old + len(reference) - size)
    return bytes(changed)


def test_no_data_reference_is_followed(tmp_path: Path) -> None:
    opened = []

    def record(url: str, *_: object) -> io.BytesIO:
        opened.append(url)
        return io.BytesIO(canary.read_bytes())

    canary = tmp_path / "canary.mp4"
    canary.write_bytes(video(steps(4)))
    upload = with_alias(canary.read_bytes(), str(canary))
    options = {"enable_drefs": "1", "use_absolute_path": "1"}
    control = av.open(io.BytesIO(upload), "r", format="mp4", options=options, io_open=record)
    with control, suppress(av.FFmpegError):
        list(control.decode(video=0))
    assert [Path(url).name for url in opened] == ["canary.mp4"]
    check_refused(upload)


def test_even_a_demuxer_that_would_follow_references_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = with_alias(video(steps(4)), "/etc/hostname")
    really_open = av.open

    def trusting(*args: object, options: dict[str, str], **kwargs: object) -> object:
        return really_open(*args, options=options | {"enable_drefs": "1", "use_absolute_path": "1"}, **kwargs)

    monkeypatch.setattr(av, "open", trusting)
    check_refused(upload)


def mutated(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    changed = bytearray(data)
    match chance.randrange(5):
        case 0:
            del changed[chance.randrange(len(changed)) :]
        case 1:
            start = chance.randrange(len(changed))
            del changed[start : start + chance.randrange(1, 60)]
        case 2:
            start = chance.randrange(len(changed))
            changed[start:start] = chance.randbytes(chance.randrange(1, 60))
        case 3:
            for _ in range(chance.randrange(1, 5)):
                at = chance.randrange(max(1, len(changed) - 4))
                struct.pack_into(">I", changed, at, chance.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 24]))
        case _:
            for _ in range(chance.randrange(1, 12)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"options": {"bf": "2", "g": "4"}}, id="mp4"),
        pytest.param({"muxer": FRAGMENTED, "options": {"g": "3"}}, id="fragmented"),
        pytest.param({"codec": "libvpx", "kind": "webm"}, id="vp8"),
        pytest.param({"codec": "libvpx-vp9", "kind": "webm"}, id="vp9"),
        pytest.param({"codec": "libx265"}, id="hevc"),
        pytest.param({"codec": "mpeg4"}, id="mpeg4"),
        pytest.param({"codec": "libsvtav1", "options": {"preset": "10"}}, id="av1"),
    ],
)
def test_mutated_files_give_frames_or_a_problem(how: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    base = video(noise(6), **how)  # x265 corrupts its heap below 64 pixels
    capfd.readouterr()
    limits = ClipLimits(frames=50, side=512, frame_pixels=1 << 18, seconds=10)
    outcomes = {True: 0, False: 0}
    for seed in range(150):
        try:
            frames = read_clip([mutated(base, seed)], 48, 32, limits)
        except ProblemError:
            outcomes[False] += 1
        else:
            assert frames.shape[1:] == (32, 48, 3)
            outcomes[True] += 1
    assert min(outcomes.values()) > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_nothing_stays_open_or_running() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    data = video(noise(), options={"g": "4"})
    damaged = bytearray(data)
    damaged[len(data) // 3 : len(data) // 3 + 2000] = bytes(2000)
    read(data)
    before = held()
    for _ in range(5):
        read(data)
        check_refused(bytes(damaged))
        check_refused(data, limits=ClipLimits(frames=3), code="frames_too_large")
        assert held() == before
