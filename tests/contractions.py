"""Sums over threads in which each thread rounds another product, from a kernel's PTX.

Where every thread has one product of a row, `tl.sum(x * y)` adds a thread's own product and its neighbour's in one
fused instruction, which does not round the own one: the threads end up with sums that differ in their last bit, and
which of them is stored is open. `tl.sum(tl.fma(x, y, 0.0))` rounds all products.
"""

import re

SHUFFLE = re.compile(r"shfl\.sync\.\w+\.b32\s+(%r\d+)")
FUSED = re.compile(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+);")


def contracted_sums(ptx: str) -> list[str]:
    """The fused additions of what another thread hands over."""
    handed = set(SHUFFLE.findall(ptx))
    return [m[0] for m in FUSED.finditer(ptx) if m[1] in handed]
