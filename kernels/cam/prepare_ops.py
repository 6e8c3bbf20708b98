"""What surrounds the camera scan as custom operators that launch Triton kernels."""

from typing import cast

import torch
import triton
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.cam.prepare_triton import discount_kernel, output_kernel, prepare_kernel
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.scan.inputs import NORMS
from longtake.kernels.scan.launch import based
from longtake.kernels.triton_tiles import aligned, octet_strides, padded

DISCOUNT_BLOCK = 256
OUTPUTS = ("q_out", "k_out", "v_out", "norm_before", "norm_after", "inflation")
HEADS_AT_ONCE = 4


def camera_tables(cos: Tensor | None, sin: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """The tables, or those that turn nothing; not aligned, since a compiled call has no addresses out of operators."""
    if cos is None or sin is None:
        ones = q.new_ones((1, q.shape[1], q.shape[-1] // 4), dtype=torch.float32)
        return ones, torch.zeros_like(ones)
    return cos, sin


def _sizes(x: Tensor, cos: Tensor) -> dict[str, int]:
    """Kernel arguments of the sizes of x [B,N,H,D] and its tables."""
    tokens, heads, dim = x.shape[1:]
    group = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    extents = {"D": dim, "SIDE": padded(dim), "HEADS": group, "GROUPS": triton.cdiv(heads, group)}
    return extents | {"heads": heads, "tokens": tokens, "own_tables": int(cos.shape[0] > 1)}


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """Kernel arguments of the strides of x [B,N,H,D]: scalars, since those of a tuple would be specialised."""
    return {f"{name}_{part}": stride for part, stride in zip(("batch", "token", "head"), octet_strides(x), strict=True)}


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
    results = _empty_tokens(q)
    tables, given = based(camera_tables(cos, sin, q)), q_inverse is not None and k_inverse is not None
    q, k, v = aligned(q), aligned(k), aligned(v)
    with on_device_of(q):
        prepare_kernel[(q.shape[0] * q.shape[1],)](
            q,
            k,
            v,
            based(projection),
            based(projection_inverse),
            *tables,
            q_weight=projection if q_weight is None else based(q_weight),
            k_weight=projection if k_weight is None else based(k_weight),
            q_rms=based(q_inverse) if given else projection,
            k_rms=based(k_inverse) if given else projection,
            **dict(zip(OUTPUTS, results, strict=True)),
            **_strides("q", q),
            **_strides("k", k),
            **_strides("v", v),
            eps=norm_eps,
            k_scale=k_scale,
            **_sizes(q, tables[0]),
            NORM=NORMS[cast(Norm, norm)],
            GIVEN=given,
            Q_WEIGHTED=q_weight is not None,
            K_WEIGHTED=k_weight is not None,
            RELU=relu,
            num_warps=1,
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
    tables = based(camera_tables(cos, sin, out))
    out = aligned(out)
    with on_device_of(out):
        output_kernel[(out.shape[0] * out.shape[1],)](
            out,
            based(projection),
            *tables,
            out=result,
            **_strides("x", out),
            **_sizes(out, tables[0]),
            num_warps=1,
        )
    return result


@cam_output.register_fake
def _(out: Tensor, projection: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty(out.shape, dtype=dtype, device=out.device)
