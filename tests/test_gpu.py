"""The model on a GPU, with the kernels that it uses there: golden vectors, and the same bits however a take is cut."""

from collections.abc import Callable
from itertools import pairwise

import golden
import numpy as np
import pytest
import torch

from longtake.server.model.registry import load_model
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import build_transformer
from longtake.server.model.world import ChunkCamera, State

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BOUNDARIES = [0, 4, 7, 10, 13, 16]
GRID = (4, 6)


def golden_error(model: SanaWMTransformer) -> list[float]:
    """Relative RMS error of both passes over every chunk of `streaming_cam_raw`, the larger of the two."""
    inputs, expected, state = golden.load("streaming"), golden.load("streaming_cam_raw"), None
    errors = []
    text = model.encode_text(inputs["in.text"], inputs["in.text_mask"])
    for i, (start, stop) in enumerate(pairwise(BOUNDARIES)):
        raymap, plucker = inputs["in.camera_conditions"][:, start:stop], inputs["in.chunk_plucker"][:, :, start:stop]
        chunk = model.encode_chunk(text, start, (stop - start, *GRID), raymap, plucker)
        latents = {kind: inputs[f"in.{kind}_latents"][:, :, start:stop].to(model.device) for kind in ("noisy", "clean")}
        with torch.no_grad():
            timesteps = expected[f"chunk{i}.noisy.timesteps"][:, 0].to(model.device)
            noisy, _ = model(latents["noisy"], timesteps, chunk, state)
            clean, state = model(latents["clean"], torch.zeros_like(timesteps), chunk, state, write=True)
        pairs = [(noisy, expected[f"chunk{i}.noisy.out"]), (clean, expected[f"chunk{i}.clean.out"])]
        errors.append(max(float((a.cpu() - b).norm() / b.norm()) for a, b in pairs))
    return errors


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.04), (torch.float32, 1e-4)], ids=["bf16", "fp32"])
def test_golden_chunks(dtype: torch.dtype, bound: float, record_property: Callable[[str, float], None]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = build_transformer(golden.tiny_config(), golden.load("tiny_weights"), dtype=dtype, device="cuda")
    errors = golden_error(model)
    assert len(errors) == 5
    record_property("largest relative RMS error of a chunk", max(errors))
    assert max(errors) <= bound, errors


def test_a_take_restored_after_every_chunk_is_the_same_bits() -> None:
    model = load_model("tiny-untrained", "cuda")
    width, height = model.spec.width, model.spec.height
    intrinsics = np.array([277.0, 277.0, width / 2, height / 2])
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    conditions = model.condition(image, "a quay")

    def take(*, restored: bool) -> list[tuple[np.ndarray, State]]:
        state, made = model.initial_state(conditions), []
        for index in range(8):
            poses = np.tile(np.eye(4), (24, 1, 1))
            poses[:, 2, 3] = 0.02 * (24 * index + 1 + np.arange(24))
            camera = ChunkCamera(poses, np.tile(intrinsics, (24, 1)), intrinsics)
            output = model.generate(conditions, state, index, camera, seed=7)
            state = {name: x.cpu().clone() for name, x in output.state.items()} if restored else output.state
            made.append((output.frames, output.state))
        return made

    for (frames, state), (again, state_again) in zip(take(restored=False), take(restored=True), strict=True):
        assert (frames == again).all()
        assert all(torch.equal(state[name], state_again[name]) for name in state)


def test_a_state_replayed_from_latents_alone_is_the_same_bits() -> None:
    """One t=0 pass a chunk, decoded only as far back as the decoder sees."""
    model = load_model("tiny-untrained", "cuda")
    width, height = model.spec.width, model.spec.height
    intrinsics = np.array([277.0, 277.0, width / 2, height / 2])
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    conditions = model.condition(image, "a quay")
    count = model.decoder_history + 4
    poses = np.tile(np.eye(4), (24 * count, 1, 1))
    poses[:, 2, 3] = 0.02 * (1 + np.arange(24 * count))
    cameras = [ChunkCamera(each, np.tile(intrinsics, (24, 1)), intrinsics) for each in np.split(poses, count)]
    state, latents = model.initial_state(conditions), []
    for index, camera in enumerate(cameras):
        output = model.generate(conditions, state, index, camera, seed=7)
        state = output.state
        latents.append(output.latents.cpu())
    replayed = model.initial_state(conditions)
    for index, camera in enumerate(cameras):
        decode = index >= count - model.decoder_history
        replayed = model.absorb(conditions, replayed, index, camera, latents[index], decode=decode).state
    assert replayed.keys() == state.keys()
    assert all(torch.equal(replayed[name], state[name]) for name in state)
