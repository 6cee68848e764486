"""Which steps of a run are recorded, what its checkpoints hold, and on how many ranks it is the same."""

import shutil

import pytest
import torch
from forked_ranks import run_ranks
from quick_cases import slow_except

from launchers import write_config
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import read_checkpoint
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.pretrain.components.static_inputs import StaticInputRecord, StaticInputsSettings
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain

KEY = "megalowbit.static_inputs"
STEPS = ("megalowbit.run.steps=4", "megalowbit.checkpoint.every=2", "megalowbit.checkpoint.keep=null")
NEAREST = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}  # ranks draw different numbers


def step_with_inputs(job):
    """A step of the loop; what each layer read in it, (tokens, in_features)."""
    seen = {}

    def keep(layer, x):
        seen.setdefault(layer.layer_name, []).append(x[0].detach().flatten(0, -2).double().clone())

    hooks = [layer.register_forward_pre_hook(keep) for layer in bit_layers(job.engine.module).values()]
    for component in job.components:
        component.before_step(job.step)
    train_step(job)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(each) for name, each in seen.items()}


CASES = {
    "ZeRO 0": [],
    "ZeRO 2": ["zero_optimization.stage=2"],
    "ZeRO 3": ["zero_optimization.stage=3"],
    "after a late switch": ['megalowbit.late_switch={"at": 2, "scope": "all"}'],
}


@pytest.mark.parametrize("case", slow_except(["ZeRO 0"], CASES))
def test_a_checkpoint_holds_the_range_of_the_last_steps(build_job, tmp_path, case):
    job = build_job("megalowbit.recipe=metis-nvfp4", f"{KEY}.last=2", *STEPS, *CASES[case])
    steps = [step_with_inputs(job) for _ in range(4)]
    job.save()
    found = read_checkpoint(tmp_path / "run").static_inputs
    assert list(found.maxima) == list(steps[0])
    assert all(name.startswith("transformer.h.") for name in found.maxima)  # names of the plain model
    for name in found.maxima:
        inputs = torch.cat([step[name] for step in steps[2:]])
        assert found.maxima[name] == inputs.abs().max()
        torch.testing.assert_close(found.means[name].double(), inputs.mean(0), rtol=1e-4, atol=1e-6)
        residual = (inputs - found.means[name].double()).abs().max().item()
        assert found.residual_maxima[name] == pytest.approx(residual, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "recorded"),
    [
        ((), 1),  # 2 % of 4 steps, at least one
        ((f"{KEY}.last=0.75",), 3),
        ((f"{KEY}.last=0",), None),
        (("megalowbit.recipe=mxfp4",), None),
        (("megalowbit.recipe=mxfp4", f"{KEY}.last=1"), 1),
        (("megalowbit.recipe=bf16",), None),
        (("megalowbit.recipe=speculative-int8", "megalowbit.speculation={}"), 1),
    ],
)
def test_by_default_runs_record_what_their_recipe_needs(build_job, overrides, recorded):
    record = build_job(*STEPS, *overrides).find(StaticInputRecord)
    assert (None if record is None else 4 - record._first) == recorded


def test_a_long_run_records_a_hundred_steps():
    assert StaticInputsSettings().steps(100_000, is_needed=True) == 100


def test_a_resumed_run_has_the_record_of_one_that_was_not_interrupted(resolve, tmp_path):
    config = resolve("megalowbit.recipe=metis-nvfp4", f"{KEY}.last=3", *STEPS)
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    checkpoints = tmp_path / "run" / "checkpoints"
    half, whole = (read_checkpoint(checkpoints / f"step-0000000{step}").static_inputs for step in (2, 4))
    shutil.rmtree(checkpoints / "step-00000004")
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=True)
    again = read_checkpoint(tmp_path / "run").static_inputs
    assert again.maxima == whole.maxima
    assert again.residual_maxima == whole.residual_maxima
    assert all(torch.equal(again.means[name], mean) for name, mean in whole.means.items())
    assert half.maxima.keys() == whole.maxima.keys()
    assert half.maxima != whole.maxima


def test_a_rollback_to_before_the_record_forgets_it(build_job, tmp_path):
    job = build_job(f"{KEY}.last=1", *STEPS)
    for step in range(4):
        step_with_inputs(job)
        if step == 1:
            job.save()
    record = job.find(StaticInputRecord)
    assert record.state_dict()["steps"] == 1
    job.load(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert read_checkpoint(tmp_path / "run").static_inputs is None
    assert record.state_dict() == {"steps": 0, "ranges": {}}
    record.before_step(2)
    assert all(layer.input_record is None for layer in bit_layers(job.engine.module).values())
    step_with_inputs(job)
    step_with_inputs(job)
    assert record.state_dict()["steps"] == 1


NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LAYOUTS = {
    "data": {"train_micro_batch_size_per_gpu": 1},
    "ZeRO 3": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "pipeline": {"pipeline": {"stages": 2}},
}


@pytest.mark.parametrize("layout", slow_except(["data"], LAYOUTS))
def test_two_ranks_record_what_one_process_does(tmp_path, layout):
    block = {"precision": "fp32", "recipe": NEAREST, "run": {"steps": 1}}
    if layout != "tensor":  # which has no splits
        block["recipe"] = {**NEAREST, "split_input": {"method": "mean"}}
    found = []
    for name, more, processes in (("one", {}, 1), ("two", LAYOUTS[layout], 2)):
        file = write_config(tmp_path, model=NO_DROPOUT, block=block, **more)
        done = run_ranks("--ds-config", file, "--run-dir", tmp_path / name, cwd=tmp_path, processes=processes)
        assert done.code == 0, done.output
        found.append(read_checkpoint(tmp_path / name).static_inputs)
    one, two = found
    assert list(one.maxima) == list(two.maxima)
    assert len(one.maxima) == 8
    # data-parallel ranks subtract the means of their own tokens, which changes what later layers read
    tolerance = 1e-4 if layout in ("tensor", "pipeline") else 0.2
    for name, maximum in one.maxima.items():
        assert two.maxima[name] == pytest.approx(maximum, rel=tolerance)
    first = "transformer.h.0.attn.c_attn"  # reads the embeddings, which are the same
    assert two.maxima[first] == pytest.approx(one.maxima[first], rel=1e-6)
    if layout != "tensor":
        torch.testing.assert_close(two.means[first], one.means[first], rtol=1e-5, atol=1e-7)
        assert two.residual_maxima[first] == pytest.approx(one.residual_maxima[first], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{KEY}.last=9",), r"last = 9 is more than megalowbit.run.steps = 4"),
        ((f"{KEY}.last=1.5",), "expected a whole number of steps"),
        ((f"{KEY}.last=-1",), "expected a whole number of steps"),
        ((f"{KEY}.last=true",), "expected a whole number of steps"),
    ],
)
def test_settings_are_checked(resolve, overrides, message):
    with pytest.raises(UserError, match=message):
        resolve(*STEPS, *overrides)


def test_a_record_without_low_bit_layers_is_refused(resolve, tmp_path):
    config = resolve(*STEPS, "megalowbit.recipe=bf16", f"{KEY}.last=1")
    with pytest.raises(UserError, match=r"static_inputs.*recipe 'bf16' has no low-bit layers"):
        pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
