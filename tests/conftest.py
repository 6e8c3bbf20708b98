"""Fixtures for every test."""

import os

os.environ["LONGTAKE_MODEL"] = "tiny-untrained"
"""What servers and commands that a test starts serve, unless it names another model."""

pytest_plugins = ["store_fixtures", "server_fixtures", "live_clients", "branch_calls"]
