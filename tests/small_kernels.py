"""The token-wise operators of the kernels, each with its reference, its custom operator and inputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from kernel_checks import DEVICE, FP32, Shape
from torch import Tensor

from longtake.kernels import norm
from longtake.kernels.gdn import gates, gates_triton, merge, merge_triton, short_conv_triton
from longtake.kernels.gdn.short_conv import short_conv, short_conv_reference
from longtake.kernels.norm import reference as norm_reference
from longtake.kernels.norm import triton as norm_triton

Arguments = dict[str, object]
SHARED = ("weight", "a_log", "dt_bias", "eps", "dtype")
"""Arguments that all batch entries share."""


class Operator(NamedTuple):
    """`flat`: arguments of the custom operator from those of the public function."""

    public: Callable[..., object]
    reference: Callable[..., object]
    custom: Callable[..., object]
    draw: Callable[[Shape, torch.dtype], Arguments]
    flat: Callable[[Arguments], tuple[object, ...]]


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def draw_tokens(shape: Shape, dtype: torch.dtype) -> Arguments:
    q = random(*shape.tokens, dtype=dtype)
    return {"q": q, "k": 3 * q.flip(1), "eps": 1e-5}


def draw_logits(shape: Shape, dtype: torch.dtype) -> Arguments:
    """Logits as a trained model has them: open gates, slow decays."""
    batch, frames, per_frame, heads, _ = shape
    return {
        "beta_logits": 3 * random(batch, frames, per_frame, heads, dtype=dtype),
        "decay_logits": 3 * random(batch, frames, heads, dtype=dtype),
        "a_log": random(heads, dtype=dtype),
        "dt_bias": random(heads, dtype=dtype) - 5,
    }


def draw_frames(shape: Shape, dtype: torch.dtype, *, tail: bool = True, taps: int = 4) -> Arguments:
    batch, frames, per_frame, heads, dim = shape
    return {
        "x": random(batch, frames, per_frame, heads * dim, dtype=dtype),
        "weight": random(heads * dim, taps, dtype=dtype),
        "tail": random(batch, taps - 1, per_frame, heads * dim, dtype=dtype) if tail else None,
    }


def draw_reads(shape: Shape, dtype: torch.dtype, *, both: bool = True, gated: bool = True) -> Arguments:
    numerator = random(*shape.tokens)
    denominator = random(*shape.tokens[:3]).abs() + 0.1
    return {
        "forward": (numerator, denominator),
        "reverse": (numerator.flip(1), denominator.flip(1)) if both else None,
        "eps": 1e-8,
        "gate": 2 * random(*shape.tokens, dtype=dtype).flip(2) if gated else None,
        "dtype": dtype,
    }


def draw_branches(shape: Shape, dtype: torch.dtype, *, camera: bool = True) -> Arguments:
    main = random(*shape.tokens, dtype=dtype)
    return {"main": main, "camera": main.flip(1) if camera else None, "gate": 2 * main.flip(2)}


def values(x: Arguments) -> tuple[object, ...]:
    return tuple(x.values())


def directions(x: Arguments) -> tuple[object, ...]:
    return (*x["forward"], *(x["reverse"] or (None, None)), x["gate"], x["eps"], x["dtype"])


RMS = Operator(norm.inverse_rms, norm_reference.inverse_rms, norm_triton.inverse_rms, draw_tokens, values)
GATES = Operator(gates.frame_gates, gates.frame_gates_reference, gates_triton.frame_gates, draw_logits, values)
CONV = Operator(short_conv, short_conv_reference, short_conv_triton.short_conv, draw_frames, values)
MERGE = Operator(merge.gdn_merge, merge.gdn_merge_reference, merge_triton.gdn_merge, draw_reads, directions)
BRANCHES = Operator(merge.gate_merge, merge.gate_merge_reference, merge_triton.gate_merge, draw_branches, values)
OPERATORS = {
    "inverse_rms": RMS,
    "frame_gates": GATES,
    "short_conv": CONV,
    "short_conv-without-tail": CONV._replace(draw=lambda shape, dtype: draw_frames(shape, dtype, tail=False)),
    "gdn_merge": MERGE,
    "gdn_merge-without-gate": MERGE._replace(draw=lambda shape, dtype: draw_reads(shape, dtype, gated=False)),
    "gdn_merge-summed": MERGE._replace(draw=lambda shape, dtype: draw_reads(shape, dtype, both=False)),
    "gate_merge": BRANCHES,
    "gate_merge-without-camera": BRANCHES._replace(draw=lambda shape, dtype: draw_branches(shape, dtype, camera=False)),
}


def draw(name: str, shape: Shape, dtype: torch.dtype) -> Arguments:
    return OPERATORS[name].draw(shape, dtype)
