"""Whether a pipelined loop may overwrite a tile that a product is still reading, from a kernel's Triton GPU IR.

Triton 3.6 gives a tile one slot for each load under way, and one more if its product may still run when the next load
into its slot starts. It forgets the last where the tile is also read into registers. No sanitizer sees that race.
"""

import re
from collections.abc import Iterator

ALLOCATION = re.compile(r"%(\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
VIEW = re.compile(r"%(\w+) = ttg\.memdesc_\w+ %(\w+)")
COPY = re.compile(r"ttg\.async_copy_global_to_local %\w+, %(\w+)")
DOT = re.compile(r"ttng\.warp_group_dot %(\w+), %(\w+),.*isAsync = true")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of each innermost loop."""
    begin = None
    for number, line in enumerate(lines):
        if " scf.for " in line:
            begin = number
        elif " scf.yield" in line and begin is not None:
            yield begin, number
            begin = None


def _finished(body: list[str], tile: str, owner: dict[str, str]) -> bool:
    """Whether every product that reads the tile has ended where `body`, up to a load into its slot, ends."""
    dots = [number for number, line in enumerate(body) if DOT.search(line)]
    readers = [n for n in dots if (m := DOT.search(body[n])) and tile in map(owner.get, m.groups())]
    waits = [(number, int(m[1])) for number, line in enumerate(body) if (m := WAIT.search(line))]
    return all(any(end > n and pending <= sum(n < d < end for d in dots) for end, pending in waits) for n in readers)


def overwritten_tiles(ir: str) -> list[str]:
    """The loads that may begin too early, as lines of `ir`."""
    lines, found = ir.splitlines(), []
    slots = {m[1]: int(m[2]) for line in lines if (m := ALLOCATION.search(line))}
    owner = {name: name for name in slots}
    for line in lines:
        if (m := VIEW.search(line)) and m[2] in owner:
            owner[m[1]] = owner[m[2]]
    copies = [(number, owner[m[1]]) for number, line in enumerate(lines) if (m := COPY.search(line)) and m[1] in owner]
    for begin, end in _loops(lines):
        for number, tile in copies:
            ahead = sum(other == tile for before, other in copies if before < begin)
            if begin < number < end and slots[tile] <= ahead and not _finished(lines[begin:number], tile, owner):
                found.append(lines[number].strip())
    return found
