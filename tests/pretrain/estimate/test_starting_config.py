"""`megalowbit init`: what it writes is a valid configuration that fits, and the next larger one does not."""

import json

import pytest

from megalowbit.errors import UserError
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import estimate_run
from megalowbit.pretrain.estimate.starting_config import (
    SIZES,
    Machine,
    _batch_size,
    readme,
    starting_config,
)
from megalowbit.shipped_files import shipped_configs

GIB = 2**30


def made(size, machine, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = starting_config(size, machine, scratch)
    found.write(tmp_path / "out")
    return found, tmp_path / "out" / "run.json"


def memory_of(path, processes, **changes):
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    config = load_config(path, overrides, world_size=processes)
    return estimate_run(config, recipe(config.recipe)).total


@pytest.mark.parametrize(
    ("size", "machine"),
    [
        ("124M", Machine(1, 24)),
        ("124M", Machine(3, 12)),  # 256 sequences are no multiple of three processes
        pytest.param("1B", Machine(8, 40), marks=pytest.mark.slow),
        pytest.param("8B", Machine(8, 80), marks=pytest.mark.slow),
    ],
)
def test_stage_and_micro_batch_fit_and_the_next_ones_do_not(size, machine, tmp_path):
    found, path = made(size, machine, tmp_path)
    written = json.loads(path.read_text())
    stage, micro = written["zero_optimization"]["stage"], written["train_micro_batch_size_per_gpu"]
    batch = written["train_batch_size"]
    assert batch % (micro * machine.processes) == 0
    limit = 0.9 * machine.gib * GIB
    assert memory_of(path, machine.processes) == found.memory.total <= limit
    if stage:
        smaller = {"zero_optimization": {"stage": stage - 1}, "train_micro_batch_size_per_gpu": 1}
        assert memory_of(path, machine.processes, **smaller) > limit
    each = batch // machine.processes
    larger = next((size for size in range(micro + 1, 33) if each % size == 0), None)
    if larger is not None:
        assert memory_of(path, machine.processes, train_micro_batch_size_per_gpu=larger) > limit


def test_the_page_has_the_values_of_the_configuration_and_the_files_stay_together(tmp_path):
    found, path = made("0.8M", Machine(1, 16, is_cpu=True), tmp_path)
    page = (path.parent / "README.md").read_text()
    assert page == readme(found, path.parent)
    for key, value in (("megalowbit.run.steps", "700"), ("train_batch_size", "4")):
        assert f"| `{key}` | `{value}` |" in page
    assert str(found.memory) in page
    assert "shipped configuration" not in page  # the batch is that of it
    config = load_config(path, [], world_size=1)
    assert config.settings.model.config == path.parent / "model.json"
    with pytest.raises(UserError, match="out already exists and is never overwritten"):
        found.write(path.parent)


def test_the_page_says_why_the_batch_is_another(tmp_path):
    found, path = made("124M", Machine(7, 24), tmp_path)
    page = (path.parent / "README.md").read_text()
    assert found.content["train_batch_size"] == 280
    assert "286,720 tokens; 256 in the shipped configuration, which 7 processes do not divide; steps" in page


@pytest.mark.parametrize(
    ("processes", "each"),
    [(1, 256), (3, 90), (7, 40), (8, 32), (20, 14), (24, 12), (28, 10), (31, 9), (48, 6), (300, 1)],
)
def test_a_batch_that_does_not_divide_grows_by_an_eighth_at_most(processes, each):
    assert _batch_size({"train_batch_size": 256}, processes) == processes * each


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs(tmp_path):
    with pytest.raises(UserError, match=r"124M does not fit on 1 GPU .*needs \d\.\d GiB with ZeRO"):
        made("124M", Machine(1, 2), tmp_path)


def test_sizes_name_shipped_configurations():
    assert set(SIZES.values()) <= set(shipped_configs())
