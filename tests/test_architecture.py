"""The plan of the house, held by a test: arrows between folders, file sizes, folder names.

Changing the plan is allowed, on purpose: here and in docs/architecture.md together.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megalowbit"
# importable from anywhere; import no room
ROOMS_OF_ALL = {"errors", "durable", "json_text", "c_library", "values"}
ALLOWED = {
    "errors": set(),
    "durable": set(),
    "json_text": set(),
    "c_library": set(),
    "values": set(),
    "process_group": set(),
    "formats": set(),
    "quantize": {"formats"},
    "spectral": {"quantize"},
    "layers": {"quantize", "spectral"},
    "optim": {"process_group"},
    "telemetry": {"process_group"},
    "speculation": {"quantize", "layers", "telemetry", "process_group"},
    "hf": {"quantize", "layers", "checkpoints"},
    "checkpoints": {"layers"},
    "data": {"process_group"},
    "cluster": {"process_group"},
    "engine": {"process_group", "optim", "layers", "telemetry", "checkpoints", "hf"},
    "pretrain": {
        "process_group",
        "quantize",
        "layers",
        "optim",
        "telemetry",
        "speculation",
        "hf",
        "data",
        "engine",
    },
}
MAX_LINES = 400
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules `path` imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            module = node.module or ""
            names |= (
                {f"{module}.{alias.name}" for alias in node.names} if module == "megalowbit" else {module}
            )
    return names


def rooms_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("megalowbit.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_folder_imports_only_what_the_plan_allows(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ALLOWED, f"{room}: not a room of the plan"
    extra = rooms_imported(path) - {room} - ROOMS_OF_ALL - ALLOWED[room]
    assert not extra, f"{room} must not import {sorted(extra)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_engine_imports_deepspeed(path):
    if room_of(path) != "engine":
        assert not {name for name in imports_of(path) if name.split(".")[0] == "deepspeed"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_folder_or_file_is_a_drawer_for_odds_and_ends():
    drawers = {"utils", "common", "helpers", "util", "misc"}
    assert not [p for p in PACKAGE.rglob("*") if p.stem in drawers]


def test_tests_mirror_the_package():
    missing = []
    for path in SOURCES:
        if path.name == "__init__.py":
            continue
        relative = path.relative_to(PACKAGE)
        if not list((ROOT / "tests" / relative.parent).glob(f"test_{path.stem}*.py")):
            missing.append(str(relative))
    assert not missing, f"no tests/**/test_*.py for {missing}"


def test_importing_the_package_is_light():
    code = (
        "import sys, megalowbit; "
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets', 'wandb'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
