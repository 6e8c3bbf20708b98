"""The published kernels of NVlabs/Sana at the works of this library: chunkwise GDN with state, and the camera branch.

They come from a checkout that the caller names. Three files of it are imported, past the `__init__` of their packages,
which ask for the whole training environment. What their own callers do once a chunk (expanded tables, padded states,
contiguous copies) is not timed.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_work import (
    EPS,
    NORM_EPS,
    Inputs,
    Results,
    Work,
    camera,
    camera_bytes,
    camera_operations,
    gdn,
    gdn_bytes,
    gdn_operations,
    k_scale,
)
from longtake.kernels.scan.configurations import Precision

PACKAGES = ("diffusion", "diffusion.model", "diffusion.model.ops", "diffusion.model.nets")
UNUSED = "diffusion.model.nets.sana_camctrl_blocks"
UNUSED_NAMES = ("compute_fov_from_fx_xi", "ucm_unproject_grid_fov", "world_to_ray_mats")
"""What the camera file imports and the timed calls never use."""
PRECISIONS: dict[Precision, int] = {"ieee": 0, "tf32": 1, "bf16": 2, "bf16-snapshot": 3}
LOOSE_LIMIT = 0.1
"""Relative RMS error: I − P is kept in bf16 there, which adds up over a clip. A wrong convention costs about 1."""


class Published(NamedTuple):
    """Modules of the checkout."""

    gdn: ModuleType
    chunkwise: ModuleType
    camera: ModuleType


def load(folder: Path, precision: Precision) -> Published:
    """Import the kernels from a checkout of NVlabs/Sana, which then compute in `precision`.

    Raises:
        SystemExit: they are not there.
    """
    if not (folder / "diffusion/model/ops/fused_gdn_chunkwise.py").exists():
        raise SystemExit(f"{folder} is no checkout of NVlabs/Sana")
    for name in PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    unused = sys.modules[UNUSED] = ModuleType(UNUSED)
    unused.__dict__.update(dict.fromkeys(UNUSED_NAMES))
    files = ("fused_gdn", "fused_gdn_chunkwise", "fused_cam_gdn")
    published = Published(*(importlib.import_module(f"diffusion.model.ops.{file}") for file in files))
    published.gdn.__dict__["PRECISION_OVERRIDE"] = PRECISIONS[precision]
    return published


def repeated(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables [N,P] as published kernels have them, [N,2P]: cos, cos and −sin, sin of each pair."""
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


def prepare_gdn(x: Inputs) -> Inputs:
    """The inputs with repeated tables, and the state with rows = value dim."""
    cos, sin = repeated(x["cos"], x["sin"])
    return x | {"public_cos": cos, "public_sin": sin, "public_kv": x["kv"].mT.contiguous()}


def run_gdn(published: Published, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse RMS, both directions with state, merge and gate: output, KV with rows = value dim, Z [B,H,D,1]."""
    frames, per_frame = x["beta"].shape[2:]
    rms = published.gdn.fused_qk_inv_rms(x["qkv"], eps=NORM_EPS)
    numerator, denominator, kv, z = published.chunkwise.fused_bidi_stateful_chunkwise_shared_phase_a(
        x["qkv"],
        *rms,
        x["q_weight"],
        x["k_weight"],
        x["public_cos"],
        x["public_sin"],
        x["beta"],
        x["decay"],
        F=frames,
        S=per_frame,
        k_scale=k_scale(x),
        init_state_kv=x["public_kv"],
        init_state_z=x["z"],
    )
    return merge(published, numerator, denominator, x["gate"]), kv, z


def merge(published: Published, numerator: Tensor, denominator: Tensor, gate: Tensor) -> Tensor:
    """Quotient and gate by the published kernel, in PyTorch where the checkout has none."""
    if hasattr(published.gdn, "fused_bidi_merge"):
        merged: Tensor = published.gdn.fused_bidi_merge(numerator, None, denominator, None, EPS, gate)
        return merged
    quotient = numerator.float() / (denominator.float().mT[..., None] + EPS)
    return (quotient * functional.silu(gate.float())).to(gate.dtype)


def gdn_results(published: Published, x: Inputs) -> Results:
    """In this library's conventions."""
    out, kv, z = run_gdn(published, x)
    return {"out": out, "kv": kv.mT, "z": z.squeeze(-1)}


def prepare_camera(x: Inputs) -> Inputs:
    """The inputs with contiguous q, k and v, Pᵀ, repeated tables, and the state padded to a power of two."""
    cos, sin = repeated(x["cam_cos"], x["cam_sin"])
    tokens = dict(zip("qkv", (each.contiguous() for each in x["qkv"].unbind(2)), strict=True))
    dim = x["kv"].shape[-1]
    margin = (1 << (dim - 1).bit_length()) - dim
    state = functional.pad(x["kv"].flatten(0, 1), (0, margin, 0, margin))
    transposed = x["projection"].mT.contiguous()
    return x | tokens | {"public_cos": cos, "public_sin": sin, "public_kv": state, "transposed": transposed}


def run_camera(published: Published, x: Inputs) -> tuple[Tensor, Tensor]:
    """Preparation, discount, both directions with state: output [B,H,D,N], state [B·H,128,128]."""
    *tokens, inflation = published.camera.cam_prep_func(
        x["q"],
        x["k"],
        x["v"],
        q_norm_weight=x["q_weight"],
        k_norm_weight=x["k_weight"],
        proj_q=x["transposed"],
        proj_kv=x["inverse"],
        rope_cos=x["public_cos"],
        rope_sin=x["public_sin"],
        k_scale=k_scale(x),
        norm_eps=NORM_EPS,
    )
    beta = x["beta"] / inflation.view(x["beta"].shape).mean(-1, keepdim=True).clamp(min=1)
    scanned = [*(each.float() for each in tokens), beta, x["decay"]]
    scan = published.chunkwise.cam_scan_chunkwise
    forward, state = scan(*scanned, init_state=x["public_kv"], save_final_state=True)
    return forward + scan(*scanned, reverse=True), state


def camera_results(published: Published, x: Inputs) -> Results:
    """In this library's conventions."""
    out, state = run_camera(published, x)
    dim = x["kv"].shape[-1]
    return {"out": out.permute(0, 3, 1, 2), "kv": state.unflatten(0, x["kv"].shape[:2])[..., :dim, :dim]}


def public_works(folder: Path, precision: Precision) -> list[Work]:
    """GDN and camera of one block by a checkout of NVlabs/Sana."""
    published = load(folder, precision)
    return [
        Work(
            f"public GDN of one block, {precision}",
            lambda x: run_gdn(published, x),
            lambda x: gdn_results(published, x),
            lambda x: gdn(x, precision, "reference"),
            lambda x: LOOSE_LIMIT,
            gdn_bytes,
            gdn_operations,
            exact=False,
            prepare=prepare_gdn,
        ),
        Work(
            f"public camera of one block without output transform, {precision}",
            lambda x: run_camera(published, x),
            lambda x: camera_results(published, x),
            lambda x: camera(x, precision, "reference", transformed=False),
            lambda x: LOOSE_LIMIT,
            camera_bytes,
            camera_operations,
            exact=False,
            prepare=prepare_camera,
        ),
    ]
