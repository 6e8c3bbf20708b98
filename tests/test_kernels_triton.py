"""The Triton kernels against the reference and float64: on the GPU, or in Triton's interpreter where there is none."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longtake.kernels import cam, gdn
from longtake.kernels.cam import reference as cam_reference
from longtake.kernels.gdn import GdnState
from longtake.kernels.gdn import reference as gdn_reference
from longtake.kernels.rope import rotate

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cuda" if GPU else "cpu")
EPS = 1e-8
ULP = 2.0**-24
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Shape(NamedTuple):
    """Sizes of a case."""

    batch: int
    frames: int
    per_frame: int
    heads: int
    dim: int


TINY = [Shape(1, 1, 1, 3, 16), Shape(2, 3, 7, 2, 16), Shape(1, 4, 9, 2, 40), Shape(1, 3, 1, 2, 112)]
SEVERAL_SEGMENTS = Shape(1, 1, 140, 1, 40)
REAL = [Shape(1, 3, 880, 20, 112), Shape(1, 4, 880, 20, 112)] if GPU else []
CASES = [(shape, dtype) for shape in [*TINY, SEVERAL_SEGMENTS, *REAL] for dtype in (FP32, BF16)]
CASES += [(shape, FP16) for shape in (TINY[2], *REAL)]


def name_of(value: Shape | torch.dtype | bool) -> str:
    if isinstance(value, bool):
        return "relu" if value else "plain"
    return "-".join(map(str, value)) if isinstance(value, Shape) else str(value).removeprefix("torch.")


TOKENWISE = [(shape, dtype, dtype != FP16) for shape, dtype in CASES if shape != SEVERAL_SEGMENTS]
each_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=name_of)
Inputs = dict[str, Tensor]


def draw(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Inputs of a scan with keys small enough for a contractive transition; gates and tables in fp32."""
    generator = torch.Generator().manual_seed(sum(shape))
    batch, frames, per_frame, heads, dim = shape
    q, k, v = torch.randn(3, batch, frames * per_frame, heads, dim, generator=generator)
    q, k = gdn.gdn_prepare(q, k, q_weight=None, k_weight=None, eps=1e-5, k_scale=(dim * per_frame) ** -0.5)
    beta = torch.rand(batch, heads, frames, per_frame, generator=generator)
    decay = 0.9 + 0.1 * torch.rand(batch, heads, frames, generator=generator)
    angles = torch.rand(frames * per_frame, dim // 2, generator=generator) * 6
    tokens = {name: x.to(dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    named = tokens | {"beta": beta, "decay": decay, "cos": angles.cos(), "sin": angles.sin()}
    return {name: x.to(DEVICE) for name, x in named.items()}


def draw_state(shape: Shape) -> GdnState:
    generator = torch.Generator().manual_seed(shape.dim)
    kv = torch.randn(shape.batch, shape.heads, shape.dim, shape.dim, generator=generator)
    return GdnState(kv.to(DEVICE), torch.rand(kv.shape[:-1], generator=generator).to(DEVICE))


def draw_cameras(shape: Shape) -> Inputs:
    """P, P⁻¹ and the tables of camera heads."""
    generator = torch.Generator().manual_seed(shape.frames)
    batch, tokens = shape.batch, shape.frames * shape.per_frame
    projection = torch.eye(4) + 0.3 * torch.randn(batch, tokens, 4, 4, generator=generator)
    angles = torch.rand(tokens, shape.dim // 4, generator=generator) * 6
    named = {"projection": projection, "projection_inverse": torch.linalg.inv(projection.double()).float()}
    return {name: x.to(DEVICE) for name, x in (named | {"cos": angles.cos(), "sin": angles.sin()}).items()}


def double(inputs: Inputs) -> Inputs:
    return {name: x.double() for name, x in inputs.items()}


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The frames start … stop − 1."""
    per_frame = inputs["beta"].shape[-1]
    rows = slice(start * per_frame, stop * per_frame)
    gates = {name: inputs[name][:, :, start:stop] for name in ("beta", "decay")}
    tables = {name: inputs[name][rows] for name in ("cos", "sin") if name in inputs}
    return {name: inputs[name][:, rows] for name in "qkv"} | gates | tables


def without_tables(inputs: Inputs) -> Inputs:
    return {name: inputs[name] for name in ("q", "k", "v", "beta", "decay")}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3, device=DEVICE).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def scan(inputs: Inputs, state: GdnState | None = None, *, reverse: bool = False) -> tuple[Tensor, ...]:
    """Numerator, denominator and, forward, the state of `gdn_scan` on the kernels."""
    with poisoned_memory():
        *reads, final = gdn.gdn_scan(**inputs, initial_state=state, reverse=reverse, backend="triton")
    return (*reads, *(final or ()))


def both(inputs: Inputs, state: GdnState | None = None) -> tuple[Tensor, ...]:
    """Output and state of `gdn_bidirectional` on the kernels."""
    with poisoned_memory():
        out, final = gdn.gdn_bidirectional(**inputs, initial_state=state, eps=EPS, backend="triton")
    return (out, *final)


def camera_scan(inputs: Inputs, state: Tensor | None = None) -> tuple[Tensor, ...]:
    with poisoned_memory():
        out, final = cam.cam_scan(**inputs, initial_state=state, backend="triton")
    assert final is not None
    return out, final


def camera_both(inputs: Inputs, state: Tensor | None = None) -> tuple[Tensor, ...]:
    with poisoned_memory():
        return cam.cam_bidirectional(**inputs, initial_state=state, backend="triton")


def relative_rms(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def assert_as_good(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    """Every tensor is finite, and its error within twice that of eager PyTorch, or than one rounding to fp32 costs."""
    for x, y, z in zip(ours, eager, truth, strict=True):
        assert x.shape == z.shape
        assert x.is_contiguous()
        assert torch.isfinite(x).all()
        if not z.any():
            assert not x.any()
        else:
            assert relative_rms(x, z) <= 2 * max(relative_rms(y, z), ULP)


def eager_memory(q: Tensor, k: Tensor, v: Tensor, x: Inputs, memory: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """`delta_scan` with every operand of a product rounded to the dtype of v, and fp32 sums."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.to(x["v"].dtype).float() @ b.to(x["v"].dtype).float()

    frames = x["decay"].shape[2]
    q, k, v = (y.float().unflatten(1, (frames, -1)).permute(1, 0, 3, 2, 4) for y in (q, k, v))
    reads = [torch.empty(0)] * frames
    for f in reversed(range(frames)) if reverse else range(frames):
        if reverse:
            reads[f] = product(q[f], memory)
        faded = x["decay"][:, :, f, None, None] * memory
        memory = faded + product(k[f].mT, x["beta"][:, :, f, :, None] * (v[f] - product(k[f], faded)))
        if not reverse:
            reads[f] = product(q[f], memory)
    return torch.stack(reads, dim=1).transpose(2, 3).flatten(1, 2), memory


def eager_scan(x: Inputs, state: GdnState | None = None, *, reverse: bool = False) -> tuple[Tensor, ...]:
    """`gdn_scan` as eager PyTorch computes it from operands of the dtype of v: the yardstick of 16-bit kernels."""
    kv = torch.zeros_like(draw_state(shape_of(x)).kv) if state is None else state.kv
    z = torch.zeros_like(kv[..., :1]) if state is None else state.z[..., None]
    turned = [rotate(x[name].float(), x["cos"], x["sin"]) for name in "qk"] if "cos" in x else [x["q"], x["k"]]
    numerator, kv = eager_memory(*turned, x["v"], x, kv, reverse=reverse)
    denominator, z = eager_memory(x["q"], x["k"], torch.ones_like(x["v"][..., :1]), x, z, reverse=reverse)
    return (numerator, denominator.squeeze(-1), *(() if reverse else (kv, z.squeeze(-1))))


def shape_of(x: Inputs) -> Shape:
    batch, heads, frames, per_frame = x["beta"].shape
    return Shape(batch, frames, per_frame, heads, x["q"].shape[-1])


def true_scan(x: Inputs, state: GdnState | None = None, *, reverse: bool = False) -> tuple[Tensor, ...]:
    wide = None if state is None else GdnState(*(y.double() for y in state))
    *reads, final = gdn_reference.gdn_scan(**double(x), initial_state=wide, reverse=reverse)
    return (*reads, *(final or ()))


def merged(forward: tuple[Tensor, ...], reverse: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (gdn.gdn_merge((forward[0], forward[1]), (reverse[0], reverse[1]), EPS), *forward[2:])


def test_kernels_run_on_the_gpu_or_else_in_the_interpreter() -> None:
    from longtake.kernels.triton_tiles import INTERPRETED, rotate_pairs

    assert bool(INTERPRETED) is not GPU
    assert type(rotate_pairs).__name__ == ("JITFunction" if GPU else "InterpretedFunction")


@each_case
def test_gdn_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    x, state = draw(shape, dtype), draw_state(shape)
    forward, reverse = eager_scan(x, state), eager_scan(x, reverse=True)
    true_forward, true_reverse = true_scan(x, state), true_scan(x, reverse=True)
    assert_as_good(scan(x, state), forward, true_forward)
    assert_as_good(scan(x, reverse=True), reverse, true_reverse)
    assert_as_good(both(x, state), merged(forward, reverse), merged(true_forward, true_reverse))


@each_case
def test_camera_scan_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    x, state = without_tables(draw(shape, dtype)), draw_state(shape)
    forward, reverse = eager_scan(x, state), eager_scan(x, reverse=True)
    true_forward, true_reverse = true_scan(x, state), true_scan(x, reverse=True)
    eager = (forward[0] + reverse[0], forward[2])
    assert_as_good(camera_both(x, state.kv), eager, (true_forward[0] + true_reverse[0], true_forward[2]))
    assert_as_good(camera_scan(x), eager_scan(x)[::2], true_scan(x)[::2])


@pytest.mark.parametrize(("shape", "dtype", "relu"), TOKENWISE, ids=name_of)
def test_camera_preparation_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype, *, relu: bool) -> None:
    x, cameras = draw(shape, dtype), draw_cameras(shape)
    weight = torch.linspace(0.5, 2, shape.heads * shape.dim, device=DEVICE)

    def prepare(
        function: Callable[..., tuple[Tensor, ...]], cast: torch.dtype | None, **extra: str
    ) -> tuple[Tensor, ...]:
        tokens = [x["v"], x["v"].flip(1), x["k"]]
        inputs = {name: y if cast is None else y.to(cast) for name, y in cameras.items()}
        norms = {"q_weight": weight, "k_weight": weight if relu else None, "eps": 1e-5, "k_scale": 0.1}
        return function(*(y if cast is None else y.to(cast) for y in tokens), **inputs, **norms, relu=relu, **extra)

    with poisoned_memory():
        ours = prepare(cam.cam_prepare, None, backend="triton")
        beta = cam.cam_discount(x["beta"], ours[3], backend="triton")
    eager, truth = prepare(cam_reference.cam_prepare, None), prepare(cam_reference.cam_prepare, torch.float64)
    assert_as_good(ours, eager, truth)
    discounts = [cam_reference.cam_discount(x["beta"].to(y.dtype), y) for y in (eager[3], truth[3])]
    assert_as_good((beta,), (discounts[0],), (discounts[1],))


@pytest.mark.parametrize(("shape", "dtype"), [case[:2] for case in TOKENWISE], ids=name_of)
def test_camera_output_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    x, cameras = draw(shape, dtype)["v"], draw_cameras(shape)
    places = [cameras[name] for name in ("projection", "cos", "sin")]
    with poisoned_memory():
        ours = cam.cam_output(x, *places, backend="triton")
    assert ours.dtype == dtype
    truth = cam_reference.cam_output(x.double(), *(y.double() for y in places))
    assert_as_good((ours,), (cam_reference.cam_output(x, *places),), (truth,))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
def test_a_long_scan_keeps_its_state_exact(dtype: torch.dtype) -> None:
    shape = Shape(1, 200, 8, 1, 112) if GPU else Shape(1, 30, 2, 1, 16)
    x = draw(shape, dtype)
    assert_as_good(scan(x)[2:], eager_scan(x)[2:], true_scan(x)[2:])


BITWISE = [(Shape(1, 3, 2, 1, 16), FP32), (Shape(1, 2, 1, 2, 40), BF16)]
BITWISE += [(shape, dtype) for shape in REAL for dtype in (FP32, BF16)]
each_bitwise = pytest.mark.parametrize(("shape", "dtype"), BITWISE, ids=name_of)


def assert_same_bits(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for x, y in zip(ours, other, strict=True):
        assert torch.equal(x, y)


@each_bitwise
def test_repeating_changes_no_bit_and_no_argument(shape: Shape, dtype: torch.dtype) -> None:
    x, state = draw(shape, dtype), draw_state(shape)
    before = [y.clone() for y in (*x.values(), *state)]
    first, camera_first = both(x, state), camera_both(without_tables(x), state.kv)
    for _ in range(3 if GPU else 1):
        assert_same_bits(both(x, state), first)
        assert_same_bits(camera_both(without_tables(x), state.kv), camera_first)
    assert_same_bits((*x.values(), *state), tuple(before))


@each_bitwise
def test_cutting_a_forward_scan_changes_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    x = draw(shape, dtype)
    whole, camera_whole = scan(x), camera_scan(without_tables(x))
    for at in {1, shape.frames - 1}:
        parts = [cut(x, 0, at), cut(x, at, shape.frames)]
        first = scan(parts[0])
        second = scan(parts[1], GdnState(*first[2:]))
        assert_same_bits((*(torch.cat(y, dim=1) for y in zip(first[:2], second[:2], strict=True)), *second[2:]), whole)
        camera_first = camera_scan(without_tables(parts[0]))
        camera_second = camera_scan(without_tables(parts[1]), camera_first[1])
        assert_same_bits((torch.cat((camera_first[0], camera_second[0]), dim=1), camera_second[1]), camera_whole)


@each_bitwise
def test_a_batch_equals_its_single_runs_bitwise(shape: Shape, dtype: torch.dtype) -> None:
    shape = shape._replace(batch=2)
    x, state, cameras = draw(shape, dtype), draw_state(shape), draw_cameras(shape)
    batched, prepared = both(x, state), prepare_camera(x, cameras)
    for b in range(2):
        part = {name: y if name in ("cos", "sin") else y[b : b + 1] for name, y in x.items()}
        assert_same_bits(tuple(y[b : b + 1] for y in batched), both(part, GdnState(*(y[b : b + 1] for y in state))))
        camera = {name: y if name in ("cos", "sin") else y[b : b + 1] for name, y in cameras.items()}
        assert_same_bits(tuple(y[b : b + 1] for y in prepared), prepare_camera(part, camera))


def prepare_camera(x: Inputs, cameras: Inputs) -> tuple[Tensor, ...]:
    """Prepared q, k, v and the discounted beta."""
    with poisoned_memory():
        *tokens, inflation = cam.cam_prepare(
            x["q"], x["k"], x["v"], **cameras, q_weight=None, k_weight=None, eps=1e-5, k_scale=0.1, backend="triton"
        )
        return (*tokens, cam.cam_discount(x["beta"], inflation, backend="triton"))


@each_bitwise
def test_strides_change_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    x, cameras = draw(shape, dtype), draw_cameras(shape)
    qkv = torch.cat([x[name] for name in "qkv"], dim=2)
    chunks = dict(zip("qkv", qkv.chunk(3, dim=2), strict=True))
    transposed = {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    odd = {name: torch.cat((x[name], x[name][..., :3]), dim=-1)[..., :-3] for name in "qkv"}
    permuted = {"beta": x["beta"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)}
    out, prepared = both(x), prepare_camera(x, cameras)
    for other in (chunks, transposed, odd):
        assert_same_bits(both(x | other | permuted), out)
        assert_same_bits(prepare_camera(x | other, cameras), prepared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"reverse": True, "initial_state": draw_state(TINY[1])}, "no initial_state", id="reverse-with-state"
        ),
        pytest.param({"initial_state": draw_state(TINY[2])}, "initial_state must be", id="state-of-another-shape"),
        pytest.param({"sin": None}, "together", id="cos-without-sin"),
        pytest.param({"sin": torch.zeros(20, 8)}, "cos and sin must be", id="short-sin"),
        pytest.param({"v": torch.zeros(2, 21, 2, 8)}, "differ in shape", id="short-v"),
        pytest.param({"beta": torch.zeros(2, 2, 3, 8)}, "does not fit", id="beta-of-other-frames"),
        pytest.param({"decay": torch.zeros(2, 2, 4)}, "decay must be", id="decay-of-other-frames"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_misfits_are_refused(backend: str, changes: dict[str, object], message: str) -> None:
    moved = {name: y.to(DEVICE) if isinstance(y, Tensor) else y for name, y in changes.items()}
    with pytest.raises(ValueError, match=message):
        gdn.gdn_scan(**(draw(TINY[1], FP32) | moved), backend=backend)


@pytest.mark.parametrize("dim", [12, 136])
def test_head_dims_beyond_the_kernels_are_refused(dim: int) -> None:
    x = without_tables(draw(Shape(1, 1, 2, 1, dim), FP32))
    with pytest.raises(ValueError, match="head dim must be"):
        cam.cam_scan(**x, backend="triton")
