"""Rows of RESULTS.md: date, commit, hardware, work and shape, number, floor."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"

SERVED = ("--model", "tiny-untrained")
"""Options of the servers that are measured: rows of different days are about the same model."""


def present_commit() -> str:
    """The commit that is checked out, or ? where git can not tell."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "?"


def row(work: str, number: str, floor: str, hardware: str | None = None, commit: str | None = None) -> str:
    """One row of today, for the commit that is checked out; the hardware is this machine's CPU when left out."""
    hardware = hardware or f"{os.cpu_count()} cores {platform.machine()}"
    commit = commit or present_commit()
    return f"| {datetime.now(UTC):%Y-%m-%d} | {commit} | {hardware} | {work} | {number} | {floor} |"


def report(rows: Sequence[str], *, record: bool) -> None:
    """Print rows; with `record` also append them to RESULTS.md."""
    print("\n".join(rows))
    if record:
        with RESULTS.open("a") as file:
            file.writelines(f"{each}\n" for each in rows)
