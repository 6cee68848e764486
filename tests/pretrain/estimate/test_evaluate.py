"""`python -m megalowbit evaluate` finds what the run has recorded, in each place where its weights are."""

import json
import shutil
import subprocess
import sys

import cpu_products
import pytest
from forked_ranks import variables

from launchers import ROOT, check_refusal, free_port, training_text, write_config
from megalowbit.commands.table import main
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import train_bpe
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import import_checkpoint
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.evaluate import ProgressLines, _configuration, evaluate
from megalowbit.pretrain.run import pretrain

TEXT = training_text()[50:1050]
BLOCK = {"recipe": "nvfp4", "run": {"steps": 4}, "validation": {"every": 2, "bf16": True}}
SWITCH = {"late_switch": {"at": 3}}
SPECULATION = {
    "recipe": "speculative-int8",
    "speculation": {"candidates": ["int8", "fp8", "bf16"], "threshold_db": 15, "every": 2},
}
BPE = {"tokenizer": "bpe", "vocab_size": 300}


def trained(folder, held=("held.txt", TEXT), **block):
    """Train in `folder / "run"`; returns the validations. `held`: a file and its text."""
    config = write_config(folder, model={"vocab_size": 320}, block={**BLOCK, **block})
    (folder / held[0]).write_text(held[1])
    text = f'megalowbit.data.validation={{"corpus": "{folder / held[0]}"}}'
    pretrain(
        load_config(config, [text], world_size=1), ProcessIdentity(), run_dir=folder / "run", is_resume=False
    )
    return validations(folder)


def validations(folder):
    """By step, from the records of the run."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: {key: value for key, value in row.items() if "validation/" in key}
        for row in rows
        if "validation/loss" in row
    }


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def recorded(finished_run, tmp_path):
    """Validations of a run in `tmp_path / "run"`, trained once: a copy, as if it had been trained there."""
    if not (finished_run / "run").exists():
        trained(finished_run)
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(str(finished_run), str(tmp_path)))
    return validations(tmp_path)


def evaluated(path, folder, *overrides, config_file=None, inputs="dynamic", **more):
    """By default, inputs are quantised as a run's own validation does it."""
    output = folder / "out.json"
    options = {"config_file": config_file, "overrides": list(overrides), "output": output, "inputs": inputs}
    options |= more
    facts = evaluate(path, ProcessIdentity(), **options)
    found = json.loads(output.read_text())
    assert figures(found) == facts
    return found


def figures(found):
    return {key: value for key, value in found.items() if "validation/" in key}


def test_a_run_its_checkpoints_and_its_export_give_the_recorded_losses(
    recorded, tmp_path, capsys, monkeypatch
):
    (tmp_path / "text.txt").unlink()  # the text for training is not needed
    run = tmp_path / "run"
    newest = evaluated(run, tmp_path)
    assert "evaluated" not in capsys.readouterr().err  # it did not last
    monkeypatch.setattr("megalowbit.pretrain.estimate.evaluate.SECONDS_BETWEEN_LINES", 0.0)
    evaluated(run, tmp_path)
    monkeypatch.undo()
    printed = capsys.readouterr()
    progress = [line for line in printed.err.splitlines() if line.startswith("evaluated ")]
    assert len(progress) > 2
    # one before each batch but the first, in two passes, one of them in bf16
    assert progress[-1].startswith(f"evaluated {len(progress) / (len(progress) + 1):.0%} of the text, 0:0")
    assert "evaluated" not in printed.out
    assert figures(newest) == recorded[4]
    assert newest["path"].endswith("step-00000004")
    assert (newest["step"], newest["recipe"]) == (4, "nvfp4")
    assert f"loss {recorded[4]['validation/loss']:.4f}, perplexity" in printed.out
    assert figures(evaluated(run / "checkpoints" / "step-00000002", tmp_path)) == recorded[2]
    assert figures(evaluated(run / "hf", tmp_path)) == recorded[4]
    capsys.readouterr()
    with pytest.raises(UserError, match=r"--output .*/none/x.json: the folder does not exist"):
        evaluate(run, ProcessIdentity(), config_file=None, overrides=[], output=tmp_path / "none" / "x.json")
    assert "loss" not in capsys.readouterr().out  # it is noticed before the text is evaluated
    plain = evaluated(run, tmp_path, "megalowbit.recipe=bf16")
    assert plain["validation/loss"] == plain["validation/bf16_loss"] == recorded[4]["validation/bf16_loss"]
    (tmp_path / "text.txt").write_text(TEXT)  # the text for training may be evaluated, too
    trained_on = evaluated(run, tmp_path, f"megalowbit.data.validation.corpus={tmp_path / 'text.txt'}")
    assert figures(trained_on) == recorded[4]


def test_progress_is_a_line_every_ten_seconds_with_the_time_left():
    now, lines = [0.0], []
    progress = ProgressLines(8, lines.append, clock=lambda: now[0])
    for _ in range(8):
        progress()
        now[0] += 4
    assert lines == ["evaluated 38% of the text, 0:00:20 left", "evaluated 75% of the text, 0:00:08 left"]


@pytest.mark.slow
def test_recorded_inputs_are_used_where_they_are_and_make_the_batch_size_unimportant(tmp_path, capsys):
    recorded = trained(tmp_path, recipe="metis-nvfp4", run={"steps": 4})
    run = tmp_path / "run"
    sizes = [f"megalowbit.validation.micro_batch_size={size}" for size in (1, 2, 5)]
    for inputs, tolerance in (("dynamic", None), (None, 1e-9)):
        losses = [evaluated(run, tmp_path, size, inputs=inputs)["validation/loss"] for size in sizes]
        spread = max(losses) - min(losses)
        assert spread > 1e-5 if tolerance is None else spread < tolerance
    found = evaluated(run, tmp_path, inputs=None)
    assert found["inputs"] == "static"
    assert 0 <= found["inputs_beyond_range"] < 0.01
    assert 0 < abs(found["validation/loss"] - recorded[4]["validation/loss"]) < 0.01
    assert found["validation/bf16_loss"] == recorded[4]["validation/bf16_loss"]
    printed = capsys.readouterr().out
    assert "inputs    static: quantised by numbers recorded at the end of training" in printed
    assert f"{found['inputs_beyond_range']:.2%} of the inputs beyond their recorded range" in printed
    half = run / "checkpoints" / "step-00000002"  # before the record
    earlier = evaluated(half, tmp_path, inputs=None)
    assert figures(earlier) == recorded[2]
    assert (earlier["inputs"], earlier["inputs_beyond_range"]) == ("dynamic", None)
    assert "each batch; their range was not recorded there" in capsys.readouterr().out
    with pytest.raises(UserError, match="--inputs static: their range was not recorded there"):
        evaluated(half, tmp_path, inputs="static")
    assert evaluated(run, tmp_path, "megalowbit.recipe=nvfp4", inputs=None)["inputs"] == "static"
    assert evaluated(run, tmp_path, "megalowbit.recipe=mxfp4", inputs=None)["inputs"] is None
    qb = 'megalowbit.recipe={"base": "nvfp4", "split_input": {"method": "qb", "rank": 2}}'
    assert evaluated(run, tmp_path, qb, inputs=None)["inputs"] == "dynamic"
    assert "takes directions from each batch" in capsys.readouterr().out


def test_after_a_late_switch_the_forward_of_the_recipe_is_evaluated_on_demand(tmp_path, capsys):
    """As a packed model computes it: rounded weights, and inputs rounded by what was recorded."""
    recorded = trained(tmp_path, recipe="nvfp4", run={"steps": 4}, late_switch={"at": 2, "scope": "forward"})
    run = tmp_path / "run"
    found = evaluated(run, tmp_path, inputs=None)
    assert found["validation/loss"] == found["validation/bf16_loss"] == recorded[4]["validation/loss"]
    assert (found["inputs"], found["late_switch"]) == (None, True)
    assert (
        "inputs    not quantised: a late switch of the run has ended the rounding" in capsys.readouterr().out
    )
    with pytest.raises(
        UserError, match=r"--inputs static: a late switch .*: --forward recipe evaluates with it"
    ):
        evaluated(run, tmp_path, inputs="static")
    served = evaluated(run, tmp_path, inputs="static", forward="recipe")
    assert (served["inputs"], served["late_switch"]) == ("static", False)
    exported = evaluated(run / "hf", tmp_path, inputs=None)
    assert figures(exported) == recorded[4]
    assert (exported["inputs"], exported["late_switch"]) == (None, True)
    assert "inputs    not quantised: a late switch of the run has ended" in capsys.readouterr().out
    before = shutil.copytree(run / "hf", run / "hf-step-00000002")  # as if an earlier end had been there
    rounded = [evaluated(before, tmp_path), evaluated(run / "hf", tmp_path, forward="recipe")]
    assert [each["late_switch"] for each in rounded] == [False, False]
    # the same weights in a configuration without a switch are rounded, too
    config = tmp_path / "other.json"
    content = json.loads((run / "config.json").read_text())
    content["megalowbit"]["late_switch"] = None
    config.write_text(json.dumps(content))
    rounded += [evaluated(run / "hf", tmp_path, config_file=config)]
    dynamic = evaluated(run, tmp_path, inputs="dynamic", forward="recipe")
    assert {each["validation/loss"] for each in rounded} == {dynamic["validation/loss"]}
    mxfp4 = evaluated(run / "hf", tmp_path, "megalowbit.recipe=mxfp4")  # as with a checkpoint
    assert mxfp4["late_switch"] is False
    assert 0 < abs(served["validation/loss"] - dynamic["validation/loss"]) < 0.01
    assert abs(served["validation/loss"] - found["validation/loss"]) > 1e-4


def test_packing_and_padding_are_those_of_the_run(tmp_path):
    """The export has no padding: it is padded again, and validation leaves it out."""
    lines = [json.dumps({"text": each}) + "\n" for each in training_text().splitlines() if each]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    held = "held.jsonl", "".join(json.dumps({"text": TEXT[at : at + 9]}) + "\n" for at in range(0, 900, 9))
    data = {"corpus": "lines.jsonl", "sequence_length": 32, "packing": "documents", "eod_mask_loss": True}
    model = {"config": "model.json", "pad_vocab_to_multiple_of": 96}
    recorded = trained(tmp_path, held, data=data, model=model, recipe="bf16")
    run = tmp_path / "run"
    for path in (run, run / "hf"):
        assert figures(evaluated(path, tmp_path)) == recorded[4]
    assert json.loads((run / "hf" / "config.json").read_text())["vocab_size"] == 320
    for other in ("packing=wrapped", "eod_mask_loss=false"):
        found = evaluated(run, tmp_path, f"megalowbit.data.{other}")
        assert abs(found["validation/loss"] - recorded[4]["validation/loss"]) > 1e-4


@pytest.mark.parametrize("is_padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_keeps_its_padding_under_another_configuration(tmp_path, is_padded):
    for name, multiple in (("padded", 96), ("plain", None)):
        (tmp_path / name).mkdir()
        model = {"config": "model.json", "pad_vocab_to_multiple_of": multiple}
        if is_padded == (name == "padded"):
            recorded, folder = trained(tmp_path / name, model=model), tmp_path / name
        else:
            config = write_config(tmp_path / name, model={"vocab_size": 320}, block={**BLOCK, "model": model})
    text = f"megalowbit.data.validation.corpus={folder / 'held.txt'}"
    for path in ("run", "run/checkpoints/step-00000004", "run/hf"):
        assert figures(evaluated(folder / path, tmp_path, text, config_file=config)) == recorded[4]
    pad = "megalowbit.model.pad_vocab_to_multiple_of"
    other, rows = ("null", (384, 320)) if is_padded else ("96", (320, 384))
    with pytest.raises(UserError, match=f"has {rows[0]} rows with its padding, and {pad} makes it {rows[1]}"):
        evaluated(folder / "run", tmp_path, f"{pad}={other}")
    assert figures(evaluated(folder / "run" / "hf", tmp_path, f"{pad}={other}")) == recorded[4]
    weights_only = evaluated(folder / "run", tmp_path, f"{pad}={other}", "megalowbit.recipe=bf16")
    assert weights_only["validation/loss"] == recorded[4]["validation/bf16_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [SWITCH, SPECULATION, {"data": {"corpus": "text.txt", "sequence_length": 32, **BPE}}]
)
def test_the_state_of_a_run_is_part_of_its_checkpoint(tmp_path, block):
    recorded = trained(tmp_path, **block)
    (tmp_path / "text.txt").unlink()
    assert figures(evaluated(tmp_path / "run", tmp_path)) == recorded[4]
    assert figures(evaluated(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path)) == recorded[2]


def test_a_folder_from_elsewhere_needs_a_configuration(recorded, tmp_path, capsys):
    shutil.move(tmp_path / "run" / "hf", tmp_path / "elsewhere")
    assert main(["evaluate", str(tmp_path / "elsewhere")]) == 2
    assert "is not in a run's folder: name a configuration with --ds-config" in capsys.readouterr().err
    config = tmp_path / "tiny.json"
    assert main(["evaluate", str(tmp_path / "elsewhere"), "--ds-config", str(config)]) == 2
    assert "there is no text to evaluate on" in capsys.readouterr().err
    text = f"megalowbit.data.validation.corpus={tmp_path / 'held.txt'}"
    assert figures(evaluated(tmp_path / "elsewhere", tmp_path, text, config_file=config)) == recorded[4]
    import_checkpoint(tmp_path / "elsewhere", tmp_path / "start")  # weights without the state of a run
    assert figures(evaluated(tmp_path / "start", tmp_path, text, config_file=config)) == recorded[4]


def test_weights_are_not_evaluated_with_the_ids_of_another_tokenizer(recorded, tmp_path, caplog):
    config, elsewhere = tmp_path / "tiny.json", tmp_path / "elsewhere"
    shutil.move(tmp_path / "run" / "hf", elsewhere)
    bpe = train_bpe(LocalCorpus(tmp_path / "text.txt"), 300, tmp_path / "cache")
    bpe.save_pretrained(tmp_path / "bpe")
    text = f"megalowbit.data.validation.corpus={tmp_path / 'held.txt'}"

    def losses(*overrides):
        return figures(evaluated(elsewhere, tmp_path, text, *overrides, config_file=config))

    by_name = losses(f"megalowbit.data.tokenizer={elsewhere}")
    assert by_name["validation/loss"] == recorded[4]["validation/loss"]
    with pytest.raises(
        UserError, match=f"elsewhere gives other ids than data.tokenizer '{tmp_path / 'bpe'}'"
    ):
        losses(f"megalowbit.data.tokenizer={tmp_path / 'bpe'}")
    (elsewhere / "tokenizer.json").write_text("{")
    assert losses() == recorded[4]
    assert "it is not known whether" in caplog.text
    for file in (tmp_path / "bpe").iterdir():
        shutil.copy(file, elsewhere)
    with pytest.raises(UserError, match=r"'byte'.*add --set megalowbit\.data\.tokenizer=.*elsewhere"):
        losses()
    assert losses(f"megalowbit.data.tokenizer={elsewhere}")
    start = tmp_path / "start"
    import_checkpoint(elsewhere, start)
    for path in (start, start / "step-00000000"):
        with pytest.raises(
            UserError, match=rf"{start}/tokenizer gives other ids than data\.tokenizer 'byte'"
        ):
            evaluated(path, tmp_path, text, config_file=config)
    named = f"megalowbit.data.tokenizer={start / 'tokenizer'}"
    assert figures(evaluated(start, tmp_path, text, named, config_file=config))


def test_a_run_without_weights_is_one_without_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"megalowbit": {}}')
    with pytest.raises(UserError, match=r"the run in .* has no complete checkpoint yet"):
        evaluate(tmp_path, ProcessIdentity(), config_file=None, overrides=[], output=None)


@pytest.mark.parametrize(("tokenizer", "parsed"), [("bpe", True), ("byte", False)])
def test_runs_of_earlier_versions_parse_special_tokens(tmp_path, tokenizer, parsed):
    data = {"tokenizer": tokenizer, "vocab_size": 300 if tokenizer == "bpe" else None}
    data |= {"validation": {"corpus": "held.txt"}, "sequence_length": 16}
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, block={"data": {"corpus": "text.txt", **data}}).rename(run / "config.json")
    arguments = {"overrides": [], "world_size": 1, "padding": {}}
    old = _configuration(run, run, None, **arguments)
    assert old.settings.data.parse_special_tokens == parsed
    new = _configuration(run, None, run / "config.json", **arguments)  # a configuration, not a run
    assert not new.settings.data.parse_special_tokens
    written = json.loads((run / "config.json").read_text())
    written["megalowbit"]["data"]["parse_special_tokens"] = False
    (run / "config.json").write_text(json.dumps(written))
    assert not _configuration(run, run, None, **arguments).settings.data.parse_special_tokens


@pytest.mark.slow
def test_two_processes_find_the_same(tmp_path):
    recorded, port, run = trained(tmp_path), free_port(), tmp_path / "run"
    command = [sys.executable, "-m", "megalowbit", "evaluate", run, "--output", tmp_path / "out.json"]
    command += ["--inputs", "dynamic"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environment |= cpu_products.variables()
    ranks = [
        subprocess.Popen([str(word) for word in command], env={**environment, **variables(rank, 2, port)})
        for rank in range(2)
    ]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    assert figures(json.loads((tmp_path / "out.json").read_text())) == recorded[4]


def test_ctrl_c_takes_one_line(tmp_path, monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("megalowbit.engine.process_start.import_deepspeed", interrupt)
    assert main(["evaluate", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "interrupted before the text was evaluated\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no command is named"),
        (("judge",), "judge"),
        (("evaluate",), "PATH"),
        (("evaluate", "none"), "none does not exist"),
    ],
)
def test_mistakes_take_one_line(arguments, message, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "megalowbit", *arguments], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, timeout=120, check=False,
    )  # fmt: skip
    check_refusal(done, message)
