"""All entry points reject the same values with the same messages."""

import json
import shutil
import subprocess
import sys

import pytest
from bad_values import overrides
from forks import run_script
from quick_cases import slow_except
from tiny_models import tiny_config, tiny_model

from launchers import ROOT, write_config
from megalowbit.commands.runs import submit
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import train_bpe
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.doctor.plan import plan_run
from megalowbit.errors import UserError, lines_of
from megalowbit.hf.checkpoint import import_checkpoint
from megalowbit.pretrain import checks
from megalowbit.pretrain.checks import load_checked_config
from megalowbit.pretrain.command_line import main
from megalowbit.pretrain.estimate.dry_run import describe
from megalowbit.pretrain.run import pretrain
from megalowbit.pretrain.sweep.runs import Run

SUBMIT = ROOT / "launch" / "slurm"
START = "start     importing torch and DeepSpeed\n"


def printed_by(program, arguments, capsys):
    """The mistakes that a command line prints, and its exit code."""
    capsys.readouterr()
    code = program(arguments)
    lines = capsys.readouterr().err.removeprefix(START).strip().split("\n  - ")
    return code, [line.removeprefix("error: ") for line in (lines[1:] or lines)]


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def rejected_by_pretrain(*more):
    def rejected(config, run_dir, override, capsys):
        arguments = ["--ds-config", str(config), "--run-dir", str(run_dir), "--set", override]
        return printed_by(main, [*arguments, *more], capsys)

    return rejected


def rejected_by_submit(config, run_dir, override, capsys):
    arguments = ["--ds-config", str(config), "--run-dir", str(run_dir), "--set", override]
    of_cluster = ["--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=1", "--dry-run"]
    return printed_by(submit.main, [*arguments, *of_cluster], capsys)


def rejected_by_a_sweep(config, run_dir, override, capsys):
    run = Run(label="x", seed=0, folder=run_dir, config=config, overrides=(override,), program=ROOT)
    with pytest.raises(UserError) as caught:
        run.resolved()
    return 2, lines_of(caught.value)


ENTRY_POINTS = (
    rejected_by_pretrain(),
    rejected_by_pretrain("--dry-run"),
    rejected_by_pretrain("--prepare-data"),
    rejected_by_submit,
    rejected_by_a_sweep,
)


def check_rejection(override, word, config, run_dir, capsys, entry_points):
    """The value is refused by the check itself and by the entry points, with the same lines."""
    with pytest.raises(UserError) as caught:
        load_checked_config(config, [override], world_size=1)
    expected = lines_of(caught.value)
    assert any(word in line for line in expected), expected
    assert all(len(line) < 1500 for line in expected)
    for rejected in entry_points:
        assert rejected(config, run_dir, override, capsys) == (2, expected), override
    assert not run_dir.exists(), "nothing is written before a configuration is known to be right"


@pytest.mark.parametrize(
    ("override", "word", "entry_point"),
    [(*each, ENTRY_POINTS[place % len(ENTRY_POINTS)]) for place, each in enumerate(overrides())],
    ids=[override for override, _ in overrides()],
)
def test_a_value_is_rejected_by_an_entry_point_as_by_the_check(
    override, word, entry_point, config, tmp_path, capsys
):
    check_rejection(override, word, config, tmp_path / "run", capsys, [entry_point])


@pytest.mark.parametrize("is_every_value", slow_except([False], [False, True]))
def test_all_entry_points_reject_a_value_with_the_same_message(is_every_value, config, tmp_path, capsys):
    for override, word in list(overrides())[:: 1 if is_every_value else 40]:
        check_rejection(override, word, config, tmp_path / "run", capsys, ENTRY_POINTS)


def test_a_check_imports_neither_models_nor_the_compiler(config):
    """Either import takes seconds, in `submit` for example."""
    code = (
        "import pathlib, sys; from megalowbit.pretrain.checks import load_checked_config; "
        "load_checked_config(pathlib.Path(sys.argv[1]), [], world_size=1); "
        "print({'torch._dynamo', 'transformers.modeling_utils'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_trackio_without_its_package_is_refused_before_a_model_is_built(config, monkeypatch):
    on = ["megalowbit.trackio.enabled=true"]
    monkeypatch.setattr(checks, "is_installed", lambda package: package != "trackio")
    with pytest.raises(UserError, match=r"^megalowbit.trackio is enabled but .*set megalowbit.trackio.ena"):
        load_checked_config(config, on, world_size=1)
    load_checked_config(config, [], world_size=1)
    monkeypatch.setattr(checks, "is_installed", lambda package: True)
    load_checked_config(config, on, world_size=1)


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}


@pytest.mark.parametrize("options", [["--dry-run"], ["--prepare-data"], []])
def test_a_tokenizer_that_cannot_be_exported_is_refused_before_it_is_used(options, config, tmp_path, capsys):
    config.with_name("model.json").write_text(json.dumps(QWEN2))
    arguments = ["--ds-config", str(config), "--run-dir", str(tmp_path / "run"), *options]
    code, lines = printed_by(main, arguments, capsys)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("tokenizer byte cannot be exported with a qwen2 model")
    assert not (tmp_path / "run").exists()
    if options == ["--prepare-data"]:
        assert main([*arguments, "--set", "megalowbit.checkpoint.export_hf=false"]) == 0


THREE_AT_ONCE = ["megalowbit.checkpoint.keep=true", "communication_data_type=fp99", "megalowbit.recipe={}"]


@pytest.mark.parametrize(
    "command",
    [
        [ROOT / "launch" / "pretrain.py", "--dry-run"],
        [ROOT / "launch" / "pretrain.py", "--prepare-data"],
        [ROOT / "launch" / "pretrain.py"],
        [SUBMIT / "submit.py", "--dry-run", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=1"],
    ],
    ids=["dry-run", "prepare-data", "run", "submit"],
)
def test_real_commands_print_all_mistakes_and_exit_with_2(command, config, tmp_path):
    arguments = [part for override in THREE_AT_ONCE for part in ("--set", override)]
    arguments += ["--ds-config", config, "--run-dir", tmp_path / "run"]
    program, *options = command
    done = run_script(program, *options, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    first, *others = done.stderr.removeprefix(START).strip().splitlines()
    assert first == "error: 3 mistakes:"
    assert len(others) == 3
    assert others[0].startswith("  - megalowbit.checkpoint.keep = True is not valid: write a number")
    assert others[1].startswith("  - unknown communication_data_type 'fp99'")
    assert others[2].startswith("  - recipe block lacks q_forward_input")


def test_errors_found_by_deepspeed_are_reported_with_the_others(config):
    overrides = ["zero_optimization.reduce_bucket_size=true", "checkpoint.tag_validation=3"]
    overrides += ["megalowbit.model.overrides.n_head=5", "csv_monitor.enabeld=true"]
    with pytest.raises(UserError) as caught:
        load_checked_config(config, overrides, world_size=1)
    lines = lines_of(caught.value)
    assert len(lines) == 4
    assert "zero_optimization.reduce_bucket_size = True is not valid: write a number" in lines[0]
    assert "DeepSpeed rejects checkpoint = {'tag_validation': 3}" in lines[1]
    assert "DeepSpeed rejects csv_monitor.enabeld = True" in lines[2]
    assert "n_head 5 must divide" in lines[3]


def test_a_recipe_left_null_is_the_default_and_shown_as_such(config):
    resolved = load_checked_config(config, ["megalowbit.recipe=null"], world_size=1)
    assert resolved.recipe == resolved.to_dict()["megalowbit"]["recipe"] == "nvfp4-first-block-fp8"


def test_auto_sizes_are_filled_in_from_the_model(config, tmp_path):
    sizes = {"reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": 921}
    sizes["stage3_param_persistence_threshold"] = 320
    overrides = ["zero_optimization.stage=3", *(f"zero_optimization.{key}=auto" for key in sizes)]
    resolved = load_checked_config(config, overrides, world_size=1).to_dict()
    assert {key: resolved["zero_optimization"][key] for key in sizes} == sizes
    again = tmp_path / "again.json"
    again.write_text(json.dumps(resolved))
    assert load_checked_config(again, [], world_size=1).to_dict() == json.loads(json.dumps(resolved))
    overrides.append("megalowbit.model.overrides.n_embd=64")
    wider = load_checked_config(config, overrides, world_size=1).to_dict()
    assert wider["zero_optimization"]["reduce_bucket_size"] == 4096


def test_an_unsupported_optimizer_name_is_rejected_with_an_alternative(config):
    for name in ("Muon", "lion", "LAMB", "OneBitAdam", "Adafactor"):
        with pytest.raises(UserError, match=r"is not among .*pass a torch optimizer.* as optimizer= to mlb"):
            load_checked_config(config, [f"optimizer.type={name}"], world_size=1)


def test_attention_without_a_mask_does_not_keep_documents_apart(config, tmp_path):
    """Such a model would train, and look across documents."""
    read = json.loads((tmp_path / "model.json").read_text())
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**read, "attn_implementation": "flex_attention"}))
    weights = [f"megalowbit.model={json.dumps({'checkpoint': str(folder)})}"]
    load_checked_config(config, weights, world_size=1)
    with pytest.raises(UserError, match="'flex_attention' would not do: set it to 'sdpa', 'eager' or one of"):
        load_checked_config(config, [*weights, "megalowbit.data.packing=documents"], world_size=1)


def test_longrope_keeps_documents_apart_only_if_its_factors_are_always_the_short_ones(config, tmp_path):
    """tests/hf/batches/test_separate_documents.py shows the difference."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config("llama").to_dict(), "rope_parameters": {**scaling, "rope_theta": 1e4}})
    )
    settings = [
        f"megalowbit.model={json.dumps({'checkpoint': str(tmp_path)})}",
        "megalowbit.data.sequence_length=17",
    ]
    load_checked_config(config, settings, world_size=1)
    for packing in ("documents", "best_fit"):
        settings.append(f"megalowbit.data.packing={packing}")
        load_checked_config(config, [*settings, "megalowbit.data.sequence_length=16"], world_size=1)
        with pytest.raises(UserError, match=f"packing '{packing}' .*longrope .*_length 17 to at most .* 16$"):
            load_checked_config(config, settings, world_size=1)


@pytest.fixture
def start(config, tmp_path):
    """A checkpoint to start from, and a BPE beside it."""
    tiny_model("gpt2", vocab_size=320).save_pretrained(tmp_path / "hf")
    bpe = train_bpe(LocalCorpus(tmp_path / "text.txt"), 300, tmp_path / "cache")
    bpe.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    return tmp_path / "start"


def from_start(config, path, tokenizer=None, **data):
    data |= {} if tokenizer is None else {"tokenizer": str(tokenizer)}
    named = [f"megalowbit.data.{key}={json.dumps(value)}" for key, value in data.items()]
    model = f"megalowbit.model={json.dumps({'checkpoint': str(path)})}"
    fast = ["megalowbit.run.steps=2", "megalowbit.checkpoint.export_hf=false"]
    return load_checked_config(config, [model, *fast, *named], world_size=1)


def train(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)


def test_weights_are_not_trained_with_the_ids_of_another_tokenizer(config, start, tmp_path):
    for path, tokenizer in ((start, start / "tokenizer"), (tmp_path / "hf", tmp_path / "hf")):
        expected = f"tokenizer in {tokenizer} .*'byte', .* set megalowbit.data.tokenizer to {tokenizer}, or, "
        for look in (describe, plan_run, lambda settings: train(settings, tmp_path / "run")):
            with pytest.raises(UserError, match=expected):
                look(from_start(config, path))
        plan_run(from_start(config, path, tokenizer))
        plan_run(from_start(config, path, "none", vocab_size=256))
    assert not (tmp_path / "run").exists()
    shutil.rmtree(start / "tokenizer")
    plan_run(from_start(config, start))


def test_a_resumed_run_may_have_another_tokenizer_than_its_first_weights(config, start, tmp_path):
    byte, run = from_start(config, start), tmp_path / "run"
    with pytest.raises(UserError, match=r"gives other ids than data\.tokenizer 'byte'"):
        train(byte, run, is_resume=True)  # there is nothing to continue
    (start / "tokenizer").rename(tmp_path / "aside")
    train(byte, run)
    (tmp_path / "aside").rename(start / "tokenizer")
    train(byte, run, is_resume=True)


def test_a_bpe_is_compared_with_that_of_the_weights_once_it_is_trained(config, start, tmp_path):
    bpe = {"tokenizer": "bpe", "cache_dir": str(tmp_path / "cache")}
    other = from_start(config, start, vocab_size=270, **bpe)
    plan_run(other)
    with pytest.raises(UserError, match=r"gives other ids than data\.tokenizer 'bpe'"):
        train(other, tmp_path / "other")
    train(from_start(config, start, vocab_size=300, **bpe), tmp_path / "same")
