"""Which server program runs on a data directory: always one that can read what is there."""

import shutil
from pathlib import Path

import pytest
import redis

from longtake.state_cache import EmbeddedServer, NoServerBinary, binaries, find_binary, packaged_binary
from longtake.state_cache.binaries import ServerVersion, identify


def fake_server(folder: Path, name: str, said: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{said} sha=0'\n")
    path.chmod(0o755)
    return path


def version(text: str) -> ServerVersion:
    found = ServerVersion.parse(text)
    assert found is not None
    return found


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, without the packaged server."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "packaged_binary", lambda: None)
    return tmp_path


def test_the_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_server(tmp_path, "valkey-server", "Valkey server v=99.0.0")
    assert find_binary().path == packaged_binary()


def test_then_valkey_then_redis(bare: Path) -> None:
    fake_server(bare, "redis-server", "Redis server v=6.2.14")
    with pytest.raises(NoServerBinary, match="7 or newer"):
        find_binary()
    new_redis = fake_server(bare, "redis-server", "Redis server v=7.0.15")
    assert find_binary().path == new_redis
    valkey = fake_server(bare, "valkey-server", "Valkey server v=8.1.0")
    assert find_binary().path == valkey


def test_without_any_it_is_said(bare: Path) -> None:
    with pytest.raises(NoServerBinary, match="install one"):
        find_binary()


def test_what_is_no_server_is_not_taken(bare: Path) -> None:
    fake_server(bare, "valkey-server", "hello")
    with pytest.raises(NoServerBinary):
        find_binary()


@pytest.mark.parametrize(
    ("reader", "written", "reads"),
    [
        ("valkey 9.1.2", "valkey 9.1.2", True),
        ("valkey 9.1.2", "valkey 8.1.8", True),
        ("valkey 8.1.8", "valkey 9.1.2", False),
        ("redis 7.0.15", "valkey 9.1.2", False),
        ("valkey 9.1.2", "redis 7.0.15", True),
        ("valkey 9.1.2", "redis 7.2.4", True),
        ("valkey 9.1.2", "redis 7.4.0", False),
        ("redis 8.2.3", "redis 7.4.0", True),
    ],
)
def test_who_reads_what(reader: str, written: str, reads: bool) -> None:
    assert version(reader).reads(version(written)) is reads


def test_another_is_taken_where_the_first_can_not_read(bare: Path) -> None:
    fake_server(bare, "valkey-server", "Valkey server v=8.1.0")
    new_redis = fake_server(bare, "redis-server", "Redis server v=8.2.3")
    assert find_binary(version("redis 7.4.1")).path == new_redis
    with pytest.raises(NoServerBinary, match=r"written by valkey 9\.1\.2, which .* nothing is damaged"):
        find_binary(version("valkey 9.1.2"))


def test_data_keeps_the_server_that_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package gone and an older Redis installed, nothing is tried on the data."""
    if (redis_server := shutil.which("redis-server")) is None or identify(Path(redis_server)) is None:
        pytest.skip("redis-server is not installed")
    with EmbeddedServer(tmp_path / "data") as server, redis.Redis.from_url(server.start()) as client:
        client.set("take", "one")
        before = str(find_binary().is_a)
    assert (tmp_path / "data" / "written-by").read_text().strip() == before
    monkeypatch.setattr(binaries, "packaged_binary", lambda: None)
    with pytest.raises(NoServerBinary, match="nothing is damaged"):
        EmbeddedServer(tmp_path / "data").start()
    monkeypatch.undo()
    with EmbeddedServer(tmp_path / "data") as server, redis.Redis.from_url(server.start()) as client:
        assert client.get("take") == b"one"
