"""Inputs of the operators around the camera scan."""

import golden
import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, REAL, Shape, mapped
from torch import Tensor

from longtake.kernels.gdn.short_conv import short_conv
from longtake.server.model.rope import rope_tables

Inputs = dict[str, object]
SMALL = Shape(2, 2, 3, 3, 40)
SHAPES = [
    Shape(1, 1, 1, 1, 16),
    SMALL,
    Shape(1, 1, 63, 1, 56),
    Shape(1, 2, 7, 3, 80),
    Shape(1, 11, 1, 3, 112),
    Shape(1, 3, 1, 2, 128),
]
CASES = [(shape, dtype) for shape in SHAPES + [REAL] * GPU for dtype in (FP32, BF16)]
CASES += [(shape, FP16) for shape in [SMALL] + [REAL] * GPU]
FEW = [(Shape(3, 2, 1, 3, 40), BF16), (Shape(3, 1, 2, 1, 16), FP32)]
FEW += [(REAL._replace(batch=3), dtype) for dtype in (BF16, FP32)] * GPU
SHARED = ("q_weight", "k_weight", "cos", "sin")
"""Arguments that all batch entries share."""
MODES: dict[str, Inputs] = {
    "plain": {"norm": "none", "q_weight": None, "k_weight": None},
    "signed": {"norm": "none", "q_weight": None, "k_weight": None, "relu": False},
    "head": {"norm": "head"},
    "head-unweighted": {"norm": "head", "q_weight": None},
    "full": {},
    "full-unweighted": {"k_weight": None},
    "full-given": {"inverse_rms": "given"},
    "softmax": {"relu": False, "k_scale": 1.0},
    "unrotated": {"cos": None, "sin": None},
}


def draw_places(shape: Shape) -> dict[str, Tensor]:
    """P, P⁻¹ and the tables of camera heads."""
    batch, tokens, _, dim = shape.tokens
    projection = torch.eye(4) + 0.3 * torch.randn(batch, tokens, 4, 4)
    inverse = torch.linalg.inv(projection.double()).float().contiguous()
    angles = torch.rand(tokens, dim // 4) * 6
    named = {"projection": projection, "projection_inverse": inverse, "cos": angles.cos(), "sin": angles.sin()}
    return {name: x.to(DEVICE) for name, x in named.items()}


def draw(shape: Shape, dtype: torch.dtype, mode: str = "full") -> Inputs:
    """Arguments of `cam_prepare`."""
    torch.manual_seed(sum(shape))
    tokens = {name: x.to(DEVICE, dtype) for name, x in zip("qkv", torch.randn(3, *shape.tokens), strict=True)}
    weight = torch.linspace(0.5, 2, shape.heads * shape.dim, device=DEVICE)
    norms = {"q_weight": weight, "k_weight": weight.flip(0).to(BF16), "norm_eps": 1e-5, "k_scale": 0.1}
    x = tokens | draw_places(shape) | norms | MODES[mode]
    if "inverse_rms" in x:
        means = (x[name].float().square().mean((-2, -1)) for name in "qk")
        x["inverse_rms"] = tuple(torch.rsqrt(mean + 1e-5) for mean in means)
    return x


def draw_beta(shape: Shape, *, per_frame: bool = False) -> Tensor:
    torch.manual_seed(sum(shape))
    beta = torch.rand(shape.batch, shape.heads, shape.frames, shape.per_frame).to(DEVICE)
    return beta[..., 0].contiguous() if per_frame else beta


def draw_inflation(shape: Shape) -> Tensor:
    torch.manual_seed(sum(shape))
    return 3 * torch.rand(shape.tokens[:3]).to(DEVICE)


def entry(x: Inputs, b: int) -> Inputs:
    """Batch entry b alone."""
    return {name: y if name in SHARED else mapped(lambda z: z[b : b + 1], y) for name, y in x.items()}


FRAMES = 7 if GPU else 2
"""Of the golden block's seven."""


def golden_branch() -> Inputs:
    """Arguments of `cam_prepare` for the first frames of block 0 of the golden model."""
    expected, weights, prefix = golden.load("gdn_ops"), golden.load("tiny_weights"), "blocks.0.attn."
    rope, rows = rope_tables(3, (7, 4, 6), 16, 10000.0), slice(FRAMES * 24)

    def project(name: str) -> Tensor:
        names = (f"{prefix}{name}_proj_cam.{part}" for part in ("weight", "bias"))
        return torch.nn.functional.linear(expected["x"], *(weights[name] for name in names))

    k, _ = short_conv(project("k").unflatten(1, (7, 24)), weights[f"{prefix}conv_k_cam.weight"].squeeze(1), None)
    tokens = {"q": project("q"), "k": k, "v": project("v")}
    named = {
        **{name: x.reshape(1, 168, 4, 16)[:, rows] for name, x in tokens.items()},
        "projection": expected["cam.P"][:, rows],
        "projection_inverse": expected["cam.P_inv"][:, rows],
        "cos": rope.cam_cos[rows].float(),
        "sin": rope.cam_sin[rows].float(),
        "q_weight": weights[f"{prefix}q_norm_cam.weight"],
        "k_weight": weights[f"{prefix}k_norm_cam.weight"],
    }
    return {name: x.to(DEVICE) for name, x in named.items()} | {"k_scale": (16 * 24) ** -0.5}
