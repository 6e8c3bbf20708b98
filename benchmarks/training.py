"""Losses of a small model that trains on the kernels, beside those on the references, step by step.

It learns to tell the next frame of moving patterns, with the gated delta rule, the camera branch and TTT-linear in its
three blocks. How far two curves may be apart is measured: a third run trains on the references with q, k and v moved by
one rounding to bf16. On a machine without a GPU run it with TRITON_INTERPRET=1.
"""

import argparse
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.results import present_commit, report
from longtake.kernels import Backend, cam_branch, frame_gates, gdn_scan, ttt_linear

BATCH, FRAMES, TOKENS, HEADS, DIM = 1, 3, 4, 1, 16
CHANNELS, RATE = HEADS * DIM, 3e-3
ROUNDING = 2.0**-8
"""How far rounding to bf16 moves a number at most, relative to it."""

Moved = Callable[[Tensor], Tensor]


class Run(NamedTuple):
    """A way to train: the backend of the operators, and what is done to q, k, v before they are rounded to bf16."""

    name: str
    backend: Backend
    moved: Moved


class Mixer(nn.Module):
    """Projections and norms of one block; what mixes its tokens is chosen by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.gates, self.fades = nn.Linear(CHANNELS, HEADS), nn.Linear(CHANNELS, HEADS)
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(CHANNELS)) for _ in range(2))
        self.start = nn.Parameter(0.3 * torch.randn(HEADS, DIM, DIM))
        self.log_rate, self.bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor], run: Run) -> Tensor:
        """x [B,F,S,C] with what the operators add to it."""
        tokens = run.moved(self.qkv(x)).bfloat16()
        q, k, v = tokens.view(BATCH, FRAMES * TOKENS, 3, HEADS, DIM).unbind(2)
        fades = self.fades(x.mean(dim=2))
        beta, decay = frame_gates(self.gates(x), fades, self.log_rate, self.bias, backend="reference")
        return x + self.proj(self.mixed(q, k, v, beta, decay, places, run.backend).float().reshape(x.shape))

    def mixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor,
        places: tuple[Tensor, Tensor],
        backend: Backend,
    ) -> Tensor:
        """One of the operators."""
        norms = {"q_weight": self.q_weight, "k_weight": self.k_weight, "k_scale": (DIM * TOKENS) ** -0.5}
        scan = {"direction": "both", "chunk_starts": [0, 2], "backend": backend}
        if self.kind == "gdn":
            return gdn_scan(q, k, v, beta, decay, norm="full", **norms, eps=1e-6, **scan).out
        if self.kind == "camera":
            return cam_branch(q, k, v, beta, decay, *places, None, None, **norms, **scan).out
        w, b = self.q_weight.view(HEADS, DIM), self.k_weight.view(HEADS, DIM) - 1
        start = self.start.expand(BATCH, HEADS, DIM, DIM).contiguous()
        states = {"initial_state": start, "initial_state_bias": torch.zeros_like(start[..., :1, :])}
        return ttt_linear(q, k, v, w, b, beta.flatten(2).mT / DIM, **states, backend=backend).out


def moving_patterns(seed: int) -> Tensor:
    """Frames [B,F + 1,S,C] that turn a little from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, TOKENS, CHANNELS, generator=generator)
    turn = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(0))
    turn = torch.matrix_exp(0.2 * (turn - turn.mT))
    return torch.stack([x @ torch.matrix_power(turn, i) for i in range(FRAMES + 1)], dim=1)


def ray_places() -> tuple[Tensor, Tensor]:
    """Maps [B,N,4,4] of cameras that are turned and moved a little, and their inverses."""
    twist = torch.zeros(BATCH, FRAMES * TOKENS, 4, 4)
    turn = 0.3 * torch.randn(BATCH, FRAMES * TOKENS, 3, 3, generator=torch.Generator().manual_seed(0))
    twist[..., :3, :3] = turn - turn.mT
    twist[..., :3, 3] = turn[..., 0]
    return torch.matrix_exp(twist), torch.matrix_exp(-twist)


def train(run: Run, steps: int, device: torch.device) -> list[float]:
    """The loss of every step, from the same weights and the same data."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Mixer(kind) for kind in ("gdn", "camera", "ttt")).to(device)
    projection, inverse = (x.contiguous().to(device) for x in ray_places())
    optimiser = torch.optim.AdamW(blocks.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        frames = moving_patterns(step).to(device)
        x = frames[:, :-1]
        for block in blocks:
            x = block(x, (projection, inverse), run)
        loss = (x - frames[:, 1:]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves, relative to the loss."""
    return max(abs(x - y) / y for x, y in zip(one, other, strict=True))


def jittered(generator: torch.Generator) -> Moved:
    """Moves every entry by up to what rounding to bf16 moves it."""

    def moved(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator).to(x.device) * 2 - 1
        return x * (1 + ROUNDING * noise)

    return moved


def main() -> None:
    """Train three times, print the curves, and fail unless they are as near as rounding lets them be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", action="store_true", help="append the row to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = (
        Run("kernels", "triton", lambda x: x),
        Run("references", "reference", lambda x: x),
        Run("moved", "reference", jittered(torch.Generator().manual_seed(1))),
    )
    curves = {run.name: train(run, arguments.steps, device) for run in runs}
    for step in range(0, arguments.steps, 20):
        print(step, *(f"{name} {curve[step]:.5f}" for name, curve in curves.items()), flush=True)
    ours, noise = (distance(curves[name], curves["references"]) for name in ("kernels", "moved"))
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} cores, interpreter"
    last = curves["kernels"][-1]
    cells = (
        f"{datetime.now(UTC):%Y-%m-%d}",
        present_commit(),
        hardware,
        f"loss over {arguments.steps} steps, gdn, camera and TTT blocks in bf16, kernels against references",
        f"apart by {ours:.1e} at most, {curves['kernels'][0]:.3f} → {last:.3f}",
        f"{noise:.1e} (q, k, v moved by a rounding)",
    )
    report([f"| {' | '.join(cells)} |"], record=arguments.record)
    if ours > 2 * noise:
        raise SystemExit(f"the curves are {ours:.1e} apart, and rounding explains {noise:.1e}")


if __name__ == "__main__":
    main()
