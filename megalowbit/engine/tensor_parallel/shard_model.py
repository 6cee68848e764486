"""Tensor parallelism: DeepSpeed's AutoTP cuts the model, our layers take over the shards.

AutoTP shards a model inside `deepspeed.initialize`, and replaces what it does not know: a low-bit layer put
in before would quietly become a plain one. So it is called here first, with a plan of our own by model
family; its layers are exchanged for `layers.tensor_parallel`'s on the same parameters, `convert` makes those
low-bit, and the mark left on the model lets the engine skip its own pass.

Attention and MLP projections are cut, heads and all. Embeddings, norms and the output head stay whole on
every rank, tied or not: they get equal gradients there, and count once in the norm. What all ranks hold
starts as the first rank of the group has it, and so do random generators, for dropout must draw alike: who
seeds them later must do so alike. Attention dropout draws the same masks on each rank's own heads.

Not covered: other families than GPT-2 and LLaMA, uneven heads, cross-attention, vocabulary parallelism,
DeepSpeed's own plans (`tensor_parallel.partition_config` and the like are refused with the configuration).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.distributed.process_grid import TENSOR_KEY, ProcessGrid
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallel_linear,
)

logger = logging.getLogger(__name__)

ParallelLinear = ColumnParallelLinear | RowParallelLinear
IS_SHARDED = "ds_autotp_parsed"  # DeepSpeed's own mark
# what AutoTP divides wherever a module has it, among what the families here have
SIZES = ("num_heads", "embed_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the projections of one model family are cut; names are the last ones of a module's path.

    Attributes:
        column: projections whose output features are cut, with the number of parts side by side in them.
        row: projections whose input features are cut.
        counts: fields of the configuration that the number of tensor ranks must divide.
        refused: fields that must be false or unset.
        attention: attributes of attention modules that hold sizes, to be divided.
    """

    column: dict[str, int]
    row: tuple[str, ...]
    counts: tuple[str, ...]
    refused: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


PLANS = {
    "gpt2": Plan(
        column={"c_attn": 3, "c_fc": 1},
        row=("c_proj",),
        counts=("n_head", "n_embd", "n_inner"),
        refused=("add_cross_attention", "reorder_and_upcast_attn"),
        attention=("num_heads", "embed_dim", "split_size"),
    ),
    "llama": Plan(
        column=dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
        row=("o_proj", "down_proj"),
        counts=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    ),
}


def shard_model(model: nn.Module, parts: DeepSpeedConfigParts) -> GroupsOfRank | None:
    """Cut a model over the tensor-parallel ranks, in place; collective, and nothing where there is one rank.

    A model that has been cut before stays as it is. Parameters stay the same objects, with less in them, but
    for those of a transformers `Conv1D`: it becomes a linear layer with a new weight.

    Args:
        model: a GPT-2 or LLaMA of transformers, with plain layers, whole.
        parts: the configuration; `tensor_parallel.autotp_size` ranks share each layer.

    Returns:
        The groups of this rank, or `None`.

    Raises:
        UserError: the model is of another family, has low-bit layers already, or cannot be cut evenly.
    """
    size = ProcessGrid.from_config(
        parts.deepspeed, process_group.rank(), process_group.world_size()
    ).tensor_size
    if size == 1:
        return None
    units = _groups(size)
    if getattr(model, IS_SHARDED, False):
        return units
    plan = succeed_together(lambda: plan_for(model, size))
    _start_alike(model, units.tensor)
    _draw_alike(units.tensor)
    transposed = replace_conv1d(model)
    sizes = attention_sizes(model, plan)
    _apply_autotp(model, plan, size)
    restore_sizes(model, sizes, plan, size)
    _exchange_layers(model, plan, TensorGroup(units.tensor), transposed)
    setattr(model, IS_SHARDED, True)
    return units


def _groups(size: int) -> GroupsOfRank:
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    found = groups.get_tensor_model_parallel_world_size()
    if found != size:
        raise UserError(
            f"{TENSOR_KEY} = {size} but this process has tensor-parallel groups of {found} already: "
            "use one size in a process"
        )
    return GroupsOfRank(
        data=groups.get_data_parallel_group(),
        model=groups.get_model_parallel_group(),
        tensor=groups.get_tensor_model_parallel_group(),
    )


def plan_for(model: nn.Module, size: int) -> Plan:
    """How `size` ranks cut a model.

    Raises:
        UserError: they cannot.
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    plan = PLANS.get(family) if isinstance(family, str) else None
    if plan is None:
        raise UserError(
            f"{TENSOR_KEY} = {size} cannot cut a {type(model).__name__}: "
            f"use a transformers model of type {' or '.join(PLANS)}, or set it to 1"
        )
    layers = bit_layers(model)
    if layers:
        raise UserError(
            f"layer {next(iter(layers))} is low-bit already, and {TENSOR_KEY} = {size} cuts plain layers: "
            "leave the conversion to megalowbit.initialize, with megalowbit.recipe"
        )
    for field in plan.refused:
        if getattr(config, field, False):
            raise UserError(f"{TENSOR_KEY} = {size} does not work with {field}: set it to false")
    for field in plan.counts:
        value = getattr(config, field, None)
        if isinstance(value, int) and value % size:
            raise UserError(
                f"{TENSOR_KEY} = {size} does not divide the model's {field} {value}: "
                f"set it to a divisor of {value}"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise UserError(
                f"parameter {name} was partitioned by deepspeed.zero.Init: build the model outside it"
            )
    return plan


@torch.no_grad()
def _start_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all tensor ranks the weights of the first: shards of different models would fit nowhere."""
    device, source = process_group.exchange_device(group), dist.get_process_group_ranks(group)[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().to(device).contiguous()
        dist.broadcast(values, source, group=group)
        tensor.copy_(values)


def _draw_alike(group: dist.ProcessGroup) -> None:
    """Give all tensor ranks the generators of the first: dropout of what they all hold must be the same."""
    device, source = process_group.exchange_device(group), dist.get_process_group_ranks(group)[0]
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    for generator in generators:
        state = generator.get_state().to(device)
        dist.broadcast(state, source, group=group)
        generator.set_state(state.cpu())


def replace_conv1d(model: nn.Module) -> frozenset[str]:
    """Put `nn.Linear` in the place of every transformers `Conv1D`, which AutoTP cannot cut; their names."""
    from transformers.pytorch_utils import Conv1D

    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        weight = module.weight
        new = nn.Linear(weight.shape[0], weight.shape[1], bias=module.bias is not None, device="meta")
        values = weight.detach().t().contiguous()
        new.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
        new.bias = module.bias
        new.train(module.training)
        model.set_submodule(name, new)
    return frozenset(found)


def _apply_autotp(model: nn.Module, plan: Plan, size: int) -> None:
    """DeepSpeed's own pass, as its engine runs it, with our plan."""
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    specs = [
        TPLayerSpec(
            patterns=[rf".*\.{name}\.weight$"],
            partition_type=PartitionType.COLUMN,
            **({"shape": (count, -1), "partition_dim": 0} if count > 1 else {}),
        )
        for name, count in plan.column.items()
    ]
    rows = [rf".*\.{name}\.weight$" for name in plan.row]
    specs.append(TPLayerSpec(patterns=rows, partition_type=PartitionType.ROW))
    autotp = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=size, layer_specs=specs),
        model_config=model.config,
        training_mode=True,
    )
    autotp.set_tensor_parallel_config(size, groups.get_tensor_model_parallel_group())
    autotp.update_linear_policies()
    autotp._replace_module(model)


def attention_sizes(model: nn.Module, plan: Plan) -> dict[str, dict[str, int]]:
    """Sizes that modules keep for themselves, some of which AutoTP divides, by module name."""
    found = {
        module_name: {
            name: value for name, value in vars(module).items() if name in {*SIZES, *plan.attention}
        }
        for module_name, module in model.named_modules()
    }
    return {name: sizes for name, sizes in found.items() if sizes}


def restore_sizes(model: nn.Module, sizes: dict[str, dict[str, int]], plan: Plan, size: int) -> None:
    """Divide what attention computes with, and nothing else; AutoTP divides by name, wherever it is."""
    modules = dict(model.named_modules())
    for module_name, values in sizes.items():
        is_attention = all(key in values for key in plan.attention)
        for key, value in values.items():
            is_divided = is_attention and key in plan.attention
            setattr(modules[module_name], key, value // size if is_divided else value)


def _exchange_layers(model: nn.Module, plan: Plan, group: TensorGroup, transposed: frozenset[str]) -> None:
    """Our layers for AutoTP's, on the same parameters.

    Raises:
        RuntimeError: AutoTP has cut something else than the plan says.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    count = 0
    for name, layer in list(model.named_modules()):
        last = name.rpartition(".")[2]
        is_row, is_planned = last in plan.row, last in plan.row or last in plan.column
        if isinstance(layer, TensorParallel_Layer) != is_planned:
            raise RuntimeError(f"DeepSpeed's AutoTP made {name} a {type(layer).__name__}, against our plan")
        if not is_planned:
            continue
        weight, bias = layer.weight, layer.bias
        num_parts = plan.column.get(last, 1)
        part = weight.shape[int(is_row)] * group.size // num_parts
        new = parallel_linear(
            weight,
            bias,
            group,
            is_row=is_row,
            parts=(part,) * num_parts,
            is_transposed=name in transposed,
        )
        new.train(layer.training)
        model.set_submodule(name, new)
        count += 1
    if not count:
        raise RuntimeError("DeepSpeed's AutoTP cut no layer, against our plan")
    if process_group.rank() == 0:
        logger.info("%d projections cut over %d tensor-parallel ranks", count, group.size)
