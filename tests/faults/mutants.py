"""The package with one promise broken each: the suite is worth something when it catches every one of them."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import longtake.state_cache

ROOT = Path(longtake.state_cache.__file__).parents[1]
"""The folder that holds the packages."""

PACKAGES = ("api_schemas", "client", "kernels", "server", "state_cache")
_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands in `file` exactly once, becomes `new`; the drill's exercise `caught_by` must notice."""

    name: str
    caught_by: str
    file: str
    old: str
    new: str

    def plant(self, tree: Path) -> None:
        """Change the copy of the packages in `tree`. Raises `ValueError` unless the text is there exactly once."""
        file = tree / self.file
        text = file.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the text to replace stands in {self.file} {count} times, not once")
        file.write_text(text.replace(self.old, self.new))


MUTANTS = (
    Mutant(
        "no idempotency check",
        "power_cuts",
        "server/engine/task.py",
        'return None if key is None else f"chunks:{key}"',
        "return None",
    ),
    Mutant(
        "a key serves for any request",
        "reused_key",
        "server/engine/advance.py",
        "if progress is not None and progress.fingerprint != command.fingerprint:",
        "if False:",
    ),
    Mutant(
        "neither fence nor compare of the head",
        "zombie",
        "state_cache/lua/commit.lua",
        "if is_fenced(ARGV[2], ARGV[3]) then return {'FENCED'} end\n"
        "refusal = head_refusal(ARGV[4], ARGV[5])\nif refusal then return refusal end\n",
        "",
    ),
    Mutant(
        "acknowledged before the log record is durable",
        "power_cuts",
        "server/engine/publish.py",
        "store.commit(replace(step, chunk=record))",
        '__import__("threading").Timer(0.2, store.commit, [replace(step, chunk=record)]).start()',
    ),
    Mutant(
        "a snapshot is taken for the wrong chunk",
        "snapshots",
        "server/engine/advance.py",
        "task.head.chunk + 1 + offset, output.state",
        "task.head.chunk + 1 + max(0, offset - 1), output.state",
    ),
    Mutant(
        "blobs are collected while a fork still points at them",
        "forks_and_garbage",
        "state_cache/retention.py",
        "for span in (*older, Span(own.branch, own.start, _NEVER)):",
        "for span in (Span(own.branch, own.start, _NEVER),):",
    ),
    Mutant(
        "a lease never lapses",
        "dead_holder",
        "state_cache/lua/acquire.lua",
        "if other and lease > now then",
        "if other and lease > 0 then",
    ),
    Mutant(
        "a lease is not renewed", "long_chunk", "server/engine/leases.py", "self._lease_s / 3", "self._lease_s * 300"
    ),
    Mutant(
        "a lease keeps nobody out",
        "long_chunk",
        "state_cache/lua/acquire.lua",
        "if other and lease > now then",
        "if false then",
    ),
    Mutant(
        "a rewind does not raise the revision",
        "rewinds",
        "state_cache/lua/rewind.lua",
        "redis.call('HINCRBY', head, 'revision', 1)\n",
        "",
    ),
    Mutant(
        "memory is trusted without a look at the store",
        "store_rolled_back",
        "server/engine/tiers.py",
        "return (self.fence, self.revision, self.chunk) == (fence, head.revision, head.chunk)",
        "return True",
    ),
    Mutant(
        "a fork lacks the last chunk it shares",
        "forks_and_garbage",
        "state_cache/redis_store.py",
        "path = cut(spans(child.parent.session_id, source), child.parent.chunk + 1)",
        "path = cut(spans(child.parent.session_id, source), child.parent.chunk)",
    ),
    Mutant(
        "a key is forgotten with its commit",
        "power_cuts",
        "state_cache/lua/commit.lua",
        "if key ~= '' then redis.call('HSET', requests, key, ARGV[12]) end\n",
        "",
    ),
)


def plant(folder: Path, mutant: Mutant | None) -> Path:
    """A copy of the packages, changed; returns what to put on PYTHONPATH."""
    tree = folder / "longtake"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        mutant.plant(tree)
    return folder


def drilled(path: Path, only: str | None = None) -> tuple[bool, str]:
    """Whether the drill, or one exercise of it, finds something in the packages on this path, and what it says."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(_TESTS)))}
    command = [sys.executable, "-m", "faults.drill", "--package", str(path)]
    if only is not None:
        command += ["--only", only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr[-3000:]
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"the drill itself failed: {said}")
    return done.returncode == 1, said
