"""Still pictures: the uploaded first frame, resizing, PNG archives and frame digests.

Uploads are hostile: only PNG, JPEG and WebP are recognised, and the declared size is checked before any decoding.
"""

import hashlib
import io
import struct
import zipfile
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import Base
from PIL.Image import Transpose

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.intrinsics import Crop

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_SIDE = 8192
MAX_PIXELS = 40_000_000

UNROTATE = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""What brings an image with this EXIF orientation upright (EXIF 2.32, tag 0x0112)."""

DECODER_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AssertionError, ArithmeticError),
    *(struct.error, zlib.error),
)
"""What Pillow raises on damaged files."""

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def read_first_frame(data: bytes, field: str) -> NDArray[np.uint8]:
    """Decode an uploaded image: upright, RGB, transparent parts on white, the high byte of 16-bit values.

    Args:
        data: a PNG, JPEG or WebP file.
        field: path of the upload in the request, for the error.

    Returns:
        uint8 [H, W, 3].

    Raises:
        ProblemError: `image_invalid` for anything that is not one whole still image of these formats;
            `image_too_large` when it declares a side over `MAX_SIDE` or more than `MAX_PIXELS`, before it is decoded.
    """
    try:
        with _open(data) as image:
            _check_declared(image, field)
            return np.array(_rgb(_upright(image)))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(field) from error
    except DECODER_ERRORS as error:
        raise ProblemError("image_invalid", "the file is not a whole PNG, JPEG or WebP image", field) from error


def resize_crop(image: NDArray[np.uint8], crop: Crop) -> NDArray[np.uint8]:
    """Resize `image` uint8 [H, W, 3] with the Lanczos filter, then cut: uint8 [crop.height, crop.width, 3]."""
    resized = Image.fromarray(image).resize((crop.resized_width, crop.resized_height), Image.Resampling.LANCZOS)
    return np.asarray(resized)[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width].copy()


def png_zip(frames: NDArray[np.uint8], first_index: int) -> bytes:
    """Frames uint8 [T, H, W, 3] as a zip of PNG files `frame_000025.png` …, numbered from `first_index`.

    The PNG files are stored as they are, with a fixed date: the same frames give the same bytes.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as files:
        for index, frame in enumerate(frames, first_index):
            png = io.BytesIO()
            Image.fromarray(frame).save(png, "PNG", compress_level=1)
            files.writestr(zipfile.ZipInfo(f"frame_{index:06d}.png", ZIP_EPOCH), png.getvalue())
    return archive.getvalue()


def frames_digest(frames: NDArray[np.uint8]) -> str:
    """`sha256:` and the hex SHA-256 of the raw RGB bytes of frames uint8 [T, H, W, 3], in order."""
    return f"sha256:{hashlib.sha256(np.ascontiguousarray(frames).data).hexdigest()}"


def _open(data: bytes) -> Image.Image:
    """Read the header only."""
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _check_declared(image: Image.Image, field: str) -> None:
    width, height = image.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise _too_large(field)
    # a JPEG may carry further pictures (MPO: depth, gain maps); its first is the photo
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ProblemError("image_invalid", "the image is animated", field)


def _upright(image: Image.Image) -> Image.Image:
    rotation = UNROTATE.get(image.getexif().get(Base.Orientation, 1))
    return image if rotation is None else image.transpose(rotation)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _too_large(field: str) -> ProblemError:
    detail = f"the image declares more than {MAX_SIDE} pixels a side or {MAX_PIXELS // 1_000_000} million in all"
    return ProblemError("image_too_large", detail, field)
