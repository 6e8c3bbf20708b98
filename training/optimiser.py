"""AdamW on fp32 masters of a model in 16 bits, with a moving average, over one or several GPUs."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
LARGEST_NORM = 1.0
AVERAGE = 0.998
"""Decay a step of the moving average, once there are enough steps for it."""


class MasterWeights:
    """The fp32 weights behind a model's parameters, whose gradients it takes and whose values it sets.

    Gradients lie in one buffer, so that a sum over GPUs is one call and a captured step always finds them.

    Args:
        parameters: of the model, of one dtype; their values are the first masters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.average = [p.clone() for p in self.masters]
        self.buffer = torch.zeros(
            sum(p.numel() for p in self.parameters), device=self.masters[0].device, dtype=self.parameters[0].dtype
        )
        parts = torch.split(self.buffer, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        groups = [
            {"params": [p for p in self.masters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.masters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, foreach=True)
        self.steps = 0

    def step(self, rate: float) -> Tensor:
        """One step with the gradients in the buffer, which is zero again after it → norm of the gradient."""
        if distributed.is_initialized():
            distributed.all_reduce(self.buffer, distributed.ReduceOp.AVG)
        gradients = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_copy_(gradients, [p.grad for p in self.parameters if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(self.masters, LARGEST_NORM, foreach=True)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.steps += 1
        torch._foreach_copy_([p.data for p in self.parameters], self.masters)
        torch._foreach_lerp_(self.average, self.masters, 1 - min(AVERAGE, self.steps / (self.steps + 10)))
        self.buffer.zero_()
        return norm

    def averaged(self, module: nn.Module) -> dict[str, Tensor]:
        """The state of `module`, which has these parameters, with the moving average in their place."""
        found = {id(p): average for p, average in zip(self.parameters, self.average, strict=True)}
        parameters = dict(module.named_parameters())
        return {
            name: found[id(parameters[name])] if name in parameters else x.float()
            for name, x in module.state_dict().items()
        }
