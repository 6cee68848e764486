"""The keys of a DeepSpeed configuration, and those that this release rejects.

DeepSpeed ignores unknown top-level keys, so a misspelt block would train with settings that the file does not
have. The tables are those of DeepSpeed 0.19.8; a contract test compares them with the installed version.
DeepSpeed's models check nested blocks, except those that megalowbit rejects or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megalowbit.config.values import RULES, unknown_key
from megalowbit.errors import Problems, UserError, shown, unknown_name

KNOWN_KEYS = frozenset(RULES)
# The keys of the blocks that determine the size of a run. DeepSpeed's models check them too, but only once it
# is imported; a dry run that overlooked a misspelt stage would report the size of another run.
ZERO_KEYS = frozenset(
    {
        "allgather_bucket_size",
        "allgather_partitions",
        "allgather_sequential",
        "compute_grad_norm",
        "contiguous_gradients",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "gather_16bit_weights_on_model_save",
        "ignore_unused_parameters",
        "leaf_module",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "max_live_parameters",
        "max_reuse_distance",
        "memory_efficient_linear",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "param_persistence_threshold",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "prefetch_bucket_size",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_all_reduce_for_fetch_params",
        "use_multi_rank_bucket_allreduce",
        "zenflow",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
NESTED_KEYS = {"zero_optimization": ZERO_KEYS, "tensor_parallel": frozenset({"autotp_size"})}

# DeepSpeed 0.19.8 raises an error for these itself, but only after seconds of imports.
REMOVED_KEYS = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)


def _is_on(value: Any) -> bool:
    return value not in (None, False, {}, [])


def _is_sharded(value: Any) -> bool:
    return isinstance(value, bool) or value not in (None, 0, 1)


def _is_not_fp32(value: Any) -> bool:
    return value not in (None, "fp32", "float32", "torch.float32", "float")


def _is_any_on(value: Any) -> bool:
    return any(map(_is_on, value.values())) if isinstance(value, Mapping) else _is_on(value)


# dotted key, whether a value is rejected, reason and remedy
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *(
        (f"tensor_parallel.{key}", _is_on, "megalowbit shards models by its tensor-parallel plan: remove it")
        for key in ("partition_config", "preset_model", "vocab_parallel_lm_head", "tp_overlap_comm")
    ),
    *(
        (f"tensor_parallel.{key}", _is_on, "it is for inference and has no effect in training: remove it")
        for key in (
            "injection_policy_tuple",
            "keep_module_on_host",
            "kernel_inject",
            "replace_with_kernel_inject",
        )
    ),
    *(
        (f"tensor_parallel.{key}", _is_on, "write the number of ranks as tensor_parallel.autotp_size only")
        for key in ("tp", "tensor_parallel")
    ),
    ("tensor_parallel.dtype", _is_on, "use megalowbit.precision instead"),
    (
        "tensor_parallel.vocab_parallel_ce_backend",
        lambda value: value not in (None, "torch"),
        "the vocabulary is not sharded: remove it",
    ),
    ("sequence_parallel_size", _is_sharded, "sequence parallelism is not supported yet: remove it"),
    (
        "data_parallel_size",
        lambda value: value is not None,
        "it follows from the number of processes: remove it",
    ),
    ("expert_parallel.enabled", _is_on, "expert parallelism is not supported yet: set it to false"),
    ("hybrid_engine.enabled", _is_on, "it is for RLHF inference: set it to false"),
    ("autotuning.enabled", _is_on, "autotuning is not supported: set it to false"),
    ("compile.deepcompile", _is_on, "DeepCompile replaces the gradient reduction: set it to false"),
    ("data_efficiency.enabled", _is_on, "curriculum sampling is not supported: set it to false"),
    ("weight_quantization", _is_on, 'it is for inference: use megalowbit.recipe, for example "nvfp4"'),
    ("torch_autocast.enabled", _is_on, 'set it to false and megalowbit.precision to "bf16" or "fp16"'),
    ("data_types.param_dtype", _is_on, "use megalowbit.precision instead"),
    ("data_types.grad_accum_dtype", _is_not_fp32, 'gradients are always summed in fp32: set it to "fp32"'),
    (
        "managed_gradient_accumulation",
        lambda value: value not in (None, True),
        "the engine counts micro-batches: remove it and set gradient_accumulation_steps",
    ),
    (
        "activation_checkpointing",
        _is_any_on,
        "Hugging Face models never call DeepSpeed's checkpointing, so it would save no memory: remove it and "
        "set megalowbit.activation_checkpointing.every",
    ),
    ("checkpoint.writer", _is_on, "checkpoints are written atomically by megalowbit: remove it"),
    ("checkpoint.load_universal", _is_on, "universal checkpoints are not supported yet: remove it"),
    (
        "checkpoint.use_node_local_storage",
        _is_on,
        "checkpoints need a folder that all nodes share: remove it",
    ),
    ("checkpoint.parallel_write", _is_on, "checkpoints are written by rank 0: remove it"),
    ("datastates_ckpt", _is_on, "checkpoints are written atomically by megalowbit: remove it"),
)
# Keys for which "auto" is a value of DeepSpeed and is not filled in.
AUTO_OF_DEEPSPEED = frozenset({"data_types.keep_in_fp32_modules"})


def check_keys(config: Mapping[str, Any], ours: Iterable[str] = ()) -> None:
    """Reject unknown top-level keys and unsupported values.

    Args:
        config: the configuration without its `"megalowbit"` block.
        ours: keys of that block, to recognise one that was written one level too high.

    Raises:
        UserError: names the key, its value and the remedy.
    """
    problems = Problems()
    ours = tuple(ours)
    for key in config:
        if key in REMOVED_KEYS:
            problems.add(UserError(f"{key} = {shown(config[key])} was removed from DeepSpeed: remove it"))
        elif key not in KNOWN_KEYS:
            problems.add(_unknown_key(key, ours))
    if config.get("zero_optimization") is True:
        problems.add(UserError('zero_optimization = true is an old name of stage 1: write {"stage": 1}'))
    for dotted, is_refused, remedy in REFUSED:
        value = _lookup(config, dotted)
        if value != "auto" and is_refused(value):
            problems.add(UserError(f"{dotted} = {shown(value)} cannot be used: {remedy}"))
    for block, known in NESTED_KEYS.items():
        _check_nested(block, config.get(block), known, problems)
    problems.raise_any()


def _unknown_key(key: str, ours: tuple[str, ...]) -> UserError:
    if key in ours:
        return UserError(f'unknown key {key!r}: move it into the "megalowbit" block, megalowbit.{key}')
    return unknown_name("key", key, sorted([*KNOWN_KEYS, "megalowbit"]))


def _check_nested(block: str, values: Any, known: frozenset[str], problems: Problems) -> None:
    if not isinstance(values, Mapping):  # `check_values` reports a wrong type
        return
    refused = {dotted.removeprefix(f"{block}.") for dotted, _, _ in REFUSED}
    for key in values:
        if key not in known and key not in refused:
            problems.add(unknown_key(block, key, sorted(known)))


def check_no_auto_left(config: Mapping[str, Any], prefix: str = "") -> None:
    """Reject every `"auto"` that was not filled in; DeepSpeed would fail on it, or read it as a name.

    Raises:
        UserError: names the key.
    """
    problems = Problems()
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            with problems.collect():
                check_no_auto_left(value, f"{dotted}.")
        elif value == "auto" and dotted not in AUTO_OF_DEEPSPEED:
            message = f"{dotted} = 'auto' cannot be filled in: write its value, or remove it for the default"
            problems.add(UserError(message))
    problems.raise_any()


def _lookup(config: Mapping[str, Any], dotted: str) -> Any:
    node: Any = config
    for part in dotted.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node
