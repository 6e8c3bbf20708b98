"""Fixtures for every test."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["LONGTAKE_THREADS"] = "1"
"""Tests are side by side on as many cores as there are: more threads would wait for each other, often far longer."""

os.environ["LONGTAKE_MODEL"] = "tiny-untrained"
"""What servers and commands that a test starts serve, unless it names another model."""

pytest_plugins = ["store_fixtures", "server_fixtures", "take_fixtures", "live_clients", "branch_calls"]
