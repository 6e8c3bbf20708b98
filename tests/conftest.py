"""Fixtures for every test."""

pytest_plugins = ["store_fixtures", "server_fixtures", "live_clients", "branch_calls"]
