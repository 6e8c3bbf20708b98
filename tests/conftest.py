"""Fixtures for every test."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Threads that wait for each other sleep: if they spun, tests side by side would take ten times as long."""

os.environ["LONGTAKE_MODEL"] = "tiny-untrained"
"""What servers and commands that a test starts serve, unless it names another model."""

pytest_plugins = ["store_fixtures", "server_fixtures", "take_fixtures", "live_clients", "branch_calls"]
