"""The client against servers that are slow, frozen, gone, locked up or not set up for it."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import pytest
import redis
from redis_servers import own_server
from scripted_redis import says, scripted

from longtake.state_cache import StoreError, StoreFull, StoreUnavailable, StoreUnsuitable
from longtake.state_cache.breaker import PAUSE_SECONDS
from longtake.state_cache.client import Client

SECRET = "hunter2"  # noqa: S105


@contextlib.contextmanager
def client_of(url: str, timeout: float = 0.5, connections: int = 2) -> Iterator[Client]:
    client = Client(url, timeout, connections)
    yield client
    client.close()


def seconds_until_refused(client: Client) -> float:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        client.run("PING")
    return time.monotonic() - started


def test_a_frozen_server_costs_one_time_out_and_not_one_a_call() -> None:
    with own_server() as (url, server), client_of(url) as client:
        assert client.run("PING")
        server.process.send_signal(signal.SIGSTOP)
        assert 0.4 < seconds_until_refused(client) < 2
        for _ in range(20):
            assert seconds_until_refused(client) < 0.2
        with pytest.raises(StoreUnavailable, match="a moment ago"), client.bulk():
            pass
        server.process.send_signal(signal.SIGCONT)
        threading.Event().wait(PAUSE_SECONDS)
        assert client.run("PING")


def test_callers_that_wait_for_a_connection_to_a_frozen_server_do_not_wait_twice() -> None:
    with own_server() as (url, server), client_of(url, connections=1) as client:
        client.run("PING")
        server.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(4) as pool:
            waits = list(pool.map(lambda _: seconds_until_refused(client), range(4)))
        server.process.send_signal(signal.SIGCONT)
        assert max(waits) < 0.9


def test_a_server_that_comes_back_is_found() -> None:
    with own_server() as (url, server), client_of(url) as client:
        client.run("PING")
        server.process.kill()
        server.process.wait()
        with pytest.raises(StoreUnavailable, match="Connection refused"):
            client.run("PING")
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            client.run("PING")
        server.start()
        threading.Event().wait(PAUSE_SECONDS)
        assert client.run("PING")


def test_one_lost_connection_does_not_open_the_breaker(redis_server: str) -> None:
    def hang_up(command: list[bytes], out: BinaryIO) -> bool:
        out.write(b"+PONG\r\n" if command[0] == b"PING" else b"")
        return command[0] != b"PING"

    with scripted(hang_up) as (url, _), client_of(url) as client:
        with pytest.raises(StoreUnavailable):
            client.run("GET", "key")
        assert client.run("PING")


def test_a_command_is_sent_once_whatever_comes_of_it() -> None:
    with scripted(lambda *_: True) as (url, seen), client_of(url) as client:
        with pytest.raises(StoreUnavailable):
            client.run("INCR", "key")
        with pytest.raises(StoreUnavailable):
            client.run_all([("INCR", "key"), ("INCR", "key")])
    assert seen == [[b"INCR", b"key"]] * 2


def test_a_reply_that_trickles_in_ends_at_the_time_limit() -> None:
    def trickle(_: list[bytes], out: BinaryIO) -> None:
        out.write(b"$1000\r\n")
        for _ in range(1000):
            out.write(b"x")
            threading.Event().wait(0.02)

    with scripted(trickle) as (url, _), client_of(url) as client:
        assert 0.4 < seconds_until_refused(client) < 1.5


MEANINGS: dict[str, tuple[type[StoreError], str]] = {
    "LOADING Redis is loading the dataset in memory": (StoreUnavailable, "loading"),
    "MISCONF Errors writing to the AOF file: No space left on device": (StoreUnavailable, "disk"),
    "BUSY Redis is busy running a script.": (StoreUnavailable, "script"),
    "READONLY You can't write against a read only replica.": (StoreUnavailable, "read-only"),
    "MASTERDOWN Link with MASTER is down": (StoreUnavailable, "lost its primary"),
    "NOREPLICAS Not enough good replicas to write.": (StoreUnavailable, "fewer replicas"),
    "CLUSTERDOWN The cluster is down": (StoreUnavailable, "cluster"),
    "NOAUTH Authentication required.": (StoreUnavailable, "asks for a password"),
    "WRONGPASS invalid username-password pair": (StoreUnavailable, "refused the user name"),
    f"NOPERM No permissions to access a key {SECRET}": (StoreUnavailable, "may not"),
    "OOM command not allowed when used memory > 'maxmemory'.": (StoreFull, "memory"),
    "ERR max number of clients reached": (StoreUnavailable, "no more connections"),
    "ERR unknown command 'LMOVE', with args beginning with: ": (StoreUnsuitable, "Redis 7 or newer"),
    f"WRONGTYPE Operation against {SECRET}": (StoreError, "WRONGTYPE"),
}


@pytest.mark.parametrize("reply", MEANINGS, ids=lambda reply: reply.split()[0])
def test_an_error_reply_is_told_by_its_meaning(reply: str) -> None:
    kind, words = MEANINGS[reply]
    with scripted(says(f"-{reply}\r\n".encode())) as (url, _), client_of(url) as client:
        for call in (lambda: client.run("GET", "a"), lambda: client.run_all([("GET", "a")]), lambda: fetch(client)):
            with pytest.raises(StoreError, match=words) as caught:
                call()
            assert type(caught.value) is kind
            assert SECRET not in str(caught.value)


def fetch(client: Client) -> object:
    with client.bulk() as bulk:
        bulk.send([("GET", "a")])
        return bulk.receive()


def test_a_password_is_asked_for_and_checked() -> None:
    with own_server("--requirepass", SECRET) as (url, _):
        with client_of(url) as client, pytest.raises(StoreUnavailable, match="asks for a password"):
            client.run("PING")
        with (
            client_of(url.replace("//", "//:wrong@")) as client,
            pytest.raises(StoreUnavailable, match="refused") as error,
        ):
            client.run("PING")
        assert "wrong" not in str(error.value)
        with client_of(url.replace("//", f"//:{SECRET}@")) as client:
            assert client.run("PING")


def test_what_a_user_may_not_do_is_told_and_does_not_open_the_breaker(redis_server: str) -> None:
    with redis.Redis.from_url(redis_server) as raw:
        raw.acl_setuser(
            "narrow", enabled=True, passwords=["+pw"], keys=["lt:*"], categories=["+@all"], commands=["-config"]
        )
        try:
            with client_of(redis_server.replace("//", "//narrow:pw@")) as client:
                for command in (("CONFIG", "GET", "dir"), ("GET", "other")):
                    with pytest.raises(StoreUnavailable, match="may not"):
                        client.run(*command)
                assert client.run("GET", "lt:key") is None
        finally:
            raw.acl_deluser("narrow")


def test_a_script_that_never_ends_is_told_apart() -> None:
    with (
        own_server("--busy-reply-threshold", "10") as (url, _),
        client_of(url, 5) as client,
        redis.Redis.from_url(url) as raw,
        ThreadPoolExecutor() as pool,
    ):
        endless = pool.submit(client.run, "EVAL", "while true do end", 0)
        with pytest.raises(StoreUnavailable, match="busy with a script"):
            repeat(lambda: client.run("GET", "key"))
        raw.script_kill()
        with pytest.raises(StoreError):
            endless.result()


def test_a_disk_that_can_not_be_written_is_told_apart() -> None:
    with own_server("--enable-protected-configs", "yes") as (url, server), client_of(url) as client:
        (server.folder / "away").mkdir()
        client.run("CONFIG", "SET", "dir", str(server.folder / "away"), "save", "3600 1")
        (server.folder / "away").rmdir()
        client.run("BGSAVE")
        with pytest.raises(StoreUnavailable, match="disk"):
            repeat(lambda: client.run("SET", "key", "value"))


def repeat(call: Callable[[], object]) -> None:
    """Until it fails, for ten seconds at most."""
    pause = threading.Event()
    for _ in range(1000):
        call()
        pause.wait(0.01)


def test_bulk_transfers_never_hold_up_a_command(redis_server: str) -> None:
    with client_of(redis_server, connections=3) as client, contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(client.bulk())
        assert client.run("PING")
        assert client.run_all([("PING",)])


def test_a_bulk_connection_in_trouble_is_not_used_again(redis_server: str) -> None:
    with client_of(redis_server, connections=1) as client:
        with contextlib.suppress(RuntimeError), client.bulk() as bulk:
            bulk.send([("ECHO", "of somebody else")])
            raise RuntimeError
        with client.bulk() as bulk:
            bulk.send([("ECHO", "mine")])
            assert bulk.receive() == b"mine"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host/0",
        f"redis://user:{SECRET}/@host:port",
        f"redis://user:{SECRET}@host:99999/0",
        f"redis://user:{SECRET}@host/0?no_such_option=1",
        f"redis+sentinel://user:{SECRET}@host:26379",
        f"redis+sentinel://user:{SECRET}@/service",
        f"redis+sentinel://user:{SECRET}@host:x/service",
    ],
)
def test_a_bad_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="redis://") as caught:
        Client(url, 1, 1)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_server_that_is_away_is_told_without_its_url() -> None:
    with client_of(f"redis://user:{SECRET}@127.0.0.1:1/0") as client:
        with pytest.raises(StoreUnavailable, match="Connection refused") as caught:
            client.run("PING")
        assert SECRET not in str(caught.value)
