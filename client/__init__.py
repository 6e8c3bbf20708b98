"""A typed client of the HTTP API, for blocking and for async code: httpx and pydantic, no torch, no server."""

from longtake.api_schemas.trajectory import TrajectoryOptions
from longtake.client.answers import pngs
from longtake.client.async_client import AsyncClient
from longtake.client.events import Event
from longtake.client.inputs import Beginning, Move
from longtake.client.problems import ReplayError, ServerProblem
from longtake.client.retry import Retry
from longtake.client.sync_client import Client

__all__ = [
    "AsyncClient",
    "Beginning",
    "Client",
    "Event",
    "Move",
    "ReplayError",
    "Retry",
    "ServerProblem",
    "TrajectoryOptions",
    "pngs",
]
