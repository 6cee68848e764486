"""Checks for a converted model in another library's training loop: does it train as configured?

Stock DeepSpeed, Hugging Face's Trainer and Accelerate ignore the `"megalowbit"` block, build their own
optimizers, and may replace layers. Nothing is patched. Instead, two places check:

- the hook that advances the random stream, at the first training forward in a DeepSpeed engine,
- `check_training`, which a script or `MegalowbitCallback` calls.

An engine is found by the hook that it registers on its module. Not detected: a model without low-bit layers
in a script that calls nothing of megalowbit; an engine around a module that contains the converted one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from megalowbit.distributed.sharded_parameters import is_sharded, reshard
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_json_object
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.loop_optimizer import name_of_dtype, optimizer_problems
from megalowbit.layers.conversion.refusals import warn_of_rounded_positions
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.quantize.random_stream import own_rank
from megalowbit.values import BLOCK, require_module

logger = logging.getLogger(__name__)

# sections of launch/pretrain.py, which mlb.initialize ignores too
OF_THE_RUN = frozenset({"model", "data", "run", "checkpoint", "telemetry", "loss_guard"})
OFF: tuple[object, ...] = (None, False, {}, "global", {"enabled": False})


def check_training(
    model: nn.Module,
    *,
    optimizer: object = None,
    config: str | Path | Mapping[str, Any] | None = None,
) -> None:
    """Check before the first step that a model trains in low precision as its configuration says.

    For scripts with an engine of stock DeepSpeed, with Accelerate, or with their own loop; in Trainer,
    `MegalowbitCallback` calls it. Local to each rank.

    Args:
        model: the converted model, or the engine or wrapper that trains it.
        optimizer: the optimizer that steps it; an engine's optimizer is found.
        config: DeepSpeed's configuration with the `"megalowbit"` block; an engine's is found.

    Raises:
        UserError: lists all problems in one line: the model has no low-bit layers or lost them, the block
            sets a key that nothing acts on, layers and block name different recipes, autocast computes in
            another half precision than the weights have, the optimizer was built for other weights or expects
            a loss scale or gradients that the loop does not provide, the random stream belongs to another
            rank, stock DeepSpeed's stage 3 would export weights in another layout than transformers reads, or
            torch has sharded layers that are split into parameters.
    """
    require_module(model, "check_training")
    inner, engine = _unwrapped(model)
    if engine is not None and hasattr(engine, "process_grid"):
        return  # made by megalowbit.initialize, which has already checked it
    reshard(inner)  # an evaluation before may have gathered weights
    problems = _problems(inner, engine, optimizer, config)
    if isinstance(model, nn.DataParallel):
        problems.append(
            "nn.DataParallel copies the model for each device, and its copies share one random stream: start "
            "one process for each device"
        )
    if problems:
        raise UserError("; ".join(problems))


def check_engine(model: nn.Module, names: tuple[str, ...]) -> None:
    """Check at a model's first training forward, from the stream's hook; without an engine, layers only.

    `names` are those of the converted layers.

    Raises:
        UserError: see `check_training`.
    """
    if own_rank() == 0:
        warn_of_rounded_positions(model)
    engine = find_engine(model)
    if engine is not None and hasattr(engine, "process_grid"):
        return
    if engine is None:  # a user may have converted single layers back by hand
        layers = [each for name, each in model.named_modules() if name in names]
        if layers and not any(_holds_low_bit(each) for each in layers):
            raise UserError(_replaced(names, names[0], layers[0]))
        return
    problems = _problems(model, engine, None, None, names)
    if problems:
        raise UserError("; ".join(problems))
    precision = _precision(engine)
    if precision != "fp32" and own_rank() == 0:
        scale = "its own loss scale" if precision == "fp16" else "its own search for inf and NaN"
        logger.warning(
            "low-bit layers train in an engine of stock DeepSpeed, with %s and its own optimizer: to use "
            "megalowbit's (grad_scaler, fp32 gradients at every stage), make the engine with "
            "megalowbit.initialize",
            scale,
        )


def find_engine(model: nn.Module) -> Any | None:
    """The DeepSpeed engine around a model, found by its hook on the model; None if there is none."""
    for hook in (*model._forward_pre_hooks.values(), *model._forward_hooks.values()):
        if not str(getattr(hook, "__module__", "")).startswith("deepspeed."):
            continue
        for cell in getattr(hook, "__closure__", None) or ():
            if getattr(cell.cell_contents, "module", None) is model:
                return cell.cell_contents
    return None


def _unwrapped(model: nn.Module) -> tuple[nn.Module, Any | None]:
    """The innermost module, and the engine around it."""
    while True:
        engine = find_engine(model)
        if engine is not None:
            return model, engine
        is_wrapper = type(model).__module__.startswith(("torch.nn.parallel.", "deepspeed.", "torch._dynamo."))
        inner = getattr(model, "module", getattr(model, "_orig_mod", None))
        if not is_wrapper or not isinstance(inner, nn.Module):
            return model, None
        model = inner


def _problems(
    model: nn.Module,
    engine: Any | None,
    optimizer: object,
    config: str | Path | Mapping[str, Any] | None,
    names: tuple[str, ...] = (),
) -> list[str]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, BitLinear)}
    settings = getattr(engine, "config", None) if config is None else config
    block = _block_of(settings)
    optimizers = [optimizer, getattr(engine, "optimizer", None), getattr(engine, "basic_optimizer", None)]
    return [
        *_layer_problems(model, layers, names, block),
        *_block_problems(block, engine),
        *_autocast_problems(layers, engine),
        *optimizer_problems(model, optimizers, engine),
        *_stream_problems(layers, engine),
        *_export_problems(layers, engine),
        *_split_problems(layers),
    ]


def _layer_problems(
    model: nn.Module, layers: Mapping[str, BitLinear], names: tuple[str, ...], block: Mapping[str, Any]
) -> list[str]:
    asked = _recipe(block)
    modules = dict(model.named_modules())
    replaced = [name for name in names if name in modules and not _holds_low_bit(modules[name])]
    if replaced:
        return [_replaced(names, replaced[0], modules[replaced[0]], len(replaced))]
    if not layers:
        if asked is not None and not asked.quantizes:
            return []
        return [
            f"{type(model).__name__} has no low-bit layers, and would train in full precision: call "
            "megalowbit.convert(model, recipe) before the optimizer is made"
        ]
    differs = (
        name
        for name, layer in layers.items()
        if asked is not None and layer.recipe != asked.of_layer(layer.layer_name)
    )
    if (other := next(differs, None)) is not None:
        return [
            f"{BLOCK}.recipe is {shown(block['recipe'])}, and layer {other} has "
            f"{shown(layers[other].recipe.name)}: convert the model with the block's recipe, or correct it"
        ]
    return []


def _holds_low_bit(module: nn.Module) -> bool:
    """Whether a module is a BitLinear or wraps one, as adapters, checkpointing and FSDP do."""
    return any(isinstance(each, BitLinear) for each in module.modules())


def _replaced(names: tuple[str, ...], name: str, layer: nn.Module, count: int | None = None) -> str:
    return (
        f"{len(names) if count is None else count} of {len(names)} low-bit layers were replaced after the "
        f"model was converted ({name} is {type(layer).__name__}): turn off what replaces layers, such as "
        "tensor_parallel or an injection policy, or use megalowbit.initialize"
    )


def _block_problems(block: Mapping[str, Any], engine: Any | None) -> list[str]:
    problems = []
    for key, value in block.items():
        if key == "recipe" or key in OF_THE_RUN or value in OFF:
            continue
        if key == "precision" and engine is not None:
            if value != _precision(engine):
                problems.append(
                    f"{BLOCK}.precision is {shown(value)}, and the engine computes in {_precision(engine)}: "
                    "correct it, or DeepSpeed's fp16 and bf16 blocks"
                )
        elif key != "precision":
            problems.append(
                f"{BLOCK}.{key} = {shown(value)} only works with megalowbit.initialize: remove it, or make "
                "the engine with megalowbit.initialize"
            )
    return problems


def _autocast_problems(layers: Mapping[str, BitLinear], engine: Any | None) -> list[str]:
    """Accelerate, and so Trainer, runs the model under autocast; an engine has its own precision."""
    state = sys.modules.get("accelerate.state")
    if engine is not None or state is None or not state.is_initialized():
        return []
    chosen = state.AcceleratorState().mixed_precision  # no, fp16, bf16 or fp8
    found = {name_of_dtype(each.weight.dtype) for each in layers.values()}
    if (chosen == "fp16" and "bfloat16" in found) or (chosen == "bf16" and "float16" in found):
        other = (found & {"float16", "bfloat16"}).pop()
        return [
            f"the weights are {other}, and mixed precision {chosen} would compute in another format: use the "
            "same for both, or model.float()"
        ]
    if chosen == "fp16" and "float16" in found:
        return [
            "the weights are float16, whose gradients torch's GradScaler cannot unscale: use model.float() "
            "with fp16, or bf16 for both"
        ]
    return []


def _stream_problems(layers: Mapping[str, BitLinear], engine: Any | None) -> list[str]:
    rank = own_rank()
    # tensor-parallel ranks hold the same data, and share the numbers of their data-parallel rank
    data_rank = getattr(getattr(engine, "mpu", None), "get_data_parallel_rank", lambda: rank)()
    streams = (each.random_stream for each in layers.values())
    wrong = next((each for each in streams if each is not None and each.rank not in (rank, data_rank)), None)
    if wrong is None:
        return []
    remedy = "leave rank= out of megalowbit.convert"
    if not (dist.is_available() and dist.is_initialized()):
        remedy = (
            "this loop treats each process as the only one, so start all with its launcher (with Accelerate "
            "on CPUs as docs/other-loops.md says), or, if there is one process, leave out rank="
        )
    return [
        f"the random stream belongs to rank {wrong.rank} and this is rank {rank}, which needs its own random "
        f"numbers: {remedy}"
    ]


def _split_problems(layers: Mapping[str, BitLinear]) -> list[str]:
    for name, layer in layers.items():
        if layer.recipe.parameter_split is not None and is_sharded(layer.weight):
            return [
                f"layer {name} has parameter_split and is sharded by torch, whose state dicts would lack its "
                "weight: choose a recipe without parameter_split"
            ]
    return []


def _export_problems(layers: Mapping[str, BitLinear], engine: Any | None) -> list[str]:
    """At stage 3 DeepSpeed, Trainer and Accelerate export parameters as stored, not a state dict."""
    if engine is None or not engine.zero_optimization_partition_weights():
        return []
    for name, layer in layers.items():
        if not layer.is_transposed and not layer.has_factors:
            continue
        fault = "transposed (no error for square ones)" if layer.is_transposed else "without its split parts"
        return [
            f"at ZeRO stage 3 this engine and DeepSpeed's tools export the weight of {name} {fault}: use "
            "stage 2 or less, or make the engine with megalowbit.initialize"
        ]
    return []


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() else "fp32"


def _recipe(block: Mapping[str, Any]) -> Recipe | None:
    return None if block.get("recipe") is None else recipe_of(block["recipe"])


def _block_of(config: object) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        if not Path(config).exists():
            return {}  # DeepSpeed also takes encoded text, and has read it
        config = read_json_object(Path(config))
    block = config.get(BLOCK) if isinstance(config, Mapping) else None
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise UserError(f'"{BLOCK}" = {shown(block)} must be an object {{…}}')
    return block
