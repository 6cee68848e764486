"""Internals of DeepSpeed's ZeRO optimizers and pipelines that the package uses: who has them, and for what.

`used()` reads the package's own source for every name that DeepSpeed's sources define and ours do not, so
that a new use without an entry in `INTERNALS` is found whatever the variable is called.
"""

import ast
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

ENGINE = Path(__file__).parents[3] / "megalowbit" / "engine"
READ = (
    *sorted(ENGINE.glob("zero_*.py")),
    *sorted(ENGINE.glob("pipeline*.py")),
    *(ENGINE / f"{n}.py" for n in ("reshape", "checkpoint_layout", "whole_weights", "tensor_parallel")),
)
DEEPSPEED = Path(deepspeed.__file__).parent
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
# not ZeRO's though DeepSpeed has them too: the engine's are in test_index.py, the others are names of ours
ELSEWHERE = frozenset({
    "all_parameters", "cur_scale", "device", "dynamic_shape", "enabled", "get_data_parallel_group",
    "get_model_parallel_group", "get_tensor_model_parallel_world_size", "gradient_accumulation_steps",
    "gradients", "group", "is_first_stage", "is_last_stage", "loss_scale", "module", "mpu", "rank", "report",
    "start", "step", "world_group", "world_size",
})  # fmt: skip
BY_NAME = frozenset({"getattr", "hasattr", "setattr"})
LOW, ALL, THREE = (1, 2), (1, 2, 3), (3,)
MEASURED = "gradients are measured in pieces: norm, clipping, overflows"
LAYOUT = "checkpoints say where each parameter lies in the flat buffers"
LOADED = "checkpoints of another cut are loaded into masters and moments"
STAGES = "a pipeline's stages, groups and tied weights"

FORGOTTEN = "zero_grad forgets what backward has reduced"

PIPELINE = (
    "_grid", "_synchronize_tied_weights", "_topo", "activation_checkpoint_interval", "ckpt_layer_path",
    "data_parallel_size", "dp_proc_group", "ds_model_proc_group", "ds_pipe_replicated", "forward_funcs",
    "get_tied_weights_and_groups", "num_stages", "parts", "pp_proc_group", "slice_proc_group", "stage_id",
    "stage_to_global", "tied_comms", "tied_modules",
)  # fmt: skip
# owner → name → (ZeRO stages whose objects have it, what of megalowbit breaks without it)
INTERNALS = {
    "optimizer": {
        "_build_compact_grad_partition_buffer": (LOW, "gradients set by hand are where the step reads"),
        "_clear_fp32_optimizer_param_groups": (THREE, LOADED),
        "_get_param_partition_rank": (THREE, MEASURED),
        "_global_grad_norm": (ALL, "engine.get_global_grad_norm() tells the norm that was measured"),
        "_hp_optimizer_states_linked": (LOW, LOADED),
        "_offload_boundary_param_ids": (THREE, FORGOTTEN),
        "_lazy_init_hp_params_optimizer_state": (LOW, LOADED),
        "_link_all_hp_params": (LOW, LOADED),
        "_set_fp32_optimizer_param_groups": (THREE, LOADED),
        "all_grad_tensors": (LOW, FORGOTTEN),
        "average_tensor": (LOW, "stage 2 divides gradients by the ranks in fp32"),
        "averaged_gradients": (ALL, MEASURED),
        "bit16_groups": (LOW, "what is trained, in the order that all ranks share"),
        "check_grad_overflow": (LOW, "bf16 steps are skipped where gradients are not finite"),
        "checkpoint_event_epilogue": (THREE, LOADED),
        "checkpoint_event_prologue": (THREE, LOADED),
        "clip_grad": (ALL, "clipping stays as configured after a load"),
        "cpu_offload": (LOW, MEASURED),
        "fp16_groups": (THREE, "what is trained, in the order that all ranks share"),
        "fp16_partitioned_groups": (THREE, LOADED),
        "fp16_partitioned_groups_flat": (THREE, LOADED),
        "fp32_partitioned_groups_flat": (THREE, LOADED),
        "get_gradient_for_reduction": (LOW, "both copies of a tied weight get the sum of its gradients"),
        "get_param_id": (ALL, MEASURED),
        "grad_partitions_flat_buffer": (THREE, "gradients of parameters that a step left out are cleared"),
        "independent_gradient_partition_epilogue": (ALL, "a step without a backward is refused"),
        "ipg_buckets": (ALL, "stage 2 waits for gradients copied on other streams before it reduces them"),
        "is_gradient_accumulation_boundary": (ALL, "a step without a backward is refused"),
        "load_state_dict": (ALL, "checkpoints of the same cut are loaded"),
        "loss_scaler": (ALL, "the engine scales by our loss scale"),
        "micro_step_id": (ALL, FORGOTTEN),
        "offload_optimizer": (THREE, MEASURED),
        "optimizer": (ALL, LOADED),
        "overflow": (ALL, "the engine counts skipped steps"),
        "param_groups": (ALL, "schedulers and lr_scale act on the groups that are stepped"),
        "params_in_partition": (LOW, MEASURED),
        "partition_size": (LOW, LAYOUT),
        "ready_for_gradients": (LOW, "gradients set by hand are told from those of a backward"),
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


def defined_by_deepspeed():
    """Names of attributes, methods and fields in DeepSpeed's ZeRO and pipeline sources."""
    names = set()
    for path in DEFINING:
        for node in ast.walk(ast.parse((DEEPSPEED / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def used():
    """Name of DeepSpeed's → files of ours that use it."""
    known = defined_by_deepspeed()
    classes = (torch, torch.Tensor, torch.nn.Module, dist, dict, str)
    of_torch = {name for each in classes for name in dir(each)} | {"grad"}
    found = {}
    for path in READ:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name, owner = None, None
            if isinstance(node, ast.Attribute):
                name, owner = node.attr, node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
                name = getattr(node.args[1], "value", None)
            is_optimizer = "optimizer" in (getattr(owner, "id", None), getattr(owner, "attr", None))
            if name in known and (is_optimizer or name not in of_torch):
                found.setdefault(name, set()).add(path.name)
    return {name: files for name, files in found.items() if name not in ELSEWHERE}
