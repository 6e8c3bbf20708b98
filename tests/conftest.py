"""Fixtures for every test."""

import os

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(workers)))  # read when torch is imported
os.environ["LONGTAKE_MODEL"] = "tiny-untrained"
"""What servers and commands that a test starts serve, unless it names another model."""

pytest_plugins = ["store_fixtures", "server_fixtures", "live_clients", "branch_calls"]
