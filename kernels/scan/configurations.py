"""The committed tile sizes of the scan for each architecture and precision; nothing is tuned at run time.

Sums over the tokens of a frame run over tiles of `absorb_rows` in order. No entry depends on B or F, so that a batch
gives the bits of its single runs.
"""

from typing import Literal, NamedTuple

import torch

Precision = Literal["ieee", "tf32", "bf16", "bf16-snapshot"]
"""How the products of a scan are taken: `ieee` every dot in fp32; `tf32`; `bf16` operands with fp32 sums, states and
snapshots; `bf16-snapshot` also keeps the memories that tokens read in bf16, but no normaliser. States are always fp32.
The reference computes in fp32 whatever is asked."""


class Tiles(NamedTuple):
    """Rows of tokens in a tile, and how many tiles one program reads."""

    rows: int
    tiles: int


class Configuration(NamedTuple):
    """Operands and their dot precision, tiles and warps of the four kernels."""

    operand: torch.dtype
    dot: str
    bf16_snapshots: bool
    prepare_heads: int
    prepare_warps: int
    absorb_rows: int
    absorb_warps: int
    absorb_stages: int
    value_columns: int
    remember_warps: int
    read: Tiles
    read_without_normaliser: Tiles
    read_warps: int


HOPPER_BF16 = Configuration(
    operand=torch.bfloat16,
    dot="ieee",
    bf16_snapshots=False,
    prepare_heads=4,
    prepare_warps=1,
    absorb_rows=64,
    absorb_warps=8,
    absorb_stages=4,
    value_columns=16,
    remember_warps=4,
    read=Tiles(32, 7),
    read_without_normaliser=Tiles(64, 4),
    read_warps=4,
)
HOPPER_TF32 = HOPPER_BF16._replace(
    operand=torch.float32,
    dot="tf32",
    absorb_rows=16,
    absorb_stages=1,
    read_without_normaliser=Tiles(32, 7),
)
CONFIGURATIONS: dict[tuple[int, int], dict[Precision, Configuration]] = {
    (9, 0): {
        "ieee": HOPPER_TF32._replace(dot="ieee", remember_warps=16, read_warps=8),
        "tf32": HOPPER_TF32,
        "bf16": HOPPER_BF16,
        "bf16-snapshot": HOPPER_BF16._replace(bf16_snapshots=True),
    }
}
"""By compute capability; the interpreter, and a GPU on which Triton is forced, use the first entry."""


def configuration(precision: Precision, device: torch.device) -> Configuration:
    """What the kernels use on `device`."""
    known = CONFIGURATIONS.get(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    return (known or CONFIGURATIONS[9, 0])[precision]
