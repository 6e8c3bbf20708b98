"""Start what the engine needs, in order: threads, the session store, the model."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from longtake.server.engine.engine import Engine
from longtake.server.model.registry import UnknownModelError, load_model
from longtake.server.settings import Settings
from longtake.state_cache import EmbeddedServer, RedisStore, StoreError

START_ERRORS = (StoreError, UnknownModelError)
"""What `start_engine` raises when the settings or the store do not allow a start."""


@contextmanager
def start_engine(settings: Settings) -> Iterator[Engine]:
    """A running engine. Without a store URL it runs a store of its own and stops it at the end.

    Blocks while the model loads. Raises `StoreError` when the store can not be used.
    """
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    with ExitStack() as stack:
        store = RedisStore(settings.state_url or _embedded(settings, stack), settings.key_prefix)
        stack.callback(store.close)
        store.check()
        model = load_model(settings.model)
        engine = Engine(model, store, settings.queue_size, settings.hot_sessions, settings.keep_snapshots)
        stack.callback(engine.close)
        yield engine


def _embedded(settings: Settings, stack: ExitStack) -> str:
    """URL of a store of our own, which `stack` stops."""
    server = EmbeddedServer(settings.data_dir)
    stack.callback(server.stop)
    return server.start()
