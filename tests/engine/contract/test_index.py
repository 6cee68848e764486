"""The table of DeepSpeed's interfaces that the package uses, and the tests that cover them.

A new import from DeepSpeed, or a new use of an attribute of its engine, needs a line in
`engine.versions.internals`, and a test in this folder whose message says what breaks without it.
"""

import ast
from functools import cache
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from zero_internals import tree, used

from megalowbit.engine.versions.contracts import contracts
from megalowbit.engine.versions.internals import (
    ARGUMENTS,
    ENGINE,
    IMPORTS,
    INTERNALS,
    METHODS,
    PIPELINE_ENGINE,
)

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "megalowbit"

OURS = frozenset({"process_grid", "regularizer"})  # set by this package
NOT_AN_ENGINE = {"config.py", "dry_run.py"}  # there, `engine` is a section of settings


@cache
def nodes():
    """Imports and attributes in each file of the package that has a name of an engine or of DeepSpeed."""
    wanted = ast.Import, ast.ImportFrom, ast.Attribute
    files = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        path: [node for node in ast.walk(tree(path)) if isinstance(node, wanted)]
        for path, text in files.items()
        if "deepspeed" in text or "engine" in text
    }


@cache
def imported():
    names = set()
    for found in nodes().values():
        for node in found:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "deepspeed"}


@cache
def used_attributes():
    names = set()
    for path, found in nodes().items():
        room = path.relative_to(PACKAGE).parts[0]
        if path.name in NOT_AN_ENGINE or room not in {"engine", "pretrain"}:
            continue
        for node in found:
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                names |= {node.attr} if name == "engine" else set()
    return names - OURS


def test_every_import_of_deepspeed_is_in_the_table():
    assert imported() - IMPORTS.keys() == set(), "a new DeepSpeed may break it: add it here and a test of it"
    assert IMPORTS.keys() - imported() == set(), "no longer used: remove it here"


def test_every_attribute_of_the_engine_is_in_the_table():
    known = ENGINE | PIPELINE_ENGINE
    assert used_attributes() - known == set(), "a new DeepSpeed may break it: add it here and a test of it"
    assert known - used_attributes() == set(), "no longer used: remove it here"


def test_every_internal_of_zero_and_pipelines_is_in_the_table():
    known = {name for names in INTERNALS.values() for name in names}
    found = used()
    new = {name: sorted(files) for name, files in found.items() if name not in known}
    assert new == {}, (
        "a new DeepSpeed may break it: add it to versions.internals.INTERNALS, with what breaks without it"
    )
    assert known - found.keys() == set(), "no longer used: remove it from versions.internals.INTERNALS"


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
def test_the_contract_is_met(contract):
    assert contract.check(), f"{contract.name}: {contract.breaks}"


def test_the_engine_has_every_attribute_that_the_package_uses(engine):
    assert isinstance(engine, DeepSpeedEngine)
    gone = [name for name in sorted(ENGINE) if not hasattr(engine, name)]
    assert gone == [], "megalowbit uses these attributes of the engine, which have gone"


def test_every_import_is_covered_by_a_test_of_this_folder():
    others = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    others.append(PACKAGE / "engine" / "versions" / "contracts.py")
    text = "".join(path.read_text(encoding="utf-8") for path in others)
    text += "".join(owner for owner in (*ARGUMENTS, *METHODS))
    untested = {
        name: use
        for name, use in IMPORTS.items()
        if name not in {"deepspeed", "deepspeed.ops"} and name.rpartition(".")[2] not in text
    }
    assert untested == {}, "no test says what these are used for when DeepSpeed changes them"
