"""How far observing what was generated drifts from having generated it, by latents and by pixels; rows for RESULTS.md.

By latents the state must be the same bits, which is checked first. With `--clip FILE` a real clip is observed through
the API of a private server as well, and generation goes on behind it.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.overhead import begin
from benchmarks.results import SERVED, report, row
from longtake.client import Client
from longtake.server.model.registry import load_model
from longtake.server.model.world import ChunkCamera, ChunkOutput, State
from longtake.server.private import private_server
from longtake.server.video.clips import read_clip
from longtake.server.video.segments import encode_segment

CHUNKS = 3


def main() -> None:
    """Measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clip", type=Path, help="an MP4 or WebM of at least 24 frames")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    report(drift(), record=arguments.record)
    if arguments.clip:
        print(observe_clip(arguments.clip))


def drift() -> list[str]:
    """Differences after one chunk that was observed instead of generated."""
    model = load_model("tiny-untrained")
    height, width = model.spec.height, model.spec.width
    y, x, c = np.ogrid[:height, :width, :3]
    conditions = model.condition((127 + 100 * np.sin(x / 40 + c) * np.cos(y / 35)).astype(np.uint8), "a quay")
    intrinsics = np.array([277.0, 277.0, width / 2, height / 2])
    poses = np.tile(np.eye(4), (24, 1, 1))
    camera = ChunkCamera(poses, np.tile(intrinsics, (24, 1)), intrinsics)
    state = model.initial_state(conditions)
    for index in range(CHUNKS - 1):
        state = model.generate(conditions, state, index, camera, seed=7).state
    index = CHUNKS - 1
    made = model.generate(conditions, state, index, camera, seed=7)
    same = model.absorb(conditions, state, index, camera, made.latents.clone()).state
    assert all(torch.equal(same[name], made.state[name]) for name in made.state)
    segment = encode_segment(made.frames, index)
    decoded = read_clip([segment.init + segment.media], width, height)
    return [
        described(name, made, model.observe(conditions, state, index, camera, frames))
        for name, frames in (("lossless frames", made.frames), ("its H.264 segment", decoded))
    ]


def described(source: str, made: ChunkOutput, seen: ChunkOutput) -> str:
    """The row of one way to observe."""
    latents = relative(seen.latents, made.latents)
    number = (
        f"relative RMS of latents {latents:.2f}, of KV {states(seen.state, made.state):.2f} (by latents: 0, same bits)"
    )
    return row(
        f"drift of observing a generated chunk from {source}; tiny-untrained, whose VAE restores nothing", number, "0"
    )


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


def states(a: State, b: State) -> float:
    """Relative RMS over all recurrent states of the main branch."""
    names = [name for name in b if name.endswith(".kv")]
    return relative(torch.cat([a[name].flatten() for name in names]), torch.cat([b[name].flatten() for name in names]))


def observe_clip(path: Path) -> str:
    """Observe the first chunks of a clip, then generate one more."""
    frames = read_clip([path.read_bytes()], 64, 64)
    poses = [np.eye(4).tolist()] * len(frames)
    with (
        tempfile.TemporaryDirectory() as folder,
        private_server(Path(folder), *SERVED) as server,
        Client(server.url) as client,
    ):
        session = begin(client)
        seen = client.observe(session, path, poses=poses)
        after = client.generate(session, actions="w-24")
    kinds = [chunk.kind for chunk in (*seen.data, *after.data)]
    used = f"{seen.frames_used} used, {seen.frames_unused} not"
    return f"{path.name}: {len(frames)} frames, {used}; chunks {', '.join(kinds)}"


if __name__ == "__main__":
    main()
