"""Merging of directions and of branches: what is added where, dtypes, sizes, and what is refused."""

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, REAL, Shape, assert_as_good, name_of, poisoned_memory
from small_kernels import draw_branches, draw_reads, random
from torch import Tensor

from longtake.kernels.gdn.merge import gate_merge, gate_merge_reference, gdn_merge

BACKENDS = ["reference", "triton"]
SHAPE = Shape(2, 2, 3, 3, 16)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


@each_backend
def test_eps_is_added_once_to_both_denominators(backend: str) -> None:
    reads = ones(1, 2, 3, 8), ones(1, 2, 3)
    assert (gdn_merge(reads, reads, eps=2.0, backend=backend) == 0.5).all()
    assert (gdn_merge(reads, eps=1.0, backend=backend) == 0.5).all()


@each_backend
def test_summed_directions_give_the_same_bits(backend: str) -> None:
    x = draw_reads(SHAPE, BF16)
    summed = tuple(a + b for a, b in zip(x["forward"], x["reverse"], strict=True))
    apart = gdn_merge(**x, backend=backend)
    assert torch.equal(gdn_merge(**(x | {"forward": summed, "reverse": None}), backend=backend), apart)


@each_backend
def test_a_denominator_may_be_negative_or_nothing(backend: str) -> None:
    denominator = torch.tensor([-2.0, 0.0], device=DEVICE).view(1, 1, 2)
    out = gdn_merge((ones(1, 1, 2, 8), denominator), eps=0.5, backend=backend)
    assert out[0, 0, :, 0].tolist() == pytest.approx([-1 / 1.5, 2.0])


@pytest.mark.parametrize("dtype", [None, FP32, BF16, FP16], ids=name_of)
@each_backend
def test_the_result_has_the_dtype_asked_for(backend: str, dtype: torch.dtype | None) -> None:
    x = draw_reads(SHAPE, FP32)
    with poisoned_memory():
        out = gdn_merge(**(x | {"dtype": dtype}), backend=backend)
        exact = gdn_merge(**(x | {"dtype": FP32}), backend=backend)
    assert out.dtype == (dtype or FP32)
    assert torch.equal(out, exact.to(out.dtype))


@each_backend
def test_nan_stays_with_its_entry_or_head(backend: str) -> None:
    x = draw_reads(SHAPE, FP32)
    x["forward"][0][0, 1, 2, 3] = torch.nan
    x["gate"][1, 2, 0, 4] = torch.nan
    x["reverse"][1][1, 4, 1] = torch.nan
    out = gdn_merge(**x, backend=backend)
    assert out.isnan().nonzero().tolist() == [[0, 1, 2, 3], [1, 2, 0, 4], *([1, 4, 1, d] for d in range(16))]


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 5, 8), (1, 1031)] + [REAL.tokens] * GPU, ids=name_of)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
def test_branches_of_any_shape_merge(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    main, camera, gate = random(*shape, dtype=dtype), 1 + random(*shape, dtype=dtype), 2 * random(*shape, dtype=dtype)
    with poisoned_memory():
        ours = gate_merge(main, camera, gate, backend="triton")
    torch.testing.assert_close(ours, gate_merge_reference(main, camera, gate))


def test_branches_have_dtypes_of_their_own() -> None:
    main, camera, gate = draw_branches(SHAPE, FP32).values()
    mixed = main.bfloat16(), camera, gate.half()
    truth = gate_merge_reference(*(x.double() for x in mixed))
    ours = gate_merge(*mixed, backend="triton")
    assert ours.dtype == BF16
    assert_as_good((ours,), (gate_merge_reference(*mixed),), (truth,))


@each_backend
def test_branches_are_added_before_any_rounding(backend: str) -> None:
    main, camera = ones(8).bfloat16(), torch.full((8,), 2.0**-9, device=DEVICE, dtype=BF16)
    gate = torch.full((8,), 32.0, device=DEVICE, dtype=BF16)
    expected = (32 * (1 + 2.0**-9) * ones(8)).bfloat16()
    assert torch.equal(gate_merge(main, camera, gate, backend=backend), expected)


READS = draw_reads(SHAPE, FP32)
NUMERATOR, DENOMINATOR = READS["forward"]
GATE = READS["gate"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"forward": (NUMERATOR[0], DENOMINATOR)}, "forward numerator must be .B,N,H,D.", id="numerator"),
        pytest.param({"forward": (NUMERATOR, DENOMINATOR[:1])}, "forward denominator must be", id="denominator"),
        pytest.param({"forward": (NUMERATOR.half(), DENOMINATOR)}, "forward numerator must be one of", id="fp16"),
        pytest.param({"reverse": (NUMERATOR[:, :1], DENOMINATOR)}, "reverse numerator must be", id="short-reverse"),
        pytest.param({"reverse": (NUMERATOR, DENOMINATOR.double())}, "reverse denominator must be one of", id="fp64"),
        pytest.param({"reverse": (NUMERATOR.mT.contiguous().mT, DENOMINATOR)}, "must be contiguous", id="strided"),
        pytest.param({"gate": GATE[..., :8]}, "gate must be", id="narrow-gate"),
        pytest.param({"eps": float("nan")}, "eps must be finite", id="eps-of-nan"),
        pytest.param({"eps": -1e-8}, "eps must be finite", id="negative-eps"),
        pytest.param({"gate": GATE.mT.contiguous().mT}, "gate must be contiguous", id="strided-gate"),
    ],
)
@each_backend
def test_misfits_of_directions_are_refused(backend: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gdn_merge(**(READS | changes), backend=backend)


@pytest.mark.parametrize("name", ["main", "camera", "gate"])
@each_backend
def test_misfits_of_branches_are_refused(backend: str, name: str) -> None:
    x = draw_branches(SHAPE, FP32)
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        gate_merge(**(x | {name: x[name].mT.contiguous().mT}), backend=backend)
    with pytest.raises(ValueError, match="must be"):
        gate_merge(**(x | {name: x[name][:1]}), backend=backend)


def test_head_dims_beyond_the_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="head dim must be"):
        gdn_merge((ones(1, 1, 1, 12), ones(1, 1, 1)), eps=1.0, backend="triton")
