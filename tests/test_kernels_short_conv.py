"""The kernel of the short convolution: cuts, tails, layouts, other numbers of taps, and what is refused."""

import pytest
import torch
from kernel_checks import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    GPU,
    REAL,
    Shape,
    assert_as_good,
    assert_same_bits,
    name_of,
    poisoned_memory,
)
from small_kernels import draw_frames
from torch import Tensor

from longtake.kernels.gdn.short_conv import short_conv, short_conv_reference

BACKENDS = ["reference", "triton"]
SHAPE = Shape(2, 8, 3, 1, 24)
SHAPES = [SHAPE, Shape(1, 8, 1, 1, 8)] + [REAL._replace(frames=8)] * GPU
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=name_of)
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)


def convolve(x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return short_conv(x, weight, tail, backend="triton")


@pytest.mark.parametrize("at", [1, 2, 5, 7])
@each_shape
@each_dtype
def test_cutting_the_past_changes_no_bit(dtype: torch.dtype, shape: Shape, at: int) -> None:
    x, weight, tail = draw_frames(shape, dtype).values()
    whole, last = convolve(x, weight, tail)
    before, between = convolve(x[:, :at], weight, tail)
    after, end = convolve(x[:, at:], weight, between)
    seen = max(0, at - 3)  # frames whose future lies before the cut
    assert_same_bits((before[:, :seen], after, end), (whole[:, :seen], whole[:, at:], last))


@each_dtype
def test_the_tail_is_the_last_raw_frames(dtype: torch.dtype) -> None:
    x, weight, tail = draw_frames(SHAPE, dtype).values()
    for frames in range(1, 6):
        _, ours = convolve(x[:, :frames], weight, tail)
        assert torch.equal(ours, torch.cat((tail, x[:, :frames]), dim=1)[:, -3:])
        assert ours.is_contiguous()
        _, fresh = convolve(x[:, :frames], weight, None)
        assert torch.equal(fresh, torch.cat((torch.zeros_like(tail), x[:, :frames]), dim=1)[:, -3:])


@each_dtype
def test_no_tail_is_a_tail_of_zeros(dtype: torch.dtype) -> None:
    x, weight, tail = draw_frames(SHAPE, dtype).values()
    assert_same_bits(convolve(x, weight, None), convolve(x, weight, torch.zeros_like(tail)))


@each_shape
@each_dtype
def test_strides_change_no_bit(dtype: torch.dtype, shape: Shape) -> None:
    x, weight, tail = draw_frames(shape, dtype).values()
    expected = convolve(x, weight, tail)
    third = torch.cat((x, x, x), dim=-1).chunk(3, dim=-1)[1]
    pixels_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    unaligned = torch.cat((x, x[..., :3]), dim=-1)[..., :-3]
    for view in (third, pixels_first, unaligned, torch.cat((x, x), dim=1)[:, 8:]):
        assert_same_bits(convolve(view, weight, tail), expected)


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@each_dtype
def test_any_number_of_taps_is_as_exact_as_eager_pytorch(dtype: torch.dtype, taps: int) -> None:
    x = draw_frames(Shape(1, 3, 3, 1, 24), dtype, taps=taps)
    truth = short_conv_reference(*(y.double() for y in x.values()))
    assert_as_good(convolve(*x.values()), short_conv_reference(**x), truth)


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16)], ids=["fp32-taps", "bf16-taps"])
def test_taps_have_a_dtype_of_their_own(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, tail = draw_frames(SHAPE, dtypes[0]).values()
    weight = weight.to(dtypes[1])
    truth = short_conv_reference(x.double(), weight.double(), tail.double())
    assert_as_good(convolve(x, weight, tail), short_conv_reference(x, weight, tail), truth)


def test_nan_stays_within_reach_of_its_frame_pixel_and_channel() -> None:
    x, weight, tail = draw_frames(Shape(1, 9, 3, 1, 24), FP32).values()
    x[0, 4, 1, 5] = torch.nan
    y, next_tail = convolve(x, weight, tail)
    assert y.isnan().nonzero().tolist() == [[0, f, 1, 5] for f in range(1, 8)]
    assert not next_tail.isnan().any()


GOOD = draw_frames(SHAPE, FP32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"x": GOOD["x"][0]}, "x must be .B,F,S,C.", id="x-of-three-dimensions"),
        pytest.param({"x": GOOD["x"].mT.contiguous().mT}, "x must have unit stride", id="strided-x"),
        pytest.param({"x": GOOD["x"].long()}, "x must be one of", id="x-of-integers"),
        pytest.param({"weight": GOOD["weight"][:16]}, r"weight must be \[24,K\]", id="short-weight"),
        pytest.param({"weight": GOOD["weight"][:, None]}, r"weight must be \[24,K\]", id="weight-of-a-module"),
        pytest.param({"weight": GOOD["weight"][:, :0]}, r"weight must be \[24,K\]", id="no-taps"),
        pytest.param({"weight": GOOD["weight"].mT.contiguous().mT}, "weight must be contiguous", id="strided-weight"),
        pytest.param({"tail": GOOD["tail"][:, :2]}, "tail must be", id="short-tail"),
        pytest.param({"tail": GOOD["tail"].bfloat16()}, "tail must be one of", id="tail-of-another-dtype"),
        pytest.param({"tail": GOOD["tail"].mT.contiguous().mT}, "tail must be contiguous", id="strided-tail"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_misfits_are_refused(backend: str, changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_conv(**(GOOD | changes), backend=backend)


def test_channels_beyond_the_kernel_are_refused() -> None:
    x = torch.zeros(1, 1, 1, 12, device=DEVICE)
    with pytest.raises(ValueError, match="multiple of 8 channels"):
        convolve(x, torch.zeros(12, 4, device=DEVICE), None)
