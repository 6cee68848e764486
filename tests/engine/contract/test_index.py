"""The table of DeepSpeed's interfaces that the package uses, and where each is held.

Whoever imports something new from DeepSpeed, or touches another attribute of its engine, adds a line here and
a test in this folder whose message says what breaks without it.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from zero_internals import INTERNALS, used

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "megalowbit"

# what is imported, and what of megalowbit needs it
IMPORTS = {
    "deepspeed": "everything: initialize, init_distributed, get_accelerator",
    "deepspeed.ops": "starting on a CPU without a compiler",
    "deepspeed.pipe.PipelineModule": "telling a pipeline from a model",
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": "the engine scales the loss through our optimizer",
    "deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine": "atomic checkpoints",
    "deepspeed.runtime.config.DeepSpeedConfig": "nested blocks are checked before a model is built",
    "deepspeed.runtime.config.DeepSpeedConfigError": "its findings end as one line",
    "deepspeed.runtime.utils.maybe_loss_for_backward": "what is scaled is the loss alone",
    # ZeRO
    "deepspeed.accelerator.get_accelerator": "streams whose gradients a bucket holds",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "stage 3 in our interface",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "stages 1 and 2 in our interface",
    "deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID": "zero_grad starts a step's sums again",
    "deepspeed.utils.safe_set_full_grad": "gradients set by hand at stages 1 and 2",
    "deepspeed.utils.safe_set_local_grad": "gradients set by hand at stage 3",
    "deepspeed.utils.safe_set_full_fp32_param": "masters are the exact initial weights",
    "deepspeed.utils.safe_set_local_fp32_param": "masters are the exact initial weights at stage 3",
    # tensor parallelism
    "deepspeed.module_inject.auto_tp.AutoTP": "which layers are cut, and how",
    "deepspeed.module_inject.autotp_config.AutoTPConfig": "which layers are cut, and how",
    "deepspeed.module_inject.autotp_config.PartitionType": "which layers are cut, and how",
    "deepspeed.module_inject.autotp_config.TPLayerSpec": "which layers are cut, and how",
    "deepspeed.module_inject.layers.TensorParallel_Layer": "sharded layers are recognised",
    "deepspeed.module_inject.set_autotp_mode": "AutoTP trains instead of inferring",
    "deepspeed.utils.groups": "groups of a tensor-parallel run",
    # pipelines
    "deepspeed.runtime.activation_checkpointing.checkpointing.non_reentrant_checkpoint": "recomputed stages",
    "deepspeed.runtime.pipe.schedule": "the instruction that reduces gradients",
    "deepspeed.runtime.utils": "a dry run deals layers to stages as a pipeline does",
}
# attributes of the engine that we read, call or replace
ENGINE = frozenset(
    {
        "backward",
        "checkpoint_engine",
        "checkpoint_mp_rank",
        "clip_fp32_gradients",
        "device",
        "global_samples",
        "global_steps",
        "gradient_accumulation_steps",
        "load_checkpoint",
        "lr_scheduler",
        "micro_steps",
        "mpu",
        "module",
        "mp_world_size",
        "optimizer",
        "save_checkpoint",
        "seq_data_parallel_group",
        "seq_dp_world_size",
        "skipped_steps",
        "step",
        "was_step_applied",
        "zero_grad",
        "zero_optimization_stage",
        "_copy_recovery_script",
        "_get_ckpt_name",
        "_get_zero_ckpt_name",
        "_save_checkpoint",
        "_save_zero_checkpoint",
    }
)
PIPELINE_ENGINE = frozenset(
    {
        "_INSTRUCTION_MAP",
        "_exec_reduce_grads",
        "batch_fn",
        "data_iterator",
        "dp_group_loss",
        "dynamic_shape",
        "eval_batch",
        "first_output_send",
        "is_first_stage",
        "is_last_stage",
        "micro_batches",
        "num_stages",
        "pipe_recv_buf",
        "set_dataiterator",
        "train_batch",
    }
)
OURS = frozenset({"process_grid", "regularizer"})  # put there by us
NOT_AN_ENGINE = {"config.py", "dry_run.py"}  # there `engine` is a section of settings


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported():
    names = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "deepspeed"}


def touched():
    names = set()
    for path, tree in trees():
        if path.name in NOT_AN_ENGINE or path.parent.name not in {"engine", "pretrain"}:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                names |= {node.attr} if name == "engine" else set()
    return names - OURS


def test_every_import_of_deepspeed_is_in_the_table():
    assert imported() - IMPORTS.keys() == set(), "a new DeepSpeed may break it: add it here and a test of it"
    assert IMPORTS.keys() - imported() == set(), "no longer used: remove it here"


def test_every_attribute_of_the_engine_is_in_the_table():
    known = ENGINE | PIPELINE_ENGINE
    assert touched() - known == set(), "a new DeepSpeed may break it: add it here and a test of it"
    assert known - touched() == set(), "no longer used: remove it here"


def test_every_internal_of_zero_and_pipelines_is_in_the_table():
    known = {name for names in INTERNALS.values() for name in names}
    found = used()
    new = {name: sorted(files) for name, files in found.items() if name not in known}
    assert new == {}, (
        "a new DeepSpeed may break it: add it to zero_internals.INTERNALS, with what breaks without it"
    )
    assert known - found.keys() == set(), "no longer used: remove it from zero_internals.INTERNALS"


@pytest.mark.parametrize("name", IMPORTS)
def test_the_import_is_where_it_was(name):
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        found = importlib.import_module(module)
        assert hasattr(found, attribute), f"{name} has gone, on which depends: {IMPORTS[name]}"


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_the_engine_has_what_we_touch(engine, name):
    assert hasattr(engine, name), f"megalowbit uses engine.{name}, which has gone"
    assert isinstance(engine, DeepSpeedEngine)


@pytest.mark.parametrize("name", sorted(PIPELINE_ENGINE))
def test_the_pipeline_engine_has_what_we_touch(name):
    is_set = f"self.{name} = " in inspect.getsource(PipelineEngine)
    assert hasattr(PipelineEngine, name) or is_set, f"megalowbit uses PipelineEngine.{name}, which has gone"


@pytest.mark.parametrize("name", IMPORTS)
def test_a_test_of_this_folder_holds_the_import(name):
    if name in {"deepspeed", "deepspeed.ops"}:
        return
    last = name.rpartition(".")[2]
    others = (path for path in HERE.glob("test_*.py") if path != Path(__file__))
    assert any(last in path.read_text(encoding="utf-8") for path in others), (
        f"{name} is used for: {IMPORTS[name]}; no test says so when DeepSpeed changes it"
    )
