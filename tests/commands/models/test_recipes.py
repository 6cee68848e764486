"""`megalowbit recipes`: a line for each recipe, and fields that are a recipe again."""

import json

import pytest

from megalowbit.commands.models.recipes import described, main
from megalowbit.layers.recipe import Recipe, named_recipes, recipes


def test_each_recipe_has_one_line_without_markdown(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes())
    assert not [line for line in lines if "](" in line or "`" in line]
    [default] = [line for line in lines if line.endswith("(the default of a run)")]
    assert default.startswith("nvfp4-first-block-fp8 ")


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_a_terminal_gets_lines_that_fit_with_names_standing_out(columns):
    lines = described(columns=columns)
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines if line[0] != " "] == list(recipes())
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(described()).split())


def test_a_very_narrow_terminal_breaks_no_word():
    assert max(map(len, described(columns=10))) == max(map(len, described(columns=60)))


@pytest.mark.parametrize("name", recipes())
def test_the_fields_of_a_recipe_are_accepted_in_place_of_its_name(name, capsys):
    assert main([name]) == 0
    printed = capsys.readouterr()
    assert Recipe.from_dict(json.loads(printed.out)) == recipes()[name]
    named = named_recipes()[name]
    lines = printed.err.splitlines()
    assert len(lines) == (1 + len(named.departures) + len(named.settings) if named.source else 0)
    assert not named.source or f"arXiv:{named.source['arxiv']}" in lines[0]
