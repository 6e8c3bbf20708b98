"""The uploaded first frame, resizing, PNG archives and digests."""

import hashlib
import io
import random
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.intrinsics import Crop
from longtake.server.video.images import frames_digest, png_zip, read_first_frame, resize_crop

PICTURE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(kind: str = "PNG", **options: object) -> bytes:
    return encoded(Image.fromarray(PICTURE), kind, **options)


def png_declaring(width: int, height: int) -> bytes:
    """A PNG header and the beginning of its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")


def webp_declaring(width: int, height: int) -> bytes:
    still = picture("WEBP", lossless=True)[12:]
    canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<II", 10, 0) + canvas + still
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg_declaring(width: int, height: int) -> bytes:
    data = bytearray(picture("JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def animated(kind: str) -> bytes:
    shifted = [Image.fromarray(np.roll(PICTURE, step, axis=1)) for step in range(3)]
    return encoded(shifted[0], kind, save_all=True, append_images=shifted[1:])


def refusal(data: bytes) -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        read_first_frame(data, "image")
    assert caught.value.field == "image"
    return caught.value


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(picture(), id="png"),
        pytest.param(picture("WEBP", lossless=True), id="webp"),
        pytest.param(encoded(Image.fromarray(PICTURE).convert("RGBA")), id="opaque-alpha"),
    ],
)
def test_lossless_images_are_read_exactly(data: bytes) -> None:
    frame = read_first_frame(data, "image")
    assert frame.dtype == np.uint8
    assert frame.flags.writeable
    assert np.array_equal(frame, PICTURE)


def test_jpeg_is_read() -> None:
    ramp = np.linspace(0, 255, 64 * 48 * 3).reshape(48, 64, 3).astype(np.uint8)
    frame = read_first_frame(encoded(Image.fromarray(ramp), "JPEG", quality=95), "image")
    assert np.abs(frame.astype(int) - ramp).mean() < 3


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(kind: str, orientation: int) -> None:
    # as the camera would store an upright picture under each orientation
    stored = {
        1: PICTURE,
        2: PICTURE[:, ::-1],
        3: PICTURE[::-1, ::-1],
        4: PICTURE[::-1],
        5: PICTURE.transpose(1, 0, 2),
        6: np.rot90(PICTURE),
        7: np.rot90(PICTURE.transpose(1, 0, 2), 2),
        8: np.rot90(PICTURE, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}[kind]
    frame = read_first_frame(
        encoded(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif, **options), "image"
    )
    assert frame.shape == PICTURE.shape
    assert np.abs(frame.astype(int) - PICTURE).max() <= (4 if kind == "JPEG" else 0)


def test_an_unknown_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert np.array_equal(read_first_frame(picture(exif=exif), "image"), PICTURE)


def test_palette_is_expanded() -> None:
    image = Image.fromarray(PICTURE).quantize(8)
    assert np.array_equal(read_first_frame(encoded(image), "image"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(PICTURE).convert(mode)
    grey = np.asarray(image.convert("L"))
    assert np.array_equal(read_first_frame(encoded(image), "image"), np.stack([grey] * 3, axis=-1))


def test_sixteen_bits_keep_their_high_byte() -> None:
    deep = np.arange(0, 65536, 97, dtype=np.uint16)[:660].reshape(20, 33)
    frame = read_first_frame(encoded(Image.fromarray(deep)), "image")
    assert np.array_equal(frame, np.stack([deep >> 8] * 3, axis=-1))


OPAQUE = np.array([[0, 255, 0], [255, 0, 255]], np.uint8)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_lie_on_white(mode: str) -> None:
    black = Image.new(mode, (3, 2))
    black.putalpha(Image.fromarray(OPAQUE))
    assert np.array_equal(read_first_frame(encoded(black), "image")[..., 0], 255 - OPAQUE)


def test_a_transparent_palette_entry_lies_on_white() -> None:
    image = Image.new("P", (3, 2))
    image.putdata((OPAQUE // 255).ravel().tolist())
    image.putpalette([9, 9, 9, 0, 0, 0])
    assert np.array_equal(read_first_frame(encoded(image, transparency=0), "image")[..., 0], 255 - OPAQUE)


def test_half_transparent_colour_is_mixed_with_white() -> None:
    image = Image.new("RGBA", (2, 2), (200, 100, 0, 128))
    assert np.abs(read_first_frame(encoded(image), "image")[0, 0].astype(int) - [227, 177, 127]).max() <= 1


def test_cmyk_jpeg_becomes_rgb() -> None:
    image = Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK")
    frame = read_first_frame(encoded(image, "JPEG", quality=95), "image")
    assert np.abs(frame[8, 8].astype(int) - [200, 40, 90]).max() <= 4


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00", id="one-byte"),
        pytest.param(random.Random(0).randbytes(4096), id="garbage"),
        pytest.param(b"#EXTM3U\nhttp://localhost/\n", id="playlist"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="svg"),
        pytest.param(b"\x89PNG\r\n\x1a\n", id="signature-only"),
        pytest.param(picture("BMP"), id="bmp"),
        pytest.param(picture("TIFF"), id="tiff"),
        pytest.param(picture("GIF"), id="gif"),
        pytest.param(picture("PPM"), id="ppm"),
    ],
)
def test_what_is_no_png_jpeg_or_webp_is_refused(data: bytes) -> None:
    assert refusal(data).code == "image_invalid"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_truncated_images_are_refused(kind: str, part: float) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    assert refusal(data[: int(len(data) * part)]).code == "image_invalid"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused(kind: str) -> None:
    assert refusal(animated(kind)).code == "image_invalid"


def test_a_jpeg_with_further_pictures_is_its_first() -> None:
    first, second = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert read_first_frame(data, "image")[8, 8, 0] > 240


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png_declaring(60_000, 60_000), id="png-60000x60000"),
        pytest.param(png_declaring(10_000, 10_000), id="png-100-megapixels"),
        pytest.param(png_declaring(8_192, 4_900), id="png-just-over-40-megapixels"),
        pytest.param(png_declaring(8_193, 1), id="png-one-side"),
        pytest.param(png_declaring(1, 8_193), id="png-other-side"),
        pytest.param(webp_declaring(16_000, 16_000), id="webp"),
        pytest.param(jpeg_declaring(60_000, 60_000), id="jpeg"),
        pytest.param(jpeg_declaring(8_192, 8_192), id="jpeg-67-megapixels"),
    ],
)
def test_huge_images_are_refused_before_they_are_decoded(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(image: Image.Image) -> None:
        raise AssertionError("the pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    tracemalloc.start()
    try:
        assert refusal(data).code == "image_too_large"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_huge_image_is_refused_when_pillow_only_warns() -> None:
    assert refusal(png_declaring(10_000, 10_000)).code == "image_too_large"


def test_the_largest_side_is_taken() -> None:
    image = Image.new("1", (8_192, 2))
    assert read_first_frame(encoded(image), "image").shape == (2, 8_192, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_files_give_an_image_or_a_problem() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    originals = [picture(kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    source, outcomes = random.Random(3), set()
    for _ in range(1500):
        data = bytearray(source.choice(originals))
        for _ in range(source.randint(1, 5)):
            at = source.randrange(len(data))
            if source.random() < 0.7:
                data[at] = source.randrange(256)
            else:
                del data[at : at + source.randint(1, 20)]
        try:
            outcomes.add(read_first_frame(bytes(data), "image").shape[2])
        except ProblemError as problem:
            outcomes.add(problem.code)
    assert {3, "image_invalid"} <= outcomes <= {3, "image_invalid", "image_too_large"}


def test_problems_do_not_repeat_the_input() -> None:
    assert "SECRET" not in refusal(b"SECRET" * 10).detail


@pytest.mark.parametrize(("width", "height"), [(640, 480), (200, 320), (320, 192), (64, 40), (41, 333)])
def test_resize_crop_gives_the_models_frame(width: int, height: int) -> None:
    crop = Crop.fit(width, height, 320, 192)
    image = np.random.default_rng(2).integers(0, 256, (height, width, 3), dtype=np.uint8)
    frame = resize_crop(image, crop)
    assert frame.shape == (192, 320, 3)
    assert frame.flags.c_contiguous
    assert frame.flags.writeable
    whole = Image.fromarray(image).resize((crop.resized_width, crop.resized_height), Image.Resampling.LANCZOS)
    box = (crop.left, crop.top, crop.left + 320, crop.top + 192)
    assert np.array_equal(frame, np.asarray(whole.crop(box)))


def test_resize_crop_keeps_an_image_of_the_models_size() -> None:
    assert np.array_equal(resize_crop(PICTURE, Crop.fit(9, 6, 9, 6)), PICTURE)


def test_resize_crop_cuts_at_the_centre() -> None:
    image = np.zeros((32, 96, 3), np.uint8)
    image[:, 32:64] = 255
    assert resize_crop(image, Crop.fit(96, 32, 32, 32)).min() == 255


def test_png_zip_round_trip() -> None:
    frames = np.random.default_rng(3).integers(0, 256, (24, 10, 14, 3), dtype=np.uint8)
    data = png_zip(frames, 25)
    assert data == png_zip(frames.copy(), 25)
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert files.testzip() is None
        assert files.namelist() == [f"frame_{index:06d}.png" for index in range(25, 49)]
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in files.infolist())
        read = [np.asarray(Image.open(io.BytesIO(files.read(name)))) for name in files.namelist()]
    assert np.array_equal(np.stack(read), frames)


def test_png_zip_of_no_frames_is_an_empty_archive() -> None:
    assert zipfile.ZipFile(io.BytesIO(png_zip(np.zeros((0, 4, 4, 3), np.uint8), 1))).namelist() == []


def test_digest_is_the_sha256_of_the_raw_bytes_in_order() -> None:
    frames = np.random.default_rng(4).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    assert frames_digest(frames) == "sha256:" + hashlib.sha256(frames.tobytes()).hexdigest()
    strided = frames[:, :, ::-1]
    assert frames_digest(strided) == "sha256:" + hashlib.sha256(strided.tobytes()).hexdigest()


@pytest.mark.parametrize("change", ["one-bit", "order"])
def test_digest_sees_every_change(change: str) -> None:
    frames = np.random.default_rng(4).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    changed = frames[::-1].copy()
    if change == "one-bit":
        changed = frames.copy()
        changed[3, 5, 7, 2] ^= 1
    assert frames_digest(changed) != frames_digest(frames)
