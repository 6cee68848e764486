"""docs/configuration.md: its tables are those of the settings classes, and every key is described."""

import importlib.util
import re
from typing import Literal, get_origin

import pytest

import megalowbit.cluster.settings
import megalowbit.pretrain.config  # noqa: F401  # all settings that a configuration can hold
from launchers import ROOT
from megalowbit.layers.recipe import Recipe
from megalowbit.spectral.settings import OperandSplit, ParameterSplit
from megalowbit.values import SettingsModel


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_settings(model=SettingsModel):
    below = [each for each in model.__subclasses__() if each.__module__.startswith("megalowbit.")]
    return [model, *(found for each in below for found in all_settings(each))]


def is_tag(name, field):
    """Whether a field only selects its class in a union; the base of such classes has a plain `str`."""
    return name == "type" and (field.annotation is str or get_origin(field.annotation) is Literal)


def test_the_page_is_up_to_date(tool):
    assert tool.main(["--check"]) == 0, "run python tools/write_reference.py"


def test_a_page_that_is_out_of_date_is_found_and_rewritten(tool, monkeypatch, tmp_path):
    page = tmp_path / "configuration.md"
    page.write_text(f"# By hand\n\n{tool.MARKER}\nold\n")
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["--check"]) == 1
    assert page.read_text().endswith("old\n")
    assert tool.main([]) == tool.main(["--check"]) == 0
    assert page.read_text().startswith("# By hand")


@pytest.mark.parametrize("model", all_settings(), ids=lambda model: model.__name__)
def test_every_key_has_a_description(model):
    missing = [
        name
        for name, field in model.model_fields.items()
        if not field.description and not is_tag(name, field)
    ]
    assert missing == []


@pytest.mark.parametrize("kind", [Recipe, OperandSplit, ParameterSplit])
def test_every_key_of_a_recipe_has_a_description(tool, kind):
    assert [row.key for row in tool.rows_of_dataclass(kind) if not row.description] == []


def test_every_section_and_key_of_the_block_is_on_the_page(tool):
    text = tool.reference()
    for key, model, _ in (*tool.sections(tool.SETTINGS_MODEL), *tool.sections(tool.EngineSettings)):
        assert f"### `{key}`\n" in text
        assert all(f"| `{name}` |" in text for name in (model.model_fields if model else ()))


def test_links_within_the_page_lead_to_its_headings(tool):
    text = tool.page()
    headings = {tool.anchor(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= headings
