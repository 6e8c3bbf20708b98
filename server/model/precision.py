"""How exactly the scans of a model compute."""

import torch

from longtake.kernels import Precision


def scan_precision(dtype: torch.dtype) -> Precision:
    """Precision of the products of a scan: as that of the activations, `ieee` for fp32 and `bf16` for 16 bits."""
    return "bf16" if dtype in (torch.bfloat16, torch.float16) else "ieee"
