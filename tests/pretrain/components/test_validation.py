"""Validation of one process: figures and records, the best checkpoint, resumes, rollbacks, refusals."""

import itertools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quick_cases import slow_except
from safetensors.torch import load_file

from launchers import SPEEDS, training_text
from megalowbit.data.token_files.megatron import MegatronWriter
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.components.loss_guard import GuardDecision
from megalowbit.pretrain.components.validation import Validation
from megalowbit.pretrain.loop import roll_back, train
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.run import pretrain
from megalowbit.telemetry.sinks.console import Console

TEXT = training_text()[50:2000]  # 60 sequences and 30 tokens
EVERY = "megalowbit.validation.every=2"
FEW = "megalowbit.validation.tokens=330"  # 10 sequences and 10 tokens; splits of each batch take long
SPECULATION = (
    "megalowbit.recipe=speculative-int8",
    'megalowbit.speculation={"candidates": ["int8", "fp8", "bf16"], "threshold_db": 15, "every": 2}',
)
SPLIT = 'megalowbit.recipe={"base": "nvfp4", "split_input": {"rank": 2}, "split_weight": {"rank": 2}}'
KINDS = {
    "nvfp4": (),
    "speculation": SPECULATION,
    "switch": ("megalowbit.late_switch.at=3",),
    "splits": (SPLIT,),
    "chunks": ("megalowbit.chunked_cross_entropy=true", 'megalowbit.activation_checkpointing={"every": 1}'),
}


@pytest.fixture
def held(tmp_path):
    """Overrides that name the text."""
    (tmp_path / "held.txt").write_text(TEXT)
    return ("megalowbit.data.validation.corpus=" + str(tmp_path / "held.txt"), EVERY)


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def of_validation(rows):
    return {row["step"]: row for row in rows if "validation/loss" in row}


def without_validation(rows):
    return [{key: value for key, value in row.items() if "validation/" not in key} for row in rows]


def prescribed(monkeypatch, losses):
    """Let validations find these losses, one after the other."""
    left = iter(losses)

    def measure(_self, _progress):
        loss = next(left)
        return {"validation/loss": loss, "validation/perplexity": 1.0, "validation/bits_per_byte": None}

    monkeypatch.setattr(Validation, "measure", measure)


def checkpoints(folder):
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return [int(name.removeprefix("step-")) for name in names]


def best(folder):
    path = folder / "checkpoints" / "best"
    return int(path.read_text().removeprefix("step-")) if path.exists() else None


def test_figures_agree_and_are_printed_and_summarised(resolve, held, tmp_path, capsys):
    rows = run(resolve(*held, "megalowbit.validation.bf16=true"), tmp_path / "run")
    found = of_validation(rows)
    assert list(found) == [2, 4, 6]
    for row in found.values():
        assert row["validation/perplexity"] == pytest.approx(math.exp(row["validation/loss"]))
        # the first byte is not predicted, and the end of the document has none
        bits = row["validation/loss"] * len(TEXT) / math.log(2) / (len(TEXT) - 1)
        assert row["validation/bits_per_byte"] == pytest.approx(bits)
        assert row["validation/bf16_loss"] == pytest.approx(row["validation/loss"], rel=1e-2)
        assert row["validation/bf16_loss"] != row["validation/loss"]
    assert found[6]["validation/loss"] < found[2]["validation/loss"] < 6
    output = capsys.readouterr().out
    assert (
        f"validate  {len(TEXT):,} tokens of {tmp_path / 'held.txt'}, every 2 steps and after the last"
        in output
    )
    line = f"validation after step 2: loss {found[2]['validation/loss']:.4f} (the lowest so far), perplexity "
    assert line in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]
    assert summary["loss"] == found[6]["validation/loss"]
    assert summary["best"] == {"step": 6, "loss": summary["loss"]}
    assert (summary["step"], summary["tokens"]) == (6, len(TEXT))


@pytest.mark.slow
def test_token_ids_have_the_losses_of_their_text(resolve, held, tmp_path):
    """Training and held-out text in Megatron's files, with their tokenizer or without one."""
    expected = of_validation(run(resolve(*held), tmp_path / "text"))
    for name, text in (("train", (tmp_path / "text.txt").read_text()), ("held", TEXT)):
        with MegatronWriter(tmp_path / name, 256) as writer:
            writer.add_document(np.frombuffer(f"{text}\0".encode(), np.uint8))
    files = (
        f"megalowbit.data.corpus={tmp_path / 'train'}",
        f"megalowbit.data.validation.corpus={tmp_path / 'held'}",
        EVERY,
    )
    assert of_validation(run(resolve(*files), tmp_path / "ids")) == expected
    unknown = ("megalowbit.data.tokenizer=none", "megalowbit.data.vocab_size=256")
    found = of_validation(run(resolve(*files, *unknown), tmp_path / "unknown"))
    without_bytes = {"validation/bits_per_byte": None}
    assert found == {step: {**row, **without_bytes} for step, row in expected.items()}
    summary = json.loads((tmp_path / "unknown" / "summary.json").read_text())["validation"]
    assert summary["bits_per_byte"] is None


@pytest.mark.parametrize("kind", slow_except(["chunks"], KINDS))
def test_training_does_not_notice(resolve, held, tmp_path, kind):
    with_it = run(resolve(*KINDS[kind], *held, FEW, "megalowbit.validation.bf16=true"), tmp_path / "with")
    without = run(resolve(*KINDS[kind]), tmp_path / "without")
    assert len(of_validation(with_it)) == 3
    assert without_validation(with_it) == without
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("with", "without")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("with", "without")]
    for key in ("speculation", "splits"):
        assert summaries[0].get(key) == summaries[1].get(key)


@pytest.mark.parametrize("kind", slow_except(["nvfp4"], ["nvfp4", "speculation", "splits"]))
def test_a_resumed_run_repeats_the_losses_bit_for_bit(resolve, held, tmp_path, kind):
    overrides = (*KINDS[kind], *held, FEW, "megalowbit.run.steps=8", "megalowbit.checkpoint.every=3")
    whole = run(resolve(*overrides, "megalowbit.checkpoint.keep=null"), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for name in ("hf", "checkpoints/step-00000008", "checkpoints/step-00000006", "checkpoints/step-00000004"):
        shutil.rmtree(tmp_path / "resumed" / name)
    for name in ("DONE", "summary.json"):
        (tmp_path / "resumed" / name).unlink()
    resumed = run(resolve(*overrides), tmp_path / "resumed", is_resume=True)
    assert list(of_validation(whole)) == [2, 4, 6, 8]
    assert resumed == whole
    assert best(tmp_path / "resumed") == best(tmp_path / "whole")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "resumed")]
    assert summaries[0]["validation"] == summaries[1]["validation"]


def test_the_best_checkpoint_is_saved_named_and_kept(resolve, held, tmp_path, monkeypatch, capsys):
    prescribed(monkeypatch, [4.0, 3.0, math.nan, 3.5, 3.2])
    keep = ("megalowbit.run.steps=10", "megalowbit.checkpoint.every=3", "megalowbit.checkpoint.keep=1")
    run(resolve(*held, *keep), tmp_path / "run")
    assert best(tmp_path / "run") == 4
    assert checkpoints(tmp_path / "run") == [4, 10]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000010"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation after")]
    assert ["lowest so far" in line for line in lines] == [True, True, False, False, False]
    prescribed(monkeypatch, [3.1, 2.9])
    longer = resolve(*held, *keep[1:], "megalowbit.run.steps=14")
    run(longer, tmp_path / "run", is_resume=True)
    assert best(tmp_path / "run") == 14
    assert checkpoints(tmp_path / "run") == [14]


def test_a_long_validation_is_said_because_stops_wait(resolve, held, monkeypatch, tmp_path, capsys):
    clock = itertools.accumulate([0, 59, 0, 61, 0, 100, 0, 200, 0, 5])  # each validation begins and ends
    module = "megalowbit.pretrain.components.validation.time"
    monkeypatch.setattr(module, SimpleNamespace(monotonic=clock.__next__))
    prescribed(monkeypatch, [4.0, 3.0, 3.5, 3.2, 3.1])
    run(resolve(*held, "megalowbit.run.steps=10"), tmp_path / "run")
    said = [line for line in capsys.readouterr().out.splitlines() if "a stop signal waits for it" in line]
    assert [line.split(",")[0] for line in said] == [
        "a validation takes 0:01:01", "a validation takes 0:03:20"
    ]  # fmt: skip


@pytest.mark.slow
def test_without_keep_best_checkpoints_are_as_without_validation(resolve, held, tmp_path, monkeypatch):
    prescribed(monkeypatch, [4.0, 3.0, 3.5])
    keep = ("megalowbit.checkpoint.every=3", "megalowbit.validation.keep_best=false")
    run(resolve(*held, *keep), tmp_path / "run")
    assert best(tmp_path / "run") is None
    assert checkpoints(tmp_path / "run") == [3, 6]


def test_a_rollback_before_the_best_checkpoint_forgets_it(build_job, held, monkeypatch, tmp_path):
    prescribed(monkeypatch, [4.0, 3.0, 3.5, 3.4, 3.6])
    job = build_job(*held, "megalowbit.checkpoint.every=3", "megalowbit.checkpoint.keep=null")
    console = Console(6, log_every=1)
    with Recorder(job, console, is_main=True, is_resume=False) as recorder:
        train(job, recorder)
        assert (best(tmp_path / "run"), checkpoints(tmp_path / "run")) == (4, [2, 3, 4, 6])
        roll_back(job, recorder, GuardDecision(action="roll back", line="a test", since=4))
        assert job.step == 3
        assert best(tmp_path / "run") == 2  # as the checkpoint of step 3 says
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
        roll_back(job, recorder, GuardDecision(action="roll back", line="a test", since=4))
        assert best(tmp_path / "run") is None
        train(job, recorder)
    assert best(tmp_path / "run") == 4  # 3.5 is the lowest since


@pytest.mark.slow
def test_with_other_text_the_search_starts_again(resolve, held, tmp_path, capsys):
    first = run(resolve(*held, "megalowbit.run.steps=4"), tmp_path / "run")
    (tmp_path / "other.txt").write_text(TEXT.swapcase())
    other = (f"megalowbit.data.validation.corpus={tmp_path / 'other.txt'}", EVERY)
    rows = run(resolve(*other, "megalowbit.run.steps=6"), tmp_path / "run", is_resume=True)
    assert rows[:4] == first
    assert of_validation(rows)[6]["validation/loss"] > of_validation(rows)[4]["validation/loss"]
    assert best(tmp_path / "run") == 6
    assert "megalowbit.data.validation.corpus: " in capsys.readouterr().out


@pytest.mark.slow
def test_validation_can_be_added_and_removed_when_a_run_is_resumed(resolve, held, tmp_path):
    run(resolve("megalowbit.run.steps=2"), tmp_path / "run")
    added = run(resolve(*held, "megalowbit.run.steps=4"), tmp_path / "run", is_resume=True)
    removed = run(resolve("megalowbit.run.steps=6"), tmp_path / "run", is_resume=True)
    assert list(of_validation(added)) == list(of_validation(removed)) == [4]


def test_by_default_the_last_step_alone_is_evaluated_on_limited_tokens(resolve, held, tmp_path, capsys):
    rows = run(
        resolve(held[0], "megalowbit.validation.tokens=100", "megalowbit.run.steps=3"), tmp_path / "run"
    )
    assert list(of_validation(rows)) == [3]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]["tokens"] == 100
    line = f"100 tokens of {tmp_path / 'held.txt'}, 5.13% of it in 4 evenly spread sequences, "
    assert f"{line}after the last step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((EVERY,), "validation.every is set, but there is no text to evaluate on"),
        (("megalowbit.validation.bf16=true",), "validation.bf16 is set, but there is no text"),
        (("<held>", "megalowbit.validation.tokens=31"), "tokens = 31 is less than one sequence .* = 32"),
        (
            ("<held>", "megalowbit.validation.micro_batch_size=3", "pipeline.stages=2"),
            "micro_batch_size = 3 must be train_micro_batch_size_per_gpu = 2 in a pipeline",
        ),
    ],
)
def test_settings_without_effect_or_of_another_size_are_refused(resolve, held, overrides, message):
    given = [word for each in overrides for word in (held[:1] if each == "<held>" else (each,))]
    with pytest.raises(UserError, match=message):
        resolve(*given)


def test_text_that_is_missing_is_refused_before_training(resolve, tmp_path):
    config = resolve("megalowbit.data.validation.corpus=none.txt")
    with pytest.raises(UserError, match=r"data.validation: corpus .*none.txt' does not exist"):
        pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    assert not (tmp_path / "run").exists()
