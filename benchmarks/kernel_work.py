"""The two works of a block that kernels are timed on: inputs, truth in float64, bytes moved and operations."""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.backend import Backend
from longtake.kernels.cam import cam_branch
from longtake.kernels.gdn import GdnState, gdn_scan
from longtake.kernels.scan.configurations import Precision

NORM_EPS, EPS = 1e-5, 1e-8
COPY_RATE, MATRIX_RATE = 4.24e12, 791e12
"""Measured ceilings of an H200: bytes a second of a copy, dense bf16 operations a second."""
LIMITS = {"ieee": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "bf16-snapshot": 1e-2}
ROUNDING = {torch.bfloat16: 4e-3, torch.float32: 0.0}
HEADS_AXIS = {"out": 2, "numerator": 2, "denominator": 2, "kv": 1, "z": 1}
HEADS_AT_ONCE = 5
Inputs = dict[str, Tensor]
Results = dict[str, Tensor]


class Shape(NamedTuple):
    """Sizes of a call; tokens of a frame, heads and head dim are those of the model at 704×1280."""

    batch: int
    frames: int
    per_frame: int = 880
    heads: int = 20
    dim: int = 112

    @property
    def tokens(self) -> int:
        return self.frames * self.per_frame

    @property
    def entries(self) -> int:
        """Of one token tensor [B,N,H,D]."""
        return self.batch * self.tokens * self.heads * self.dim

    def __str__(self) -> str:
        return f"B={self.batch} F={self.frames} S={self.per_frame} H={self.heads} D={self.dim}"


class Work(NamedTuple):
    """What is timed, and what shows that it is right.

    `run` is timed, on inputs that went through `prepare`. `results` are its named tensors (and others that show more)
    in this library's conventions, `truth` the same from float64 inputs by the reference. `limit` gives the largest
    relative RMS error of a tensor; `exact` works give the same bits whenever they run.
    """

    name: str
    run: Callable[[Inputs], object]
    results: Callable[[Inputs], Results]
    truth: Callable[[Inputs], Results]
    limit: Callable[[Tensor], float]
    moved: Callable[[Shape], int]
    operations: Callable[[Shape], int]
    exact: bool = True
    prepare: Callable[[Inputs], Inputs] = dict

    def floor(self, shape: Shape) -> float:
        """Microseconds: the larger of bytes, each moved once, and operations over the measured ceilings."""
        return max(self.moved(shape) / COPY_RATE, self.operations(shape) / MATRIX_RATE) * 1e6


def draw(shape: Shape, device: str = "cuda") -> Inputs:
    """Random inputs of both works: bf16 tokens, q, k and v in one buffer, and fp32 gates, tables, matrices, states."""
    batch, frames, per_frame, heads, dim = shape
    projection, inverse = poses(batch, shape.tokens, device)
    angles, cam_angles = (6 * torch.rand(shape.tokens, dim // part, device=device) for part in (2, 4))
    return {
        "qkv": torch.randn(batch, shape.tokens, 3, heads, dim, device=device, dtype=torch.bfloat16),
        "gate": torch.randn(batch, shape.tokens, heads, dim, device=device, dtype=torch.bfloat16),
        "beta": torch.rand(batch, heads, frames, per_frame, device=device),
        "decay": 0.9 + 0.1 * torch.rand(batch, heads, frames, device=device),
        "kv": torch.randn(batch, heads, dim, dim, device=device),
        "z": torch.rand(batch, heads, dim, device=device),
        "q_weight": 0.5 + torch.rand(heads * dim, device=device),
        "k_weight": 0.5 + torch.rand(heads * dim, device=device),
        "projection": projection,
        "inverse": inverse,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "cam_cos": cam_angles.cos(),
        "cam_sin": cam_angles.sin(),
    }


def poses(batch: int, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Rigid motions [B,N,4,4] of about half a unit and half a radian, and their inverses."""
    turn = 0.3 * torch.randn(batch, tokens, 3, 3, device=device)
    twist = torch.zeros(batch, tokens, 4, 4, device=device)
    twist[..., :3, :3] = turn - turn.mT
    twist[..., :3, 3] = 0.5 * torch.randn(batch, tokens, 3, device=device)
    return torch.linalg.matrix_exp(twist).contiguous(), torch.linalg.matrix_exp(-twist).contiguous()


def k_scale(x: Inputs) -> float:
    """(S·D)^−½, which keeps the transition contractive."""
    return float((x["beta"].shape[-1] * x["qkv"].shape[-1]) ** -0.5)


def tokens_of(x: Inputs) -> tuple[Tensor, ...]:
    """q, k and v, which are views of one buffer."""
    return (x["q"], x["k"], x["v"]) if "q" in x else x["qkv"].unbind(2)


def given_rms(x: Inputs) -> tuple[Tensor, Tensor] | None:
    """Inverse RMS of q and k, where heads were cut out of the tensors that it belongs to."""
    return (x["q_rms"], x["k_rms"]) if "q_rms" in x else None


def gdn(x: Inputs, precision: Precision, backend: Backend | None = None, *, merged: bool = True) -> Results:
    """Inverse RMS, both directions, state in and out, quotient, gate; or numerator and denominator."""
    q, k, v = tokens_of(x)
    found = gdn_scan(
        q,
        k,
        v,
        x["beta"],
        x["decay"],
        direction="both",
        norm="full",
        q_weight=x["q_weight"],
        k_weight=x["k_weight"],
        norm_eps=NORM_EPS,
        inverse_rms=given_rms(x),
        k_scale=k_scale(x),
        cos=x["cos"],
        sin=x["sin"],
        eps=EPS if merged else None,
        gate=x["gate"] if merged else None,
        initial_state=GdnState(x["kv"], x["z"]),
        precision=precision,
        backend=backend,
    )
    if found.denominator is not None:
        return {"numerator": found.out, "denominator": found.denominator}
    assert found.state is not None
    return {"out": found.out, "kv": found.state.kv, "z": found.state.z}


def gdn_results(x: Inputs, precision: Precision, backend: Backend | None = None) -> Results:
    """Output and state, and the numerator and denominator behind the output."""
    return gdn(x, precision, backend) | gdn(x, precision, backend, merged=False)


def camera(x: Inputs, precision: Precision, backend: Backend | None = None, *, transformed: bool = True) -> Results:
    """Preparation, discount, both directions, state in and out, output transform."""
    q, k, v = tokens_of(x)
    found = cam_branch(
        q,
        k,
        v,
        x["beta"],
        x["decay"],
        x["projection"],
        x["inverse"],
        x["cam_cos"],
        x["cam_sin"],
        norm="full",
        q_weight=x["q_weight"],
        k_weight=x["k_weight"],
        norm_eps=NORM_EPS,
        inverse_rms=given_rms(x),
        k_scale=k_scale(x),
        direction="both",
        discount=True,
        output_transform=transformed,
        initial_state=x["kv"],
        precision=precision,
        backend=backend,
    )
    assert found.state is not None
    return {"out": found.out, "kv": found.state}


def gdn_bytes(shape: Shape) -> int:
    """q, k, v, gate and output in bf16; states in and out, beta, decay and tables in fp32."""
    memories, words = shape.batch * shape.heads, 2 * shape.tokens * shape.dim // 2
    words += memories * (2 * shape.dim * (shape.dim + 1) + shape.tokens + shape.frames)
    return 5 * 2 * shape.entries + 4 * words


def camera_bytes(shape: Shape) -> int:
    """q, k, v and output in bf16; states in and out, beta, decay, tables and matrices in fp32."""
    memories, words = shape.batch * shape.heads, 2 * shape.tokens * shape.dim // 4
    words += memories * (2 * shape.dim**2 + shape.tokens + shape.frames) + shape.batch * shape.tokens * 2 * 16
    return 4 * 2 * shape.entries + 4 * words


def scan_operations(shape: Shape, products: int) -> int:
    """Products of S×D by D a frame and head, and one D×D by D×D for either direction."""
    each = products * 2 * shape.per_frame * shape.dim**2 + 2 * 2 * shape.dim**3
    return shape.batch * shape.heads * shape.frames * each


def gdn_operations(shape: Shape) -> int:
    """KᵀK, rotated and not, KᵀV, and q times the memory, the directions summed before."""
    return scan_operations(shape, 4)


def camera_operations(shape: Shape) -> int:
    """KᵀK, KᵀV, and q times the memory, the directions summed before."""
    return scan_operations(shape, 3)


def limit(x: Tensor, precision: Precision) -> float:
    """Of the precision, and no less than rounding to the dtype of the tensor costs."""
    return max(LIMITS[precision], ROUNDING[x.dtype])


def own_works(precision: Precision) -> list[Work]:
    """GDN and camera of one block by this library."""
    return [
        Work(
            f"GDN of one block, {precision}",
            lambda x: gdn(x, precision),
            lambda x: gdn_results(x, precision),
            lambda x: gdn_results(x, precision, "reference"),
            lambda x: limit(x, precision),
            gdn_bytes,
            gdn_operations,
        ),
        Work(
            f"camera of one block, {precision}",
            lambda x: camera(x, precision),
            lambda x: camera(x, precision),
            lambda x: camera(x, precision, "reference"),
            lambda x: limit(x, precision),
            camera_bytes,
            camera_operations,
        ),
    ]


def with_rms(x: Inputs) -> Inputs:
    """The inputs and the inverse RMS of q and k over all heads, taken in float64."""
    squares = [each.double().square().mean((-2, -1)) for each in x["qkv"].unbind(2)[:2]]
    q_rms, k_rms = ((mean + NORM_EPS).rsqrt().float() for mean in squares)
    return x | {"q_rms": q_rms, "k_rms": k_rms}


def heads_in_float64(x: Inputs, start: int, stop: int) -> Inputs:
    """Heads start … stop − 1 of inputs with their inverse RMS: heads never meet but in the norm."""
    heads = slice(start, stop)
    dim = x["qkv"].shape[-1]
    cut = {"qkv": x["qkv"][:, :, :, heads], "gate": x["gate"][:, :, heads]}
    cut |= {name: x[name][:, heads] for name in ("beta", "decay", "kv", "z")}
    cut |= {name: x[name].view(-1, dim)[heads].flatten() for name in ("q_weight", "k_weight")}
    return x | {name: each.double().contiguous() for name, each in cut.items()}


def relative_errors(work: Work, x: Inputs, found: Results) -> dict[str, float]:
    """‖found − truth‖ / ‖truth‖ of every result; a few heads at a time, so that long clips fit."""
    heads, whole = x["beta"].shape[1], with_rms(x)
    wrong, size = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)
    for start in range(0, heads, HEADS_AT_ONCE):
        stop = min(start + HEADS_AT_ONCE, heads)
        for name, exact in work.truth(heads_in_float64(whole, start, stop)).items():
            part = found[name].narrow(HEADS_AXIS[name], start, stop - start)
            wrong[name] += float((part.double() - exact).square().sum())
            size[name] += float(exact.square().sum())
    return {name: sqrt(wrong[name] / size[name]) for name in found}
