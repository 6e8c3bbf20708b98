"""Documentation that can not rot: every problem, setting and command stands in it as it is."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from longtake.api_schemas.camera import Camera
from longtake.api_schemas.problems import PROBLEMS
from longtake.api_schemas.resources import Advanced, Chunk, CreateSession, PostChunks, Session
from longtake.server.cli import app
from longtake.server.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"


def test_every_problem_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (DOCS / "problems.md").read_text(), re.M)
    assert dict(rows) == {code: str(int(status)) for code, (status, _) in PROBLEMS.items()}


def test_every_problem_is_raised_somewhere() -> None:
    source = "".join(file.read_text() for file in (DOCS.parent / "server").rglob("*.py"))
    assert [code for code in PROBLEMS if f'"{code}"' not in source] == []


def test_every_setting_is_documented_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    rows = dict(re.findall(r"^\| `(LONGTAKE_\w+)` \| `?([^|`]*?)`? \|", (DOCS / "settings.md").read_text(), re.M))
    expected = {f"LONGTAKE_{name.upper()}": value for name, value in Settings.model_construct().model_dump().items()}
    assert rows.keys() == expected.keys()
    for name, value in expected.items():
        shown = "unset" if value is None else "empty" if value == "" else str(value).replace(str(Path.home()), "~")
        assert rows[name] == shown, name


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "serve",
        "generate",
        "scene",
        "sessions ls",
        "sessions show",
        "sessions fork",
        "sessions rewind",
        "sessions rm",
        "trajectory show",
        "trajectory convert",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize("page", ["docs/durability.md", "tests/faults/README.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    source = "".join(file.read_text() for file in (DOCS.parent / "tests").rglob("test_*.py"))
    files = {file.stem for file in (DOCS.parent / "tests").rglob("test_*.py")}
    named = set(re.findall(r"\btest_\w+", (DOCS.parent / page).read_text()))
    assert len(named) > 20
    assert {name for name in named - files if f"def {name}(" not in source} == set()


def test_the_examples_of_the_kernels_run() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (DOCS / "kernels.md").read_text(), re.M | re.S)
    assert len(examples) == 3
    for example in examples:
        subprocess.run([sys.executable, "-c", example], check=True, timeout=120)


def test_links_between_documents_lead_somewhere() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_field_of_a_request_is_documented_with_its_default() -> None:
    section = (DOCS / "http.md").read_text().split("## Fields")[1].split("\n## ")[0]
    parts = section.split("The body of")[1:]
    tables = [dict(re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", part, re.M)) for part in parts]
    camera = {f"camera.{name}": field for name, field in Camera.model_fields.items()}
    chunks = camera | {name: field for name, field in PostChunks.model_fields.items() if name != "camera"}
    for table, fields in zip(tables, (dict(CreateSession.model_fields), chunks), strict=True):
        assert table.keys() == fields.keys()
        for name, field in fields.items():
            if field.default not in (None, ""):
                assert table[name] == f"`{str(field.default).replace('False', 'false')}`", name


def test_every_field_of_an_answer_is_documented() -> None:
    section = (DOCS / "http.md").read_text().split("## Answers")[1].split("\n## ")[0]
    tables, posted = section.split("`POST …/chunks` answers")
    for table, answer in zip(re.findall(r"(?:^\|.*\n)+", tables, re.M), (Session, Chunk), strict=True):
        named = re.findall(r"^\| ([^|]*) \|", table, re.M)[1:]
        assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == answer.model_fields.keys()
    assert set(re.findall(r"`(\w+)`", posted)) == Advanced.model_fields.keys()


async def test_every_route_is_documented(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)`", (DOCS / "http.md").read_text(), re.M)) == routes
