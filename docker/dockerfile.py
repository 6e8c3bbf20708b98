"""The parts of a Dockerfile and a .dockerignore that this project uses; what it does not use is refused by name."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


class DockerfileError(RuntimeError):
    """The Dockerfile says what is not understood here."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: RUN, COPY…; `flags` such as --from=app without their dashes."""

    word: str
    flags: Mapping[str, str]
    value: str

    @property
    def exec_form(self) -> list[str]:
        """Arguments of the JSON form.

        Raises:
            DockerfileError: it is written in the shell form.
        """
        if not self.value.startswith("["):
            raise DockerfileError(f"{self.word} is not in exec form: {self.value}")
        return [str(part) for part in json.loads(self.value)]


@dataclass(frozen=True)
class Stage:
    """A FROM with what follows it."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments declared before the first FROM, and the stages by name.

    Raises:
        DockerfileError: a stage without a name, or an instruction that is only known to newer builders.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    declared: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    name = ""
    for instruction in (_instruction(line) for line in joined.splitlines() if line.strip()):
        if instruction.word == "FROM":
            if (named := re.fullmatch(r"(\S+)\s+AS\s+(\S+)", instruction.value)) is None:
                raise DockerfileError(f"a stage without a name: {instruction.value}")
            name = named[2]
            stages[name] = Stage(name, expand(named[1], declared), ())
        elif not stages:
            declared |= pairs(instruction)
        else:
            stages[name] = replace(stages[name], instructions=(*stages[name].instructions, instruction))
    return declared, stages


def _instruction(line: str) -> Instruction:
    word, _, rest = line.strip().partition(" ")
    flags: dict[str, str] = {}
    while flag := re.match(r"\s*--([a-z-]+)=(\S+)\s+", rest):
        flags[flag[1]] = flag[2]
        rest = rest[flag.end() :]
    if "<<" in rest:
        raise DockerfileError(f"here-documents are not understood: {line}")
    return Instruction(word.upper(), flags, rest.strip())


def pairs(instruction: Instruction) -> dict[str, str]:
    """KEY=VALUE pairs of ENV, ARG and LABEL, unquoted; an ARG without a value is left out."""
    return dict(part.split("=", 1) for part in shlex.split(instruction.value) if "=" in part)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`; an unknown name is an error."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise DockerfileError(f"unknown variable {name} in {text}")
        return variables[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def allowed(context: Path) -> list[str]:
    """What .dockerignore lets into a build: it ignores all but the names after `!`."""
    lines = (context / ".dockerignore").read_text("utf-8").splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]
