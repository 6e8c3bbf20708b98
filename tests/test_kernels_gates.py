"""Gates of the delta rule: their formula, their layout, and what is refused."""

from math import exp, log1p

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, GPU, REAL, Shape, name_of, poisoned_memory
from small_kernels import draw_logits
from torch import Tensor

from longtake.kernels.gdn.gates import frame_gates

BACKENDS = ["reference", "triton"]
SHAPE = Shape(2, 3, 5, 3, 16)


def gates(x: dict[str, Tensor], backend: str = "triton") -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return frame_gates(**x, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_follow_their_formula(backend: str) -> None:
    x = draw_logits(SHAPE, FP32)
    beta, decay = gates(x, backend)
    for b, h, f in [(0, 0, 0), (1, 2, 1), (0, 1, 2)]:
        logits = x["beta_logits"][b, f, :, h].tolist()
        assert beta[b, h, f].tolist() == pytest.approx([1 / (1 + exp(-logit)) for logit in logits], rel=1e-6)
        a, pull = float(x["a_log"][h]), float(x["decay_logits"][b, f, h] + x["dt_bias"][h])
        assert float(decay[b, h, f]) == pytest.approx(exp(-exp(a) * log1p(exp(pull))), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_open_close_and_decay_as_themselves(backend: str) -> None:
    x = {
        "beta_logits": torch.tensor([-1000.0, 0.0, 1000.0], device=DEVICE).view(1, 3, 1, 1),
        "decay_logits": torch.tensor([30.0, 1000.0, -1000.0], device=DEVICE).view(1, 3, 1),
        "a_log": torch.tensor([-3.0], device=DEVICE),
        "dt_bias": torch.zeros(1, device=DEVICE),
    }
    beta, decay = gates(x, backend)
    assert beta.flatten().tolist() == [0.0, 0.5, 1.0]
    assert decay.flatten().tolist() == pytest.approx([exp(-30 * exp(-3)), exp(-1000 * exp(-3)), 1.0], rel=1e-6)


@pytest.mark.parametrize("shape", [SHAPE] + [REAL] * GPU, ids=name_of)
def test_every_argument_has_a_dtype_of_its_own(shape: Shape) -> None:
    x = draw_logits(shape, BF16)
    mixed = x | {"beta_logits": x["beta_logits"].float(), "a_log": x["a_log"].float()}
    for ours, expected in zip(gates(mixed), gates({name: y.float() for name, y in x.items()}), strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_with_its_token_and_frame(backend: str) -> None:
    x = draw_logits(SHAPE, FP32)
    x["beta_logits"][1, 2, 3, 0] = torch.nan
    x["decay_logits"][0, 1, 2] = torch.nan
    beta, decay = gates(x, backend)
    assert beta.isnan().nonzero().tolist() == [[1, 0, 2, 3]]
    assert decay.isnan().nonzero().tolist() == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        pytest.param("beta_logits", (2, 3, 5), "beta_logits must be .B,F,S,H.", id="beta-of-three-dimensions"),
        pytest.param("decay_logits", (2, 4, 3), "decay_logits must be", id="decay-of-other-frames"),
        pytest.param("a_log", (1,), "a_log must be", id="a-of-one-head"),
        pytest.param("dt_bias", (3, 1), "dt_bias must be", id="bias-of-two-dimensions"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_misfits_are_refused(backend: str, name: str, wrong: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frame_gates(**(draw_logits(SHAPE, FP32) | {name: torch.zeros(wrong, device=DEVICE)}), backend=backend)


@pytest.mark.parametrize("name", ["beta_logits", "decay_logits", "a_log", "dt_bias"])
def test_strides_and_integers_are_refused(name: str) -> None:
    x = draw_logits(SHAPE, FP32)
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        frame_gates(**(x | {name: torch.stack((x[name], x[name]), dim=-1)[..., 0]}))
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        frame_gates(**(x | {name: x[name].long()}))
