"""Keys, hosts and origins: who may come in, and what they see."""

import logging
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from pydantic import SecretStr
from server_fixtures import MAX_BODY, begin, first_frame, path, post

from longtake.server.app import create_app
from longtake.server.doors import ApiKeys, Doors, allowed_hosts, doors_of, is_loopback
from longtake.server.engine.engine import Engine
from longtake.server.settings import Settings, StartError
from longtake.state_cache import MemoryStore

ClientOf = Callable[[str | None], httpx.AsyncClient]


@pytest.fixture
async def client_of(engine: Engine) -> AsyncIterator[ClientOf]:
    app = create_app(engine, MAX_BODY, Doors(keys=ApiKeys(["key-one", "key-two"])))
    opened: list[httpx.AsyncClient] = []

    def make(key: str | None) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app)
        opened.append(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers))
        return opened[-1]

    yield make
    for client in opened:
        await client.aclose()


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic key-one", "key-one", "Bearer", "Bearer key-one-more"])
async def test_without_a_key_nothing_opens(client_of: ClientOf, header: str | None) -> None:
    http = client_of(None)
    headers = {} if header is None else {"Authorization": header}
    for method, address in [
        ("GET", "/v1/models"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/sessions"),
        ("GET", "/v1/sessions/ses_" + "a" * 39),
        ("POST", "/v1/sessions/ses_" + "a" * 39 + "/chunks"),
    ]:
        answer = await http.request(method, address, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), address
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for address in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert (await http.get(address, headers=headers)).status_code == 200


async def test_a_session_belongs_to_its_key(client_of: ClientOf) -> None:
    mine, theirs = client_of("key-one"), client_of("key-two")
    session = await begin(mine)
    assert (await post(mine, session, path(24))).status_code == 201
    absent = await theirs.get("/v1/sessions/ses_" + "a" * 39)
    for method, address in [
        ("GET", session),
        ("DELETE", session),
        ("GET", f"{session}/video"),
        ("GET", f"{session}/chunks"),
        ("GET", f"{session}/chunks/0"),
        ("GET", f"{session}/chunks/0/video"),
        ("GET", f"{session}/chunks/0/frames"),
    ]:
        answer = await theirs.request(method, address)
        assert (answer.status_code, answer.json()) == (404, absent.json()), address
    assert (await post(theirs, session, path(24, start=25))).status_code == 404
    assert (await theirs.get("/v1/sessions")).json()["data"] == []
    assert len((await mine.get("/v1/sessions")).json()["data"]) == 1
    assert (await mine.get(session)).json()["next_chunk"] == 1


async def test_the_same_idempotency_key_of_two_callers_makes_two_sessions(client_of: ClientOf) -> None:
    body, headers = {"image": first_frame()}, {"Idempotency-Key": "new"}
    made = [
        (await client_of(key).post("/v1/sessions", json=body, headers=headers)).json()["id"]
        for key in ("key-one", "key-two", "key-one")
    ]
    assert made[0] == made[2] != made[1]


async def test_keys_are_stored_nowhere(client_of: ClientOf, memory: MemoryStore, engine: Engine) -> None:
    session = (await begin(client_of("key-one"))).rsplit("/", 1)[1]
    assert "key-one" not in repr(memory.read(session)) + repr(vars(ApiKeys(["key-one"])))
    assert memory.read(session)[0].owner == ApiKeys(["key-one"]).owner("Bearer key-one") != ""


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:8000": 200,
    "localhost:8000": 200,
    "[::1]:8000": 200,
    "LOCALHOST": 200,
    "evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "": 403,
    "[": 403,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
async def test_a_foreign_host_is_refused(http: httpx.AsyncClient, host: str, status: int) -> None:
    answer = await http.get("/healthz", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["code"] == "forbidden"


ORIGINS = {
    None: 200,
    "http://127.0.0.1": 200,
    "http://evil.example": 403,
    "null": 403,
    "http://127.0.0.1:9999": 403,
    "https://studio.example": 200,
}


@pytest.mark.parametrize(("origin", "status"), ORIGINS.items())
async def test_a_foreign_origin_is_refused(engine: Engine, origin: str | None, status: int) -> None:
    app = create_app(engine, MAX_BODY, Doors(origins=frozenset({"https://studio.example"})))
    headers = {} if origin is None else {"Origin": origin}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        assert (await http.get("/healthz", headers=headers)).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])  # noqa: S104
def test_an_address_on_the_network_needs_keys(host: str) -> None:
    with pytest.raises(StartError, match="LONGTAKE_API_KEYS"):
        doors_of(Settings(host=host))
    assert doors_of(Settings(host=host, insecure=True)).hosts is None
    keyed = doors_of(Settings(host=host, api_keys=SecretStr("a, b")))
    assert keyed.keys.owner("Bearer b") != keyed.keys.owner("bearer a") != ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    doors = doors_of(Settings(host=host))
    assert not doors.keys
    assert doors.hosts is not None
    assert host in doors.hosts


def test_configured_hosts_replace_any() -> None:
    assert allowed_hosts("0.0.0.0", ["World.example"]) == {"world.example", "localhost", "127.0.0.1", "::1"}  # noqa: S104


def test_settings_do_not_show_keys(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(api_keys=SecretStr("open-sesame"))
    with caplog.at_level(logging.DEBUG):
        logging.getLogger(__name__).info("%r %s", settings, settings.model_dump_json())
    assert "open-sesame" not in caplog.text
