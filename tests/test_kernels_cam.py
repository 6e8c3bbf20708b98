"""The camera branch against golden vectors, and what its transform promises."""

import golden
import pytest
import torch
from torch import Tensor

from longtake.kernels.cam import cam_bidirectional, cam_discount, cam_output, cam_prepare, cam_scan
from longtake.kernels.gdn import short_conv
from longtake.server.camera.rays import ray_matrices
from longtake.server.model.rope import rope_tables

OPS = golden.load("gdn_ops")
WEIGHTS = golden.load("tiny_weights")
EPS = 1e-5


def tables(start: int, shape: tuple[int, int, int], dim: int) -> tuple[Tensor, Tensor]:
    rope = rope_tables(start, shape, dim, 10000.0)
    return rope.cam_cos.float(), rope.cam_sin.float()


def project(x: Tensor, weights: dict[str, Tensor], prefix: str, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw camera q, k, v [1,N,C] with the short convolution on k."""

    def linear(name: str) -> Tensor:
        weight, bias = weights[f"{prefix}{name}_proj_cam.weight"], weights[f"{prefix}{name}_proj_cam.bias"]
        return torch.nn.functional.linear(x, weight, bias)

    k, _ = short_conv(linear("k").unflatten(1, (frames, -1)), weights[f"{prefix}conv_k_cam.weight"].squeeze(1), None)
    return linear("q"), k.flatten(1, 2), linear("v")


def prepared(*, downscale: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block 0's camera branch on the golden input, before its scan."""
    cos, sin = tables(3, (7, 4, 6), 16)
    q, k, v = (x.unflatten(-1, (4, 16)) for x in project(OPS["x"], WEIGHTS, "blocks.0.attn.", 7))
    return cam_prepare(
        q,
        k,
        v,
        OPS["cam.P"],
        OPS["cam.P_inv"],
        cos,
        sin,
        q_weight=WEIGHTS["blocks.0.attn.q_norm_cam.weight"],
        k_weight=WEIGHTS["blocks.0.attn.k_norm_cam.weight"],
        eps=EPS,
        k_scale=(16 * 24) ** -0.5,
        downscale=downscale,
    )


def relative(ours: Tensor, reference: Tensor) -> float:
    return golden.worst(ours, reference) / float(reference.abs().max())


@pytest.mark.parametrize(("stage", "downscale"), [("post_ucpe", False), ("downscaled", True)])
def test_prepared_tokens_match_golden(stage: str, *, downscale: bool) -> None:
    q, k, v, _ = prepared(downscale=downscale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert relative(x, golden.tokens(OPS[f"cam.{name}_{stage}"])) < 1e-6


@pytest.mark.parametrize(("prefix", "downscale"), [("cam_raw", False), ("cam", True)])
def test_branch_of_a_block_matches_golden(prefix: str, *, downscale: bool) -> None:
    q, k, v, inflation = prepared(downscale=downscale)
    assert relative(inflation, OPS[f"{prefix}.k_inflation_sq"].transpose(1, 2)) < 1e-6
    beta = cam_discount(OPS["gates.beta"], inflation)
    assert relative(beta, OPS[f"{prefix}.scan_beta"]) < 1e-6
    state = golden.key_rows(OPS["cam.init_state_kv"])
    out, final = cam_bidirectional(q, k, v, beta, OPS["gates.decay"], initial_state=state)
    assert relative(out, golden.tokens(OPS[f"{prefix}.scan_out"])) < 1e-6
    assert relative(final, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 1e-6
    returned = cam_output(out, OPS["cam.P"], *tables(3, (7, 4, 6), 16)).flatten(2)
    assert relative(returned, OPS[f"{prefix}.branch_out"]) < 1e-6


@pytest.mark.parametrize(("prefix", "downscale"), [("cam112_raw", False), ("cam112", True)])
def test_branch_at_head_dim_112_matches_golden(prefix: str, *, downscale: bool) -> None:
    frames, height, width = OPS["cam112.frames_hw"].tolist()
    projection, inverse = ray_matrices(OPS["cam112.camera_conditions"], height, width)
    cos, sin = tables(9, (frames, height, width), 112)
    q, k, v = (x[:, :, None] for x in project(OPS["cam112.x"], OPS, "cam112.", frames))
    norms = {"q_weight": OPS["cam112.q_norm_cam.weight"], "k_weight": OPS["cam112.k_norm_cam.weight"], "eps": EPS}
    scale = (112 * height * width) ** -0.5
    q, k, v, inflation = cam_prepare(
        q, k, v, projection, inverse, cos, sin, **norms, k_scale=scale, downscale=downscale
    )
    beta = cam_discount(OPS["cam112.beta"], inflation)
    assert relative(beta, OPS[f"{prefix}.scan_beta"]) < 1e-6
    state = golden.key_rows(OPS["cam112.init_state_kv"])
    out, final = cam_bidirectional(q, k, v, beta, OPS["cam112.decay"], initial_state=state)
    assert relative(final, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 2e-6
    assert relative(cam_output(out, projection, cos, sin).flatten(2), OPS[f"{prefix}.branch_out"]) < 2e-6


@pytest.mark.parametrize("prefix", ["scan", "scan112"])
def test_scan_with_a_state_matches_golden(prefix: str) -> None:
    q, k, v = (golden.tokens(OPS[f"{prefix}.{name}"]) for name in ("q_rot", "k_rot", "v"))
    beta, decay = OPS[f"{prefix}.beta"], OPS[f"{prefix}.decay"]
    state = golden.key_rows(OPS[f"{prefix}.init_state_kv"])
    out, final = cam_bidirectional(q, k, v, beta, decay, initial_state=state)
    assert relative(out, golden.tokens(OPS[f"{prefix}.cam_cached_out.ref64"])) < 1e-6
    assert relative(final, golden.key_rows(OPS[f"{prefix}.final_state_kv"])) < 1e-6


def test_transforms_match_golden() -> None:
    x = OPS["apply.in"].transpose(1, 2)
    cos, sin = tables(3, (7, 4, 6), 16)
    plain = {"q_weight": None, "k_weight": None, "eps": EPS, "k_scale": 1.0, "relu": False}
    _, _, v, _ = cam_prepare(x, x, x, OPS["cam.P"], OPS["cam.P_inv"], cos, sin, **plain)
    _, _, q, _ = cam_prepare(x, x, x, OPS["cam.P"], OPS["cam.P"].mT, cos, sin, **plain)
    assert relative(v, OPS["apply.kv"].transpose(1, 2)) < 1e-6
    assert relative(q, OPS["apply.q"].transpose(1, 2)) < 1e-6
    assert relative(cam_output(x, OPS["cam.P"], cos, sin), OPS["apply.o"].transpose(1, 2)) < 1e-6


def random_branch(frames: int, per_frame: int, dim: int) -> dict[str, Tensor]:
    """Inputs of a camera scan, B = 2 and H = 3."""
    torch.manual_seed(frames + per_frame + dim)
    q, k, v = torch.randn(3, 2, frames * per_frame, 3, dim) * (dim * per_frame) ** -0.5
    beta, decay = torch.rand(2, 3, frames, per_frame), 0.9 + 0.1 * torch.rand(2, 3, frames)
    return {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}


@pytest.mark.parametrize(("frames", "at"), [(4, 1), (4, 2), (4, 3), (2, 1)])
def test_cutting_a_forward_scan_changes_no_bit(frames: int, at: int) -> None:
    x = random_branch(frames, 7, 40)
    state = torch.randn(2, 3, 40, 40)
    gates = {part: {n: x[n][:, :, s] for n in ("beta", "decay")} for part, s in halves(at)}
    rows = {part: {n: x[n][:, s] for n in "qkv"} for part, s in halves(at * 7)}
    out, final = cam_scan(**x, initial_state=state)
    first, middle = cam_scan(**rows["first"], **gates["first"], initial_state=state)
    second, last = cam_scan(**rows["second"], **gates["second"], initial_state=middle)
    assert torch.equal(torch.cat((first, second), dim=1), out)
    assert last is not None
    assert final is not None
    assert torch.equal(last, final)


def halves(at: int) -> list[tuple[str, slice]]:
    return [("first", slice(None, at)), ("second", slice(at, None))]


def test_reverse_scan_of_one_frame_is_empty_and_takes_no_state() -> None:
    x = random_branch(1, 7, 16)
    out, final = cam_scan(**x, reverse=True)
    assert final is None
    assert not out.any()
    with pytest.raises(ValueError, match="no initial_state"):
        cam_scan(**x, initial_state=torch.zeros(2, 3, 16, 16), reverse=True)


def test_a_value_returns_to_its_own_ray_frame_unchanged() -> None:
    cos, sin = tables(0, (7, 4, 6), 16)
    x = OPS["apply.in"].transpose(1, 2)
    scales = {"q_weight": None, "k_weight": None, "eps": EPS, "k_scale": 1.0}
    _, _, v, _ = cam_prepare(x, x, x, OPS["cam.P"], OPS["cam.P_inv"], cos, sin, **scales)
    assert relative(cam_output(v, OPS["cam.P"], cos, sin), x) < 1e-6


def test_discount_divides_by_the_frame_mean_but_never_raises_beta() -> None:
    inflation = torch.tensor([0.2, 0.4, 2.0, 6.0]).view(1, 4, 1)
    beta = cam_discount(torch.ones(1, 1, 2, 2), inflation)
    assert beta.flatten().tolist() == [1, 1, 0.25, 0.25]


@pytest.mark.parametrize(
    ("dim", "projection", "message"),
    [
        pytest.param(12, (1, 7, 4, 4), "multiple of 8", id="head-dim-12"),
        pytest.param(16, (1, 6, 4, 4), "does not fit", id="projection-of-fewer-tokens"),
    ],
)
def test_misfits_are_refused(dim: int, projection: tuple[int, ...], message: str) -> None:
    x, matrix, table = torch.zeros(1, 7, 2, dim), torch.zeros(projection), torch.zeros(7, dim // 4)
    with pytest.raises(ValueError, match=message):
        cam_output(x, matrix, table, table)
