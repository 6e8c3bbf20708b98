"""Who may import whom: the directions of the architecture, and what stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVER = "longtake.server"

ALLOWED = {
    "api_schemas": ["longtake.api_schemas"],
    "client": ["longtake.api_schemas", "longtake.client"],
    "kernels": ["longtake.kernels"],
    "state_cache": ["longtake.state_cache"],
    "server/camera": ["longtake.api_schemas", f"{SERVER}.camera"],
    "server/video": ["longtake.api_schemas", f"{SERVER}.camera", f"{SERVER}.video"],
    "server/model": ["longtake.api_schemas", "longtake.kernels", f"{SERVER}.camera", f"{SERVER}.model"],
    "server/engine": [
        "longtake.api_schemas",
        "longtake.state_cache",
        *(f"{SERVER}.{part}" for part in ("camera", "video", "model", "engine", "settings")),
    ],
    "training": [
        "longtake.api_schemas",
        "longtake.kernels",
        f"{SERVER}.camera",
        f"{SERVER}.model",
        "longtake.training",
    ],
    "server/routes": ["longtake.api_schemas", f"{SERVER}.engine", f"{SERVER}.routes"],
}
LIGHT = {"pydantic", "pydantic_core", "typing_extensions", "annotated_types", "typing_inspection", "longtake"}


def imports(folder: str) -> dict[str, set[str]]:
    """Imported modules of every file below a folder."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        modules = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                modules.add(node.module or "")
        found[str(file.relative_to(ROOT))] = modules
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder: str) -> None:
    files = imports(folder)
    assert files
    for file, modules in files.items():
        ours = {module for module in modules if module.split(".")[0] == "longtake"}
        wrong = {m for m in ours if not any(m == a or m.startswith(f"{a}.") for a in ALLOWED[folder])}
        assert not wrong, f"{file} imports {wrong}"


def test_only_the_model_touches_kernels_and_only_the_engine_touches_the_store() -> None:
    for file, modules in imports("server").items():
        for module in modules:
            assert not module.startswith("longtake.kernels") or file.startswith("server/model/"), file
            assert not module.startswith("longtake.state_cache") or file.startswith("server/engine/"), file
            assert not module.startswith("longtake.training") or file == "server/scene.py", file


def test_the_schemas_import_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import longtake.api_schemas.resources, longtake.api_schemas.problems\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    outside = {name for name in printed.split() if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert outside <= LIGHT
    assert "longtake" in outside


def test_the_kernels_import_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import longtake.kernels.gdn, longtake.kernels.cam; print('fine')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "fine\n"
