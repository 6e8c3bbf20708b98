"""Arguments that come in the wrong container are refused by name, by both backends alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import BF16, DEVICE, Shape
from scan_modes import SCANS, Arguments, draw

from longtake.kernels import GdnState, ReverseInputs, cam_branch, cam_scan, gdn_merge, gdn_scan
from longtake.kernels.backend import BackendError

SMALL = Shape(2, 2, 3, 1, 16)
Changes = Callable[[Arguments], dict[str, Any]]
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])

MISFITS: dict[str, tuple[str, Changes, str]] = {
    "a-tensor-as-state": (
        "gdn",
        lambda x: {"initial_state": x["initial_state"].kv},
        "initial_state must be two tensors",
    ),
    "half-a-state": ("gdn", lambda x: {"initial_state": (x["initial_state"].kv,)}, "initial_state must be two tensors"),
    "half-an-out-state": ("gdn", lambda x: {"out_state": (None, x["initial_state"].z)}, "kv and z of out_state"),
    "one-inverse-rms": ("gdn", lambda x: {"norm": "full", "inverse_rms": x["q"][..., 0, 0]}, "inverse_rms must be two"),
    "a-tuple-as-reverse": ("gdn", lambda x: {"reverse": (x["q"],)}, "reverse must be ReverseInputs"),
    "reverse-rms": (
        "gdn",
        lambda x: {"norm": "full", "reverse": ReverseInputs(inverse_rms=x["q"][..., 0, 0])},
        "reverse inverse_rms must be two",
    ),
    "a-list-as-slots": ("gdn", lambda x: {"slots": [1, 0]}, "slots must be a tensor"),
    "fractions-as-starts": ("gdn", lambda x: {"chunk_starts": [0, 1.5]}, "whole numbers"),
    **{
        f"a-gdn-state-as-{state}-of-{scan}": (
            scan,
            lambda x, state=state: {state: GdnState(x["initial_state"], x["initial_state"])},
            f"{state} must be a tensor",
        )
        for scan in ("cam", "branch")
        for state in ("initial_state", "out_state")
    },
    **{
        f"no-{name}-in-{scan}": (scan, lambda x, name=name: {name: None}, f"{name} must be a tensor")
        for scan in ("gdn", "cam", "branch")
        for name in ("q", "beta", "decay")
    },
    "an-empty-pool": (
        "cam",
        lambda x: {"initial_state": x["initial_state"][:0], "slots": torch.tensor([1, 0], device=DEVICE)},
        "initial_state must be",
    ),
    "a-state-of-other-heads": ("cam", lambda x: {"initial_state": x["initial_state"][:, :0]}, "initial_state must be"),
    "one-inverse-rms-for-the-branch": ("branch", lambda x: {"inverse_rms": (x["q"],)}, "inverse_rms must be two"),
}


@each_backend
@pytest.mark.parametrize("name", MISFITS)
def test_wrong_containers_are_refused_by_name(name: str, backend: str) -> None:
    scan, changes, message = MISFITS[name]
    x = draw(scan, SMALL, BF16, "both state")
    with pytest.raises(ValueError, match=message):
        SCANS[scan].public(**(x | changes(x)), backend=backend)


@each_backend
def test_pools_of_different_sizes_are_refused(backend: str) -> None:
    x = draw("cam", SMALL, BF16, "both pool")
    bigger = torch.cat((x["initial_state"], x["initial_state"]))
    with pytest.raises(ValueError, match="pools with the same rows"):
        cam_scan(**(x | {"out_state": bigger}), backend=backend)


@each_backend
def test_a_plain_tuple_of_out_states_returns_as_a_state(backend: str) -> None:
    x = draw("gdn", SMALL, BF16, "both state")
    out = tuple(torch.zeros_like(y) for y in x["initial_state"])
    state = gdn_scan(**(x | {"out_state": out}), backend=backend).state
    assert isinstance(state, GdnState)
    assert state.kv is out[0]
    assert state.z.any()


@each_backend
def test_a_merge_says_what_it_wants(backend: str) -> None:
    found = gdn_scan(**draw("gdn", SMALL, BF16, "both state"), backend="reference")
    with pytest.raises(ValueError, match="forward must be two tensors, numerator and denominator"):
        gdn_merge(found, eps=1e-8, backend=backend)
    with pytest.raises(ValueError, match="numerator and denominator of forward come together"):
        gdn_merge((found.out, None), eps=1e-8, backend=backend)


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"batch": 0}, {"dim": 15}])
def test_empty_tokens_and_odd_head_dims_are_refused(sizes: dict[str, int]) -> None:
    shape = SMALL._replace(**sizes)
    q = torch.zeros(shape.tokens, device=DEVICE)
    beta, decay = (torch.zeros(shape.batch, shape.heads, *rest, device=DEVICE) for rest in ((2, 3), (2,)))
    with pytest.raises(ValueError, match="none of them 0 and D even"):
        gdn_scan(q, q, q, beta, decay, backend="reference")


def test_a_head_dim_beyond_the_kernels_is_no_backend_of_theirs() -> None:
    x = draw("branch", SMALL._replace(dim=136), BF16, "both state")
    with pytest.raises(BackendError, match="multiple of 8 up to 128, got 136"):
        cam_branch(**x, backend="triton")
    assert cam_branch(**x).out.shape == x["q"].shape


@each_backend
@pytest.mark.parametrize("shared", ["cos", "sin"])
def test_one_table_may_be_shared_and_the_other_not(shared: str, backend: str) -> None:
    x = draw("gdn", SMALL, BF16, "both turned-own state")
    x[shared] = x[shared][:1].contiguous()
    both = x | {shared: x[shared].expand(2, -1, -1).contiguous()}
    ours, expected = (gdn_scan(**y, precision="ieee", backend=backend) for y in (x, both))
    assert torch.equal(ours.out, expected.out)


@each_backend
def test_an_out_state_that_requires_grad_is_refused_and_not_written(backend: str) -> None:
    x = draw("cam", SMALL, BF16, "both state")
    out = torch.zeros_like(x["initial_state"]).requires_grad_()
    with torch.no_grad(), pytest.raises(ValueError, match="can not require grad"):
        cam_scan(**(x | {"out_state": out}), backend=backend)
    assert not out.any()
