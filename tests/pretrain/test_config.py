import json
import sys
from pathlib import Path

import pytest

from launchers import write_config
from megalowbit.errors import UserError, lines_of
from megalowbit.pretrain.config import load_config


def raw_config(**block):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"corpus": "stdlib", "sequence_length": 64},
            "run": {"steps": 5},
            **block,
        },
    }


@pytest.fixture
def write(tmp_path):
    def write(raw):
        path = tmp_path / "run.json"
        path.write_text(json.dumps(raw), encoding="utf-8")
        return path

    (tmp_path / "model.json").write_text("{}", encoding="utf-8")
    return write


def resolve(path, *overrides, world_size=2):
    return load_config(path, list(overrides), world_size=world_size)


def test_defaults_are_filled_in_and_the_result_runs_again(write, tmp_path):
    config = resolve(write(raw_config()))
    resolved = config.to_dict()
    assert resolved["train_batch_size"] == 4
    assert resolved["megalowbit"]["recipe"] == "nvfp4-first-block-fp8"
    assert resolved["megalowbit"]["precision"] == "bf16"
    again = tmp_path / "again.json"
    again.write_text(json.dumps(resolved), encoding="utf-8")
    assert resolve(again).to_dict() == resolved


def test_the_seed_of_the_run_orders_the_data_unless_it_has_its_own(write):
    path = write(raw_config())
    assert resolve(path, "megalowbit.run.seed=77").settings.data.seed == 77
    assert resolve(path, "megalowbit.run.seed=77", "megalowbit.data.seed=5").settings.data.seed == 5


def test_paths_in_the_file_are_relative_to_the_file_and_overrides_to_the_working_directory(
    write, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    path = write(raw_config(data={"corpus": "text.jsonl", "sequence_length": 8}))
    settings = resolve(path).settings
    assert Path(settings.model.config) == tmp_path / "model.json"
    assert Path(settings.data.corpus) == tmp_path / "text.jsonl"
    settings = resolve(path, "megalowbit.model.config=other.json").settings
    assert Path(settings.model.config) == elsewhere / "other.json"


def test_the_name_of_a_data_set_is_no_path(write):
    path = write(raw_config(data={"corpus": "someone/some-text", "sequence_length": 8}))
    assert resolve(path).settings.data.corpus == "someone/some-text"


def test_overrides_are_json_or_plain_text_and_create_what_is_missing(write):
    config = resolve(
        write(raw_config()),
        "megalowbit.run.steps=9",
        "megalowbit.recipe=bf16",
        "gradient_clipping=0.5",
        'scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}}',
        "megalowbit.checkpoint.keep=null",
    )
    assert config.settings.run.steps == 9
    assert config.parts.settings.recipe == "bf16"
    assert config.parts.deepspeed["gradient_clipping"] == 0.5
    assert config.parts.deepspeed["scheduler"]["type"] == "WarmupLR"
    assert config.settings.checkpoint.keep is None
    assert config.to_dict()["megalowbit"]["checkpoint"]["keep"] is None


def test_a_later_override_wins(write):
    config = resolve(write(raw_config()), "megalowbit.run.steps=9", "megalowbit.run.steps=3")
    assert config.settings.run.steps == 3


def test_a_stock_fp16_block_is_translated_and_not_passed_to_deepspeed(write):
    raw = raw_config()
    raw["fp16"] = {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale_window": 7,
        "hysteresis": 3,
        "min_loss_scale": 2,
    }
    config = resolve(write(raw))
    assert "fp16" not in config.parts.deepspeed
    assert config.parts.settings.precision == "fp16"
    scaler = config.to_dict()["megalowbit"]["grad_scaler"]
    assert scaler["initial_scale"] == 4096
    assert (scaler["growth_interval"], scaler["hysteresis"], scaler["min_scale"]) == (7, 3, 2)


def test_stock_monitor_blocks_configure_the_sinks_of_the_run(write):
    raw = raw_config()
    raw["wandb"] = {"enabled": True, "project": "mine"}
    raw["tensorboard"] = {"enabled": True, "output_path": "tb", "job_name": "j"}
    config = resolve(write(raw))
    assert config.monitors.wandb.project == "mine"
    assert not {"wandb", "tensorboard"} & config.parts.deepspeed.keys()
    assert config.to_dict()["wandb"] == {"enabled": True, "project": "mine"}


def without(raw, *path):
    node = raw
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return raw


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["megalowbit.recipee=nvfp4"], "unknown key 'megalowbit.recipee': did you mean 'megalowbit.recipe'"),
        (
            ["megalowbit.run.stepz=3"],
            "unknown key 'megalowbit.run.stepz': did you mean 'megalowbit.run.steps'",
        ),
        (["gradient_cliping=1"], "'gradient_cliping': did you mean 'gradient_clipping'"),
        (["wandb.projekt=x"], "unknown key 'wandb.projekt': did you mean 'wandb.project'"),
        (["megalowbit.run.steps=0"], "megalowbit.run.steps = 0 is not valid"),
        (["megalowbit.run.overflow_retries=true"], "megalowbit.run.overflow_retries = True is not valid"),
        (["megalowbit.run.overflow_retries=1.5"], "megalowbit.run.overflow_retries = 1.5 is not valid"),
        (["megalowbit.run.steps=many"], "megalowbit.run.steps = 'many' is not valid"),
        (["megalowbit.run.seed=-1"], "megalowbit.run.seed = -1 is not valid"),
        (["megalowbit.run.name=a/b"], "megalowbit.run.name = 'a/b' is not valid"),
        (["megalowbit.run.name=."], "megalowbit.run.name = '.' is not valid"),
        (["megalowbit.run.name=.."], "megalowbit.run.name = '..' is not valid"),
        (["megalowbit.run.steps=" + "[" * 100_000], "is nested too deeply"),
        (["megalowbit.run.steps=" + "9" * 5000], "holds an integer of thousands of digits"),
        (["gradient_clipping=NaN"], "NaN is not a JSON number"),
        (['megalowbit.model.config="a\\u0000b"'], "megalowbit.model.config = 'a\\x00b' is not a valid path"),
        (['megalowbit.model.config="\\ud800"'], "megalowbit.model.config = '\\ud800' is not a valid path"),
        (["megalowbit.model.config=~nobody-of-this-name/x.json"], "is not a valid path (Could not determine"),
        (["megalowbit.data.corpus=" + "x" * 300], "is not a valid path (File name too long)"),
        (["megalowbit.data.corpus=" + "x" * 300 + ".txt"], "is not a valid path (File name too long)"),
        (['megalowbit.data.cache_dir="a\\u0000b"'], "megalowbit.data.cache_dir = 'a\\x00b' is not a valid"),
        (["megalowbit.precision=fp8"], "megalowbit.precision = 'fp8' is not valid"),
        (["megalowbit.data.sequence_length=1"], "megalowbit.data.sequence_length = 1 is not valid"),
        (["megalowbit.run"], "--set 'megalowbit.run' is not key=value"),
        (["megalowbit.run.steps.more=1"], "megalowbit.run.steps is 5, not an object that can contain 'more'"),
        (["megalowbit=3"], '"megalowbit" = 3 must be an object'),
        (["zero_optimization.stage=4"], "zero_optimization.stage"),
        (["train_batch_size=7"], "train_batch_size 7"),
        (["bf16.enabled=true", "megalowbit.precision=fp16"], "bf16"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_remedy(write, overrides, message):
    with pytest.raises(UserError) as caught:
        resolve(write(raw_config()), *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="from there on opening the file says it")
def test_a_loop_of_links_is_a_one_line_error(write, tmp_path):
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    with pytest.raises(UserError, match=r"megalowbit\.model\.config = '.*loop\.json' is not a valid path"):
        resolve(write(raw_config()), f"megalowbit.model.config={tmp_path}/loop.json")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path, write):
    path = write(raw_config())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert resolve(path).settings.run.steps == 5


def test_the_cache_folder_is_a_path_like_the_others(write, tmp_path):
    path = write(raw_config(data={"corpus": "stdlib", "sequence_length": 8, "cache_dir": "cache"}))
    assert resolve(path).settings.data.cache_dir == tmp_path / "cache"
    assert resolve(path, "megalowbit.data.cache_dir=~/x").settings.data.cache_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("corpus", "is_path"),
    [
        ("text.jsonl.zst", True), ("text.arrow", True), ("shards/*.jsonl", True), ("ids.bin", True),
        ("ids", True), ("other", False), ("someone/data", False), ("stdlib", False),
    ],
)  # fmt: skip
def test_a_corpus_that_looks_like_files_is_a_path_beside_the_configuration(write, tmp_path, corpus, is_path):
    (tmp_path / "ids.idx").touch()  # "ids" is the prefix of Megatron's files
    path = write(raw_config(data={"corpus": corpus, "sequence_length": 8}))
    assert resolve(path).settings.data.corpus == (str(tmp_path / corpus) if is_path else corpus)


def test_paths_of_sources_are_beside_the_configuration_and_overrides_reach_them(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    sources = {
        "web": {"corpus": "web.jsonl", "weight": 3},
        "hub": {"corpus": "someone/data", "weight": 1},
        "own": {"corpus": "stdlib", "weight": 1},
    }
    path = write(raw_config(data={"sources": sources, "sequence_length": 8}))
    found = resolve(path, "megalowbit.data.sources.web.weight=0.5").settings.data
    assert found.corpus == "blend"
    assert {name: (each.corpus, each.weight) for name, each in found.sources.items()} == {
        "web": (str(tmp_path / "web.jsonl"), 0.5),
        "hub": ("someone/data", 1),
        "own": ("stdlib", 1),
    }
    again = tmp_path / "again.json"
    again.write_text(json.dumps(resolve(path).to_dict()))  # a resolved configuration is one, too
    assert resolve(again).settings == resolve(path).settings.model_copy(
        update={"run": resolve(again).settings.run}
    )
    with pytest.raises(UserError, match=r"data.sources.web.corpus = '' is empty"):
        resolve(path, "megalowbit.data.sources.web.corpus=")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "megalowbit.data.sources.web.weight=-1",
            "data.sources.web.weight = -1 is not valid: .* greater than",
        ),
        ("megalowbit.data.sources.web.weight=NaN", "NaN is not a JSON number: write a finite number"),
        (
            "megalowbit.data.sources.web.weights=1",
            "unknown key 'megalowbit.data.sources.web.weights': did you",
        ),
        ('megalowbit.data.sources={"web": {"weight": 1}}', "data.sources.web.corpus is missing: the text"),
        (
            'megalowbit.data.sources={"web": {"corpus": "a", "weight": 1}, "web": {"corpus": "b"}}',
            "key 'web' occurs twice in one object: remove one of them",
        ),
        (
            "megalowbit.data.corpus=web.txt",
            "corpus is '.*web.txt', and sources are set, too: set one of them",
        ),
        ("megalowbit.data.sources.web.weight=0", "all weights in sources are 0: give one of them"),
        ('megalowbit.data.phases=[{"from_step": 3, "weights": {"wep": 1}}]', "names 'wep', which is not in"),
    ],
)
def test_mistakes_in_sources_are_one_line_errors(write, override, message):
    sources = {"web": {"corpus": "web.jsonl", "weight": 3}}
    with pytest.raises(UserError, match=message) as caught:
        resolve(write(raw_config(data={"sources": sources, "sequence_length": 8})), override)
    assert len(str(caught.value).splitlines()) == 1


def test_none_is_no_folder_with_a_tokenizer(write, tmp_path):
    (tmp_path / "none").mkdir()
    data = {"corpus": "ids.bin", "tokenizer": "none", "vocab_size": 300, "sequence_length": 8}
    assert resolve(write(raw_config(data=data))).settings.data.tokenizer == "none"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("megalowbit",), 'has no "megalowbit" object'),
        (("megalowbit", "run"), "megalowbit.run is missing"),
        (("megalowbit", "run", "steps"), "megalowbit.run.steps is missing: number of optimizer steps"),
        (("megalowbit", "data"), "megalowbit.data is missing"),
        (("optimizer",), "optimizer is missing"),
    ],
)
def test_a_missing_part_is_named(write, path, message):
    with pytest.raises(UserError) as caught:
        resolve(write(without(raw_config(), *path)))
    assert message in str(caught.value)


def test_an_unreadable_file_is_named_with_the_place(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json"):
        resolve(tmp_path / "nothing.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(UserError, match=r"broken\.json is not JSON: line 2, column 6"):
        resolve(broken)


SPLIT = {"base": "nvfp4", "parameter_split": {"rank": 4, "warmup_steps": 5}}


@pytest.mark.parametrize(
    "recipe",
    [
        SPLIT,
        {"base": SPLIT, "keep": ["*.h.0.*"]},
        {"base": SPLIT, "parameter_split": {"rank": 2}},
        {"base": "nvfp4", "parameter_split": {"warmup_steps": 50}},
    ],
)
def test_a_first_split_after_the_last_step_is_refused(write, recipe):
    path = write(raw_config(recipe=recipe))
    with pytest.raises(UserError, match=r"parameter_split\.warmup_steps = 50? is not below .*steps = 5, so"):
        resolve(path)
    resolve(path, "megalowbit.run.steps=51")


@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4",
        {"base": "nvfp4", "parameter_split": {"rank": 4}},
        {"base": "nvfp4", "parameter_split": {"rank": 4, "warmup_steps": 4}},
        {"base": SPLIT, "parameter_split": None},
        {"base": SPLIT, "parameter_split": {"warmup_steps": 0}},
    ],
)
def test_a_first_split_before_the_last_step_is_none_or_in_time(write, recipe):
    assert resolve(write(raw_config(recipe=recipe))).recipe == recipe


def test_unsupported_pipeline_settings_are_rejected_before_any_import(write):
    overrides = ["pipeline.stages=2", "zero_optimization.stage=2"]
    with pytest.raises(UserError, match=r"zero_optimization\.stage = 2 .* pipeline\.stages = 2"):
        resolve(write(raw_config()), *overrides)


def test_settings_under_which_no_rollback_can_happen_are_rejected(tmp_path):
    config = write_config(tmp_path)
    guarded = ['megalowbit.loss_guard={"nonfinite": "rollback", "patience": 50}']
    with pytest.raises(
        UserError, match=r"patience = 50 is never reached, .*max_consecutive_skips = 50 stops"
    ):
        load_config(config, guarded, world_size=1)
    load_config(config, [*guarded, "megalowbit.run.max_consecutive_skips=51"], world_size=1)
    load_config(config, ["megalowbit.loss_guard.patience=50"], world_size=1)  # it only skips


def test_all_unsupported_combinations_are_reported_together(write):
    with pytest.raises(UserError) as caught:
        resolve(
            write(raw_config()),
            "zero_optimization.stage=2",
            "megalowbit.fp32_norms=true",
            "megalowbit.layer_scaling.enabled=true",
            "gradient_allreduce_op=sum",
            "megalowbit.late_switch.at=9000",
        )
    lines = lines_of(caught.value)
    named = (
        "late_switch.at = 9000",
        "fp32_norms cannot",
        "layer_scaling cannot",
        "gradient_allreduce_op = 'sum'",
    )
    assert len(lines) == len(named)
    assert all(any(name in line for line in lines) for name in named)
