"""The command line with two stages: the same run as one process, resumed and exported."""

import shutil

import pytest
import torch
from forked_ranks import run_ranks
from transformers import AutoModelForCausalLM

from launchers import metrics, write_config
from megalowbit.checkpoints.contents import CheckpointContents

pytestmark = pytest.mark.slow

KEYS = ("step", "loss", "lr", "grad_norm", "loss_scale", "tokens", "skipped_steps")
BLOCK = {"precision": "fp32", "recipe": {"base": "mxfp4", "gemm": "fp8"}, "checkpoint": {"every": 3}}
# masks of dropout are drawn by stage
MODEL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
STAGES = {"stages": 2, "activation_checkpoint_interval": 1}


def rows(folder):
    return [[row[key] for key in KEYS] for row in metrics(folder)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same configuration trained by one process and by two stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_config(folder, model=MODEL, block=BLOCK)
    one = run_ranks("--ds-config", folder / "tiny.json", "--run-dir", folder / "one", cwd=folder)
    assert one.code == 0, one.output
    write_config(folder, model=MODEL, block=BLOCK, pipeline=STAGES)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "two")
    two = run_ranks(*arguments, cwd=folder, processes=2)
    assert two.code == 0, two.output
    assert "data 1, stages 2" in two.output
    assert line_of(one, "model ") == line_of(two, "model ")
    # the first product of recomputed blocks runs twice
    products = [line_of(each, "products ").partition(", ")[2] for each in (one, two)]
    assert products[0] == products[1] != ""
    return folder


def line_of(done, start):
    (line,) = [line for line in done.output.splitlines() if line.startswith(start)]
    return line


def test_two_stages_record_the_same_as_one_process(folders):
    one, two = rows(folders / "one"), rows(folders / "two")
    assert len(one) == len(two) == 6
    for expected, found in zip(one, two, strict=True):
        # low-bit rounding turns the last bits of other sums into steps of the format, later in the run
        assert found == pytest.approx(expected, rel=1e-3)
    assert two[0] == pytest.approx(one[0], rel=1e-5)


def test_statistics_by_role_cover_all_stages(folders):
    one, two = (metrics(folders / name)[0] for name in ("one", "two"))
    of_roles = {name: value for name, value in one.items() if name.startswith("quantization/")}
    assert len(of_roles) > 6
    assert {name: two[name] for name in of_roles} == pytest.approx(of_roles, rel=1e-3, abs=1e-6)


def test_the_export_is_the_full_model(folders):
    one, two = (AutoModelForCausalLM.from_pretrained(folders / name / "hf") for name in ("one", "two"))
    cards = [(folders / name / "hf" / "README.md").read_text() for name in ("one", "two")]
    row = "| dtype of these weights | {} |".format(str(one.dtype).removeprefix("torch."))
    assert all(row in card for card in cards)
    expected = one.state_dict()
    assert two.state_dict().keys() == expected.keys()
    for name, value in two.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=5e-3, rtol=0)


@pytest.mark.slow
def test_a_resumed_pipeline_equals_an_uninterrupted_one(folders):
    stopped = folders / "stopped"
    shutil.copytree(folders / "two", stopped)
    shutil.rmtree(stopped / "hf")
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    arguments = ("--ds-config", folders / "tiny.json", "--run-dir", stopped, "--resume", "auto")
    done = run_ranks(*arguments, cwd=folders, processes=2)
    assert done.code == 0, done.output
    assert "resumed after step 3" in done.output
    assert rows(stopped) == rows(folders / "two")


@pytest.mark.slow
def test_one_process_resumes_a_checkpoint_of_two_stages(folders):
    whole = folders / "whole"
    shutil.copytree(folders / "two", whole)
    shutil.rmtree(whole / "hf")
    shutil.rmtree(whole / "checkpoints" / "step-00000006")
    arguments = ("--ds-config", folders / "tiny.json", "--run-dir", whole, "--resume", "auto")
    done = run_ranks(*arguments, "--set", "pipeline.stages=1", cwd=folders)
    assert done.code == 0, done.output
    one_rank = "ZeRO 0 on 1 data-parallel rank"
    assert f"checkpoint of {one_rank}, 2 pipeline stages continued on {one_rank}" in done.output
    assert "pipeline.stages: 2 → 1" in done.output
    found, expected = rows(whole), rows(folders / "two")
    assert found[:3] == expected[:3]
    for after, before in zip(found[3:], expected[3:], strict=True):
        assert after == pytest.approx(before, rel=1e-3)
    totals = [metrics(each)[-1]["gradient_overflow/total_elements"] for each in (whole, folders / "two")]
    assert totals[0] == totals[1]


@pytest.mark.slow
def test_an_lr_schedule_counts_applied_steps_on_two_stages_and_after_a_resume(tmp_path):
    schedule = {"type": "linear", "warmup_steps": 2}
    scaler = {"type": "dynamic", "initial_scale": 2.0**20}
    block = {"precision": "fp16", "recipe": "bf16", "checkpoint": {"every": 3}, "grad_scaler": scaler}
    write_config(tmp_path, block={**block, "lr_schedule": schedule}, pipeline=STAGES, scheduler=None)
    run = tmp_path / "run"
    arguments = ("--ds-config", tmp_path / "tiny.json", "--run-dir", run)
    done = run_ranks(*arguments, cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    whole, applied = rows(run), 0
    for row in metrics(run):
        factor = (applied + 1) / 2 if applied < 2 else (6 - applied) / 4
        assert row["lr"] == pytest.approx(3e-3 * factor, rel=1e-12)
        applied = row["step"] - row["skipped_steps"]
    assert 0 < applied < 6
    shutil.rmtree(run / "hf")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    done = run_ranks(*arguments, "--resume", "auto", cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    assert rows(run) == whole


SPLIT = {"split_weight": {"rank": 2, "refresh_every": 50}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        ({"base": "nvfp4", **SPLIT}, [f"{block}.{name}" for block in range(2) for name in PROJECTIONS]),
        # on the second stage only, and behind a base that does not split
        ({"base": "nvfp4", "layers": {"*.h.1.mlp": SPLIT}}, ["1.mlp.c_fc", "1.mlp.c_proj"]),
    ],
)
def test_directions_of_all_stages_are_saved_and_follow_their_layers(tmp_path, recipe, layers):
    block = {**BLOCK, "recipe": recipe, "run": {"steps": 3}}
    write_config(tmp_path, model=MODEL, block=block, pipeline={"stages": 2})
    arguments = ("--ds-config", tmp_path / "tiny.json", "--run-dir", tmp_path / "run")
    done = run_ranks(*arguments, cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    steps = ("--set", "megalowbit.run.steps=6", "--set", "pipeline.stages=1")
    done = run_ranks(*arguments, "--resume", "auto", *steps, cwd=tmp_path)
    assert done.code == 0, done.output
    before, after = (
        CheckpointContents(tmp_path / "run" / "checkpoints" / f"step-{step:08d}").header["progress"]
        for step in (3, 6)
    )
    names = {f"transformer.h.{each}" for each in layers}
    assert before["weight_splits"].keys() == after["weight_splits"].keys() == names
    for name in names:  # not found anew: as many cold starts as before
        counts = [each["weight_splits"][name]["weight"]["counts"] for each in (before, after)]
        assert counts[0]["cold"] == counts[1]["cold"] == 1, counts
