"""Gradients where shortcuts would show: tables that are no rotations, second gradients, autocast, mixed dtypes."""

import gradients
import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, Shape
from scan_modes import SCANS, draw

from longtake.kernels import BackendError, Precision, gdn_scan, ttt_linear

SMALL, TINY = Shape(1, 3, 7, 2, 16), Shape(1, 2, 2, 1, 16)
TURNED = {"gdn": "both full weights turned state", "branch": "both weights state chunks"}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("stretch", [1.25, 0.0])
def test_tables_need_not_be_rotations(name: str, stretch: float) -> None:
    x = draw(name, SMALL, FP32, TURNED[name])
    x |= {"cos": x["cos"] * stretch, "sin": x["sin"] * stretch}
    truth = gradients.true(name, x)
    ours = gradients.run(name, x, "ieee")
    for key, true in truth.items():
        assert float((ours[key] - true).norm()) <= 1e-6 * float(true.norm()), key


def penalised(name: str, **backends: str) -> torch.Tensor:
    """Gradient of q when the size of the gradient of v is part of the loss."""
    x = gradients.leaves(draw(name, TINY, FP32, TURNED[name]))
    out = SCANS[name].public(**x, precision="ieee", **backends).out
    (by_v,) = torch.autograd.grad(out.square().sum(), x["v"], create_graph=True)
    (out.sum() + by_v.square().sum()).backward()
    return x["q"].grad


@pytest.mark.parametrize("name", TURNED)
def test_a_gradient_of_a_gradient_comes_from_the_reference(name: str) -> None:
    found, true = penalised(name, backend="triton", backward="reference"), penalised(name, backend="reference")
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5 * float(true.abs().max()))
    with pytest.raises(BackendError, match="take backward='reference'"):
        penalised(name, backend="triton")


def test_a_gradient_of_a_gradient_of_ttt_linear_comes_from_the_reference() -> None:
    def penalty(**backends: str) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(0)
        q, k, v = (0.3 * torch.randn(1, 32, 1, 16, generator=generator, device=DEVICE) for _ in range(3))
        w, b, eta = torch.ones(1, 16, device=DEVICE), torch.zeros(1, 16, device=DEVICE), q[..., 0].abs()
        q, v = q.requires_grad_(), v.requires_grad_()
        out = ttt_linear(q, k, v, w, b, eta, **backends).out
        (by_v,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
        (out.sum() + by_v.square().sum()).backward()
        return q.grad

    true = penalty(backend="reference")
    torch.testing.assert_close(penalty(backend="triton", backward="reference"), true, rtol=1e-3, atol=1e-4)
    with pytest.raises(BackendError, match="take backward='reference'"):
        penalty(backend="triton")


def test_autocast_changes_no_gradient_of_the_reference() -> None:
    x = draw("gdn", TINY, FP32, TURNED["gdn"])
    how = {"backend": "triton", "backward": "reference", "precision": "ieee"}
    outside = gradients.gradients("gdn", x, **how)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = gradients.gradients("gdn", x, **how)
    assert all(torch.equal(inside[key], outside[key]) for key in outside)


def test_a_gradient_keeps_what_its_own_dtype_can_hold() -> None:
    """q in fp32 beside k in bf16: the norm takes all but a little of the gradient of q."""
    x = draw("gdn", TINY, FP32, "forward full state")
    x |= {"k": x["k"].to(BF16), "v": x["v"].to(BF16)}
    with_bf16 = gradients.gradients("gdn", x, backend="triton", precision="bf16")["q"]
    x |= {"k": x["k"].float(), "v": x["v"].float()}
    in_fp32 = gradients.gradients("gdn", x, backend="triton", precision="bf16")["q"]
    assert torch.equal(with_bf16, in_fp32)


def test_a_decay_that_no_frame_is_absorbed_with_may_hold_anything() -> None:
    x = draw("gdn", TINY, FP32, "reverse full turned")
    found = []
    for decay in (0.5, float("nan")):
        given = gradients.leaves(x | {"decay": x["decay"].clone()})
        given["decay"].data[:, :, 0] = decay
        out = gdn_scan(**given, backend="triton", precision="ieee").out
        out.square().sum().backward()
        found.append([given[key].grad for key in ("q", "k", "v", "beta")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_norm_without_eps_has_gradients_of_its_weights() -> None:
    x = draw("gdn", SMALL, FP32, "both head weights") | {"norm_eps": 0.0}
    truth, ours = gradients.true("gdn", x), gradients.run("gdn", x, "ieee")
    for key in ("q_weight", "k_weight", "q", "k"):
        torch.testing.assert_close(ours[key].double(), truth[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "precision"), [(BF16, "bf16"), (FP32, "bf16"), (FP32, "tf32")])
def test_small_keys_of_a_camera_at_rest_have_exact_gradients(dtype: torch.dtype, precision: Precision) -> None:
    """The growth's gradient is a difference of two equals, each as large as the key is small."""
    shape = Shape(1, 2, 8, 1, 16)
    x = draw("branch", shape, dtype, "forward full unturned")
    rest = torch.eye(4, device=DEVICE).expand(1, 16, 4, 4).contiguous()
    x["k"][:, 3::8] = -x["k"][:, 3::8].abs()
    x["k"][:, 3::8, :, 0] = 1e-3
    x |= {"projection": rest, "projection_inverse": rest.clone()}
    truth = gradients.true("branch", x)["k"]
    ours, eager = gradients.run("branch", x, precision)["k"], gradients.eager("branch", x, precision)["k"]
    assert float((ours - truth).norm()) <= 2 * float((eager - truth).norm())


@pytest.mark.parametrize("length", [1.967739990504924e-6, 1.4110012216406176e-6])
def test_a_norm_below_its_floor_does_not_grow(length: float) -> None:
    """Keys longer than the floor that their position makes shorter; floor/norm²·norm² rounds to more than the floor."""
    shrunk = torch.eye(4, device=DEVICE).repeat(1, 4, 1, 1)
    shrunk[:, 0::2] *= 0.5
    shrunk[:, 1::2] *= 2
    x = draw("branch", Shape(1, 2, 2, 1, 8), FP32, "both state unturned bare") | {"k_scale": 1.0}
    x |= {"projection": torch.linalg.inv(shrunk).contiguous(), "projection_inverse": shrunk}
    x["k"] = torch.zeros(1, 4, 1, 8, device=DEVICE)
    x["k"][:, 1::2] = 1
    x["k"][:, 0::2, 0, 0] = length
    truth, ours = gradients.true("branch", x)["k"], gradients.run("branch", x, "ieee")["k"]
    torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["k", "v", "beta"])
def test_what_no_frame_absorbs_reaches_no_other_frame(name: str) -> None:
    x = draw("gdn", TINY, FP32, "reverse turned")
    frames = []
    for value in (1.0, float("nan")):
        given = gradients.leaves(x | {name: x[name].clone()})
        first = given[name].data[:, :2] if name in "kv" else given[name].data[:, :, 0]
        first[..., :1] = value
        gdn_scan(**given, backend="triton", precision="ieee").out.square().sum().backward()
        frames.append([given["k"].grad[:, 2:], given["v"].grad[:, 2:], given["beta"].grad[:, :, 1:]])
    assert all(torch.equal(one, other) for one, other in zip(*frames, strict=True))


@pytest.mark.parametrize("name", ["k", "v", "beta"])
@pytest.mark.parametrize(
    ("scan", "features"),
    [("gdn", "reverse head weights"), ("gdn", "reverse full weights chunks"), ("branch", "reverse weights")],
)
def test_what_no_frame_absorbs_has_no_gradient_whatever_it_holds(scan: str, features: str, name: str) -> None:
    x = draw(scan, TINY, FP32, features)
    found = []
    for value in (1.0, float("nan")):
        spoilt = x | {name: x[name].clone()}
        first = spoilt[name][:, :2] if name in "kv" else spoilt[name][:, :, 0]
        first[..., :1] = value
        found.append(gradients.gradients(scan, spoilt, backend="triton", precision="ieee"))
    assert all(torch.equal(y, found[1][key]) for key, y in found[0].items())


@pytest.mark.parametrize("direction", ["both", "reverse"])
def test_first_frames_of_chunks_may_leave_out_the_very_first(direction: str) -> None:
    x = draw("gdn", TINY, FP32, direction)
    starts = (torch.tensor(given, device=DEVICE) for given in ([1], [0, 1]))
    one, other = (
        gradients.gradients("gdn", x | {"chunk_starts": y}, backend="triton", precision="ieee") for y in starts
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
