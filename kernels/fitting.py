"""Launches with as many warps as a GPU has room for, decided once for each kernel that is compiled."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_FITTING: dict[tuple[object, ...], int] = {}
"""Warps of kernels that were compiled, by kernel, GPU, warps asked for and modes."""


class Fitted:
    """A kernel on a device, to be launched as `Fitted(kernel, device)[grid](…, num_warps=…)`.

    Where a GPU has no room for it, half of the warps are tried, down to one; what fits is kept for the process and
    logged, since sums of other warps have other bits. The tables' warps fit every GPU that they are made for.
    """

    def __init__(self, kernel: Any, device: torch.device) -> None:  # noqa: ANN401
        self._kernel, self._device = kernel, device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The launch over a grid.

        Raises:
            OutOfResources: not even one warp fits.
        """
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int, **modes: Any) -> None:  # noqa: ANN401
        from triton.runtime.errors import OutOfResources

        compiled_for = sorted((name, str(mode)) for name, mode in modes.items() if name.isupper())
        key = (self._kernel, self._device, num_warps, *compiled_for)
        warps = _FITTING.get(key, num_warps)
        while True:
            try:
                self._kernel[grid](*arguments, **modes, num_warps=warps)
            except OutOfResources as error:
                if warps == 1:
                    raise
                warps //= 2
                name = self._kernel.fn.__name__
                _LOG.warning("%s does not fit %s; tried with %d warps: %s", name, self._device, warps, error)
            else:
                _FITTING[key] = warps
                return
