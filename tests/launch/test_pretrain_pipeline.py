"""The command line with two stages: the same run as one process, resumed and exported."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from launchers import metrics, run, write_config

KEYS = ("step", "loss", "lr", "grad_norm", "loss_scale", "tokens", "skipped_steps")
BLOCK = {"precision": "fp32", "recipe": "nvfp4", "checkpoint": {"every": 3}}
# masks of dropout are drawn by stage
MODEL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STAGES = {"stages": 2, "activation_checkpoint_interval": 1}


def rows(folder):
    return [[row[key] for key in KEYS] for row in metrics(folder)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same configuration trained by one process and by two stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_config(folder, model=MODEL, block=BLOCK)
    one = run("python", "--ds-config", folder / "tiny.json", "--run-dir", folder / "one", cwd=folder)
    assert one.code == 0, one.output
    write_config(folder, model=MODEL, block=BLOCK, pipeline=STAGES)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "two")
    two = run("torchrun", *arguments, cwd=folder, processes=2)
    assert two.code == 0, two.output
    assert "data 1, stages 2" in two.output
    return folder


def test_two_stages_record_what_one_process_does(folders):
    one, two = rows(folders / "one"), rows(folders / "two")
    assert len(one) == len(two) == 6
    for expected, found in zip(one, two, strict=True):
        # low-bit rounding turns the last bits of other sums into steps of the format, later in the run
        assert found == pytest.approx(expected, rel=1e-3)
    assert two[0] == pytest.approx(one[0], rel=1e-5)


def test_the_export_is_the_whole_model(folders):
    one, two = (AutoModelForCausalLM.from_pretrained(folders / name / "hf") for name in ("one", "two"))
    expected = one.state_dict()
    assert two.state_dict().keys() == expected.keys()
    for name, value in two.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=5e-3, rtol=0)


def test_a_resumed_pipeline_is_the_one_that_was_not_stopped(folders):
    stopped = folders / "stopped"
    shutil.copytree(folders / "two", stopped)
    shutil.rmtree(stopped / "hf")
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    arguments = ("--ds-config", folders / "tiny.json", "--run-dir", stopped, "--resume", "auto")
    done = run("torchrun", *arguments, cwd=folders, processes=2)
    assert done.code == 0, done.output
    assert "resumed after step 3" in done.output
    assert rows(stopped) == rows(folders / "two")
