"""Carry out the Dockerfile without a container engine: its RUN steps in a fresh Debian, then its server.

Every stage that the target needs is a folder that starts as Debian 12 from debootstrap, with Debian's Python in the
place of the base image's; RUN goes through chroot, COPY is copied. The server then runs as the image's user on a
read-only root, and must answer the image's health check, `/readyz`, one session with one chunk, and SIGTERM.

Needs Linux, root, debootstrap and a package index. An index of one's own: --pip-conf, --bind, --env.
    sudo python3 docker/rehearse.py
"""

import argparse
import base64
import http.client
import json
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

from dockerfile import DockerfileError, Instruction, Stage, allowed, expand, pairs, parse

log = logging.getLogger("rehearse")

HERE = Path(__file__).resolve().parent
DEBIAN_PACKAGES = "ca-certificates,python-is-python3,python3,python3-venv"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_SECONDS = 120.0
STOP_SECONDS = 30.0


class RehearsalError(RuntimeError):
    """A step of the Dockerfile or a check of the server failed."""


@dataclass(frozen=True)
class Image:
    """What the instructions so far have made: a root folder and how to run things in it."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    healthcheck: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()


@dataclass
class Rehearsal:
    """Builds stages below `folder` on request, each once.

    Args:
        folder: an empty folder for the roots.
        context: the folder that COPY reads, whose .dockerignore names all that it may.
        stages: stages of the Dockerfile by name.
        given: build arguments from the command line.
        env: further variables for RUN.
        pip_conf: a file to lie at /etc/pip.conf while RUN works.
        binds: folders or files of this machine to see, read-only, at the same path.
        mirror: where debootstrap gets Debian.
    """

    folder: Path
    context: Path
    stages: Mapping[str, Stage]
    given: Mapping[str, str]
    env: Mapping[str, str]
    pip_conf: Path | None
    binds: Sequence[Path]
    mirror: str
    images: dict[str, Image] = field(default_factory=dict)
    steps: list[tuple[str, str, float]] = field(default_factory=list)

    def build(self, name: str) -> Image:
        """The image of a stage, or a fresh Debian for what is not a stage.

        Raises:
            RehearsalError: a step failed.
            DockerfileError: a step is not understood.
        """
        if name not in self.images:
            self.images[name] = self._stage(self.stages[name]) if name in self.stages else self._debian()
        return self.images[name]

    def _debian(self) -> Image:
        root = self.folder / "debian"
        command = ["debootstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(root)]
        with self._timed("base", "debootstrap bookworm, Debian's Python"):
            _call([*command, self.mirror] if self.mirror else command)
        for name in ("resolv.conf", "hosts"):
            shutil.copyfile(f"/etc/{name}", root / "etc" / name)
        return Image(root)

    def _stage(self, stage: Stage) -> Image:
        base = self.build(stage.base)
        root = self.folder / stage.name
        _call(["cp", "-a", "--reflink=auto", str(base.root), str(root)])
        image = replace(base, root=root, arguments={})
        for instruction in stage.instructions:
            image = self._apply(stage, image, instruction)
        return image

    def _apply(self, stage: Stage, image: Image, instruction: Instruction) -> Image:
        match instruction.word:
            case "RUN":
                self._run(stage, image, instruction.value)
            case "COPY":
                self._copy(image, instruction)
            case "ENV":
                variables = {**image.arguments, **image.env}
                return replace(
                    image, env=image.env | pairs(replace(instruction, value=expand(instruction.value, variables)))
                )
            case "ARG":
                arguments = pairs(instruction)
                return replace(image, arguments=image.arguments | arguments | _chosen(self.given, arguments))
            case "WORKDIR":
                (image.root / instruction.value.lstrip("/")).mkdir(parents=True, exist_ok=True)
                return replace(image, workdir=instruction.value)
            case "USER":
                return replace(image, user=instruction.value)
            case "HEALTHCHECK":
                check = replace(instruction, value=instruction.value.removeprefix("CMD").strip())
                return replace(image, healthcheck=tuple(check.exec_form))
            case "ENTRYPOINT":
                return replace(image, entrypoint=tuple(instruction.exec_form))
            case "LABEL" | "EXPOSE" | "STOPSIGNAL":
                pass
            case word:
                raise DockerfileError(f"{word} is not understood")
        return image

    def _run(self, stage: Stage, image: Image, command: str) -> None:
        env = {**image.arguments, **image.env, **self.env}
        with self._timed(stage.name, f"RUN {command}"), self._mounted(image.root):
            _call(_inside(replace(image, env=env), ["/bin/sh", "-c", command]))

    @contextmanager
    def _mounted(self, root: Path) -> Iterator[None]:
        """/proc, the pip configuration and the bound paths, while a step runs."""
        targets = [root / path.relative_to("/") for path in self.binds]
        _call(["mount", "-t", "proc", "proc", str(root / "proc")])
        if self.pip_conf is not None:
            shutil.copyfile(self.pip_conf, root / "etc/pip.conf")
        for source, target in zip(self.binds, targets, strict=True):
            _bind(source, target)
        try:
            yield
        finally:
            for target in (*reversed(targets), root / "proc"):
                _call(["umount", str(target)])
            (root / "etc/pip.conf").unlink(missing_ok=True)

    def _copy(self, image: Image, instruction: Instruction) -> None:
        *sources, target = instruction.value.split()
        if unknown := instruction.flags.keys() - {"from"}:
            raise DockerfileError(f"COPY with {sorted(unknown)} is not understood")
        into = image.root / os.path.join(image.workdir, target).lstrip("/")  # noqa: PTH118
        into.mkdir(parents=True, exist_ok=True)
        if (stage := instruction.flags.get("from")) is not None:
            root = self.build(stage).root
            for source in sources:
                _call(["cp", "-a", f"{root / source.lstrip('/')}/.", str(into)])
            return
        for source in allowed(self.context) if sources == ["."] else sources:
            _copy_from_context(self.context, source, into)

    @contextmanager
    def _timed(self, stage: str, what: str) -> Iterator[None]:
        log.info("%s: %s", stage, what)
        start = time.monotonic()
        yield
        self.steps.append((stage, what, time.monotonic() - start))


def _copy_from_context(context: Path, name: str, into: Path) -> None:
    if name not in allowed(context):
        raise DockerfileError(f".dockerignore keeps {name} out of the build")
    source = context / name
    if source.is_dir():
        shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copyfile(source, into / name)


def _chosen(given: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name in declared}


def _inside(image: Image, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in the image, as its user, with its variables only."""
    user = [f"--userspec={image.user}"] if image.user else []
    variables = [f"{name}={value}" for name, value in image.env.items()]
    return ["chroot", *user, str(image.root), "env", "-i", f"--chdir={image.workdir}", *variables, *command]


def _bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _call(["mount", "--bind", "-o", "ro", str(source), str(target)])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        tail = done.stdout.decode(errors="replace")[-3000:]
        raise RehearsalError(f"status {done.returncode} of {shlex.join(command)}\n{tail}")


def freeze(image: Image, data: str) -> None:
    """Make the root read-only but for `data` and what an engine would mount: /tmp, /dev/shm and /proc."""
    root = str(image.root)
    _call(["mount", "--bind", root, root])
    _call(["mount", "--bind", root + data, root + data])
    for folder in ("/tmp", "/dev/shm"):  # noqa: S108
        _call(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", root + folder])
    _call(["mount", "-t", "proc", "proc", root + "/proc"])
    _call(["mount", "-o", "remount,bind,ro", root])


def try_server(image: Image, picture: Path) -> list[tuple[str, str, float]]:
    """Start the entry point and use it; one row a check, with what it answered and its seconds.

    Raises:
        RehearsalError: a check failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    image = replace(image, env=image.env | {"LONGTAKE_PORT": str(port)})
    start = time.monotonic()
    with subprocess.Popen(_inside(image, image.entrypoint)) as server:
        try:
            rows = [("health check of the image", *_healthy(image, server, start))]
            rows += [("GET /readyz", *_ask(port, "GET", "/readyz", None, 200))]
            rows += _one_chunk(port, picture)
            start = time.monotonic()
            server.terminate()
            status = server.wait(STOP_SECONDS)
        finally:
            server.kill()
    if status != 0:
        raise RehearsalError(f"the server ended with status {status} on SIGTERM")
    return [*rows, ("SIGTERM", "status 0", time.monotonic() - start)]


def _healthy(image: Image, server: subprocess.Popen[bytes], start: float) -> tuple[str, float]:
    """Repeat the image's health check until it succeeds."""
    while server.poll() is None and time.monotonic() < start + START_SECONDS:
        if subprocess.run(_inside(image, image.healthcheck), check=False, capture_output=True).returncode == 0:
            return f"healthy, as {_user_of(server.pid)}", time.monotonic() - start
        time.sleep(0.2)
    raise RehearsalError("the server did not become healthy")


def _user_of(pid: int) -> str:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    found = re.search(r"^Uid:\s+(\d+)", status, re.M)
    return f"uid {found[1]}" if found else "nobody known"


def _one_chunk(port: int, picture: Path) -> list[tuple[str, str, float]]:
    image = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    body, seconds = _ask(port, "POST", "/v1/sessions", {"image": image, "seed": 7}, 201)
    session = json.loads(body)["id"]
    walk = {"camera": {"actions": "w-24"}}
    answer, chunk_seconds = _ask(port, "POST", f"/v1/sessions/{session}/chunks", walk, 201)
    digest = json.loads(answer)["data"][0]["frames_digest"]
    return [
        ("POST /v1/sessions", "201", seconds),
        ("POST …/chunks, 24 frames", f"201, {digest[:19]}…", chunk_seconds),
    ]


def _ask(port: int, method: str, path: str, body: object, expected: int) -> tuple[str, float]:
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
    with connection.getresponse() as response:
        answer = response.read().decode()
    connection.close()
    if response.status != expected:
        raise RehearsalError(f"{method} {path}: {response.status} {answer}")
    return answer, time.monotonic() - start


def size_of(path: Path) -> int:
    """MiB that a folder takes on disk."""
    return int(subprocess.run(["du", "-smx", str(path)], check=True, capture_output=True, text=True).stdout.split()[0])


def report(rehearsal: Rehearsal, image: Image, checks: Sequence[tuple[str, str, float]]) -> str:
    """The result as Markdown."""
    rows = [f"| {stage} | `{shorten(what, 90)}` | {seconds:.1f} |" for stage, what, seconds in rehearsal.steps]
    served = [f"| {what} | `{answer}` | {seconds:.2f} |" for what, answer, seconds in checks]
    sizes = ", ".join(f"{name} {size_of(image.root / name)} MiB" for name in ("opt/venv", "opt/app"))
    root = f"Root {size_of(image.root)} MiB, of which {sizes}."
    steps = ["| stage | step | s |", "|---|---|---|", *rows]
    return "\n".join([*steps, "", root, "", "| check | answer | s |", "|---|---|---|", *served])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="stage to build (default: cpu)")
    parser.add_argument("--context", type=Path, default=HERE.parent, help="build context (default: this checkout)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build's")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable for the RUN steps")
    parser.add_argument("--pip-conf", type=Path, help="pip configuration for the RUN steps")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="path of this machine the RUN steps see")
    parser.add_argument("--mirror", default="", help="Debian mirror (default: debootstrap's)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def rehearse(options: argparse.Namespace) -> None:
    """Build, serve and log the result; to be called in a mount namespace of its own."""
    _, stages = parse((HERE / "Dockerfile").read_text("utf-8"))
    given, env = (dict(pair.split("=", 1) for pair in pairs) for pairs in (options.build_arg, options.env))
    binds = [path.resolve() for path in options.bind]
    context = options.context.resolve()
    rehearsal = Rehearsal(options.inside, context, stages, given, env, options.pip_conf, binds, options.mirror)
    image = rehearsal.build(options.target)
    freeze(image, image.env["LONGTAKE_DATA_DIR"])
    checks = try_server(image, context / "server/assets/courtyard.png")
    log.info("\n%s", report(rehearsal, image, checks))


def main() -> int:
    """Rehearse in a temporary folder; mounts and processes go with the namespaces they live in."""
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    options = _options()
    if options.inside is not None:
        try:
            rehearse(options)
        except (RehearsalError, DockerfileError) as error:
            log.error("%s", error)
            return 1
        return 0
    with tempfile.TemporaryDirectory(prefix="longtake-rehearsal-") as folder:
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*alone, sys.executable, __file__, "--inside", folder, *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
