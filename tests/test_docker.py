"""The files under docker/, checked without a container engine: hadolint, Compose itself, a real Redis."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from store_fixtures import make_session

from longtake.server.engine.start import WEEK
from longtake.server.settings import Settings
from longtake.state_cache import RedisStore
from longtake.state_cache.embedded import SETTINGS

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
sys.path.insert(0, str(DOCKER))

from dockerfile import DockerfileError, Instruction, Stage, allowed, pairs, parse  # noqa: E402

COMPOSE = (DOCKER / "compose.yaml").read_text()
SECRETS = {"LONGTAKE_API_KEYS": "one-key", "REDIS_PASSWORD": "secret"}
TARGETS = ("cpu", "cuda")
DECLARED, STAGES = parse((DOCKER / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

Resolved = Mapping[str, Any]


def tool(name: str) -> str:
    """A program of the dev dependencies."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if (found := shutil.which(name, path=path)) is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"{name} is not installed")
    return found


def compose(file: Path, *options: str, env: Mapping[str, str] = SECRETS) -> subprocess.CompletedProcess[str]:
    """`docker compose config` with the example's .env and these variables: no engine is asked."""
    command = [tool("docker-compose"), "-f", str(file), "--env-file", str(DOCKER / ".env.example"), *options]
    return subprocess.run([*command, "--format", "json"], env=dict(env), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    """The compose file as Compose understands it, all profiles."""
    done = compose(DOCKER / "compose.yaml", "--profile", "*", "config")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def bases(name: str) -> list[Stage]:
    """The stage and those it starts from, last first."""
    return [STAGES[name], *bases(STAGES[name].base)] if name in STAGES else []


def last(name: str, word: str) -> Instruction:
    """The instruction of this word that holds for a target."""
    return next(found for stage in bases(name) for found in reversed(stage.instructions) if found.word == word)


def instructions(*words: str) -> list[Instruction]:
    return [found for stage in STAGES.values() for found in stage.instructions if found.word in words]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    command = [tool("hadolint"), "--failure-threshold", "style", str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_base_images_are_tagged_with_a_version(resolved: Resolved) -> None:
    images = {stage.base for stage in STAGES.values()} - STAGES.keys()
    images |= {service["image"] for service in resolved["services"].values() if "build" not in service}
    assert images
    assert [image for image in images if not re.search(r":\d+(\.\d+)*-[a-z-]+$|@sha256:[0-9a-f]{64}$", image)] == []


def test_the_base_image_has_a_python_that_the_project_supports() -> None:
    major, minor = re.findall(r"\d+", DECLARED["PYTHON_IMAGE"])[:2]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").split(".")
    assert (int(major), int(minor)) >= tuple(int(part) for part in oldest)


def test_nothing_is_added_from_elsewhere() -> None:
    assert instructions("ADD", "ONBUILD", "MAINTAINER", "VOLUME") == []


def test_every_stage_serves_a_target() -> None:
    reached: set[str] = set()
    waiting = list(TARGETS)
    while waiting:
        name = waiting.pop()
        if name in reached or name not in STAGES:
            continue
        reached.add(name)
        sources = (found.flags.get("from", "") for found in STAGES[name].instructions)
        waiting += [STAGES[name].base, *sources]
    assert reached == STAGES.keys()


def test_a_build_without_a_target_makes_the_cpu_image() -> None:
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_the_server_as_nobody_in_particular(target: str) -> None:
    assert last(target, "ENTRYPOINT").exec_form == ["longtake", "serve"]
    assert last(target, "STOPSIGNAL").value == "SIGTERM"
    assert STAGES[target].instructions[-1] == Instruction("USER", {}, "10001:10001")
    env = {name: value for stage in bases(target) for found in stage.instructions for name, value in _env(found)}
    assert env["PYTHONUNBUFFERED"] == "1"
    assert not env.keys() & {"LONGTAKE_HOST", "LONGTAKE_API_KEYS"}


def _env(instruction: Instruction) -> list[tuple[str, str]]:
    return list(pairs(instruction).items()) if instruction.word == "ENV" else []


def test_no_secret_can_reach_a_layer() -> None:
    names = {name.split("=")[0] for found in instructions("ARG", "ENV") for name in pairs(found)}
    assert [name for name in names if re.search("KEY|PASS|TOKEN|SECRET", name)] == []


@pytest.mark.parametrize("target", TARGETS)
def test_dependencies_are_installed_without_the_source(target: str) -> None:
    copies = [found for found in STAGES[f"{target}-packages"].instructions if found.word == "COPY"]
    assert [found.value for found in copies] == ["pyproject.toml ./"]


@pytest.mark.parametrize("target", TARGETS)
def test_packages_and_code_are_layers_of_their_own(target: str) -> None:
    copies = [found.flags["from"] for found in STAGES[target].instructions if found.word == "COPY"]
    assert copies == [f"{target}-packages", "app"]


def test_the_label_says_the_version_of_the_project() -> None:
    arguments = [pairs(found) for found in STAGES["runtime"].instructions if found.word == "ARG"]
    assert {"VERSION": PROJECT["project"]["version"]} in arguments


def test_a_build_sees_what_the_package_needs_and_nothing_else() -> None:
    folders = {marker.parent.name for marker in ROOT.glob("*/py.typed")}
    assert folders >= set(PROJECT["tool"]["setuptools"]["package-dir"].values())
    files = ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    assert sorted(allowed(ROOT)) == sorted([*folders, *files])
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_tells_by_the_status(status: int, healthy: bool) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert (_health_check(server.server_port) == 0) is healthy
        thread.join()
    assert asked == ["/healthz"]


def test_the_health_check_fails_where_nobody_listens() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_port
    assert _health_check(port) != 0


def _health_check(port: int) -> int:
    check = last("cpu", "HEALTHCHECK").value.removeprefix("CMD ")
    _, *arguments = json.loads(check)
    env = {**os.environ, "LONGTAKE_PORT": str(port)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, check=False).returncode


@pytest.mark.parametrize("secret", SECRETS)
def test_compose_refuses_to_start_without_a_secret(secret: str) -> None:
    env = {name: value for name, value in SECRETS.items() if name != secret}
    done = compose(DOCKER / "compose.yaml", "--profile", "cpu", "config", env=env)
    assert done.returncode != 0
    assert f"{secret} is missing a value: set it in docker/.env" in done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("read_only: true", "read_olny: true"), ("- ALL", "ALL"), ("service_healthy", "service_well")],
    ids=["unknown-key", "wrong-type", "unknown-value"],
)
def test_compose_checks_the_file_against_its_schema(right: str, wrong: str, tmp_path: Path) -> None:
    spoilt = COMPOSE.replace("cap_drop: [ALL]", "cap_drop:\n    - ALL").replace(right, wrong, 1)
    (tmp_path / "compose.yaml").write_text(spoilt)
    assert compose(tmp_path / "compose.yaml", "--profile", "cpu", "config").returncode != 0


@pytest.mark.parametrize(("profile", "server"), [("cpu", "server"), ("gpu", "server-gpu")])
def test_a_profile_starts_one_server_and_the_store(profile: str, server: str) -> None:
    done = compose(DOCKER / "compose.yaml", "--profile", profile, "config")
    services = json.loads(done.stdout)["services"]
    assert services.keys() == {server, "redis"}
    assert services[server]["build"]["target"] in TARGETS
    assert services[server]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_only_the_servers_are_published_and_only_on_loopback(resolved: Resolved) -> None:
    ports = {name: service.get("ports", []) for name, service in resolved["services"].items()}
    assert ports.pop("redis") == []
    assert [port["host_ip"] for found in ports.values() for port in found] == ["127.0.0.1", "127.0.0.1"]
    assert resolved["networks"]["state"]["internal"] is True
    assert resolved["services"]["redis"]["networks"].keys() == {"state"}


def test_every_service_has_as_few_rights_as_it_needs(resolved: Resolved) -> None:
    for service in resolved["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.keys() & {"privileged", "network_mode", "ipc", "pid", "cap_add"}


def test_every_service_may_warm_up_and_finish(resolved: Resolved) -> None:
    for service in resolved["services"].values():
        assert _seconds(service["stop_grace_period"]) >= 60
        assert _seconds(service["healthcheck"]["start_period"]) >= 300


def _seconds(duration: str) -> int:
    return sum(int(count) * {"m": 60, "s": 1}[unit] for count, unit in re.findall(r"(\d+)([ms])", duration))


def test_volumes_are_declared_and_sessions_persist(resolved: Resolved) -> None:
    mounts = [mount for service in resolved["services"].values() for mount in service.get("volumes", [])]
    assert {mount["source"] for mount in mounts if mount["type"] == "volume"} == resolved["volumes"].keys()
    assert [mount["target"] for mount in resolved["services"]["redis"]["volumes"]] == ["/data"]


def test_the_gpu_server_gets_one_device(resolved: Resolved) -> None:
    server = resolved["services"]["server-gpu"]
    assert server["environment"]["LONGTAKE_DEVICE"] == "cuda"
    devices = server["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    cache = last("cuda", "ENV")
    assert pairs(cache)["TRITON_CACHE_DIR"].startswith(server["volumes"][0]["target"])


@pytest.mark.parametrize("service", ["server", "server-gpu"])
def test_the_settings_of_a_server_are_valid(service: str, resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = resolved["services"][service]["environment"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)  # noqa: S104
    assert settings.state_url == "redis://:secret@redis:6379/0"
    given = {name.removeprefix("LONGTAKE_").lower() for name in environment}
    elsewhere = {"data_dir", "device", "insecure", "key_prefix"}
    assert given | elsewhere == set(Settings.model_fields)


def test_every_variable_stands_in_the_example_with_a_comment() -> None:
    paragraphs = (DOCKER / ".env.example").read_text().strip().split("\n\n")[1:]
    names = []
    for paragraph in paragraphs:
        comment, line = paragraph.split("\n")
        assert re.match(r"# \S", comment)
        names.append(line.partition("=")[0])
    used = re.findall(r"\$\{(\w+)", COMPOSE) + re.findall(r"^  (LONGTAKE_\w+):$", COMPOSE, re.M)
    assert sorted(names) == sorted(set(used))


def test_the_example_holds_defaults_and_no_secret() -> None:
    lines = re.findall(r"^(\w+)=(.*)$", (DOCKER / ".env.example").read_text(), re.M)
    shown = dict(lines)
    assert [shown.pop(name) for name in SECRETS] == ["", ""]
    for name in ("REDIS_MAXMEMORY", "LONGTAKE_PUBLISHED_PORT"):
        assert f"${{{name}:-{shown.pop(name)}}}" in COMPOSE
    assert shown.pop("LONGTAKE_TTL_S") == str(WEEK)
    defaults = Settings.model_construct().model_dump()
    assert shown == {name: str(defaults[name.removeprefix("LONGTAKE_").lower()]) for name in shown}


def test_git_does_not_take_the_filled_in_file() -> None:
    assert ".env" in (DOCKER / ".gitignore").read_text().splitlines()


def test_redis_is_set_up_as_the_embedded_store(resolved: Resolved) -> None:
    given = _redis_options(resolved)
    own = {name: value for name, value in SETTINGS.items() if name not in ("port", "unixsocketperm", "daemonize")}
    assert {name: given[name] for name in own} == own


def _redis_options(resolved: Resolved) -> dict[str, str]:
    program, *arguments = resolved["services"]["redis"]["command"]
    assert program == "redis-server"
    options: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            options[name := argument.removeprefix("--")] = []
        else:
            options[name].append(argument)
    return {name: " ".join(values) for name, values in options.items()}


@contextmanager
def composed_redis(resolved: Resolved, data: Path) -> Iterator[str]:
    """A redis-server of this machine with the command line of the compose file; gives its socket."""
    command = [str(data) if part == "/data" else part for part in resolved["services"]["redis"]["command"]]
    socket = f"{data}/s"
    command[0] = tool("redis-server")
    with subprocess.Popen([*command, "--port", "0", "--unixsocket", socket, "--logfile", "log"]) as server:
        try:
            for _ in range(500):
                if Path(socket).is_socket():
                    break
                time.sleep(0.01)
            yield socket
        finally:
            server.terminate()


def test_redis_with_these_options_is_durable_and_asks_for_its_password(resolved: Resolved, tmp_path: Path) -> None:
    check = resolved["services"]["redis"]["healthcheck"]["test"]
    assert check[0] == "CMD"
    with composed_redis(resolved, tmp_path) as socket:
        ping = [tool("redis-cli"), "-s", socket, *check[2:]]
        env = resolved["services"]["redis"]["environment"]
        statuses = [
            subprocess.run(ping, env=given, capture_output=True, check=False).returncode
            for given in (env, {}, {"REDISCLI_AUTH": "wrong"})
        ]
        assert [status == 0 for status in statuses] == [True, False, False]
        store = RedisStore(f"unix://:secret@{socket}")
        status = store.check()
        assert (status.durability, status.policy, status.limit_bytes) == ("strict", "noeviction", 4 * 2**30)
        store.close()
        with redis.Redis(unix_socket_path=socket) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_copy_of_the_stopped_volume_is_a_backup(resolved: Resolved, tmp_path: Path) -> None:
    volume, copy = tmp_path / "volume", tmp_path / "copy"
    volume.mkdir()
    with composed_redis(resolved, volume) as socket:
        store = RedisStore(f"unix://:secret@{socket}")
        session_id = make_session(store)
        store.close()
    shutil.copytree(volume, copy)
    with composed_redis(resolved, copy) as socket:
        store = RedisStore(f"unix://:secret@{socket}")
        assert store.read(session_id)[0].id == session_id
        store.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM debian:12\n", "a stage without a name"),
        ("FROM debian:12 AS a\nRUN <<EOF\n", "here-documents"),
        ("FROM ${BASE} AS a\n", "unknown variable BASE"),
    ],
    ids=["unnamed-stage", "here-document", "unknown-argument"],
)
def test_the_parser_refuses_what_it_does_not_know(text: str, said: str) -> None:
    with pytest.raises(DockerfileError, match=said):
        parse(text)


def test_the_parser_joins_lines_and_reads_flags() -> None:
    text = 'ARG A=1\nFROM x:${A} AS a\n# no\nRUN one \\\n    # no\n    && two\nCOPY --from=b /c /d\nENV K="v w" L=m\n'
    declared, stages = parse(text)
    assert declared == {"A": "1"}
    assert stages["a"].base == "x:1"
    run, copy, env = stages["a"].instructions
    assert (run.word, run.value) == ("RUN", "one && two")
    assert (copy.flags, copy.value) == ({"from": "b"}, "/c /d")
    assert pairs(env) == {"K": "v w", "L": "m"}
