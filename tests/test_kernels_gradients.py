"""The references' gradients, in float64 against differences."""

import pytest
import torch
from kernel_checks import Shape, mapped, tensors
from scan_modes import SCANS, Arguments, draw, draw_branch, draw_slots
from torch import Tensor
from torch.autograd import gradcheck

from longtake.kernels import GdnState, ReverseInputs, cam_prepare

SHAPE = Shape(1, 3, 2, 2, 8)
FROM_ZERO = 0.05
"""Least distance of q and k from the kink of ReLU."""
CASES = [
    ("gdn", "forward full weights turned state"),
    ("gdn", "reverse head turned chunks"),
    ("gdn", "both full k-weight turned-own state chunks"),
    ("gdn", "both full weights turned state gated"),
    ("gdn", "both state quotient"),
    ("gdn", "both turned state chunks others"),
    ("cam", "forward state"),
    ("cam", "reverse chunks frame-beta"),
    ("cam", "both state chunks others"),
]


def wide(value: object) -> object:
    return mapped(lambda x: x.double() if x.is_floating_point() else x, value)


def off_the_kink(x: Tensor) -> Tensor:
    return torch.where(x.abs() < FROM_ZERO, FROM_ZERO * torch.where(x < 0, -1.0, 1.0), x)


def smooth(x: Arguments) -> Arguments:
    """float64 arguments with q and k where ReLU is smooth, those of the reverse scan too."""
    x = wide(x)
    x |= {name: off_the_kink(x[name]) for name in "qk"}
    back = x.get("reverse")
    if isinstance(back, ReverseInputs):
        x["reverse"] = back._replace(
            **{name: off_the_kink(y) for name in "qk" if (y := getattr(back, name)) is not None}
        )
    return x


def placed(features: str) -> Arguments:
    """Arguments of `cam_branch` whose keys all outlive ReLU and whose frames grow or shrink for certain."""
    x = smooth(draw_branch(SHAPE, torch.float64, features, distance=3.0))
    x["k"] = x["k"].abs()
    names = ("q", "k", "v", "projection", "projection_inverse", "cos", "sin")
    inflation = cam_prepare(**{name: x[name] for name in names}, backend="reference").inflation
    growth = torch.unflatten(inflation, 1, (SHAPE.frames, -1)).mean(2)
    assert ((growth - 1).abs() > 1e-2).all()
    assert (growth > 1).any()
    return x


def leaves(x: Arguments) -> list[Tensor]:
    return [y.requires_grad_() for y in tensors(x) if y.is_floating_point()]


def refilled(x: Arguments, values: tuple[Tensor, ...]) -> Arguments:
    """The arguments with their floating-point tensors replaced in order."""
    rest = iter(values)
    return mapped(lambda y: next(rest) if y.is_floating_point() else y, x)


def assert_gradients(name: str, x: Arguments) -> None:
    def scan(*values: Tensor) -> tuple[Tensor, ...]:
        return tensors(SCANS[name].public(**refilled(x, values), backend="reference"))

    assert gradcheck(scan, leaves(x), fast_mode=True)


@pytest.mark.parametrize(("name", "features"), CASES)
def test_a_scan_is_differentiated(name: str, features: str) -> None:
    assert_gradients(name, smooth(draw(name, SHAPE, torch.float64, features)))


@pytest.mark.parametrize(("name", "features"), [("gdn", "both full weights turned state"), ("cam", "both state")])
def test_frames_that_forget_everything_are_differentiated(name: str, features: str) -> None:
    x = smooth(draw(name, SHAPE, torch.float64, features))
    x["decay"][:, :, 1] = 0
    assert_gradients(name, x)


def test_rows_of_a_pool_that_are_not_read_get_no_gradient() -> None:
    x = smooth(draw("gdn", SHAPE, torch.float64, "forward pool"))
    state = mapped(lambda y: y.requires_grad_(), x["initial_state"])
    assert isinstance(state, GdnState)
    sum(y.sum() for y in tensors(SCANS["gdn"].public(**x | {"initial_state": state}, backend="reference"))).backward()
    for y in state:
        read = torch.zeros(len(y), dtype=torch.bool).index_fill(0, draw_slots(SHAPE), True)
        assert y.grad is not None
        assert y.grad[read].flatten(1).any(1).all()
        assert not y.grad[~read].any()


@pytest.mark.parametrize("features", ["both weights state chunks", "forward head frame-beta state own"])
def test_a_camera_branch_is_differentiated(features: str) -> None:
    """To the maps and tables too, as independent inputs, and through the discount."""
    assert_gradients("branch", placed(features))
