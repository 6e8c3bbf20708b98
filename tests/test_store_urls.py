"""TLS and sentinel URLs against real servers."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis_servers import OwnServer, free_port

from longtake.state_cache import MAX_BLOB, StoreUnavailable
from longtake.state_cache.client import Client
from longtake.state_cache.redis_blobs import RedisBlobs

SERVICE = "takes"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `ca.crt`, and `server.crt` for localhost with `server.key`, which the CA has signed; `other.crt`."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    sign = ["x509", "-req", "-extfile", "names"]
    new = ["req", "-newkey", "rsa:2048", "-nodes"]
    commands = [
        [*new, "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"],
        [*new, "-x509", "-subj", "/CN=other", "-keyout", "other.key", "-out", "other.crt"],
        [*new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr"],
        [*sign, "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "server.crt"],
    ]
    for command in commands:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    return folder


def tls_options(certificates: Path) -> list[str]:
    files = {"ca-cert-file": "ca.crt", "cert-file": "server.crt", "key-file": "server.key"}
    named = [part for name, file in files.items() for part in (f"--tls-{name}", str(certificates / file))]
    return [*named, "--tls-auth-clients", "no"]


@pytest.fixture(scope="module")
def tls_server(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that takes TLS only."""
    port, folder = free_port(), tmp_path_factory.mktemp("tls")
    options = ["--port", "0", "--tls-port", str(port), "--save", "", *tls_options(certificates)]
    with OwnServer(folder, *options, port=port, ssl=True, ssl_ca_certs=str(certificates / "ca.crt")):
        yield f"localhost:{port}"


def test_blobs_travel_over_tls(tls_server: str, certificates: Path) -> None:
    client = Client(f"rediss://{tls_server}/0?ssl_ca_certs={certificates}/ca.crt", 3, 2)
    blobs, data = RedisBlobs(client), [os.urandom(size) for size in (MAX_BLOB, 17, 0, 300_000, MAX_BLOB)]
    buffers = [bytearray(len(blob)) for blob in data]
    refs = blobs.put("tls:", data)
    blobs.get_into("tls:", refs, [memoryview(buffer) for buffer in buffers])
    assert buffers == data
    assert blobs.get("tls:", refs) == data
    client.close()


def test_a_server_that_another_authority_has_signed_is_refused(tls_server: str, certificates: Path) -> None:
    client = Client(f"rediss://user:secret@{tls_server}/0?ssl_ca_certs={certificates}/other.crt", 3, 2)
    with pytest.raises(StoreUnavailable, match="certificate") as caught:
        client.run("PING")
    assert "secret" not in str(caught.value)
    client.close()


def test_a_server_without_tls_is_no_server_with_it(redis_server: str, tmp_path: Path) -> None:
    port = free_port()
    with OwnServer(tmp_path, "--port", str(port), "--save", "", port=port):
        client = Client(f"rediss://localhost:{port}/0", 1, 1)
        with pytest.raises(StoreUnavailable):
            client.run("PING")
        client.close()


class Group:
    """A primary, a replica and two sentinels that watch them."""

    def __init__(self, folder: Path, stack: ExitStack, tls: list[str], ca: str | None) -> None:
        self.ports = {name: free_port() for name in ("first", "second", "sentinel 1", "sentinel 2")}
        tls_login: dict[str, str | int | bool] = {"ssl": True, "ssl_ca_certs": ca} if ca else {}
        replication = ["--tls-replication", "yes"] if ca else []

        def start(name: str, password: str, *options: str) -> OwnServer:
            home, port = folder / name, self.ports[name]
            home.mkdir()
            (home / "conf").write_text("")
            ports = ["--port", "0", "--tls-port"] if ca else ["--port"]
            command = [str(home / "conf"), *options, *ports, str(port), "--requirepass", password, *tls, *replication]
            return stack.enter_context(OwnServer(home, *command, port=port, password=password, **tls_login))

        data = ["--save", "", "--masterauth", "pw", "--repl-diskless-sync-delay", "0"]
        self.first = start("first", "pw", *data)
        self.second = start("second", "pw", *data, "--replicaof", f"127.0.0.1 {self.ports['first']}")
        self.sentinels = [start(name, "watch", "--sentinel") for name in self.names]
        for sentinel in self.sentinels:
            sentinel.raw.execute_command("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", self.ports["first"], 2)
            for name, value in {"auth-pass": "pw", "down-after-milliseconds": 500, "failover-timeout": 5000}.items():
                sentinel.raw.execute_command("SENTINEL", "SET", SERVICE, name, value)

    names = ("sentinel 1", "sentinel 2")

    @property
    def hosts(self) -> str:
        return ",".join(f"localhost:{self.ports[name]}" for name in self.names)

    def sees_all(self, sentinel: OwnServer) -> bool:
        state = sentinel.raw.sentinel_masters()[SERVICE]
        return bool(state["num-other-sentinels"] == state["num-slaves"] == 1)

    def fail_over(self) -> None:
        """Kill the primary once the sentinels know each other and the replica, and wait for their choice."""
        until(lambda: all(self.sees_all(sentinel) for sentinel in self.sentinels))
        self.first.process.kill()
        until(self._is_chosen)

    def _is_chosen(self) -> bool:
        try:
            return bool(self.second.raw.info("replication")["role"] == "master")
        except redis.ConnectionError:  # it hangs up on everybody when its part changes
            return False


def until(done: Callable[[], object], seconds: float = 20) -> None:
    give_up = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < give_up
        threading.Event().wait(0.05)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_sentinels_lead_to_the_primary_also_after_a_failover(secure: bool, tmp_path: Path, certificates: Path) -> None:
    tls, ca = (tls_options(certificates), str(certificates / "ca.crt")) if secure else ([], None)
    with ExitStack() as stack:
        group = Group(tmp_path, stack, tls, ca)
        query = "sentinel_password=watch" + (f"&ssl_ca_certs={ca}" if ca else "")
        scheme = "rediss+sentinel" if secure else "redis+sentinel"
        client = Client(f"{scheme}://:pw@localhost:1,{group.hosts}/{SERVICE}/0?{query}", 2, 2)
        stack.callback(client.close)
        blobs, data = RedisBlobs(client), [os.urandom(MAX_BLOB)] * 2 + [b"small"]
        assert blobs.get("s:", blobs.put("s:", data)) == data
        assert group.first.raw.dbsize() == 2
        group.fail_over()

        def written() -> bool:
            try:
                return client.run("SET", "after", "failover") == b"OK"
            except StoreUnavailable:
                return False

        until(written)
        until(lambda: group.second.raw.get("after") == b"failover")


def test_a_service_that_no_sentinel_knows_is_told(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "conf").write_text("")
    with OwnServer(tmp_path, str(tmp_path / "conf"), "--sentinel", "--port", str(port), port=port):
        client = Client(f"redis+sentinel://localhost:{port}/other", 1, 1)
        with pytest.raises(StoreUnavailable, match="no sentinel knows"):
            client.run("PING")
        client.close()
