"""Start what the engine needs, in order: threads, the session store, the model."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import torch

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.registry import UnloadableError, load_model, require_loadable
from longtake.server.model.weights import WeightsError
from longtake.server.model.world import WorldModel
from longtake.server.settings import Settings, StartError
from longtake.server.video.clips import ClipLimits
from longtake.state_cache import (
    DURABILITIES,
    EmbeddedServer,
    Holder,
    RedisStore,
    Retention,
    Store,
    StoreError,
    StoreUnavailable,
    new_session_id,
)

log = logging.getLogger(__name__)

WEEK = 7 * 86400
"""Seconds; how long an idle session lives in a store that others share."""


@contextmanager
def start_engine(settings: Settings, url: str | None = None) -> Iterator[Engine]:
    """A running engine, which will answer at `url`. Without a store URL it runs a store of its own and stops it.

    Blocks while the model loads. Raises `StartError` when the store or the model can not be had.
    """
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    with ExitStack() as stack:
        try:
            require_loadable(settings.model, settings.device)  # before the store makes a folder
            store = open_store(settings, stack, url)
            model = load_model(settings.model, settings.device)
        except (StoreError, UnloadableError, WeightsError) as error:
            raise StartError(str(error)) from error
        limits = Limits(
            queue_size=settings.queue_size,
            device_state_bytes=settings.device_state_bytes,
            host_state_bytes=settings.host_state_bytes,
            snapshot_every=settings.snapshot_every,
            retention=_retention(settings, model),
            exact_required=settings.exact == "require",
            lease_s=settings.lease_s,
            ttl_s=settings.ttl_s or (WEEK if settings.state_url else None),
            clip=ClipLimits(frames=settings.max_clip_frames),
        )
        engine = Engine(model, store, limits, _holder(settings))
        stack.callback(engine.close)
        yield engine


def _retention(settings: Settings, model: WorldModel) -> Retention:
    """What sessions keep: at least what the decoder needs to show the newest chunk again."""
    chunks = max(settings.retain_chunks, model.decoder_history + 1) if settings.retain_chunks else None
    return Retention(settings.keep_snapshots, chunks)


def _holder(settings: Settings) -> Holder:
    """Who this server is to others. On a store of its own it is alone: what an earlier one held is free at once."""
    name = settings.replica_id or (new_session_id() if settings.state_url else "embedded")
    return Holder(name, settings.replica_address)


def open_store(settings: Settings, stack: ExitStack, ours: str | None = None) -> Store:
    """The session store, checked; `stack` closes it. `ours` is where this server answers."""
    url = settings.state_url or _embedded(settings, stack, ours)
    try:
        store = RedisStore(url, settings.key_prefix)
    except ValueError as error:
        raise StartError("LONGTAKE_STATE_URL is not the URL of a Redis or Valkey server") from error
    stack.callback(store.close)
    try:
        status = store.check()
    except StoreUnavailable as error:
        where = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        raise StoreUnavailable(f"no session store answers at {where}: {error.__cause__ or error}") from error
    log.info("sessions are kept in %s %s, durability %s", status.server, status.version, status.durability)
    if DURABILITIES.index(status.durability) < DURABILITIES.index(settings.durability):
        raise StartError(
            f"the store's durability is {status.durability}, LONGTAKE_DURABILITY asks for {settings.durability}"
        )
    if status.durability != "strict":
        log.warning("a crash of the store may lose what was acknowledged: set appendonly yes and appendfsync always")
    return store


def _embedded(settings: Settings, stack: ExitStack, ours: str | None) -> str:
    """URL of a store of our own, which `stack` stops."""
    server = EmbeddedServer(settings.data_dir, url=ours)
    stack.callback(server.stop)
    url = server.start()
    server.supervise()
    return url
