"""What surrounds the camera scan as custom operators that launch Triton kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.cam.prepare_triton import discount_kernel, output_kernel, prepare_kernel
from longtake.kernels.triton_tiles import ALIGNMENT, aligned, octet_strides, padded

DISCOUNT_BLOCK = 256
OUTPUTS = ("q_out", "k_out", "v_out", "norm_before", "norm_after", "inflation")
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


PARTS = ("batch", "token", "head")


def _based(x: Tensor) -> Tensor:
    """A contiguous tensor itself, or a copy unless it begins at a multiple of 16 bytes: alignment decides layouts."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _rotation(cos: Tensor | None, sin: Tensor | None, idle: Tensor) -> dict[str, Any]:
    """Kernel arguments of the tables [1|B,N,pairs]; without tables `idle` stands in, which no kernel reads."""
    rotated = cos is not None and sin is not None
    arguments: dict[str, Any] = {"ROTATED": rotated}
    for name, table in (("cos", cos), ("sin", sin)):
        strides = (0, 0, 0) if table is None else (table.stride(0) if table.shape[0] > 1 else 0, *table.stride()[1:])
        arguments[name] = idle if table is None else table
        arguments |= {f"{name}_{part}": stride for part, stride in zip(PARTS[:2], strides[:2], strict=True)}
        arguments[f"{name}_step"] = strides[2]
    return arguments


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """Kernel arguments of the strides of x [B,N,H,D]: scalars, since those of a tuple would be specialised."""
    return {f"{name}_{part}": stride for part, stride in zip(PARTS, octet_strides(x), strict=True)}


def _blocks(x: Tensor) -> dict[str, int]:
    """Head dim, and the extents of a tile that holds all heads of a token of x [B,N,H,D]."""
    heads, dim = x.shape[2:]
    return {"D": dim, "BLOCK_H": triton.next_power_of_2(heads), "BLOCK_D": padded(dim)}


Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty_tokens(q: Tensor) -> Prepared:
    """Memory for the fields of `CamTokens`."""
    tokens = [torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(3)]
    norms = [torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(3)]
    return tokens[0], tokens[1], tokens[2], norms[0], norms[1], norms[2]


@torch.library.custom_op("longtake::cam_prepare", mutates_args=())
def cam_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    projection_inverse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_inverse: Tensor | None,
    k_inverse: Tensor | None,
    norm: str,
    norm_eps: float,
    k_scale: float,
    relu: bool,
) -> Prepared:
    """Checked inputs → the fields of `CamTokens`; cos and sin as `pair_tables` gives them."""
    given = q_inverse is not None and k_inverse is not None
    results = _empty_tokens(q)
    q, k, v = aligned(q), aligned(k), aligned(v)
    batch, tokens, heads, _ = q.shape
    with on_device_of(q):
        prepare_kernel[(batch * tokens,)](
            q,
            k,
            v,
            projection,
            projection_inverse,
            q_weight=q if q_weight is None else _based(q_weight),
            k_weight=k if k_weight is None else _based(k_weight),
            q_inverse=q_inverse if given else projection,
            k_inverse=k_inverse if given else projection,
            **dict(zip(OUTPUTS, results, strict=True)),
            heads=heads,
            tokens=tokens,
            **_strides("q", q),
            **_strides("k", k),
            **_strides("v", v),
            eps=norm_eps,
            k_scale=k_scale,
            NORM="given" if given else norm,
            Q_WEIGHTED=q_weight is not None,
            K_WEIGHTED=k_weight is not None,
            RELU=relu,
            num_warps=4,
            **_rotation(cos, sin, projection),
            **_blocks(q),
        )
    return results


@cam_prepare.register_fake
def _(q: Tensor, *_: object) -> Prepared:
    return _empty_tokens(q)


@torch.library.custom_op("longtake::cam_discount", mutates_args=())
def cam_discount(beta: Tensor, inflation: Tensor) -> Tensor:
    """Checked inputs → the discounted β, in fp32."""
    out = torch.empty(beta.shape, dtype=torch.float32, device=beta.device)
    (batch, heads, frames), tokens = beta.shape[:3], inflation.shape[1]
    with on_device_of(beta):
        discount_kernel[(batch * heads * frames,)](
            beta,
            inflation,
            out,
            heads,
            frames,
            tokens // frames,
            BLOCK=DISCOUNT_BLOCK,
            PER_FRAME=beta.ndim == 3,
            num_warps=4,
        )
    return out


@cam_discount.register_fake
def _(beta: Tensor, inflation: Tensor) -> Tensor:
    return torch.empty(beta.shape, dtype=torch.float32, device=beta.device)


@torch.library.custom_op("longtake::cam_output", mutates_args=())
def cam_output(out: Tensor, projection: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Checked inputs → the output in the ray frames, computed in fp32 and rounded once; tables as in `cam_prepare`."""
    result = torch.empty(out.shape, dtype=dtype, device=out.device)
    out = aligned(out)
    batch, tokens, heads, _ = out.shape
    with on_device_of(out):
        output_kernel[(batch * tokens,)](
            out,
            projection,
            out=result,
            heads=heads,
            tokens=tokens,
            **_strides("x", out),
            DTYPE=DTYPES[dtype],
            num_warps=4,
            **_rotation(cos, sin, projection),
            **_blocks(out),
        )
    return result


@cam_output.register_fake
def _(out: Tensor, projection: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty(out.shape, dtype=dtype, device=out.device)
