"""Contracts: what must hold inside DeepSpeed for our results to be correct (sources, tables, calculations).

Each contract names what goes wrong if it is broken. All contracts are quick and need no process group:
`broken_contracts` checks the installed DeepSpeed at the start of a run, and the tests use the same table.
Behaviour that only a running engine shows (order of calls, types of objects, numbers) is tested in
tests/engine/contract/. Run these tests before supporting a new DeepSpeed version.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from megalowbit.config import keys as deepspeed_keys
from megalowbit.config import stock_precision
from megalowbit.config import values as deepspeed_values
from megalowbit.config.deepspeed_json import DEFAULT_CLIPPING
from megalowbit.config.optimizer import SCHEDULERS
from megalowbit.config.pipeline import BEST, DEFAULTS
from megalowbit.engine.overflow_retry import COUNTERS
from megalowbit.engine.tensor_parallel.same_batch import HANDLE
from megalowbit.engine.tensor_parallel.shard_model import IS_SHARDED
from megalowbit.engine.versions.internals import Contract, deepspeed_object, deepspeed_source, name_contracts

ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine.PipelineEngine"
LOW = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
THREE = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
COLLECTIVES = ("barrier(", "all_reduce(", "broadcast(", "all_gather(")
# read by deepspeed.initialize or the engine, not by DeepSpeedConfig
READ_ELSEWHERE = frozenset({"sequence_parallel_size", "data_parallel_size"})

# function or class, text that its source must contain, what goes wrong without it
SOURCES = (
    (f"{ENGINE}._configure_optimizer", "optimizer = basic_optimizer", "our optimizer would be wrapped"),
    (f"{ENGINE}._apply_autotp_partitioning", f'getattr(model, "{IS_SHARDED}", False)',
     "the engine would replace low-bit layers"),
    (f"{ENGINE}._configure_tensor_parallel_states",
     f"self.{HANDLE} = self.module.register_forward_pre_hook(",
     "different batches on tensor-parallel ranks would raise DeepSpeed's assertion, or pass unnoticed"),
    (f"{ENGINE}._configure_tensor_parallel_states", "self.mpu = groups",
     "the check of the first batch would find no tensor-parallel group"),
    (f"{ENGINE}._save_checkpoint", "self.checkpoint_engine.save(", "checkpoints would not be atomic"),
    (f"{ENGINE}._save_zero_checkpoint", "self.checkpoint_engine.save(", "checkpoints would not be atomic"),
    (f"{ENGINE}._save_zero_checkpoint", "self._copy_recovery_script(",
     "a full disk on rank 0 would leave the other ranks waiting"),
    (f"{ENGINE}.save_checkpoint", "self._save_checkpoint(",
     "an error while states are collected would leave other ranks waiting"),
    (f"{ENGINE}.save_checkpoint", "self._save_zero_checkpoint(",
     "an error in ZeRO's states would leave other ranks waiting"),
    (f"{ENGINE}.module_state_dict", "self.module.state_dict(",
     "checkpoints would hold parameters in another layout"),
    (f"{ENGINE}.load_module_state_dict", "self.module.load_state_dict(",
     "checkpoints would be loaded in another layout"),
    ("deepspeed.pipe.PipelineModule.save_state_dict", "layer.state_dict()",
     "a pipeline's files would hold parameters in another layout"),
    (f"{ENGINE}._consolidated_16bit_state_dict", "self._zero3_consolidated_16bit_state_dict(",
     "exports of stage 3 would hold weights of Conv1D layers transposed"),
    (f"{ENGINE}._consolidated_16bit_state_dict", "self._replace_module_consolidated_state_dict(",
     "exports of tensor-parallel engines would hold weights of Conv1D layers transposed"),
    (f"{LOW}.step", "check_grad_overflow) and is_invalid_grad_norm(scaled_global_grad_norm)",
     "ZeRO stages 1 and 2 would apply inf and NaN in bf16"),
    (THREE, "if is_invalid_grad_norm(scaled_global_grad_norm):",
     "ZeRO stage 3 would apply inf and NaN"),
    (LOW, "self.average_tensor(", "stage 2 would divide gradients by the ranks in half precision"),
    (LOW, "dtype=self._gradient_reduction_buffer_dtype()",
     "stage 2 would reduce gradients in half precision, and lose micro-batches to rounding"),
    (f"{LOW}._lazy_init_hp_params_optimizer_state", "_hp_optimizer_states_linked",
     "moments of another layout would be loaded into the first group only"),
    (f"{PIPELINE}._next_batch", "next(self.data_iterator)", "a pipeline's data would be read unchecked"),
    (f"{PIPELINE}._exec_load_micro_batch", "is_first_stage", "stages without data would try to read some"),
    (f"{PIPELINE}.reset_activation_shape", "self.first_output_send = True",
     "batches of another shape would be rejected"),
    (f"{PIPELINE}.reset_activation_shape", "self.pipe_recv_buf = None",
     "batches of another shape would be rejected"),
    (f"{PIPELINE}.__init__", "use_reentrant", "pipeline.use_reentrant would do nothing"),
    (f"{PIPELINE}.__init__", "ZeRO-2 and ZeRO-3 are incompatible",
     "our rejection of ZeRO 2 and 3 in pipelines would have to be reviewed"),
    *((kind, f"self.{name} = ", f"our property {name} would have no effect")
      for kind in (LOW, THREE)
      for name in ("loss_scaler", "dynamic_loss_scale", "timers", "overflow", "_global_grad_norm")),
)  # fmt: skip
# function, text that its source must not contain, what goes wrong with it
ABSENT = (
    (f"{LOW}.get_gradient_for_reduction", ".to(self.dtype)",
     "gradients of tied weights would be summed in half precision"),
    *((f"{ENGINE}.{name}", word, "an error in it could not be kept until all ranks have written")
      for name in ("_save_checkpoint", "_save_zero_checkpoint")
      for word in COLLECTIVES),
    *((f"{ENGINE}.{name}", "torch.save", "checkpoints would not be atomic")
      for name in ("_save_checkpoint", "_save_zero_checkpoint")),
)  # fmt: skip


@cache
def contracts() -> tuple[Contract, ...]:
    """All contracts; imports DeepSpeed only when called."""
    return (*name_contracts(), *_source_contracts(), *_table_contracts())


def broken_contracts() -> list[Contract]:
    """The contracts that the installed DeepSpeed breaks."""
    return [contract for contract in contracts() if not contract.holds()]


def _source_contracts() -> Iterator[Contract]:
    for rows, verb, is_there in ((SOURCES, "has", True), (ABSENT, "is without", False)):
        for place, text, breaks in rows:
            yield Contract(
                name=f"source of {_short(place)} {verb} {text!r}",
                breaks=breaks,
                check=partial(_is_as_expected, place, text, is_there),
            )


def _is_as_expected(place: str, text: str, is_there: bool) -> bool:
    return (text in _source_of(place)) == is_there


def _short(place: str) -> str:
    return ".".join(place.split(".")[3:]).removeprefix("engine.")


@cache
def _source_of(place: str) -> str:
    """Source of a class or function."""
    found = deepspeed_object(place)
    if not inspect.isclass(found):
        return inspect.getsource(inspect.unwrap(found))
    text = deepspeed_source(str(inspect.getsourcefile(found)))
    start = text.index(f"\nclass {found.__name__}(")  # inspect's own search for a class parses the whole file
    return re.split(r"\n(?=class |def |@)", text[start + 1 :])[0]


def _table_contracts() -> Iterator[Contract]:
    rows: tuple[tuple[str, Callable[[], object], str], ...] = (
        ("top-level configuration keys", _keys_agree, "users' keys would be rejected or silently ignored"),
        ("removed configuration keys", _removed_keys_agree, "users' keys would be silently ignored"),
        ("keys of zero_optimization", _zero_keys_agree, "a key of zero_optimization would be ignored"),
        ("keys of tensor_parallel", _tensor_keys_agree, "a key of tensor_parallel would be ignored"),
        ("keys of pipeline", _pipeline_keys_agree, "a key of pipeline would be rejected or ignored"),
        ("fp16 and bf16 blocks", _precision_agrees, "stock configurations would get another loss scale"),
        (
            "default of gradient_clipping",
            _clipping_agrees,
            "configurations without it would clip differently",
        ),
        ("allowed values", _choices_agree, "values that DeepSpeed accepts would be rejected, or the reverse"),
        ("parameters of schedulers", _schedulers_agree, "a scheduler would be rejected, or fail late"),
        ("counters of a step", _counters_agree, "a repeated step would be counted twice"),
        ("end of a pipeline's step", _pipeline_step_ends, "tied gradients would be summed after the average"),
        ("order of ranks in a pipeline", _topology_agrees, "ranks would read data of other ranks"),
        ("what counts as a loss", _losses_are_known, "other tensors would be scaled, or a loss would not"),
    )
    for name, check, breaks in rows:
        yield Contract(name=name, breaks=breaks, check=check)


class _Recorder(dict[str, Any]):
    """A configuration that records which keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return dict.get(self, key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return dict.__contains__(self, key)

    def keys(self) -> Any:
        return self


def _keys_agree() -> bool:
    recorder = _Recorder({"train_batch_size": 1})
    # the keys that are read do not depend on the number of processes
    one_process = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
    deepspeed_object("deepspeed.runtime.config.DeepSpeedConfig")(recorder, one_process)
    return recorder.seen | READ_ELSEWHERE == deepspeed_keys.KNOWN_KEYS | deepspeed_keys.REMOVED_KEYS


def _removed_keys_agree() -> bool:
    removed = deepspeed_object("deepspeed.runtime.config._REMOVED_TOP_LEVEL_CONFIG_KEYS")
    return set(removed) == deepspeed_keys.REMOVED_KEYS


def _keys_of(model: Any) -> set[str]:
    fields = model.model_fields
    return fields.keys() | {field.alias for field in fields.values() if field.alias}


def _zero_keys_agree() -> bool:
    config = deepspeed_object("deepspeed.runtime.zero.config.DeepSpeedZeroConfig")
    return _keys_of(config) == deepspeed_keys.ZERO_KEYS


def _tensor_keys_agree() -> bool:
    config = deepspeed_object("deepspeed.runtime.tensor_parallel.config.TPTrainingConfig")
    refused = {dotted.removeprefix("tensor_parallel.") for dotted, _, _ in deepspeed_keys.REFUSED}
    return _keys_of(config) - refused == {"autotp_size"}


def _pipeline_keys_agree() -> bool:
    defaults = deepspeed_object("deepspeed.runtime.config.get_pipeline_config")({})
    return {*defaults, "use_reentrant"} == DEFAULTS.keys() and defaults["partition"] == BEST


def _precision_agrees() -> bool:
    fp16 = deepspeed_object("deepspeed.runtime.precision_config.DeepSpeedFP16Config")
    bf16 = deepspeed_object("deepspeed.runtime.precision_config.DeepSpeedBF16Config")
    found = {key: getattr(fp16(), key) for key in stock_precision.SCALER_KEYS}
    return (
        set(fp16.model_fields) == set(stock_precision.KEYS["fp16"])
        and set(bf16.model_fields) == set(stock_precision.KEYS["bf16"])
        and found == stock_precision.SCALER_DEFAULTS
    )


def _clipping_agrees() -> bool:
    default = deepspeed_object("deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT")
    return bool(default == DEFAULT_CLIPPING)


def _choices_agree() -> bool:
    levels = deepspeed_object("deepspeed.utils.logging.log_levels")
    operations = deepspeed_object("deepspeed.runtime.constants.GRADIENT_ALLREDUCE_OP_SUPPORTED")
    monitors = deepspeed_object("deepspeed.monitor.config.DeepSpeedMonitorConfig").model_fields
    return (
        set(deepspeed_values.LOG_LEVELS) == set(levels)
        and set(deepspeed_values.ALLREDUCE_OPS) == set(operations)
        and set(monitors) - {"csv_monitor"} == set(deepspeed_values.MONITOR_PACKAGES)
    )


def _schedulers_agree() -> bool:
    known = deepspeed_object("deepspeed.runtime.lr_schedules")
    for name, (required, optional) in SCHEDULERS.items():
        parameters = inspect.signature(
            getattr(known, name, None) or getattr(torch.optim.lr_scheduler, name)
        ).parameters
        needed = {key for key, each in parameters.items() if each.default is each.empty}
        if not {*required, *optional} <= parameters.keys() or needed - {"optimizer", "self"} != set(required):
            return False
    return True


def _counters_agree() -> bool:
    source = _source_of(f"{ENGINE}._take_model_step") + _source_of(f"{ENGINE}.step")
    moved = set(re.findall(r"self\.(\w+) \+= ", source))
    return moved - {"update_interval"} == set(COUNTERS)  # of ZenFlow, which is rejected


def _pipeline_step_ends() -> bool:
    schedule = deepspeed_object("deepspeed.runtime.pipe.schedule")
    end = [schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep]
    for stages in (1, 2, 3):
        for stage in range(stages):
            steps = list(schedule.TrainSchedule(micro_batches=2, stages=stages, stage_id=stage))
            reductions = [each for step in steps for each in step if isinstance(each, schedule.ReduceGrads)]
            if [type(each) for each in steps[-1][-3:]] != end or len(reductions) != 1:
                return False
    return True


def _topology_agrees() -> bool:
    topology = deepspeed_object("deepspeed.runtime.pipe.topology.PipeDataParallelTopology")
    place = topology(num_pp=2, num_dp=3).get_coord(4)
    return bool((place.pipe, place.data) == (1, 1))


def _losses_are_known() -> bool:
    is_loss = deepspeed_object("deepspeed.runtime.utils.maybe_loss_for_backward")
    graph = torch.ones(2, requires_grad=True)
    return bool(is_loss(graph.sum()) and not is_loss(graph * 2) and not is_loss(torch.ones(())))
