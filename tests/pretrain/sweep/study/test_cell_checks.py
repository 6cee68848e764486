"""Mistakes that are found before the first cell is trained."""

import json

import pytest
from programs import call_main

TOOL = "tools/study.py"


def error_of(study, out, capsys, *more, **changes):
    raw = json.loads(study.read_text()) | changes
    study.write_text(json.dumps(raw))
    done = call_main(TOOL, study, "--out", out, *more, capsys=capsys)
    assert done.returncode == 2
    assert not (out / "cells").exists()
    return done.stderr


def with_recipe(**changes):
    plain = {"name": "bf16", "set": {"megalowbit.recipe": "bf16"}}
    return [plain, {"name": "other", "set": {"megalowbit.recipe": "nvfp4", **changes}}]


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("megalowbit.data.sequence_length", 8, "8, and 32"),
        ("train_micro_batch_size_per_gpu", 4, "train_batch_size is 8, and 4"),
        ("megalowbit.data.seed", 5, "5, and "),
    ],
)
def test_a_recipe_that_reads_other_batches_is_no_pair(study, tmp_path, capsys, key, value, shown):
    error = error_of(study, tmp_path / "out", capsys, recipes=with_recipe(**{key: value}))
    assert "tiny,parts,8,other,1: " in error
    assert shown in error
    assert "in tiny,parts,8,bf16,1: the cells of a pair read the same batches" in error


def test_a_rollback_would_read_new_batches(study, tmp_path, capsys):
    recipes = with_recipe(**{"megalowbit.loss_guard": {"spike": "rollback"}})
    error = error_of(study, tmp_path / "out", capsys, "--list", recipes=recipes)
    assert "tiny,parts,8,other,1: a rollback of megalowbit.loss_guard goes on with new batches" in error


def test_a_rollback_of_the_baseline_is_found_without_a_cell_of_it(study, tmp_path, capsys):
    recipes = with_recipe()
    recipes[0]["set"]["megalowbit.loss_guard"] = {"spike": "rollback"}
    error = error_of(study, tmp_path / "out", capsys, "--recipe", "other", recipes=recipes)
    assert "tiny,parts,8,bf16,1: a rollback of megalowbit.loss_guard" in error


def test_other_text_for_validation_leaves_the_batches_as_they_are(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    other = {"corpus": str(tmp_path / "parts")}
    raw["recipes"] = with_recipe(**{"megalowbit.data.validation": other, "megalowbit.validation.every": 4})
    study.write_text(json.dumps(raw))
    done = call_main(TOOL, study, "--out", tmp_path / "out", "--list", capsys=capsys)
    assert done.returncode == 0, done.stderr
    raw["recipes"] = with_recipe(**{"megalowbit.data.validation": {"share": 0.2}})
    error = error_of(study, tmp_path / "out", capsys, "--list", recipes=raw["recipes"])
    assert "megalowbit.data.validation.share is 0.2, and None in" in error


def test_a_recipe_that_names_layers_that_there_are_not(study, tmp_path, capsys):
    block = {"base": "nvfp4", "layers": {"*.mlp.down": {"base": "fp8"}}}
    recipes = with_recipe(**{"megalowbit.recipe": block})
    error = error_of(study, tmp_path / "out", capsys, recipes=recipes)
    assert "size 'tiny', 'other': " in error
    assert "'*.mlp.down' matches no linear layer" in error


def test_a_held_out_text_shorter_than_a_sequence(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    longer = raw["set"] | {"megalowbit.data.sequence_length": 4000}
    overrides = {"megalowbit.model.overrides": {"n_positions": 4000}}
    error = error_of(study, tmp_path / "out", capsys, set=longer | overrides)
    assert "text 'parts', held out: " in error
    assert "or raise `heldout_bytes` of the study and remove" in error
