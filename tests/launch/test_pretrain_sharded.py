"""The command line at ZeRO 1, 2 and 3: killed, resumed, resumed elsewhere, past damage, and exported.

The rows that a killed run had written after its checkpoint are those of a run that was not disturbed.
"""

import json
import shutil

import pytest
import torch
from forked_ranks import Ranks, run_ranks
from forks import run_script
from quick_cases import slow_except
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launchers import ROOT, metrics, write_config
from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings

EVERY, KILLED, STEPS = 4, 11, 13  # with checkpoints of steps 4 and 8, or soon with that of 12
STAGES = slow_except([2], [1, 2, 3])
KEYS = ("step", "loss", "lr", "grad_norm", "loss_scale", "tokens", "skipped_steps")
# stage 2 has no dropout, whose masks are drawn by rank: it is resumed on one
DROPOUT = {1: 0.1, 2: 0.0, 3: 0.1}


def rows(folder):
    return [[row[key] for key in KEYS] for row in metrics(folder)]


def launch(folder, run_dir, *arguments, processes=2):
    config = ("--ds-config", folder / "tiny.json", "--run-dir", run_dir)
    return run_ranks(*config, *arguments, cwd=folder, processes=processes)


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: f"stage {stage}")
def killed(request, tmp_path_factory):
    """Folder of a run killed some steps after its second checkpoint; stage; its records."""
    folder, stage = tmp_path_factory.mktemp(f"stage{request.param}"), request.param
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT[stage])
    block = {
        "precision": "bf16", "recipe": "nvfp4", "run": {"steps": STEPS},
        "checkpoint": {"every": EVERY, "keep": None},
    }  # fmt: skip
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    write_config(folder, model=drops, block=block, zero_optimization=zero)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "run")
    with Ranks(folder, *arguments) as ranks:
        ranks.reach(folder / "run", KILLED)
    # a run that was faster than the signal, or as fast
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000013", ignore_errors=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000012", ignore_errors=True)
    shutil.rmtree(folder / "run" / "hf", ignore_errors=True)
    written = rows(folder / "run")
    assert [row[0] for row in written[:KILLED]] == list(range(1, KILLED + 1))
    return folder, stage, written


@pytest.fixture(scope="module")
def resumed(killed):
    """The run continued: at stages 1 and 3 from its newest checkpoint, at stage 2 past a damaged one."""
    folder, stage, _ = killed
    shutil.copytree(folder / "run", folder / "one")
    newest = folder / "run" / "checkpoints" / "step-00000008"
    if stage == 2:
        file = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    done = launch(folder, folder / "run", "--resume", "auto")
    assert done.code == 0, done.output
    return done.output


def test_a_killed_run_resumes_with_bitwise_equal_losses(killed, resumed):
    folder, stage, before = killed
    first = EVERY if stage == 2 else 2 * EVERY
    assert f"resumed after step {first}" in resumed
    after = rows(folder / "run")
    assert [row[0] for row in after] == list(range(1, STEPS + 1))  # each step once
    assert after[: len(before)] == before
    assert len(before) > first


def test_damage_is_told_and_moved_aside(killed, resumed):
    folder, stage, _ = killed
    names = {path.name for path in (folder / "run" / "checkpoints").iterdir() if path.is_dir()}
    whole = {f"step-{step:08d}" for step in (4, 8, 12, 13)}
    if stage == 2:
        (line,) = [line for line in resumed.splitlines() if "damaged" in line]
        assert "step-00000008 is damaged: zero_pp_rank_1_mp_rank_00_optim_states.pt" in line
        assert line.endswith("moved to step-00000008.damaged")
        assert names == {*whole, "step-00000008.damaged"}  # and that step was saved again
    else:
        assert "damaged" not in resumed
        assert names == whole


@pytest.mark.parametrize("killed", [2], indirect=True, ids=["stage 2"])
def test_one_process_goes_on_and_says_so(killed, resumed):
    folder, _, before = killed
    accumulation = ("--set", "gradient_accumulation_steps=4")  # the same batch
    done = launch(folder, folder / "one", "--resume", "auto", *accumulation, processes=1)
    assert done.code == 0, done.output
    line = "checkpoint of ZeRO 2 on 2 data-parallel ranks continued on ZeRO 2 on 1 data-parallel rank"
    assert done.output.count(line) == 1
    after = rows(folder / "one")
    assert [row[0] for row in after] == list(range(1, STEPS + 1))
    assert after[:8] == before[:8]
    for found, expected in zip(after[8:], rows(folder / "run")[8:], strict=True):
        assert found == pytest.approx(expected, rel=2e-2)  # scales of low-bit tensors are of a rank's batch


def test_the_run_exports_and_starts_another(killed, resumed, tmp_path):
    folder, stage, _ = killed
    done = run_script(ROOT / "tools" / "convert_hf.py", "to-hf", folder / "run", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    written, expected = (
        load_file(each / "model.safetensors") for each in (tmp_path / "hf", folder / "run" / "hf")
    )
    assert written.keys() == expected.keys()
    assert all(
        written[key].dtype == value.dtype and written[key].equal(value) for key, value in expected.items()
    )

    masters = CheckpointContents(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    model = build_model(ModelSettings(checkpoint=folder / "run"), seed=0)
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(model.get_parameter(name).t(), masters.weight(name))  # not rounded to bf16
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").get_parameter(name)
    assert torch.equal(model.get_parameter(name).to(rounded.dtype), rounded)
    assert not torch.equal(model.get_parameter(name), rounded.float())
    if stage == 1:
        write_config(tmp_path, block={"run": {"steps": 1}, "checkpoint": {"export_hf": False}})
        settings = json.dumps({"checkpoint": str(folder / "run")})
        started = launch(tmp_path, tmp_path / "new", "--set", f"megalowbit.model={settings}", processes=1)
        assert started.code == 0, started.output
        assert metrics(tmp_path / "new")[0]["loss"] < metrics(folder / "run")[4]["loss"]
