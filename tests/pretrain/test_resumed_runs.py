"""Every setting with a state of its own: a run that is killed and resumed ends bitwise as one that was not.

Compared are all records, the summary and everything in the last checkpoint: generators, moments, scaler,
factors, counters. What a checkpoint does not hold at all shows in the losses.
"""

import random
import shutil

import numpy as np
import pytest
import torch
from quick_cases import slow_except
from soak_runs import compare

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.pretrain.run import pretrain

STEPS, SAVED = 7, 4
FP16 = "megalowbit.precision=fp16"
NVFP4 = 'megalowbit.recipe={"base": "nvfp4"'


def scaler(**block):
    text = ", ".join(f'"{key}": {value}' for key, value in block.items())
    return FP16, f"megalowbit.grad_scaler={{{text}}}"


def dynamic(mode):
    more = {"hysteresis": 1} if mode != "torch" else {}
    return scaler(type='"dynamic"', mode=f'"{mode}"', initial_scale=2.0**19, growth_interval=2, **more)


CASES = {
    **{mode: dynamic(mode) for mode in ("megatron", "torch", "deepspeed", "clean_step")},
    **{
        kind: scaler(type=f'"{kind}"', initial_scale=2.0**19)
        for kind in ("max_value", "norm_ratio", "max_norm", "controller")
    },
    "layer_scaling": (  # whose factors grow only where the scale leaves room
        *scaler(type='"dynamic"', initial_scale=2.0**8),
        'megalowbit.layer_scaling={"enabled": true}',
    ),
    "splits": (
        f'{NVFP4}, "split_input": {{"rank": 2}}, "split_weight": {{"rank": 2, "refresh_every": 3}}, '
        '"split_grad_output": {"rank": 4, "refresh_every": 3}}',
    ),
    "parameter_split": (f'{NVFP4}, "parameter_split": {{"rank": 4, "warmup_steps": 2, "merge_steps": 3}}}}',),
    "layers": (
        'megalowbit.recipe={"base": "metis-nvfp4", "layers": {"*.h.0.mlp": "bf16", "*.mlp": "metis-qb", '
        '"*.c_proj": {"layout": "per_gemm", "hadamard": true}}}',
        'megalowbit.late_switch={"at": 5, "scope": "forward"}',
        "megalowbit.static_inputs.last=5",
    ),
    "late_switch": ("megalowbit.late_switch.at=3",),
    "speculation": (
        "megalowbit.recipe=speculative-int8",
        'megalowbit.speculation={"every": 2, "verify_every": 2, "threshold_db": 20}',
    ),
    "fp32": ("megalowbit.precision=fp32", "megalowbit.recipe=bf16"),
    "regularizer": ("megalowbit.regularizer.strength=1e-4",),
    "sum_of_norms": ("megalowbit.gradient_norm=sum_of_norms", "megalowbit.log_num_zeros_in_grad=true"),
}


def disturb_generators():
    """As a new process has others than the one that was killed."""
    random.seed()
    np.random.seed(random.randrange(2**32))
    torch.manual_seed(random.randrange(2**62))


# what the others add to a run has a test of its own, which resumes it too
QUICK = ["controller", "layer_scaling", "layers", "splits"]


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_a_resumed_run_ends_bitwise_equal_to_an_uninterrupted_one(resolve, tmp_path, name):
    config = resolve(
        *CASES[name],
        f"megalowbit.run.steps={STEPS}",
        f"megalowbit.checkpoint.every={SAVED}",
        "megalowbit.checkpoint.export_hf=false",
        "megalowbit.telemetry.layers_every=3",
    )
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "undisturbed", is_resume=False)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
    for name in ("DONE", "summary.json"):
        (tmp_path / "run" / name).unlink()
    disturb_generators()
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=True)
    assert compare(tmp_path / "run", tmp_path / "undisturbed") == []
