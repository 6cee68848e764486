"""Lists the DeepSpeed internals that the package uses, and what depends on each.

If you import something new from DeepSpeed, or use another attribute of its engine or optimizers, add a line
here; tests/engine/contract/test_index.py reads the package's source and reports missing lines. The tests
check that the installed DeepSpeed has all names, and so does the start of a run with an unsupported version
(`installed`). `contracts` and the tests check how these names behave.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Something that DeepSpeed must have or do.

    Attributes:
        name: a short description.
        breaks: the part of megalowbit that does not work without it.
        check: returns whether the contract holds; an exception means that it does not.
    """

    name: str
    breaks: str
    check: Callable[[], object]

    def holds(self) -> bool:
        """Whether the contract holds for the installed DeepSpeed."""
        try:
            return bool(self.check())
        except Exception:  # a changed internal can raise anything
            return False


# imported name → what depends on it
IMPORTS = {
    "deepspeed": "everything: initialize, init_distributed, get_accelerator",
    "deepspeed.ops": "starting on a CPU without a compiler",
    "deepspeed.pipe.PipelineModule": "pipelines are recognised",
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": "the engine scales the loss through our optimizer",
    "deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine": "atomic checkpoints",
    "deepspeed.runtime.config.DeepSpeedConfig": "nested blocks are checked before a model is built",
    "deepspeed.runtime.utils.maybe_loss_for_backward": "only the loss is scaled",
    # ZeRO
    "deepspeed.accelerator.get_accelerator": "streams whose gradients a bucket holds",
    "deepspeed.runtime.zero.config.DeepSpeedZeroConfig": "mistakes in zero_optimization are one line each",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "stage 3 in our interface",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "stages 1 and 2 in our interface",
    "deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID": "zero_grad starts a step's sums again",
    "deepspeed.utils.safe_get_full_fp32_param": "oscillating weights are measured and reset",
    "deepspeed.utils.safe_set_full_grad": "gradients set by hand at stages 1 and 2",
    "deepspeed.utils.safe_set_local_grad": "gradients set by hand at stage 3",
    "deepspeed.utils.safe_set_full_fp32_param": "masters are the exact initial weights",
    "deepspeed.utils.safe_set_local_fp32_param": "masters are the exact initial weights at stage 3",
    # tensor parallelism
    "deepspeed.module_inject.auto_tp.AutoTP": "which layers are sharded, and how",
    "deepspeed.module_inject.autotp_config.AutoTPConfig": "which layers are sharded, and how",
    "deepspeed.module_inject.autotp_config.PartitionType": "which layers are sharded, and how",
    "deepspeed.module_inject.autotp_config.TPLayerSpec": "which layers are sharded, and how",
    "deepspeed.module_inject.layers.TensorParallel_Layer": "sharded layers are recognised",
    "deepspeed.module_inject.set_autotp_mode": "AutoTP prepares training, not inference",
    "deepspeed.utils.groups": "groups of a tensor-parallel run",
    # pipelines
    "deepspeed.runtime.activation_checkpointing.checkpointing.non_reentrant_checkpoint": "recomputed stages",
    "deepspeed.runtime.pipe.schedule": "the instruction that reduces gradients",
    "deepspeed.runtime.utils": "a dry run distributes layers over stages as a pipeline does",
}
# attributes of the engine that we read, call or replace
ENGINE = frozenset({
    "backward", "checkpoint_engine", "checkpoint_mp_rank", "clip_fp32_gradients", "coalesce_grad_reduction",
    "device", "global_samples", "global_steps", "gradient_accumulation_steps", "load_checkpoint",
    "lr_scheduler", "micro_steps", "module", "mp_world_size", "mpu", "optimizer", "register_forward_hook",
    "save_16bit_model", "save_checkpoint", "save_fp16_model", "scale",
    "seq_data_parallel_group", "seq_dp_world_size", "skipped_steps", "step", "training_dataloader",
    "was_step_applied", "zero_gather_16bit_weights_on_model_save", "zero_grad", "zero_optimization_stage",
    "_backward_prologue_per_tensor", "_copy_recovery_script", "_get_ckpt_name", "_get_zero_ckpt_name",
    "_replace_module_consolidated_state_dict", "_save_checkpoint", "_save_zero_checkpoint",
    "_take_model_step", "_zero3_consolidated_16bit_state_dict",
})  # fmt: skip
PIPELINE_ENGINE = frozenset({
    "_INSTRUCTION_MAP", "_exec_reduce_grads", "batch_fn", "data_iterator", "dynamic_shape", "eval_batch",
    "first_output_send", "is_first_stage", "is_last_stage", "micro_batches", "num_stages", "pipe_recv_buf",
    "set_dataiterator", "total_loss", "train_batch",
})  # fmt: skip
DEFINING = (
    "runtime/base_optimizer.py",
    "runtime/pipe/module.py",
    "runtime/pipe/topology.py",
    "runtime/zero/partition_parameters.py",
    "runtime/zero/stage3.py",
    "runtime/zero/stage_1_and_2.py",
    "utils/mixed_precision_linkage.py",
    "utils/tensor_fragment.py",
)
PIPELINE_FILE = "runtime/pipe/engine.py"
LOW, ALL, THREE = (1, 2), (1, 2, 3), (3,)
MEASURED = "gradients are measured in pieces: norm, clipping, overflows"
LAYOUT = "checkpoints record where each parameter is in the flat buffers"
LOADED = "checkpoints of another layout are loaded into masters and moments"
STAGES = "a pipeline's stages, groups, tied weights and loss"

FORGOTTEN = "zero_grad clears gradients that backward has reduced"

PIPELINE = (
    "_grid", "_synchronize_tied_weights", "_topo", "activation_checkpoint_interval", "ckpt_layer_path",
    "data_parallel_size", "dp_proc_group", "ds_model_proc_group", "ds_pipe_replicated", "forward_funcs",
    "get_tied_weights_and_groups", "loss_fn", "num_stages", "parts", "pp_proc_group", "slice_proc_group",
    "stage_id", "stage_to_global", "tied_comms", "tied_modules",
)  # fmt: skip
# owner → name → (ZeRO stages whose objects have it, what depends on it)
INTERNALS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "optimizer": {
        "_build_compact_grad_partition_buffer": (
            LOW,
            "gradients set by hand are in the buffers that the step reads",
        ),
        "_clear_fp32_optimizer_param_groups": (THREE, LOADED),
        "_get_param_partition_rank": (THREE, MEASURED),
        "_global_grad_norm": (ALL, "engine.get_global_grad_norm() returns the measured norm"),
        "_hp_optimizer_states_linked": (LOW, LOADED),
        "_offload_boundary_param_ids": (THREE, FORGOTTEN),
        "_lazy_init_hp_params_optimizer_state": (LOW, LOADED),
        "_link_all_hp_params": (LOW, LOADED),
        "_set_fp32_optimizer_param_groups": (THREE, LOADED),
        "_wait_for_offload_copies": (LOW, MEASURED),
        "all_grad_tensors": (LOW, FORGOTTEN),
        "average_tensor": (LOW, "stage 2 divides gradients by the ranks in fp32"),
        "averaged_gradients": (ALL, MEASURED),
        "bit16_groups": (LOW, "what is trained, in the order that all ranks share"),
        "check_grad_overflow": (LOW, "bf16 steps are skipped if gradients are not finite"),
        "checkpoint_event_epilogue": (THREE, LOADED),
        "checkpoint_event_prologue": (THREE, LOADED),
        "clip_grad": (ALL, "clipping stays as configured after a load"),
        "cpu_offload": (LOW, MEASURED),
        "destroy": (ALL, "hooks on gradients are removed with the engine"),
        "fp16_groups": (THREE, "what is trained, in the order that all ranks share"),
        "fp16_partitioned_groups": (THREE, LOADED),
        "fp16_partitioned_groups_flat": (THREE, LOADED),
        "fp32_partitioned_groups_flat": (THREE, LOADED),
        "gradient_accumulation_dtype": (LOW, "a second backward adds to the first in fp32 too"),
        "get_gradient_for_reduction": (LOW, "both copies of a tied weight get the sum of its gradients"),
        "get_param_id": (ALL, MEASURED),
        "grad_partitions_flat_buffer": (THREE, "gradients of unused parameters are cleared"),
        "independent_gradient_partition_epilogue": (ALL, "a step without a backward is rejected"),
        "ipg_buckets": (ALL, "stage 2 waits for gradients copied on other streams before it reduces them"),
        "is_gradient_accumulation_boundary": (ALL, "a step without a backward is rejected"),
        "load_state_dict": (ALL, "checkpoints of the same layout are loaded"),
        "loss_scaler": (ALL, "the engine uses our loss scale"),
        "micro_step_id": (ALL, FORGOTTEN),
        "offload_optimizer": (THREE, MEASURED),
        "optimizer": (ALL, LOADED),
        "overflow": (ALL, "the engine counts skipped steps"),
        "param_groups": (ALL, "schedulers and lr_scale act on the groups that are stepped"),
        "params_in_partition": (LOW, MEASURED),
        "partition_size": (LOW, LAYOUT),
        "ready_for_gradients": (LOW, "gradients set by hand are distinguished from those of a backward"),
        "reset_cpu_buffers": (ALL, FORGOTTEN),
        "round_robin_bit16_groups": (LOW, LAYOUT),
        "round_robin_bit16_offsets": (LOW, LAYOUT),
        "single_partition_of_fp32_groups": (LOW, LOADED),
        "state": (ALL, LOADED),
        "state_dict": (ALL, "checkpoints hold masters and moments"),
        "sub_group_to_group_id": (THREE, LAYOUT),
        "unflatten": (ALL, LOADED),
    },
    "parameter": {
        "_hp_mapping": (LOW, MEASURED),
        "_z3_optimizer": (THREE, "masters are the exact initial weights"),
        "ds_id": (THREE, "a partitioned parameter is recognised"),
        "ds_numel": (THREE, MEASURED),
        "ds_shape": (THREE, LAYOUT),
        "ds_tensor": (THREE, "masters are the exact initial weights; weights are loaded into their pieces"),
        "partition_numel": (THREE, LAYOUT),
    },
    "offloaded": {"_offload_accumulated_param_ids": (LOW, FORGOTTEN), "grad_position": (ALL, MEASURED)},
    "address": {"lp_fragment_address": (LOW, MEASURED)},
    "bucket": {"copy_streams": (LOW, "stage 2 waits for gradients copied on other streams")},
    "source": {"_zero_padding": (LOW, MEASURED)},
    "pipeline": dict.fromkeys(PIPELINE, ((), STAGES)),
}

# arguments that are passed by name
ARGUMENTS = {
    "deepspeed.initialize": (
        (
            "model", "optimizer", "training_data", "lr_scheduler", "mpu", "dist_init_required", "collate_fn",
            "config",
        ),
        "the engine is built",
    ),
    "deepspeed.init_distributed": (
        ("dist_backend", "timeout", "verbose", "dist_init_required"),
        "the process group is started, with the timeout that is configured",
    ),
    "deepspeed.pipe.PipelineModule.__init__": (
        (
            "num_stages", "loss_fn", "partition_method", "activation_checkpoint_interval",
            "activation_checkpoint_func", "dynamic_shape",
        ),
        STAGES,
    ),
}  # fmt: skip
# methods that our classes override or call
METHODS = {
    "deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine": (
        ("save", "load", "makedirs", "commit", "create"),
        "checkpoints are written atomically",
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
        (
            "check_overflow", "step", "zero_grad", "scaled_global_norm", "average_tensor", "load_state_dict",
            "independent_gradient_partition_epilogue", "_use_compact_grad_partition_buffer",
        ),
        "ZeRO stages 1 and 2 measure, skip and reduce as stage 0 does",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        (
            "check_overflow", "step", "zero_grad", "_get_norm_groups",
            "independent_gradient_partition_epilogue",
        ),
        "ZeRO stage 3 measures and skips as stage 0 does",
    ),
    "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator": (
        ("set_device", "communication_backend_name", "device_name", "device_count", "current_stream"),
        "a process starts on its device",
    ),
}  # fmt: skip


def deepspeed_object(path: str) -> Any:
    """The module, or object in a module, with this dotted name.

    Raises:
        AttributeError, ImportError: it does not exist.
    """
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@cache
def deepspeed_source(*paths: str) -> str:
    """Concatenated source files of the installed DeepSpeed; paths are relative to the package."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    return "".join((folder / path).read_text(encoding="utf-8") for path in paths)


def takes(function: Any, names: tuple[str, ...]) -> bool:
    """Whether a function has parameters of these names."""
    return set(names) <= inspect.signature(function).parameters.keys()


def has_attribute(owner: str, name: str, path: str) -> bool:
    """Whether a class has an attribute, or the file `path` sets it on objects."""
    is_set = re.search(rf"\bself\.{name}\b[^=\n]* = |__dict__\['{name}'\] = ", deepspeed_source(path))
    return hasattr(deepspeed_object(owner), name) or is_set is not None


def name_contracts() -> Iterator[Contract]:
    """The contracts of all tables in this file."""
    for name, breaks in IMPORTS.items():
        yield Contract(name=f"import {name}", breaks=breaks, check=partial(_is_there, name))
    attributes: tuple[tuple[str, str, frozenset[str], str], ...] = (
        ("DeepSpeedEngine", "runtime/engine.py", ENGINE, "runs are built, stepped and saved"),
        ("PipelineEngine", "runtime/pipe/engine.py", PIPELINE_ENGINE, STAGES),
    )
    for cls, path, names, breaks in attributes:
        owner = f"deepspeed.{path.removesuffix('.py').replace('/', '.')}.{cls}"
        for name in sorted(names):
            yield Contract(
                name=f"{cls}.{name}", breaks=breaks, check=partial(has_attribute, owner, name, path)
            )
    for owner, table in INTERNALS.items():
        for name, (_, breaks) in table.items():
            yield Contract(
                name=f"ZeRO's and pipelines' {owner} {name}", breaks=breaks, check=partial(_is_named, name)
            )
    for owner, (methods, breaks) in METHODS.items():
        for name in methods:
            called = f"{owner.rpartition('.')[2]}.{name}()"
            yield Contract(name=called, breaks=breaks, check=partial(_is_there, f"{owner}.{name}"))
    for owner, (arguments, breaks) in ARGUMENTS.items():
        yield Contract(
            name=f"arguments of {owner}", breaks=breaks, check=partial(_takes_named, owner, arguments)
        )


def _is_there(path: str) -> bool:
    return deepspeed_object(path) is not None


def _is_named(name: str) -> bool:
    return re.search(rf"\b{name}\b", deepspeed_source(*DEFINING, PIPELINE_FILE)) is not None


def _takes_named(path: str, names: tuple[str, ...]) -> bool:
    return takes(deepspeed_object(path), names)
