import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from quick_cases import slow_except
from studies import RESULT

from launchers import write_config
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model
from megalowbit.layers import recipe as recipe_module
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.matmul.quantizations import Quantizations
from megalowbit.layers.recipe import named_recipes, recipe, recipes
from megalowbit.pretrain.components.late_switch import LateSwitchSettings
from megalowbit.pretrain.sweep.study.cells import cell_named, cells_of
from megalowbit.pretrain.sweep.study.evaluation import final_recipe
from megalowbit.pretrain.sweep.study.kept_results import to_kept
from megalowbit.pretrain.sweep.study.reproduction import unpack
from megalowbit.pretrain.sweep.study.results import result_of
from megalowbit.pretrain.sweep.study.study_file import read_study, study_of
from megalowbit.pretrain.sweep.study.texts import TextFacts

ROOT = Path(__file__).parents[4]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.json"))
FACTS = TextFacts(
    description="",
    train_bytes=1,
    heldout_bytes=1,
    heldout_documents=1,
    heldout_repeated=0.0,
    train_sha256="a" * 64,
    heldout_sha256="b" * 64,
)


def study_in(tmp_path, **changes):
    write_config(tmp_path)
    raw = {
        "base": "tiny.json",
        "set": {"train_micro_batch_size_per_gpu": 4},
        "sizes": [{"name": "small"}, {"name": "wide", "set": {"megalowbit.model.overrides": {"n_embd": 64}}}],
        "texts": [{"name": "t", "source": "stdlib"}],
        "seeds": [1, 2],
        "steps": [6],
        "recipes": [
            {"name": "nvfp4", "set": {"megalowbit.recipe": "nvfp4"}, "lr_factors": [1, 0.5]},
            {"name": "bf16", "set": {"megalowbit.recipe": "bf16"}},
        ],
        "baseline": "bf16",
        "replicas": [{"name": "again", "of": "nvfp4", "lr_factor": 1.000001}],
        **changes,
    }
    (tmp_path / "study.json").write_text(json.dumps(raw))
    return read_study(tmp_path / "study.json")


def named(study, tmp_path, name):
    return cell_named(study, tmp_path / "out", ROOT / "launch" / "pretrain.py", name)


def test_cells_are_whole_pairs_with_the_baseline_first(tmp_path):
    names = [cell.name for cell in cells_of(study_in(tmp_path), tmp_path, ROOT)]
    assert names[:5] == [
        "small,t,6,bf16,1",
        "small,t,6,nvfp4,1",
        "small,t,6,nvfp4@lr0.5,1",
        "small,t,6,again,1",
        "small,t,6,bf16,2",
    ]
    assert len(names) == len(set(names)) == 16


def test_a_cell_has_the_overrides_of_study_size_and_recipe(tmp_path):
    study = study_in(tmp_path)
    config = named(study, tmp_path, "wide,t,6,again,2").config
    assert config.recipe == "nvfp4"
    assert config.settings.model.overrides == {"n_embd": 64}
    assert config.settings.run.seed == 2
    assert config.parts.deepspeed["train_micro_batch_size_per_gpu"] == 4
    assert config.parts.deepspeed["optimizer"]["params"]["lr"] == 3e-3 * 1.000001
    assert config.settings.data.corpus == str(tmp_path / "out" / "texts" / "t" / "train.jsonl")
    half = named(study, tmp_path, "small,t,6,nvfp4@lr0.5,1").config
    assert half.parts.deepspeed["optimizer"]["params"]["lr"] == 1.5e-3


def test_a_factor_without_effect_on_the_learning_rate_is_refused(tmp_path):
    """Some schedulers replace the optimizer's rate by one of their own, unless that is "auto"."""
    study = study_in(tmp_path)
    base = json.loads((tmp_path / "tiny.json").read_text())
    warmup = {"warmup_min_lr": 0, "warmup_num_steps": 2}
    for name, params, is_refused in (
        ("WarmupLR", {**warmup, "warmup_max_lr": "auto"}, False),
        ("WarmupLR", {**warmup, "warmup_max_lr": 0.003}, True),
        ("WarmupCosineLR", {"total_num_steps": 6}, False),
        ("CosineAnnealingLR", {"T_max": 6}, False),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 0.003}, True),
    ):
        base["scheduler"] = {"type": name, "params": params}
        (tmp_path / "tiny.json").write_text(json.dumps(base))
        cell = named(study, tmp_path, "small,t,6,nvfp4@lr0.5,1")
        if is_refused:
            with pytest.raises(
                UserError, match=f"lr_factor has no effect, because {name} has learning rates"
            ):
                _ = cell.config
        else:
            assert cell.config.parts.deepspeed["optimizer"]["params"]["lr"] == 1.5e-3


def test_weights_and_tokenizers_count_by_their_contents(tmp_path):
    study = study_in(tmp_path)
    base = json.loads((tmp_path / "tiny.json").read_text())
    config = transformers.GPT2Config.from_json_file(tmp_path / "model.json")
    base["megalowbit"]["model"] = {"checkpoint": "weights"}
    base["megalowbit"]["data"] |= {"tokenizer": str(tmp_path / "tokenizer")}
    (tmp_path / "tiny.json").write_text(json.dumps(base))
    found = []
    for seed, has_other_text in ((0, False), (1, False), (1, True)):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "weights")
        ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
        if has_other_text:
            text = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
            (tmp_path / "tokenizer" / "tokenizer.json").write_text(text + "\n")
        cell = named(study, tmp_path, "small,t,6,bf16,1")
        found.append(cell.settings(FACTS))
    first, second, third = (each["files"] for each in found)
    assert first["weights"] != second["weights"] == third["weights"]
    assert first["tokenizer"] == second["tokenizer"] != third["tokenizer"]
    assert "files.weights" in cell.changed_settings(found[0], found[2])
    earlier = {key: value for key, value in found[0].items() if key != "files"}  # by an earlier version
    assert cell.changed_settings(earlier, found[2]) == ""


def test_a_stress_has_the_set_of_its_size_first_and_its_own_lengths_and_learning_rate(tmp_path):
    wide = {"name": "wide", "set": {"megalowbit.model.overrides": {"n_embd": 64}, "gradient_clipping": 0.5}}
    hot = {
        "name": "hot",
        "stress_of": "wide",
        "lr_factor": 4,
        "steps": [8],
        "set": {"gradient_clipping": 2.0},
    }
    study = study_in(tmp_path, sizes=[wide, hot], instability={"window": 4})
    names = [cell.name for cell in cells_of(study, tmp_path, ROOT) if cell.size.name == "hot"]
    assert len(names) == 8
    assert {name.split(",")[2] for name in names} == {"8"}
    config = named(study, tmp_path, "hot,t,8,nvfp4@lr0.5,1").config
    assert config.settings.model.overrides == {"n_embd": 64}
    assert config.parts.deepspeed["gradient_clipping"] == 2.0
    assert config.parts.deepspeed["optimizer"]["params"]["lr"] == 3e-3 * 2
    assert config.settings.run.steps == 8


def test_a_later_override_wins_over_one_inside_it(tmp_path):
    sizes = [{"name": "small", "set": {"megalowbit.recipe.keep_last": 1}}]
    study = study_in(tmp_path, set={"megalowbit.recipe": {"base": "mxfp4"}}, sizes=sizes)
    assert named(study, tmp_path, "small,t,6,bf16,1").config.recipe == "bf16"


def test_the_model_of_a_size_is_in_the_results(tmp_path):
    """Also if only the sizes name a model; its file may be gone when a cell is run again."""
    study_in(tmp_path)
    model, base = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("model", "tiny"))
    (tmp_path / "other.json").write_text(json.dumps({**model, "n_head": 4}))
    del base["megalowbit"]["model"]
    (tmp_path / "tiny.json").write_text(json.dumps(base))
    sizes = [
        {"name": name, "set": {"megalowbit.model.config": str(tmp_path / f"{name}.json")}}
        for name in ("model", "other")
    ]
    raw = {**json.loads((tmp_path / "study.json").read_text()), "sizes": sizes}
    study = study_of(raw, "study", tmp_path)
    cells = {}
    for size in ("model", "other"):
        cell = named(study, tmp_path, f"{size},t,6,bf16,1")
        cells[cell.name] = (cell, result_of({**RESULT, "settings": cell.settings(FACTS)}, "", ""))
    data = {"format": 2, "study": raw, "base": base, "model": None, "texts": {}, **to_kept(cells, ROOT)}
    (tmp_path / "results.json").write_text(json.dumps(data))
    (tmp_path / "other.json").unlink()
    for size, num_heads in (("model", model["n_head"]), ("other", 4)):
        path, _ = unpack(tmp_path / "results.json", f"{size},t,6,bf16,1", tmp_path / f"again-{size}")
        again = named(read_study(path), tmp_path, f"{size},t,6,bf16,1")
        assert again.settings(FACTS)["model"]["n_head"] == num_heads


def test_a_mistake_in_a_recipe_is_named_with_the_cell(tmp_path):
    study = study_in(tmp_path, recipes=[{"name": "bf16", "set": {"megalowbit.recipe": "nvfp5"}}], replicas=[])
    with pytest.raises(
        UserError, match=r"size 'small', 'bf16': .*unknown recipe 'nvfp5': did you mean 'nvfp4'"
    ):
        _ = named(study, tmp_path, "small,t,6,bf16,1").config
    with pytest.raises(UserError, match="unknown cell 'small,t,6,bf17,1': did you mean 'small,t,6,bf16,1'"):
        named(study, tmp_path, "small,t,6,bf17,1")


def test_changed_settings_of_a_cell_are_named(tmp_path):
    cell = named(study_in(tmp_path), tmp_path, "small,t,6,nvfp4,1")
    settings = cell.settings(FACTS)
    assert not cell.check_settings(settings)
    cell.write("cell.json", settings)
    assert cell.check_settings(settings)
    other = named(study_in(tmp_path, set={"gradient_clipping": 0.5}), tmp_path, cell.name)
    with pytest.raises(UserError) as caught:
        other.check_settings(other.settings(FACTS))
    message = str(caught.value)
    assert message.startswith(f"{cell.path} was run with other settings: ")
    assert "config.gradient_clipping = 0.5 (was 1.0)" in message
    model = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**model, "n_head": 4}))
    again = named(study_in(tmp_path), tmp_path, cell.name)
    (tmp_path / "model.json").write_text(json.dumps({**model, "n_head": 4}))
    with pytest.raises(UserError, match=r"model\.n_head = 4 \(was 2\)"):
        again.check_settings(again.settings(FACTS))
    (tmp_path / "model.json").write_text(json.dumps(model))
    text = TextFacts(**{**vars(FACTS), "train_sha256": "c" * 64})
    with pytest.raises(UserError, match=r"text\.train_sha256 = 'cc"):
        cell.check_settings(cell.settings(text))


def test_a_recipe_counts_by_its_fields(tmp_path, monkeypatch):
    cell = named(study_in(tmp_path), tmp_path, "small,t,6,nvfp4,1")
    settings = cell.settings(FACTS)
    cell.write("cell.json", settings)
    known = dict(named_recipes())
    other = dataclasses.replace(known["nvfp4"].recipe, q_forward_input="mxfp4e2m1bnosr")
    monkeypatch.setitem(known, "nvfp4", known["nvfp4"]._replace(recipe=other))
    monkeypatch.setattr(recipe_module, "named_recipes", lambda: known)
    with pytest.raises(
        UserError, match=r"recipe\.q_forward_input = 'mxfp4e2m1bnosr' \(was 'nvfp4e2m1bnosr'\)"
    ):
        cell.check_settings(cell.settings(FACTS))
    earlier = {key: value for key, value in settings.items() if key != "recipe"}  # by an earlier version
    assert cell.changed_settings(earlier, cell.settings(FACTS)) == ""
    assert cell.changed_settings({**settings, "recipe": None}, cell.settings(FACTS)) == ""


def test_a_field_of_recipes_that_was_added_later_counts_as_its_default(tmp_path):
    cell = named(study_in(tmp_path), tmp_path, "small,t,6,nvfp4,1")
    settings = cell.settings(FACTS)
    assert settings["recipe"].pop("keep_last") == 0
    assert cell.changed_settings(settings, cell.settings(FACTS)) == ""
    settings["recipe"]["gone"] = 1
    assert "recipe.gone" in cell.changed_settings(settings, cell.settings(FACTS))


@functools.cache
def shipped(path):
    """A study and its cells; a cell keeps the configuration that it has resolved."""
    study = read_study(path)
    return study, cells_of(study, Path("/nowhere"), ROOT / "launch" / "pretrain.py")


def first_cells(path):
    """The first cell of each size and recipe."""
    return {(cell.size.name, cell.label): cell for cell in reversed(shipped(path)[1])}


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_recipe_of_a_shipped_study_resolves(path):
    study, distinct = shipped(path)[0], first_cells(path)
    assert len(distinct) >= len(study.sizes) * len(study.recipes)
    for cell in distinct.values():
        assert cell.config.settings.run.steps == (cell.size.steps or study.steps)[0]


FORWARD, BACKWARD = {"input", "weight"}, {"backward_input", "backward_weight"}
GRADIENTS = {"grad_output", "grad_output_for_weight"}
ALL = FORWARD | BACKWARD | GRADIENTS
# what is quantised; the whole name of the quantizer where it is not the recipe's own
GAP = {
    "bf16": set(),
    "nvfp4-first-100-steps": ALL,
    "nvfp4": ALL,
    "metis-nvfp4": ALL,
    "mxfp4": ALL,
    "nvidia-nvfp4": ALL,
    "nvfp4-four-over-six": ALL,
    "nvfp4-late-forward": ALL,
    "nvfp4-late-all": ALL,
    "only-forward": FORWARD,
    "only-backward": BACKWARD | GRADIENTS,
    "only-weights": {"weight", "backward_weight"},
    "only-inputs": {"input", "backward_input"},
    "only-output-gradients": GRADIENTS,
    "nvfp4-unbiased-gradients": ALL,
}


@pytest.mark.parametrize("is_every_length", slow_except([False], [False, True]))
def test_every_study_in_configs_is_valid(is_every_length):
    for path in STUDIES:
        study, cells = shipped(path)
        seen = {}
        for cell in cells if is_every_length else first_cells(path).values():
            if cell.seed == study.seeds[0]:
                seen[cell.label] = recipe(cell.config.recipe)
        rows = sum(len(each.lr_factors) for each in study.recipes)
        assert len(seen) == rows + len(study.replicas), path
        assert seen[study.baseline].name == "bf16", path


def test_the_study_of_recipes_has_all_of_them_but_the_speculative_one():
    study = read_study(ROOT / "configs" / "studies" / "recipes.json")
    expected = set(recipes()) - {"speculative-int8"}
    assert {each.name for each in study.recipes} - set(study.baseline_forks) == expected
    for each in study.recipes:  # with what belongs to them
        if each.name in expected:
            given = {key.removeprefix("megalowbit."): value for key, value in each.set.items()}
            assert given == {"recipe": each.name, **named_recipes()[each.name].settings}


@pytest.fixture(scope="module")
def gap():
    """The recipes of configs/studies/gap.json: name → resolved configuration."""
    cells = first_cells(ROOT / "configs" / "studies" / "gap.json")
    return {label: cell.config for (size, label), cell in cells.items() if size == "0.8M"}


def plans_of(config, chosen):
    """The quantisations of each layer of a model with this recipe."""
    model = build_model(config.settings.model, seed=0)
    convert(model, chosen)
    return [Quantizations.of(layer.recipe) for layer in bit_layers(model).values()]


def quantised(plan):
    return {name for name in ALL if not getattr(plan, name).quantizer.is_identity}


@pytest.mark.parametrize("name", GAP)
def test_the_layers_of_the_gap_study_quantise_what_the_recipes_name_says(gap, name):
    plans = plans_of(gap[name], recipe(gap[name].recipe))
    assert len(plans) == {"bf16": 0, "nvidia-nvfp4": 12}.get(name, 16)
    assert all(quantised(plan) == GAP[name] for plan in plans)


def test_the_gap_study_has_all_its_recipes_and_replicas(gap):
    assert set(gap) == {*GAP, "bf16-again", "nvfp4-again"}
    assert gap["nvfp4-again"].recipe == "nvfp4"
    lr = gap["nvfp4-again"].parts.deepspeed["optimizer"]["params"]["lr"]
    assert lr == pytest.approx(0.001000001, rel=1e-12)


def test_the_gap_studys_changes_of_nvfp4_are_one_thing_each(gap):
    def names(recipe_name, chosen=None):
        (first, *_) = plans_of(gap[recipe_name], chosen or recipe(gap[recipe_name].recipe))
        return {operand: getattr(first, operand).quantizer.name for operand in ALL}

    plain, six, unbiased = map(names, ("nvfp4", "nvfp4-four-over-six", "nvfp4-unbiased-gradients"))
    changed = {operand: name for operand, name in six.items() if name != plain[operand]}
    assert changed == dict.fromkeys(FORWARD | BACKWARD, "nvfp4e2m1bnosr:4over6")
    changed = {operand: name for operand, name in unbiased.items() if name != plain[operand]}
    assert changed == dict.fromkeys(GRADIENTS, "nvfp4e2m1b:unbiased")
    for name in ("only-forward", "only-backward", "only-weights", "only-inputs", "only-output-gradients"):
        assert all(each in (plain[operand], "fp32") for operand, each in names(name).items())


@pytest.mark.parametrize(
    ("name", "left"), [("nvfp4-late-forward", BACKWARD | GRADIENTS), ("nvfp4-late-all", set())]
)
def test_the_late_switches_of_the_gap_study_leave_what_their_names_say(gap, name, left):
    switch = gap[name].settings.of(LateSwitchSettings)
    assert (switch.step(1500), switch.step(3000)) == (1200, 2400)
    after = final_recipe(gap[name])
    assert quantised(Quantizations.of(after)) == left
