"""Ray-relative positions on q, k and v, the discount of β and the output transform: exact on either backend."""

import golden
import pytest
import torch
from cam_cases import CASES, FEW, FRAMES, MODES, SMALL, Inputs, draw, draw_beta, draw_inflation, entry, golden_branch
from kernel_checks import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    ULP,
    Shape,
    assert_as_good,
    assert_same_bits,
    mapped,
    name_of,
    poisoned_memory,
    relative_rms,
    tensors,
)
from torch import Tensor

from longtake.kernels.cam import prepare_reference as reference
from longtake.kernels.cam.prepare import cam_discount, cam_output, cam_prepare
from longtake.kernels.cam.prepare_reference import CamTokens
from longtake.server.model.rope import rope_tables

each_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=name_of)
few_cases = pytest.mark.parametrize(("shape", "dtype"), FEW, ids=name_of)
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


def prepare(x: Inputs) -> CamTokens:
    with poisoned_memory():
        return cam_prepare(**x, backend="triton")


def output(x: Inputs, dtype: torch.dtype | None = None) -> Tensor:
    """`cam_output` of v."""
    with poisoned_memory():
        return cam_output(x["v"], x["projection"], x["cos"], x["sin"], dtype=dtype, backend="triton")


def all_of(x: Inputs, beta: Tensor) -> tuple[Tensor, ...]:
    """What the three operators give."""
    tokens = prepare(x)
    with poisoned_memory():
        return (*tokens, cam_discount(beta, tokens.inflation, backend="triton"), output(x))


def check_prepare(x: Inputs) -> None:
    """As `assert_as_good`; one rounding of k costs its squared norm two, and the ratio is as wrong as the norms."""
    ours, eager = prepare(x), reference.cam_prepare(**x)
    truth = reference.cam_prepare(**mapped(Tensor.double, x))
    assert_as_good(ours[:3], eager[:3], truth[:3])
    costs = [relative_rms(y, z) for y, z in zip(eager[3:], truth[3:], strict=True)]
    for y, z in zip(ours[3:], truth[3:], strict=True):
        assert y.shape == z.shape
        assert y.is_contiguous()
        assert relative_rms(y, z) <= 2 * max(*costs, 2 * ULP)


@each_case
def test_preparation_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    check_prepare(draw(shape, dtype))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_as_exact_as_eager_pytorch(mode: str) -> None:
    check_prepare(draw(SMALL, BF16, mode))


@each_case
@pytest.mark.parametrize("per_frame", [False, True], ids=["of-tokens", "of-frames"])
def test_discount_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype, *, per_frame: bool) -> None:
    beta, inflation = draw_beta(shape, per_frame=per_frame).to(dtype), draw_inflation(shape)
    with poisoned_memory():
        ours = cam_discount(beta, inflation, backend="triton")
    truth = reference.cam_discount(beta.double(), inflation.double())
    assert_as_good((ours,), (reference.cam_discount(beta, inflation),), (truth,))


@each_case
def test_output_is_as_exact_as_eager_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    x = draw(shape, dtype)
    places = [x[name] for name in ("projection", "cos", "sin")]
    truth = reference.cam_output(x["v"].double(), *(y.double() for y in places))
    assert_as_good((output(x),), (reference.cam_output(x["v"], *places),), (truth,))


@each_backend
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=name_of)
def test_output_is_rounded_once_to_the_dtype_asked_for(dtype: torch.dtype, backend: str) -> None:
    x = draw(SMALL, FP16)
    places = [x[name] for name in ("projection", "cos", "sin")]
    wide = cam_output(x["v"].float(), *places, backend=backend)
    assert wide.dtype == FP32
    ours = cam_output(x["v"], *places, dtype=dtype, backend=backend)
    assert_same_bits((ours,), (wide.to(dtype),))


@each_backend
@pytest.mark.parametrize(("stage", "downscale"), [("post_ucpe", False), ("downscaled", True)])
def test_prepared_tokens_match_golden(stage: str, *, downscale: bool, backend: str) -> None:
    x, expected = golden_branch(), golden.load("gdn_ops")
    tokens = cam_prepare(**x, downscale=downscale, backend=backend)
    for name in "qkv":
        assert relative(getattr(tokens, name), golden.tokens(expected[f"cam.{name}_{stage}"])) < 1e-6
    prefix = "cam" if downscale else "cam_raw"
    assert relative(tokens.inflation, expected[f"{prefix}.k_inflation_sq"].transpose(1, 2)) < 1e-6
    beta = cam_discount(
        expected["gates.beta"][:, :, :FRAMES].contiguous().to(DEVICE), tokens.inflation, backend=backend
    )
    assert relative(beta, expected[f"{prefix}.scan_beta"], 2) < 1e-6


@each_backend
def test_transforms_match_golden(backend: str) -> None:
    x, expected = golden_branch(), golden.load("gdn_ops")
    given = expected["apply.in"].transpose(1, 2)[:, : FRAMES * 24].to(DEVICE)
    places = {name: x[name] for name in ("projection", "projection_inverse", "cos", "sin")}
    tokens = cam_prepare(given, given, given, **places, norm="none", relu=False, backend=backend)
    del places["projection_inverse"]
    out = cam_output(given, **places, backend=backend)
    for name, y in (("q", tokens.q), ("kv", tokens.k), ("kv", tokens.v), ("o", out)):
        assert relative(y, expected[f"apply.{name}"].transpose(1, 2)) < 1e-6


def relative(ours: Tensor, expected: Tensor, along: int = 1) -> float:
    """Largest difference from the first entries of a golden tensor over its largest value."""
    expected = expected.narrow(along, 0, ours.shape[along])
    return golden.worst(ours.cpu(), expected) / float(expected.abs().max())


@each_backend
def test_a_value_returns_to_its_own_ray_frame_unchanged(backend: str) -> None:
    x = draw(SMALL, FP32)
    v = cam_prepare(**x, backend=backend).v
    returned = cam_output(v, x["projection"], x["cos"], x["sin"], backend=backend)
    torch.testing.assert_close(returned, x["v"], rtol=0, atol=1e-4)


@each_backend
def test_the_discount_divides_by_the_frame_mean_but_never_raises_beta(backend: str) -> None:
    inflation = torch.tensor([0.2, 0.4, 2.0, 6.0], device=DEVICE).view(1, 4, 1)
    tokens, frames = torch.ones(1, 1, 2, 2, device=DEVICE), torch.ones(1, 1, 2, device=DEVICE)
    assert cam_discount(tokens, inflation, backend=backend).flatten().tolist() == [1, 1, 0.25, 0.25]
    assert cam_discount(frames, inflation, backend=backend).flatten().tolist() == [1, 0.25]


@each_backend
def test_norms_are_those_of_k_and_the_ratio_has_a_floor(backend: str) -> None:
    x = draw(SMALL, FP32, "plain")
    x["k"][0, 3] = 0
    tokens = cam_prepare(**x, backend=backend)
    assert not tokens.norm_before[0, 3].any()
    assert not tokens.norm_after[0, 3].any()
    assert torch.equal(tokens.inflation[0, 3], torch.ones(3, device=DEVICE))
    torch.testing.assert_close(tokens.norm_after, tokens.k.square().sum(-1))
    torch.testing.assert_close(tokens.norm_before, (x["k"].relu() * x["k_scale"]).square().sum(-1))


def test_downscaled_tokens_are_those_of_the_reference_and_never_longer_than_before() -> None:
    x = draw(SMALL, BF16)
    ours = cam_prepare(**x, downscale=True, backend="triton")
    assert_same_bits(ours, reference.cam_prepare(**x, downscale=True))
    assert (ours.norm_after <= ours.norm_before * (1 + 1e-5) + 1e-4).all()


@few_cases
@each_backend
def test_each_pair_may_come_twice_in_a_table(shape: Shape, dtype: torch.dtype, backend: str) -> None:
    x = draw(shape, dtype)
    twice = {name: x[name].repeat_interleave(2, dim=-1) for name in ("cos", "sin")}
    for tables in (twice, {"cos": twice["cos"]}):
        assert_same_bits(*(cam_prepare(**y, backend=backend) for y in (x | tables, x)))


@few_cases
@each_backend
def test_batched_sessions_at_other_frames_equal_single_runs(shape: Shape, dtype: torch.dtype, backend: str) -> None:
    x = draw(shape, dtype)
    size = (shape.frames, 1, shape.per_frame)
    ropes = [rope_tables(start, size, shape.dim, 10000.0) for start in (0, 121, 4000)]
    tables = {
        name: torch.stack([getattr(r, f"cam_{name}") for r in ropes]).float().to(DEVICE) for name in ("cos", "sin")
    }
    whole = cam_prepare(**(x | tables), backend=backend)
    for b in range(3):
        own = {name: y[b] for name, y in tables.items()}
        assert_same_bits(tuple(y[b : b + 1] for y in whole), cam_prepare(**entry(x | own, b), backend=backend))


@each_backend
def test_no_tables_mean_no_rotation(backend: str) -> None:
    x = draw(SMALL, FP32)
    still = {"cos": torch.ones_like(x["cos"]), "sin": torch.zeros_like(x["sin"])}
    none = {"cos": None, "sin": None}
    assert_same_bits(*(cam_prepare(**(x | y), backend=backend) for y in (none, still)))
    arguments = x["v"], x["projection"]
    assert_same_bits(*((cam_output(*arguments, **y, backend=backend),) for y in (none, still)))


@few_cases
def test_repeating_changes_no_bit_and_no_argument(shape: Shape, dtype: torch.dtype) -> None:
    x, beta = draw(shape, dtype), draw_beta(shape)
    before, first = [y.clone() for y in (*tensors(x), beta)], all_of(x, beta)
    assert_same_bits(all_of(x, beta), first)
    assert_same_bits((*tensors(x), beta), tuple(before))


@few_cases
@pytest.mark.parametrize("mode", ["head", "full", "full-given"])
def test_a_batch_equals_its_single_runs_bitwise(shape: Shape, dtype: torch.dtype, mode: str) -> None:
    x, beta = draw(shape, dtype, mode), draw_beta(shape)
    whole = all_of(x, beta)
    for b in range(shape.batch):
        assert_same_bits(tuple(y[b : b + 1] for y in whole), all_of(entry(x, b), beta[b : b + 1]))


@few_cases
def test_strides_change_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    x, beta = draw(shape, dtype), draw_beta(shape)
    first = all_of(x, beta)
    chunks = dict(zip("qkv", torch.cat([x[name] for name in "qkv"], dim=2).chunk(3, dim=2), strict=True))
    transposed = {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    odd = {name: torch.cat((x[name], x[name][..., :3]), dim=-1)[..., :-3] for name in "qkv"}
    shifted = {"q_weight": torch.cat((x["q_weight"][:1], x["q_weight"]))[1:]}
    for other in (chunks, transposed, odd, shifted):
        assert_same_bits(all_of(x | other, beta), first)
        assert all(y.is_contiguous() for y in reference.cam_prepare(**(x | other)))


@each_backend
@pytest.mark.parametrize("mode", ["plain", "head", "full"])
def test_nan_reaches_its_own_token_and_no_other(mode: str, backend: str) -> None:
    x = draw(SMALL, BF16, mode)
    clean = cam_prepare(**x, backend=backend)
    for name in "qkv":
        x[name][1, 3, 2, 5] = torch.nan
    spoilt = cam_prepare(**x, backend=backend)
    heads = slice(None) if mode == "full" else 2
    for y, z in zip(spoilt, clean, strict=True):
        assert y[1, 3, 2].isnan().any()
        y[1, 3, heads] = z[1, 3, heads]
    assert_same_bits(spoilt, clean)


@each_backend
def test_nan_reaches_its_own_frame_and_head_of_beta(backend: str) -> None:
    beta, inflation = draw_beta(SMALL), draw_inflation(SMALL)
    clean = cam_discount(beta, inflation, backend=backend)
    inflation[1, 4, 2] = torch.nan
    spoilt = cam_discount(beta, inflation, backend=backend)
    assert spoilt[1, 2, 1].isnan().all()
    spoilt[1, 2, 1] = clean[1, 2, 1]
    assert torch.equal(spoilt, clean)
