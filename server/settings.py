"""Every setting of the server, read from `LONGTAKE_…` environment variables; the command line overrides them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/longtake`, or `~/.local/share/longtake`."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "longtake"


OTHER_VARIABLES = frozenset(
    {
        "LONGTAKE_API_KEY",
        "LONGTAKE_FAILPOINTS",
        "LONGTAKE_FAULT_MINUTES",
        "LONGTAKE_KERNELS",
        "LONGTAKE_PUBLISHED_PORT",
    }
)
"""Environment variables that are no setting of the server, but of commands, kernels, tests and containers."""


class StartError(Exception):
    """The settings, or what they point to, do not allow a start."""


class Settings(BaseSettings):
    """Settings with their defaults; bytes, counts and seconds."""

    model_config = SettingsConfigDict(env_prefix="LONGTAKE_", extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model: str = Field("tiny-world", description="Model to serve.")
    state_url: str | None = Field(
        None,
        pattern=r"^((redis|rediss)(\+sentinel)?|unix)://",
        description="redis://, rediss://, unix:// or redis+sentinel:// URL of the session store; unset: our own.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs.")
    api_keys: SecretStr | None = Field(
        None, description="Comma-separated keys; with any, requests need one and sessions belong to theirs."
    )
    insecure: bool = Field(False, description="Allow a non-loopback address without API keys.")
    allowed_hosts: str = Field("", description="Comma-separated names that `Host` may have, besides loopback's.")
    allowed_origins: str = Field("", description="Comma-separated origins of pages elsewhere that may call the server.")
    ttl_s: int | None = Field(
        None,
        ge=60,
        le=10 * 365 * 86400,
        description="Seconds without a chunk or pose after which a session goes; unset: never, with a URL 7 days.",
    )
    data_dir: Path = Field(default_factory=default_data_dir, description="Where the embedded store keeps its files.")
    key_prefix: str = Field("lt", pattern=r"^[a-z0-9-]{1,16}$", description="Prefix of every key in the store.")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="Largest request body.")
    queue_size: int = Field(32, ge=1, description="Requests that may wait or run at once; further ones get 503.")
    device_state_bytes: int = Field(
        8 * 2**30, ge=0, description="State that stays on the device between requests; the rest moves to host memory."
    )
    host_state_bytes: int = Field(
        2 * 2**30, ge=0, description="State that stays in host memory between requests; the rest is in the store alone."
    )
    snapshot_every: int = Field(
        0, ge=0, description="Chunks from one snapshot of a state to the next; 0: by its size and the time of a replay."
    )
    keep_snapshots: int = Field(2, ge=1, description="Newest state snapshots kept for each session.")
    retain_chunks: int = Field(
        0, ge=0, description="Newest chunks kept for each session, at least; of older ones only digests stay. 0: all."
    )
    exact: Literal["prefer", "require"] = Field(
        "prefer", description="Whether to go on where a replay on other hardware gave other bits, or to refuse."
    )
    lease_s: float = Field(
        10.0, ge=0.5, le=3600, description="Seconds without a sign of life after which others take a session over."
    )
    replica_id: str = Field(
        "", pattern=r"^[\x21-\x7e]{0,64}$", description="Unique name of this server, the same after a restart."
    )
    replica_address: str = Field("", max_length=256, description="Where others find it, for clients of a busy session.")
    durability: Literal["strict", "relaxed", "none"] = Field(
        "none", description="Least durability of the store that the server starts with."
    )
    max_clip_frames: int = Field(240, ge=24, le=4096, description="Frames that an uploaded clip may have.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What goes to standard error.")
    grace_s: int = Field(30, ge=0, description="Seconds that open connections get to end when the server stops.")
    threads: int = Field(
        0, ge=0, description="CPU threads of the model; 0: one a core. Part of the numerics fingerprint."
    )


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Names of `LONGTAKE_…` environment variables that nothing reads: most likely misspelt."""
    prefix = "LONGTAKE_"
    known = OTHER_VARIABLES | {f"{prefix}{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in environment if name.upper().startswith(prefix) and name.upper() not in known)
