"""Stage 1 of SANA-WM at full size on this GPU, with random weights: are cut takes the same bits, how long is a chunk.

Eight chunks are made twice, once with the state left on the device and once with every tensor of it copied to the host
and back after each chunk. Only if all bits agree is the time of a steady chunk (four Euler passes and the pass at t=0)
measured; rows for RESULTS.md. LONGTAKE_KERNELS=reference measures the same without the kernels.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import report, row
from longtake.kernels.backend import numerics
from longtake.server.camera.rays import chunk_geometry
from longtake.server.model.conditions import ChunkCondition, TextCondition
from longtake.server.model.config import SANA_WM_1600M
from longtake.server.model.noise import latent_noise
from longtake.server.model.precision import scan_precision
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import TransformerState
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import build_transformer, untrained_weights
from longtake.state_cache.digest import state_digest

CHUNKS = 8
FLOOR_MS = 97
"""76 TFLOP for the five passes of a chunk at 791 TFLOP/s."""


def main() -> None:
    """Check, measure, print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    config, dtype = SANA_WM_1600M, torch.bfloat16
    model = build_transformer(
        config, untrained_weights(config, 0, dtype=dtype, device="cuda"), dtype=dtype, device="cuda"
    )
    text = encode_text(model)
    kept, _ = take(model, text, restored=False)
    restored, seconds = take(model, text, restored=True)
    assert kept == restored, "a take restored after every chunk differs"
    shape = "stage 1 at 2.66 B parameters, random weights, 22×40 tokens, B=1, bf16"
    gpu, kernels = torch.cuda.get_device_name(), numerics(model.device, scan_precision(dtype))
    steady = statistics.median(seconds[2:]) * 1e3
    rows = [
        row(f"split equivalence: {shape}, state restored after each of {CHUNKS} chunks", "same bits", "–", gpu),
        row(
            f"chunk of 3 latents, 5 passes, eager, kernels {kernels}: {shape}",
            f"{steady:.0f} ms",
            f"{FLOOR_MS} ms",
            gpu,
        ),
    ]
    report(rows, record=arguments.record)


def encode_text(model: SanaWMTransformer) -> TextCondition:
    """Random text of full length."""
    config = model.config
    text = torch.randn(1, config.model_max_length, config.caption_channels, generator=torch.Generator().manual_seed(1))
    return model.encode_text(text, torch.ones(1, config.model_max_length))


@torch.inference_mode()
def take(model: SanaWMTransformer, text: TextCondition, *, restored: bool) -> tuple[list[str], list[float]]:
    """State digests and seconds of each chunk."""
    state: TransformerState | None = None
    digests, seconds = [], []
    for index in range(CHUNKS):
        chunk, latents = condition(model, text, index)
        torch.cuda.synchronize()
        started = time.perf_counter()
        latents = denoise_chunk(model, latents, chunk, state, pinned=int(index == 0))
        state = absorb_chunk(model, latents, chunk, state)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tensors = state.to_tensors()
        digests.append(state_digest(tensors | {"latents": latents.contiguous()}))
        if restored:
            copies = {name: x.cpu().clone().to("cuda") for name, x in tensors.items()}
            state = TransformerState.from_tensors(copies, model.config)
    return digests, seconds


def condition(model: SanaWMTransformer, text: TextCondition, index: int) -> tuple[ChunkCondition, Tensor]:
    """A camera that walks forward and turns, and the chunk's noise."""
    h, w = model.config.latent_hw
    frame = 24 * index + 1 + np.arange(24)
    angle = 0.004 * frame
    poses = np.tile(np.eye(4), (24, 1, 1))
    poses[:, 0, 0], poses[:, 0, 2], poses[:, 2, 0], poses[:, 2, 2] = (
        *(np.cos(angle), np.sin(angle)),
        *(-np.sin(angle), np.cos(angle)),
    )
    poses[:, 2, 3] = 0.025 * frame
    intrinsics = np.array([1062.4, 1036.8, 652.8, 330.9])
    geometry = chunk_geometry(index, poses, np.tile(intrinsics, (24, 1)), intrinsics, h, w)
    frames = geometry.raymap.shape[0]
    start = 0 if index == 0 else 3 * index + 1
    chunk = model.encode_chunk(text, start, (frames, h, w), geometry.raymap[None], geometry.plucker[None])
    noise = [latent_noise(7, start + i, (1, model.config.in_channels, h, w)) for i in range(frames)]
    return chunk, torch.stack(noise, dim=2).to("cuda", torch.bfloat16)


if __name__ == "__main__":
    main()
