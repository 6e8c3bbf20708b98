"""Blocks that torch.compile fuses for training: between kernels PyTorch runs some three hundred small operators."""

from collections.abc import Callable
from typing import Any

import torch

from longtake.server.model.block import Block
from longtake.server.model.state import BlockState, SoftmaxMemory
from longtake.server.model.transformer import SanaWMTransformer

Pass = tuple[torch.Tensor, BlockState | None]


class FusedPass:
    """A block's forward pass, compiled for chunks that find a whole state; the first ones of a take stay as they are.

    Every shape that is compiled costs half a minute, which the first chunks, one pass in five, would not earn back.
    """

    def __init__(self, block: Block, backend: str) -> None:
        self._eager: Callable[..., Pass] = block.forward
        self._compiled: Callable[..., Pass] = torch.compile(
            block.forward, fullgraph=True, dynamic=False, backend=backend
        )

    def __call__(self, *arguments: Any, write: bool) -> Pass:  # noqa: ANN401
        """As `Block.forward`."""
        state: BlockState | None = arguments[-1]
        if state is None or (isinstance(state.memory, SoftmaxMemory) and not state.memory.window):
            return self._eager(*arguments, write=write)
        x, after = self._compiled(*arguments, write=True)
        return x, after if write else None


def fuse(model: SanaWMTransformer, backend: str = "inductor") -> None:
    """Compile the blocks of a model on their first use, in place, with a backend of torch.compile."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = FusedPass(block, backend)  # type: ignore[assignment]
