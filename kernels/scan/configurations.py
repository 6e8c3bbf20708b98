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


class Reading(NamedTuple):
    """Rows of tokens in a tile, how many tiles one program reads at most, its warps and the most registers of a thread.

    `turned`: the memory is the left operand, so that a tile may have few rows, and tokens pass a fence to be the right.
    """

    rows: int
    tiles: int
    warps: int
    registers: int | None = None
    turned: bool = False

    def tiles_of(self, tokens: int) -> int:
        """How many tiles one program reads of a frame of so many tokens."""
        return min(self.tiles, -(-tokens // self.rows))


class Configuration(NamedTuple):
    """Operands and their dot precision, tiles and warps of the four kernels, and of `queries` and `keys` going back."""

    operand: torch.dtype
    dot: str
    bf16_snapshots: bool
    prepare_heads: int
    prepare_warps: int
    absorb_rows: int
    absorb_warps: int
    absorb_stages: int
    receive_stages: int
    combine_warps: int
    combine_stages: int
    value_columns: int
    remember_warps: int
    remember_stages: int
    read: Reading
    read_without_normaliser: Reading
    queries: Reading
    keys: Reading
    keys_columns: int


HOPPER_BF16 = Configuration(
    operand=torch.bfloat16,
    dot="ieee",
    bf16_snapshots=False,
    prepare_heads=4,
    prepare_warps=1,
    absorb_rows=64,
    absorb_warps=8,
    absorb_stages=4,
    receive_stages=3,
    combine_warps=8,
    combine_stages=3,
    value_columns=32,
    remember_warps=4,
    remember_stages=3,
    read=Reading(32, 7, warps=4, registers=168, turned=True),
    read_without_normaliser=Reading(64, 7, warps=4, registers=168),
    queries=Reading(64, 2, warps=8, registers=128),
    keys=Reading(64, 1, warps=8, registers=128),
    keys_columns=128,
)
HOPPER_TF32 = HOPPER_BF16._replace(
    operand=torch.float32,
    dot="tf32",
    absorb_rows=16,
    absorb_stages=1,
    receive_stages=1,
    combine_stages=1,
    value_columns=16,
    remember_stages=1,
    remember_warps=8,
    read=Reading(16, 14, warps=4),
    read_without_normaliser=Reading(16, 14, warps=4),
    queries=Reading(16, 14, warps=4),
    keys=Reading(16, 1, warps=4),
    keys_columns=32,
)
HOPPER_IEEE = HOPPER_TF32._replace(
    dot="ieee",
    absorb_warps=16,
    combine_warps=16,
    remember_warps=16,
    read=Reading(16, 14, warps=8),
    read_without_normaliser=Reading(16, 14, warps=8),
    queries=Reading(16, 14, warps=8),
    keys=Reading(16, 1, warps=8),
)
CONFIGURATIONS: dict[tuple[int, int], dict[Precision, Configuration]] = {
    (9, 0): {
        "ieee": HOPPER_IEEE,
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
