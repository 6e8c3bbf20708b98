"""Inverse RMS of queries and keys: any layout, and what is refused."""

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, GPU, REAL, Shape, assert_same_bits, name_of, poisoned_memory
from torch import Tensor
from torch.nn.functional import rms_norm

from longtake.kernels.norm import inverse_rms

SHAPES = [Shape(2, 1, 3, 3, 40), Shape(1, 2, 2, 1, 112)] + [REAL] * GPU
BACKENDS = ["reference", "triton"]


def draw(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    q, k = torch.randn(2, *shape.tokens, generator=generator).to(DEVICE, dtype)
    return q, k


def scales(q: Tensor, k: Tensor, backend: str = "triton") -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return inverse_rms(q, k, eps=1e-5, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_normalise_all_heads_of_a_token_together(backend: str) -> None:
    for x, scale in zip(draw(SHAPES[0], FP32), scales(*draw(SHAPES[0], FP32), backend), strict=True):
        expected = rms_norm(x.flatten(2), (120,), eps=1e-5)
        torch.testing.assert_close(x.flatten(2) * scale[..., None], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_is_added_to_the_mean_square(backend: str) -> None:
    q = torch.zeros(1, 1, 2, 8, device=DEVICE)
    for scale in inverse_rms(q, q, eps=0.25, backend=backend):
        assert scale.tolist() == [[2.0]]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_strides_change_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    q, k = draw(shape, dtype)
    expected = scales(q, k)
    thirds = torch.cat((q, k, k), dim=2).chunk(3, dim=2)
    interleaved = torch.stack((q, k), dim=3).unbind(3)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    unaligned = [torch.cat((x, x[..., :3]), dim=-1)[..., :-3] for x in (q, k)]
    for views in (thirds[:2], interleaved, head_first, unaligned, (q, thirds[1])):
        assert_same_bits(scales(*views), expected)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
def test_a_token_alone_has_the_same_bits(dtype: torch.dtype) -> None:
    q, k = draw(SHAPES[0], dtype)
    whole = scales(q, k)
    for n in range(q.shape[1]):
        assert_same_bits(scales(q[:, n : n + 1], k[:, n : n + 1]), tuple(x[:, n : n + 1] for x in whole))


Q = torch.zeros(1, 2, 3, 16, device=DEVICE)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        pytest.param(Q[0], Q[0], "q must be .B,N,H,D.", id="q-of-three-dimensions"),
        pytest.param(Q, Q[:, :1], "k must be", id="short-k"),
        pytest.param(Q.long(), Q, "q must be one of", id="q-of-integers"),
        pytest.param(Q, Q.mT.contiguous().mT, "k must have unit stride", id="strided-k"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_misfits_are_refused(backend: str, q: Tensor, k: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inverse_rms(q, k, eps=1e-5, backend=backend)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_eps_that_is_negative_or_not_finite_is_refused(backend: str, eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be finite and not negative"):
        inverse_rms(Q, Q, eps=eps, backend=backend)


@pytest.mark.parametrize("dim", [12, 136])
def test_head_dims_beyond_the_kernel_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="head dim must be"):
        scales(*draw(Shape(1, 1, 1, 1, dim), FP32))
