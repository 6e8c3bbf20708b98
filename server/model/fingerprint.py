"""What decides the bits of a model, as two short hashes: its weights, and how this machine computes."""

import hashlib
import platform
from typing import Any, Protocol

import torch

from longtake.kernels import backend as kernels
from longtake.server.model.precision import scan_precision


class Part(Protocol):
    """A module with its configuration, whose `repr` tells everything that it decides."""

    @property
    def config(self) -> object:
        """What decides its arithmetic besides its weights."""

    def state_dict(self) -> dict[str, Any]:
        """Its tensors by name."""


def weights_fingerprint(name: str, *modules: Part) -> str:
    """Hash of a model's id, its configurations and every tensor: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(name.encode())
    for module in modules:
        digest.update(repr(module.config).encode())
        for key, tensor in module.state_dict().items():
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def numerics_fingerprint(device: torch.device, dtype: torch.dtype) -> str:
    """Hash of what else moves the last bit: device model, library versions, precision, CPU threads and instructions."""
    parts = [
        torch.__version__,
        str(dtype),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        kernels.numerics(device, scan_precision(dtype)),
    ]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
