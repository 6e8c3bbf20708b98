"""Chunk-wise H.264: what a player reads from the segments, alone and joined."""

import gc
import io
import struct
import weakref
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from longtake.server.model.vae import TINY_VAE, CausalVideoVAE, init_untrained, to_uint8
from longtake.server.video import segments
from longtake.server.video.segments import Segment, encode_segment, from_zero


def join(init: bytes, medias: list[bytes]) -> bytes:
    """One file of consecutive chunks."""
    return b"".join([init, *medias])


Take = tuple[list[np.ndarray], list[Segment]]

HEIGHT, WIDTH, FRAMES = 96, 160, 24


def blocks(
    low: int = 0, high: int = 255, step: int = 1, seed: int = 0, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> np.ndarray:
    """Coloured noise in 4×4 blocks, new in every frame."""
    levels = np.arange(low, high + 1, step, dtype=np.uint8)
    small = np.random.default_rng(seed).choice(levels, (FRAMES, size[0] // 4, size[1] // 4, 3))
    return small.repeat(4, axis=1).repeat(4, axis=2)


def waves(phase: float = 0) -> np.ndarray:
    """Smooth coloured waves that move."""
    t, y, x, c = np.ogrid[:FRAMES, :HEIGHT, :WIDTH, :3]
    wave = np.sin(x / 30 + t / 4 + c + phase) * np.cos(y / 25 - t / 6 + 2 * c)
    return np.round(127.5 + 120 * wave).astype(np.uint8)


def flat() -> np.ndarray:
    """Eight saturated colours, one in a frame."""
    colours = np.array([[(i >> c & 1) * 255 for c in range(3)] for i in range(8)], np.uint8)
    return np.broadcast_to(colours[np.arange(FRAMES) % 8, None, None], (FRAMES, HEIGHT, WIDTH, 3))


def untrained_model() -> np.ndarray:
    vae = CausalVideoVAE(TINY_VAE)
    init_untrained(vae, seed=0)
    with torch.no_grad():
        latents = torch.randn(1, 16, 4, 3, 5, generator=torch.Generator().manual_seed(0))
        return to_uint8(vae.decode(latents, None)[0][0, :, 1:]).numpy()


def read(data: bytes) -> tuple[np.ndarray, list[Fraction]]:
    """Frames and their times in seconds."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), [f.pts * f.time_base for f in frames]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def boxes(data: bytes) -> list[bytes]:
    kinds, at = [], 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        kinds.append(kind)
        at += size
    assert at == len(data)
    return kinds


@pytest.fixture(scope="module")
def take() -> Take:
    chunks = [waves(0), blocks(), waves(2), blocks(seed=1)]
    return chunks, [encode_segment(frames, k) for k, frames in enumerate(chunks)]


def test_joined_segments_are_one_video_of_every_frame_in_order(take: Take) -> None:
    chunks, made = take
    frames, times = read(join(made[0].init, [segment.media for segment in made]))
    assert times == [Fraction(i, 16) for i in range(4 * FRAMES)]
    raw = np.concatenate(chunks)
    assert frames.shape == raw.shape
    assert min(psnr(a, b) for a, b in zip(frames, raw, strict=True)) >= 35


def test_the_initialisation_is_the_same_for_every_chunk(take: Take) -> None:
    _, made = take
    assert len({segment.init for segment in made}) == 1
    assert boxes(made[0].init) == [b"ftyp", b"moov"]
    assert all(boxes(segment.media) == [b"moof", b"mdat"] for segment in made)


def test_fragments_carry_their_number_and_their_time(take: Take) -> None:
    _, made = take
    for k, segment in enumerate(made):
        (number,) = struct.unpack_from(">I", segment.media, segment.media.index(b"mfhd") + 8)
        version, ticks = struct.unpack_from(">IQ", segment.media, segment.media.index(b"tfdt") + 4)
        assert (number, version, ticks) == (k + 1, 1 << 24, 24_000 * k)


def test_a_single_segment_plays_alone(take: Take) -> None:
    chunks, made = take
    frames, times = read(join(made[3].init, [made[3].media]))
    assert times == [Fraction(72 + i, 16) for i in range(FRAMES)]
    assert psnr(frames, chunks[3]) >= 35


def test_a_take_joined_from_the_middle_plays(take: Take) -> None:
    _, made = take
    frames, times = read(join(made[0].init, [made[2].media, made[3].media]))
    assert len(frames) == 2 * FRAMES
    assert times[0] == 3


def test_a_player_reads_rate_duration_size_and_colour(take: Take) -> None:
    _, made = take
    with av.open(io.BytesIO(join(made[0].init, [segment.media for segment in made]))) as container:
        (stream,) = container.streams
        assert isinstance(stream, av.VideoStream)
        assert container.duration == 6 * 1_000_000
        assert stream.duration * stream.time_base == 6
        assert stream.average_rate == 16
        codec = stream.codec_context
        assert (codec.name, codec.pix_fmt, codec.width, codec.height) == ("h264", "yuv420p", WIDTH, HEIGHT)
        assert (codec.color_primaries, codec.color_trc, codec.colorspace, codec.color_range) == (1, 1, 1, 1)
        packets = [packet for packet in container.demux(stream) if packet.size]
    assert [i for i, packet in enumerate(packets) if packet.is_keyframe] == [0, 24, 48, 72]
    assert all(packet.dts == packet.pts for packet in packets)


@pytest.mark.parametrize(
    ("content", "least"),
    [
        pytest.param(waves(), 40, id="waves"),
        pytest.param(blocks(), 35, id="block-noise"),
        pytest.param(blocks(64, 191), 38, id="softer-block-noise"),
        pytest.param(blocks(step=255), 34, id="saturated-block-noise"),
        pytest.param(untrained_model(), 37, id="untrained-model"),
        pytest.param(flat(), 40, id="flat-colours"),
    ],
)
def test_every_frame_is_close_to_the_raw_one(content: np.ndarray, least: int) -> None:
    segment = encode_segment(content, 0)
    frames, _ = read(join(segment.init, [segment.media]))
    assert min(psnr(a, b) for a, b in zip(frames, content, strict=True)) >= least


@pytest.mark.parametrize(("height", "width"), [(16, 16), (34, 18), (64, 62)])
@pytest.mark.parametrize("count", [1, 24])
def test_other_even_sizes_and_lengths(height: int, width: int, count: int) -> None:
    frames = blocks(size=(height + 2, width + 2))[:count, :height, :width]
    made = [encode_segment(frames, k) for k in range(2)]
    decoded, times = read(join(made[0].init, [segment.media for segment in made]))
    assert decoded.shape == (2 * count, height, width, 3)
    assert times == [Fraction(i, 16) for i in range(2 * count)]


def test_other_frame_rates() -> None:
    made = [encode_segment(waves()[:6], k, fps=25) for k in range(2)]
    _, times = read(join(made[0].init, [segment.media for segment in made]))
    assert times == [Fraction(i, 25) for i in range(12)]


def test_a_take_of_weeks_still_has_its_time() -> None:
    chunk = 2_000_000
    segment = encode_segment(waves(), chunk)
    _, times = read(join(segment.init, [segment.media]))
    assert times[0] == Fraction(3, 2) * chunk


def test_the_same_frames_give_the_same_bytes_and_stay_unchanged() -> None:
    frames = blocks()
    kept = frames.copy()
    frames.flags.writeable = False
    assert encode_segment(frames, 5) == encode_segment(frames[:, :, ::-1][:, :, ::-1], 5)
    assert np.array_equal(frames, kept)


@pytest.mark.parametrize(
    ("frames", "index", "message"),
    [
        pytest.param(np.zeros((24, 33, 32, 3), np.uint8), 0, "odd side", id="odd-height"),
        pytest.param(np.zeros((24, 32, 33, 3), np.uint8), 0, "odd side", id="odd-width"),
        pytest.param(np.zeros((24, 32, 32, 4), np.uint8), 0, "not uint8", id="alpha"),
        pytest.param(np.zeros((24, 32, 32), np.uint8), 0, "not uint8", id="grey"),
        pytest.param(np.zeros((24, 32, 32, 3), np.float32), 0, "not uint8", id="floats"),
        pytest.param(np.zeros((0, 32, 32, 3), np.uint8), 0, "not uint8", id="no-frames"),
        pytest.param(np.zeros((24, 32, 32, 3), np.uint8), -1, "negative", id="negative-index"),
    ],
)
def test_bad_frames_are_refused_by_name(frames: np.ndarray, index: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_segment(frames, index)


def test_a_failing_encoder_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[weakref.ref[io.BytesIO]] = []
    open_container, yuv_frames = av.open, segments._yuv_frames

    def remember(file: io.BytesIO, *args: str, **options: object) -> av.container.OutputContainer:
        files.append(weakref.ref(file))
        return open_container(file, *args, **options)

    def fail(frames: np.ndarray, fps: int) -> Iterator[av.VideoFrame]:
        yield from yuv_frames(frames[:3], fps)
        raise RuntimeError("out of frames")

    monkeypatch.setattr(av, "open", remember)
    monkeypatch.setattr(segments, "_yuv_frames", fail)
    with pytest.raises(RuntimeError, match="out of frames"):
        encode_segment(waves(), 0)
    gc.collect()
    assert [file() for file in files] == [None]


def test_one_chunk_from_zero_starts_and_ends_like_a_clip_of_its_own() -> None:
    segment = encode_segment(waves(), 5)
    file = from_zero(segment.init + segment.media)
    frames, times = read(file)
    assert times == [Fraction(frame, 16) for frame in range(FRAMES)]
    assert (frames == read(segment.init + segment.media)[0]).all()
    with av.open(io.BytesIO(file)) as container:
        assert container.duration == 1_500_000
