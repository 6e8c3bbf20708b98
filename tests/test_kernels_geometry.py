"""Ray matrices against golden vectors, against float64 and against their own definition, on both backends."""

import numpy as np
import pytest
import torch
from golden import load, worst
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, assert_as_good, assert_same_bits, name_of, poisoned_memory
from scipy.spatial.transform import Rotation
from torch import Tensor

from longtake.kernels.cam import geometry_triton
from longtake.kernels.cam.geometry import ray_matrices, ray_matrices_reference

each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])
SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 11, 1, 63), (3, 2, 7, 1)] + [(2, 121, 22, 40)] * GPU
IDENTITY = torch.eye(4, device=DEVICE)


def random_raymap(batch: int, frames: int, distance: float = 1.0) -> Tensor:
    """Cameras anywhere, with intrinsics in latent pixels."""
    rng = np.random.default_rng(3)
    c2w = np.tile(np.eye(4), (batch, frames, 1, 1))
    c2w[..., :3, :3] = Rotation.random(batch * frames, rng=rng).as_matrix().reshape(batch, frames, 3, 3)
    c2w[..., :3, 3] = rng.normal(scale=distance, size=(batch, frames, 3))
    intrinsics = rng.uniform(3.0, 9.0, size=(batch, frames, 4))
    packed = np.concatenate([c2w.reshape(batch, frames, 16), intrinsics], axis=-1)
    return torch.from_numpy(packed).to(DEVICE, FP32)


def matrices(raymap: Tensor, height: int, width: int, patch: int = 1) -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return ray_matrices(raymap, height, width, patch=patch, backend="triton")


@each_backend
def test_golden_ray_matrices(backend: str) -> None:
    expected = load("camera")
    ours = ray_matrices(expected["pack41.latent_conditions"].to(DEVICE), 4, 6, backend=backend)
    for x, name in zip(ours, ("P", "P_inv"), strict=True):
        assert worst(x.cpu(), expected[f"pack41.{name}"].reshape(1, 6 * 4 * 6, 4, 4)) < 1e-6


@each_backend
def test_golden_full_size(backend: str) -> None:
    expected = load("camera")
    projection, _ = ray_matrices(expected["real.latent_conditions"].to(DEVICE), 22, 40, backend=backend)
    assert worst(projection[..., :3, :].cpu(), expected["real.P"].reshape(1, 3 * 22 * 40, 3, 4)) < 1e-6


@pytest.mark.parametrize("size", SIZES, ids=name_of)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("patch", [1, 2, 3])
def test_rays_are_as_exact_as_eager_pytorch(size: tuple[int, ...], dtype: torch.dtype, patch: int) -> None:
    raymap, grid = random_raymap(*size[:2]).to(dtype), size[2:]
    eager, truth = (ray_matrices_reference(x, *grid, patch) for x in (raymap, raymap.double()))
    assert_as_good(matrices(raymap, *grid, patch), eager, truth)


@each_backend
@pytest.mark.parametrize("patch", [1, 2])
def test_a_token_looks_through_the_first_pixel_of_its_patch(patch: int, backend: str) -> None:
    raymap = random_raymap(2, 3)
    projection, _ = ray_matrices(raymap, 5, 7, patch=patch, backend=backend)
    for frame, i, j in [(0, 0, 0), (2, 4, 6), (1, 3, 2)]:
        c2w, (fx, fy, cx, cy) = raymap[1, frame, :16].reshape(4, 4), raymap[1, frame, 16:]
        u, v = torch.tensor([patch * j, patch * i], dtype=FP32, device=DEVICE)
        one = torch.ones_like(u)
        point = c2w @ torch.stack([(u - cx) / fx, (v - cy) / fy, one, one])
        x, y, z, _ = projection[1, (frame * 5 + i) * 7 + j] @ point
        assert abs(x) < 1e-5
        assert abs(y) < 1e-5
        assert z > 0.9


@each_backend
def test_a_patch_divides_the_intrinsics(backend: str) -> None:
    raymap = random_raymap(1, 3)
    halved = raymap.clone()
    halved[..., 16:] /= 2
    ours = ray_matrices(raymap, 4, 5, patch=2, backend=backend)
    assert_same_bits(ours, ray_matrices(halved, 4, 5, backend=backend))
    every_other = ray_matrices(raymap, 8, 10, backend=backend)
    assert_same_bits(ours, tuple(x.view(1, 3, 8, 10, 4, 4)[:, :, ::2, ::2].flatten(1, 3) for x in every_other))


@each_backend
def test_the_inverse_undoes_the_projection(backend: str) -> None:
    projection, inverse = ray_matrices(random_raymap(1, 4), 3, 5, backend=backend)
    assert (projection @ inverse - IDENTITY).abs().max() < 1e-6


@each_backend
def test_the_inverse_is_exact_far_from_the_origin(backend: str) -> None:
    raymap = random_raymap(1, 2, distance=1e5)
    _, inverse = ray_matrices(raymap, 3, 5, backend=backend)
    centres = raymap[..., [3, 7, 11]].repeat_interleave(15, dim=1)
    assert torch.equal(inverse[..., :3, 3], centres)


@each_backend
@pytest.mark.parametrize(
    ("entry", "value"), [(5, torch.nan), (3, torch.nan), (3, torch.inf), (16, torch.nan), (16, 0.0), (18, torch.inf)]
)
def test_a_frame_that_is_not_finite_becomes_the_identity_and_no_other(entry: int, value: float, backend: str) -> None:
    raymap = random_raymap(2, 3)
    clean = ray_matrices(raymap, 2, 3, backend=backend)
    raymap[1, 1, entry] = value
    with np.errstate(divide="ignore", invalid="ignore"):
        spoilt = ray_matrices(raymap, 2, 3, backend=backend)
    for x, y in zip(spoilt, clean, strict=True):
        assert torch.equal(x[1, 6:12], IDENTITY.expand(6, 4, 4))
        assert torch.equal(x[1, :6], y[1, :6])
        assert torch.equal(x[1, 12:], y[1, 12:])
        assert torch.equal(x[0], y[0])


@each_backend
@pytest.mark.parametrize(
    ("side", "fy", "cy"), [(1, 1e-30, -1.0), (2, 1.0, 0.0)], ids=["infinite-length", "zero-cross-product"]
)
def test_a_ray_along_the_camera_y_axis_becomes_the_identity(side: int, fy: float, cy: float, backend: str) -> None:
    pose = torch.eye(4)
    pose[:3, 1] = IDENTITY[side, :3]
    raymap = torch.cat((pose.flatten(), torch.tensor([1.0, fy, 0.0, cy])))[None, None].to(DEVICE)
    with np.errstate(over="ignore", invalid="ignore"):
        for x in ray_matrices(raymap, 1, 1, backend=backend):
            assert torch.equal(x[0, 0], IDENTITY)


@each_backend
def test_geometry_stays_in_fp32_under_autocast(backend: str) -> None:
    raymap = random_raymap(1, 2, distance=50.0)
    plain = ray_matrices(raymap, 3, 4, backend=backend)
    with torch.autocast(DEVICE.type, dtype=BF16):
        assert_same_bits(ray_matrices(raymap, 3, 4, backend=backend), plain)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
def test_a_batch_equals_its_single_runs_bitwise(dtype: torch.dtype) -> None:
    raymap = random_raymap(3, 3).to(dtype)
    before, whole = raymap.clone(), matrices(raymap, 5, 7)
    assert_same_bits(matrices(raymap, 5, 7), whole)
    for b in range(3):
        assert_same_bits(tuple(x[b : b + 1] for x in whole), matrices(raymap[b : b + 1], 5, 7))
    assert torch.equal(raymap, before)


def test_the_operator_is_registered_soundly() -> None:
    torch.library.opcheck(geometry_triton.ray_matrices, (random_raymap(2, 3), 5, 7, 2))


@each_backend
def test_the_operator_compiles_without_a_break(backend: str) -> None:
    raymap = random_raymap(2, 3)
    compiled = torch.compile(ray_matrices, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(raymap, 2, 3, backend=backend), ray_matrices(raymap, 2, 3, backend=backend))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_captured_runs_equal_eager_ones_and_never_wait() -> None:
    raymap, graph = random_raymap(1, 3), torch.cuda.CUDAGraph()
    eager = matrices(raymap, 22, 40)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = ray_matrices(raymap, 22, 40, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x in captured:
        x.zero_()
    graph.replay()
    assert_same_bits(captured, eager)


def test_only_the_reference_takes_float64() -> None:
    raymap = random_raymap(1, 1).double()
    with pytest.raises(ValueError, match="float64"):
        ray_matrices(raymap, 2, 3, backend="triton")
    assert all(x.dtype == torch.float64 for x in ray_matrices(raymap, 2, 3))


@each_backend
@pytest.mark.parametrize(
    ("raymap", "sizes", "message"),
    [
        pytest.param(torch.zeros(1, 3, 19), (2, 3, 1), "raymap must be", id="19-numbers"),
        pytest.param(torch.zeros(3, 20), (2, 3, 1), "raymap must be", id="without-a-batch"),
        pytest.param(torch.zeros(1, 20, 3).mT, (2, 3, 1), "raymap must be contiguous", id="strided"),
        pytest.param(torch.zeros(1, 3, 20, dtype=torch.int64), (2, 3, 1), "raymap must be", id="whole-numbers"),
        pytest.param(torch.zeros(1, 3, 20), (0, 3, 1), "height must be positive", id="no-rows"),
        pytest.param(torch.zeros(1, 3, 20), (2, -1, 1), "width must be positive", id="negative-columns"),
        pytest.param(torch.zeros(1, 3, 20), (2, 3, 0), "patch must be positive", id="no-patch"),
    ],
)
def test_misfits_are_refused(raymap: Tensor, sizes: tuple[int, int, int], message: str, backend: str) -> None:
    height, width, patch = sizes
    with pytest.raises(ValueError, match=message):
        ray_matrices(raymap.to(DEVICE), height, width, patch=patch, backend=backend)
