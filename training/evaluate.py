"""How good the model that ships is: 64 scenes and paths that it never saw.

    python -m training.evaluate --weights server/model/assets/tiny-world --pictures sheets --record

Rows name the weights by the digest of their file. On a GPU it takes a minute and a half; on two cores one part of four
scenes (`--scenes 4 --only fidelity`) takes three. Pictures are contact sheets, every eighth frame of a take below the
true one.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.results import report, row
from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.server.model.bundle import TRANSFORMER_FILE, Bundle, load_bundle
from longtake.server.model.vae import to_uint8
from longtake.server.model.weights import WeightsError
from longtake.training.clips import HEIGHT, WIDTH, Clips, draw_clips, to_pixels
from longtake.training.generation import CameraPath, Forget, takes
from longtake.training.measures import colours, known, psnr, registered, sharpness
from longtake.training.pictures import save_rows
from longtake.training.train import WEIGHTS

SCENES = 64
CHUNKS, LONG = 4, 40
ENDS = range(CHUNK_FRAMES, CHUNK_FRAMES * CHUNKS + 1, CHUNK_FRAMES)
"""Last frames of the chunks."""
FAR_DB = 16.0
"""A path leads away if copying the first frame scores no more than this in the fourth chunk."""
DRIFT = 0.25
KNOWN = 0.5
"""How much of a view the first frame shows at least, where rotation is judged."""


class Row(NamedTuple):
    """A line of the results: what was measured, what came out, and what it must reach."""

    work: str
    number: str
    goal: str


class Judge:
    """Runs a model on the held-out clips of some kind of path."""

    def __init__(self, model: Bundle, device: torch.device, count: int, pictures: Path | None) -> None:
        self.model, self.device, self.count, self.pictures = model, device, count, pictures

    def clips(self, chunks: int, kind: str | None = None) -> Clips:
        """Held-out clips: seeds from 0 on."""
        return draw_clips(self.count, 0, 1 + CHUNK_FRAMES * chunks, self.device, kind)

    def play(self, clips: Clips, poses: Tensor | None = None, forget: Forget | None = None) -> Tensor:
        """What the model makes of the clips' first frames, along other poses if they are given → [B,24K,H,W,3]."""
        path = CameraPath(clips.poses if poses is None else poses, clips.intrinsics)
        return torch.cat(list(takes(self.model, clips.frames[:, 0], path, clips.captions, 0, forget=forget)), dim=1)

    def restore(self, frames: Tensor) -> Tensor:
        """Frames [B,1+24K,H,W,3] behind encoder and decoder, but the first."""
        restored, _ = self.model.vae.decode(self.model.vae.encode(to_pixels(frames)), None)
        return torch.stack([to_uint8(video[:, 1:]) for video in restored])

    def film(self, name: str, made: Tensor, most: int = 8) -> None:
        """A contact sheet of generated frames alone."""
        if self.pictures is not None:
            save_rows(self.pictures / f"{name}.png", list(made[:most]))

    def draw(self, name: str, clips: Clips, made: Tensor, most: int = 8) -> None:
        """Contact sheets of the first clips."""
        if self.pictures is not None:
            rows = [(true[8::8], video[7::8]) for true, video in zip(clips.frames[:most], made, strict=False)]
            save_rows(self.pictures / f"{name}.png", [row for pair in rows for row in pair])


def by_chunk(frames: Tensor) -> Iterator[Tensor]:
    """[B,24K,…] → K times [B,24,…]."""
    return iter(torch.split(frames, CHUNK_FRAMES, dim=1))


def mean(x: Tensor) -> float:
    """Mean over clips."""
    return float(x.double().mean())


def scores(found: Tensor, true: Tensor) -> Tensor:
    """PSNR of every chunk [B,K] in dB."""
    return torch.stack([psnr(a, b) for a, b in zip(by_chunk(found), by_chunk(true), strict=True)], dim=1)


def fidelity(judge: Judge) -> Iterator[Row]:
    """PSNR to the true render, and how much of it is owed to the right poses."""
    clips = judge.clips(CHUNKS)
    true, made = clips.frames[:, 1:], judge.play(clips)
    judge.draw("paths", clips, made)
    ours = scores(made, true)
    copied = scores(clips.frames[:, :1].expand_as(true), true)
    astray = scores(judge.play(clips, clips.poses.roll(1, dims=0)), true)
    far = copied[:, -1] <= FAR_DB
    name = f"{int(far.sum())} of {judge.count} held-out paths on which copying the first frame scores ≤ {FAR_DB:g} dB"
    first, last = (mean(ours[far, i]) for i in (0, -1))
    yield Row(f"PSNR to the true render, first / fourth chunk; {name}", f"{first:.1f} / {last:.1f} dB", "22 / 19.5 dB")
    numbers = (" / ".join(f"{mean(x[:, i]):.1f}" for i in (0, -1)) for x in (ours, copied))
    yield Row("the same on all paths; beside it copying the first frame", " dB; ".join(numbers) + " dB", "–")
    margin = (ours - astray)[far]
    yield Row("PSNR with right poses less that with another path's; the same paths", f"{mean(margin):.1f} dB", "3 dB")
    seen = judge.restore(clips.frames)
    yield Row(
        "PSNR of the VAE alone, first / fourth chunk",
        " / ".join(f"{mean(scores(seen, true)[:, i]):.1f}" for i in (0, -1)) + " dB",
        "–",
    )


def following(judge: Judge) -> Iterator[Row]:
    """Rotation error a chunk: how far the registered rotation off the true pose moves from chunk to chunk.

    Beside it the same of takes that stand still: what a model scores that follows nothing. What the first frame does
    not show is invented, so that it matches the true scene nowhere: chunks are judged between views that it shows half
    of.
    """
    clips = judge.clips(CHUNKS)
    made, copied = judge.play(clips), clips.frames[:, :1].expand_as(clips.frames)[:, 1:]
    found, still = (rotations(misplaced(clips, frames)) for frames in (made, copied))
    shown = torch.stack([known(clips.poses[:, end], clips.intrinsics, HEIGHT, WIDTH) for end in (0, *ENDS)]) >= KNOWN
    judged = shown[1:] & shown[:-1]
    ours, all_chunks = (f"{mean(x):.2f}° (median {float(x.median()):.2f}°)" for x in (found[judged], found))
    yield Row(
        f"rotation error a chunk, {int(judged.sum())} of {judged.numel()} chunks between views half of which the first "
        "frame shows, registered against the renderer; beside it, standing still; of all chunks",
        f"{ours}; {mean(still[judged]):.2f}°; {all_chunks}",
        "3°",
    )


def misplaced(clips: Clips, frames: Tensor) -> Tensor:
    """Yaw and pitch off the true pose of the last frame of each chunk, [K,B,2] in radians."""
    found = [registered(clips.scenes, frames[:, end - 1], clips.poses[:, end], clips.intrinsics) for end in ENDS]
    return torch.stack(found)


def rotations(off: Tensor) -> Tensor:
    """Degrees by which each chunk moves what is registered, [K,B], from where the ends of chunks look [K,B,2]."""
    before = torch.cat([torch.zeros_like(off[:1]), off[:-1]])
    return torch.rad2deg((off - before).norm(dim=-1))


def memory(judge: Judge) -> Iterator[Row]:
    """A view that comes back after two chunks of looking away."""
    clips = judge.clips(CHUNKS, "return")
    made = judge.play(clips)
    judge.draw("return", clips, made)
    view = clips.frames[:, CHUNK_FRAMES]
    with_it = psnr(made[:, -1], view)
    yield Row(
        f"look 90° away for two chunks and return, {judge.count} takes: PSNR of the last frame to the view before",
        f"{mean(with_it):.1f} dB",
        "18 dB",
    )
    forgets: dict[Forget, str] = {"everything": "2 dB", "scans": "–"}
    for forget, goal in forgets.items():
        without = psnr(judge.play(clips, forget=forget)[:, -1], view)
        yield Row(
            f"the same less that of the model with {forget} of its state zeroed before each chunk",
            f"{mean(with_it - without):.1f} dB",
            goal,
        )


def drift(judge: Judge) -> Iterator[Row]:
    """Sharpness and colours at chunk 40, relative to chunk 1 and to what the true frames do meanwhile."""
    frames = 1 + CHUNK_FRAMES * LONG
    ends = [0, *range(1, 1 + CHUNK_FRAMES), *range(frames - CHUNK_FRAMES, frames)]
    clips = draw_clips(judge.count, 0, frames, judge.device, "wander", ends)
    path = CameraPath(clips.poses, clips.intrinsics)
    chunks = list(takes(judge.model, clips.frames[:, 0], path, clips.captions, 0))
    judge.film("long", torch.cat(chunks, dim=1)[:, :: 2 * CHUNK_FRAMES])
    true = list(by_chunk(clips.frames[:, 1:]))
    for name, measure in (("sharpness", lambda x: sharpness(x)[:, None]), ("colours", colours)):
        ours, theirs = (measure(x[-1]) / measure(x[0]).clamp(min=1) for x in (chunks, true))
        beside, alone = (relative.amax(1) for relative in ((ours / theirs - 1).abs(), (ours - 1).abs()))
        within, strictly = (int((x <= DRIFT).sum()) for x in (beside, alone))
        number = f"{within} ({strictly}) of {judge.count} scenes, median change {float(beside.median()):.0%}"
        goal = f"all {judge.count}"
        yield Row(f"{name} at chunk {LONG} within 25 % of chunk 1, beside the true render (alone)", number, goal)


def main() -> None:
    """Measure, print, and with --record append to benchmarks/RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help=f"folder of the model; default: {WEIGHTS}")
    parser.add_argument("--scenes", type=int, default=SCENES, help="how many, at least 2")
    parser.add_argument("--pictures", type=Path, help="folder for contact sheets")
    parser.add_argument("--only", choices=("fidelity", "following", "memory", "drift"), action="append")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    parser.add_argument("--commit", help="what is measured, where git can not tell")
    arguments = parser.parse_args()
    if arguments.scenes < 2:
        parser.error("--scenes must be at least 2: each path is compared with that of another scene")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    try:
        model = load_bundle(arguments.weights, device)
    except WeightsError as error:
        parser.error(str(error))
    measured = f"tiny-world {hashlib.sha256((arguments.weights / TRANSFORMER_FILE).read_bytes()).hexdigest()[:8]}"
    if device.type == "cuda":
        model.transformer.to(torch.bfloat16)  # as it was trained; on a CPU fp32, as it is served
        model.words.to(device)
    judge = Judge(model, device, arguments.scenes, arguments.pictures)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else None
    parts = {"fidelity": fidelity, "following": following, "memory": memory, "drift": drift}
    for name in arguments.only or parts:
        with torch.no_grad():
            found = list(parts[name](judge))
        rows = [row(f"{measured}: {x.work}", x.number, x.goal, hardware, arguments.commit) for x in found]
        report(rows, record=arguments.record)


if __name__ == "__main__":
    main()
