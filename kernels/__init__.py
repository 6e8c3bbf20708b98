"""Operators of streaming world models: frame-wise gated delta rule (`gdn`) and its camera branch (`cam`).

Layouts everywhere: tokens [B,N,H,D] with N = F*S, frames first; gates beta [B,H,F,S] and decay [B,H,F];
states [B,H,D,D] with rows = key dim and columns = value dim. Every operator has a reference in PyTorch, fp32 or float64
when given float64, and Triton kernels for CUDA tensors; nothing here imports Triton before it is used.
"""

from longtake.kernels.backend import Backend, BackendError
from longtake.kernels.cam import (
    CamOutput,
    CamTokens,
    cam_branch,
    cam_discount,
    cam_output,
    cam_prepare,
    cam_scan,
    ray_matrices,
)
from longtake.kernels.delta import Direction, ReverseInputs
from longtake.kernels.gdn import (
    GdnOutput,
    GdnState,
    frame_gates,
    gate_merge,
    gdn_merge,
    gdn_prepare,
    gdn_scan,
    short_conv,
)
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.norm import inverse_rms
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.ttt import TttOutput, ttt_linear

__all__ = [
    "Backend",
    "BackendError",
    "CamOutput",
    "CamTokens",
    "Direction",
    "GdnOutput",
    "GdnState",
    "Norm",
    "Precision",
    "ReverseInputs",
    "TttOutput",
    "cam_branch",
    "cam_discount",
    "cam_output",
    "cam_prepare",
    "cam_scan",
    "frame_gates",
    "gate_merge",
    "gdn_merge",
    "gdn_prepare",
    "gdn_scan",
    "inverse_rms",
    "ray_matrices",
    "short_conv",
    "ttt_linear",
]
