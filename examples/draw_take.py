"""Draw the README's picture from a demo: the first frame, frames before the kill, and frames after it.

Usage: python examples/draw_take.py longtake-demo/take.mp4 docs/take.png
"""

import sys
from importlib.resources import as_file, files
from pathlib import Path

import av
from PIL import Image, ImageDraw, ImageFont

from longtake.server.demo import FIRST_FRAME

WIDTH, HEIGHT, GAP, LABEL = 192, 120, 10, 34
SHOWN = [(48, "frame 48"), (84, "frame 84"), (120, "frame 120"), None, (156, "frame 156"), (192, "frame 192")]
INK, RED = (40, 40, 46), (200, 40, 40)


def main(video: Path, picture: Path) -> None:
    """Read the video and write the picture."""
    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    with as_file(files("longtake.server") / "assets" / FIRST_FRAME) as first:
        tiles = [(Image.open(first), "first frame")]
    sheet = Image.new("RGB", ((len(SHOWN) + 1) * (WIDTH + GAP) + GAP, HEIGHT + LABEL + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    tiles += [(frames[shown[0] - 1], shown[1]) if shown else (None, "") for shown in SHOWN]
    for column, (tile, label) in enumerate(tiles):
        left = GAP + column * (WIDTH + GAP)
        if tile is None:
            draw.text((left + 58, HEIGHT // 2 - 4), "kill -9", RED, ImageFont.load_default(24))
            draw.text((left + 46, HEIGHT // 2 + 26), "started again", INK, font)
            continue
        sheet.paste(tile.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), (left, GAP))
        draw.text((left, HEIGHT + GAP + 6), label, INK, font)
    sheet.save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
