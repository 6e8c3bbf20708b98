"""Arguments of every mode of the scans, what eager PyTorch makes of them, and the truth in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, REAL, Shape, mapped, poisoned_memory, tensors
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longtake.kernels import GdnState, Precision, ReverseInputs, cam_branch, cam_scan, gdn_scan

Arguments = dict[str, object]
Public = Callable[..., object]
Results = tuple[Tensor, ...]
EPS = 1e-8
LEAST_DENOMINATOR = 1e-3
"""A quotient by less says more about its inputs than about the kernel."""


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draw_tokens(shape: Shape, dtype: torch.dtype) -> Arguments:
    """q, k, v and gates of a scan."""
    batch, frames, per_frame, heads, _ = shape
    tokens = {name: random(i, *shape.tokens).to(dtype) for i, name in enumerate("qkv")}
    beta, decay = uniform(3, batch, heads, frames, per_frame), 0.9 + 0.1 * uniform(4, batch, heads, frames)
    return tokens | {"beta": beta, "decay": decay}


def k_scale(shape: Shape) -> float:
    """(S·D)^−½, which keeps the transition contractive."""
    return float((shape.per_frame * shape.dim) ** -0.5)


def draw_state(shape: Shape, rows: int | None = None) -> GdnState:
    kv = random(5, rows or shape.batch, shape.heads, shape.dim, shape.dim)
    return GdnState(kv, uniform(6, *kv.shape[:-1]))


def draw_slots(shape: Shape) -> Tensor:
    """Distinct rows of a pool of B + 2, not in order."""
    return torch.arange(shape.batch, 0, -1, device=DEVICE)


def draw_tables(shape: Shape, pairs: int, *, own: bool = False, doubled: bool = False) -> Arguments:
    """Tables [N,P] or [B,N,P]; doubled as published kernels take them: cos twice, then −sin and sin."""
    angles = 6 * uniform(7, shape.batch if own else 1, shape.tokens[1], pairs)
    cos, sin = angles.cos(), angles.sin()
    if doubled:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return {"cos": cos, "sin": sin} if own else {"cos": cos[0], "sin": sin[0]}


def draw_weights(shape: Shape, dtype: torch.dtype = FP32) -> Arguments:
    width = shape.heads * shape.dim
    weights = {"q_weight": 0.5 + uniform(8, width), "k_weight": 0.5 + uniform(9, width)}
    return {name: weight.to(dtype) for name, weight in weights.items()}


def draw_rms(shape: Shape, seed: int = 10) -> tuple[Tensor, Tensor]:
    return 0.5 + uniform(seed, *shape.tokens[:2]), 0.5 + uniform(seed + 1, *shape.tokens[:2])


def draw_starts(shape: Shape) -> Tensor:
    """Chunks of one frame, then of two."""
    return torch.tensor([0, *range(1, shape.frames, 2)], device=DEVICE)


def draw_reverse(shape: Shape, dtype: torch.dtype) -> ReverseInputs:
    """Other tokens and gates for the reverse scan."""
    x = draw_tokens(shape, dtype)
    tokens = {name: x[name].flip(1) for name in "qkv"}
    return ReverseInputs(**tokens, **{name: x[name].flip(2) for name in ("beta", "decay")})


def poses(shape: Shape, distance: float) -> tuple[Tensor, Tensor]:
    """P and P⁻¹ [B,N,4,4] of cameras turned a little, `distance` away: keys grow with the distance."""
    twist = torch.zeros(*shape.tokens[:2], 4, 4)
    turn = 0.3 * random(12, *shape.tokens[:2], 3, 3).cpu()
    twist[..., :3, :3] = turn - turn.mT
    twist[..., :3, 3] = distance * random(13, *shape.tokens[:2], 3).cpu()
    return tuple(torch.linalg.matrix_exp(x.double()).float().contiguous().to(DEVICE) for x in (twist, -twist))


Draw = Callable[[Shape, torch.dtype], Arguments]
FEATURES: dict[str, Draw] = {
    "reverse": lambda shape, dtype: {"direction": "reverse"},
    "forward": lambda shape, dtype: {"direction": "forward"},
    "both": lambda shape, dtype: {"direction": "both"},
    "head": lambda shape, dtype: {"norm": "head"},
    "full": lambda shape, dtype: {"norm": "full"},
    "given": lambda shape, dtype: {"norm": "full", "inverse_rms": draw_rms(shape)},
    "weights": lambda shape, dtype: draw_weights(shape),
    "bf16-weights": lambda shape, dtype: draw_weights(shape, BF16),
    "k-weight": lambda shape, dtype: draw_weights(shape) | {"q_weight": None},
    "turned": lambda shape, dtype: draw_tables(shape, shape.dim // 2),
    "turned-doubled": lambda shape, dtype: draw_tables(shape, shape.dim // 2, doubled=True),
    "turned-own": lambda shape, dtype: draw_tables(shape, shape.dim // 2, own=True),
    "turned-own-doubled": lambda shape, dtype: draw_tables(shape, shape.dim // 2, own=True, doubled=True),
    "state": lambda shape, dtype: {"initial_state": draw_state(shape)},
    "pool": lambda shape, dtype: {"initial_state": draw_state(shape, shape.batch + 2), "slots": draw_slots(shape)},
    "chunks": lambda shape, dtype: {"chunk_starts": draw_starts(shape)},
    "quotient": lambda shape, dtype: {"eps": EPS},
    "gated": lambda shape, dtype: {"eps": EPS, "gate": 2 * random(14, *shape.tokens).to(dtype)},
    "others": lambda shape, dtype: {"reverse": draw_reverse(shape, dtype)},
    "frame-beta": lambda shape, dtype: {"beta": uniform(3, shape.batch, shape.heads, shape.frames)},
    "raw-beta": lambda shape, dtype: {"discount": False},
    "ray-frame": lambda shape, dtype: {"output_transform": False},
    "unturned": lambda shape, dtype: {"cos": None, "sin": None},
    "own": lambda shape, dtype: draw_tables(shape, shape.dim // 4, own=True),
    "doubled": lambda shape, dtype: draw_tables(shape, shape.dim // 4, doubled=True),
    "bare": lambda shape, dtype: {"norm": "none"},
}


def draw_gdn(shape: Shape, dtype: torch.dtype, features: str) -> Arguments:
    """Arguments of `gdn_scan`."""
    x = draw_tokens(shape, dtype) | {"k_scale": k_scale(shape)}
    for feature in features.split():
        x |= FEATURES[feature](shape, dtype)
    return x


def draw_cam(shape: Shape, dtype: torch.dtype, features: str) -> Arguments:
    """Arguments of `cam_scan`: signed keys, small enough for a contractive transition."""
    x = draw_tokens(shape, dtype)
    x["k"] = (x["k"].float() * k_scale(shape)).to(dtype)
    return without_normaliser(x, shape, dtype, features)


def draw_branch(shape: Shape, dtype: torch.dtype, features: str, distance: float = 1.0) -> Arguments:
    """Arguments of `cam_branch`."""
    projection, inverse = poses(shape, distance)
    x = draw_tokens(shape, dtype) | {"projection": projection, "projection_inverse": inverse}
    x |= draw_tables(shape, shape.dim // 4) | {"k_scale": k_scale(shape)}
    return without_normaliser(x, shape, dtype, features)


def without_normaliser(x: Arguments, shape: Shape, dtype: torch.dtype, features: str) -> Arguments:
    for feature in features.split():
        x |= FEATURES[feature](shape, dtype)
    state = x.get("initial_state")
    return x | {"initial_state": state.kv} if isinstance(state, GdnState) else x


class Scan(NamedTuple):
    """A public function and what draws its arguments."""

    public: Public
    draw: Callable[[Shape, torch.dtype, str], Arguments]


SCANS = {"gdn": Scan(gdn_scan, draw_gdn), "cam": Scan(cam_scan, draw_cam), "branch": Scan(cam_branch, draw_branch)}


def draw(name: str, shape: Shape, dtype: torch.dtype, features: str) -> Arguments:
    return SCANS[name].draw(shape, dtype, features)


def run(name: str, x: Arguments, precision: Precision = "bf16") -> Results:
    """Every tensor that the kernels give, from memory full of NaN."""
    with poisoned_memory():
        return tensors(SCANS[name].public(**x, precision=precision, backend="triton"))


def round_tf32(x: Tensor) -> Tensor:
    """fp32 with ten bits of mantissa, to nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class RoundedProducts(TorchFunctionMode):
    """Matrix products of operands rounded as the precision says, with fp32 sums."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    def rounded(self, x: Tensor) -> Tensor:
        if self.precision == "ieee":
            return x
        return round_tf32(x.contiguous()) if self.precision == "tf32" else x.to(BF16).float()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Results = (), kwargs: Arguments | None = None
    ) -> object:
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
            args = tuple(self.rounded(x) for x in args)
        return func(*args, **(kwargs or {}))


def eager(name: str, x: Arguments, precision: Precision) -> Results:
    """The delta form in eager PyTorch, the yardstick of the kernels."""
    with RoundedProducts(precision):
        return tensors(SCANS[name].public(**x, backend="reference"))


def true(name: str, x: Arguments) -> Results:
    wide = mapped(lambda y: y.double() if y.is_floating_point() else y, x)
    return tensors(SCANS[name].public(**wide, backend="reference"))


def measurable(name: str, x: Arguments, *results: Results) -> list[Results]:
    """The results, where they are quotients only the entries whose true denominator is not tiny."""
    if "eps" not in x:
        return list(results)
    apart = {key: y for key, y in x.items() if key not in ("eps", "gate")}
    certain = true(name, apart)[1] > LEAST_DENOMINATOR
    assert certain.float().mean() > 0.5
    return [(out[certain], *rest) for out, *rest in results]


SMALL = Shape(1, 3, 7, 2, 16)
GDN_CASES: list[tuple[Shape, torch.dtype, Precision, str]] = [
    (Shape(1, 1, 1, 3, 16), FP32, "ieee", "forward"),
    (SMALL._replace(batch=2), FP32, "ieee", "both full bf16-weights turned-own state chunks"),
    (Shape(1, 2, 7, 2, 32), BF16, "bf16", "both full weights turned state gated"),
    (Shape(1, 4, 7, 1, 40), FP16, "bf16", "both head k-weight turned-doubled state quotient"),
    (Shape(1, 1, 63, 1, 56), BF16, "bf16", "forward full weights turned"),
    (Shape(1, 1, 65, 1, 64), FP32, "tf32", "both turned state"),
    (Shape(1, 11, 1, 1, 80), BF16, "bf16", "reverse full turned chunks"),
    (Shape(1, 3, 7, 1, 112), BF16, "bf16-snapshot", "both full weights turned state"),
    (Shape(1, 2, 7, 1, 128), FP32, "bf16", "both given weights"),
    (Shape(3, 1, 7, 2, 16), BF16, "ieee", "both head turned-own-doubled pool gated"),
    (Shape(1, 2, 7, 2, 16), FP32, "ieee", "both full turned state chunks others"),
    (Shape(1, 2, 1, 2, 24), BF16, "bf16", "both given weights turned state others gated"),
]
CAM_CASES: list[tuple[Shape, torch.dtype, Precision, str]] = [
    (Shape(1, 1, 1, 3, 16), FP32, "ieee", "forward"),
    (SMALL, FP32, "ieee", "both state chunks"),
    (Shape(1, 1, 65, 1, 40), BF16, "bf16", "both pool frame-beta"),
    (Shape(1, 4, 7, 2, 56), FP32, "tf32", "reverse chunks"),
    (SMALL, FP16, "bf16-snapshot", "both state chunks others"),
]
BRANCH_CASES: list[tuple[Shape, torch.dtype, Precision, str]] = [
    (Shape(1, 1, 1, 3, 16), FP32, "ieee", "forward"),
    (SMALL._replace(batch=2), FP32, "ieee", "both bf16-weights state chunks frame-beta own"),
    (Shape(1, 1, 63, 1, 40), BF16, "bf16", "both given weights pool"),
    (Shape(1, 4, 7, 1, 112), BF16, "bf16", "both k-weight state doubled"),
    (SMALL, FP16, "bf16-snapshot", "forward head weights state raw-beta"),
    (Shape(1, 3, 7, 2, 80), FP32, "tf32", "reverse bare chunks ray-frame unturned"),
]
CASES = [
    (name, *case)
    for name, cases in (("gdn", GDN_CASES), ("cam", CAM_CASES), ("branch", BRANCH_CASES))
    for case in cases
]
REAL_MODES = [
    ("gdn", "both full weights turned state gated"),
    ("branch", "both weights state"),
    ("cam", "both state chunks"),
    ("gdn", "both head turned-own pool chunks"),
    ("gdn", "forward given turned state"),
    ("gdn", "reverse full bf16-weights turned chunks"),
    ("gdn", "both full turned state chunks others"),
    ("branch", "forward head state own raw-beta"),
    ("branch", "reverse given chunks frame-beta ray-frame"),
]
"""Every mode in bf16, the first two in every precision: each takes its time to compile."""
REAL_PRECISIONS: list[tuple[torch.dtype, Precision, int]] = [
    (BF16, "bf16", len(REAL_MODES)),
    (BF16, "bf16-snapshot", 2),
    (FP16, "bf16", 2),
    (FP32, "tf32", 2),
    (FP32, "ieee", 2),
]
REAL_SHAPES = [REAL, REAL._replace(frames=4), REAL._replace(batch=2, frames=11, heads=5)]
if GPU:
    CASES += [
        (name, shape, dtype, precision, features)
        for dtype, precision, modes in REAL_PRECISIONS
        for name, features in REAL_MODES[:modes]
        for shape in REAL_SHAPES
    ]
