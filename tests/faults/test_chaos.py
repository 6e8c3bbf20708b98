"""Seeded runs of clients against replicas and stores that keep failing; `make faults` runs them for half an hour."""

import faulthandler
import os
import secrets
import time
from pathlib import Path

import pytest

from faults.chaos import Plan, run

MINUTES = "LONGTAKE_FAULT_MINUTES"

SHORT = (
    Plan(seed=1, seconds=8, kind="valkey", pause_s=0.4),
    Plan(seed=2, seconds=8, kind="redis", pause_s=0.4),
    Plan(seed=3, seconds=8, kind="valkey", replicas=2, pause_s=0.25, store_faults=False),
    Plan(seed=4, seconds=8, kind="redis", replicas=4, pause_s=0.25),
    Plan(seed=5, seconds=8, kind="valkey", players=1, contests=4),
)
"""Runs for every change."""


@pytest.mark.parametrize("plan", SHORT, ids=lambda plan: f"seed {plan.seed}")
def test_chaos(plan: Plan, tmp_path: Path) -> None:
    """Every invariant, whatever happens."""
    findings = run(plan, tmp_path)
    assert not findings.found, "\n".join([str(plan), str(findings.counts), *findings.found])
    assert findings.counts["201"] > 10, "the run did not get anything done"  # how much depends on the machine


@pytest.mark.skipif(MINUTES not in os.environ, reason="the long form: make faults")
def test_chaos_for_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The long form: a new seed every minute, printed, so that a failure can be run again."""
    faulthandler.cancel_dump_traceback_later()  # every call of a run has a deadline of its own
    end = time.monotonic() + 60 * float(os.environ[MINUTES])
    count = 0
    while time.monotonic() < end:
        seed = secrets.randbelow(10**6)
        kind, replicas, pause = ("redis", "valkey")[seed % 2], 2 + seed % 3, (0.2, 0.6)[seed // 2 % 2]
        plan = Plan(seed, 60, kind, replicas, players=2 + seed % 4, contests=seed % 4, pause_s=pause)
        with capsys.disabled():
            print(plan, flush=True)  # noqa: T201
        findings = run(plan, tmp_path / str(count))
        assert not findings.found, "\n".join([str(plan), str(findings.counts), *findings.found])
        count += 1
