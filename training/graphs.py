"""A step as one CUDA graph: thousands of small kernels are launched at once."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 3
Tensors = dict[str, Tensor]


class CapturedStep:
    """Runs `step` on tensors of always the same shapes; on a GPU after the first call as a graph.

    Args:
        step: takes tensors by name, adds to gradients, returns tensors by name. It must not ask the GPU for a value.
        clear: undoes what calls to warm up added.
    """

    def __init__(self, step: Callable[[Tensors], Tensors], clear: Callable[[], object]) -> None:
        self._step, self._clear = step, clear
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensors = {}
        self._outputs: Tensors = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        """What the step returns; valid until the next call."""
        if not next(iter(inputs.values())).is_cuda:
            return self._step(inputs)
        if self._graph is None:
            self._capture(inputs)
        for name, x in inputs.items():
            self._inputs[name].copy_(x)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: Tensors) -> None:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._step(self._inputs)
        self._graph = graph
