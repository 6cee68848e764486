"""Tensor parallelism: DeepSpeed's AutoTP cuts the model, our layers take over the shards.

AutoTP shards a model inside `deepspeed.initialize`, and replaces what it does not know: a low-bit layer put
in before would quietly become a plain one. So it is called here first, with the plan of the model's family;
its layers are exchanged for `layers.tensor_parallel`'s on the same parameters, `convert` makes those
low-bit, and the mark left on the model lets the engine skip its own pass.

Attention and MLP projections are cut, heads and all. Embeddings, norms and the output head stay whole on
every rank, tied or not: they get equal gradients there, and count once in the norm. Norms that work on each
head see a rank's own heads only, so their gradients are summed over the ranks. What all ranks hold starts
as the first rank of the group has it, and so do random generators, for dropout must draw alike: who seeds
them later must do so alike. Attention dropout draws the same masks on each rank's own heads.

Not covered: models of no family in `families`, uneven heads, cross-attention, vocabulary parallelism,
DeepSpeed's own plans (`tensor_parallel.partition_config` and the like are refused with the configuration).
"""

from __future__ import annotations

import logging
import re

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
from megalowbit.families.base import Family, Projection
from megalowbit.families.registry import FAMILIES
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.tensor_parallel.linear import parallel_linear

logger = logging.getLogger(__name__)

IS_SHARDED = "ds_autotp_parsed"  # DeepSpeed's own mark
# what AutoTP divides wherever a module has it, among what the families here have
SIZES = ("num_heads", "embed_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")


def shard_model(model: nn.Module, parts: DeepSpeedConfigParts) -> GroupsOfRank | None:
    """Shard a full model over the tensor-parallel ranks, in place; collective. One rank cuts nothing.

    The model is of one of the families, with plain layers; one that has been cut before stays as it is.
    Parameters stay the same objects, with less in them, but for those of a transformers `Conv1D`: it becomes
    a linear layer with a new weight.

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
    family = succeed_together(divisible_family, model, size)
    _broadcast_initial_state(model, units.tensor)
    transposed = replace_conv1d(model)
    sizes = module_sizes(model, family)
    _apply_autotp(model, family, size)
    restore_sizes(model, sizes, family, size)
    group = TensorGroup(units.tensor)
    _exchange_layers(model, family, group, transposed)
    _sum_head_norms(model, family, group)
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


def divisible_family(model: nn.Module, size: int) -> Family:
    """The family of a model; refused are models that `size` ranks cannot share."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UserError(
            f"{TENSOR_KEY} = {size} cannot cut a {type(model).__name__}: "
            f"use a transformers model of type {' or '.join(FAMILIES)}, or set it to 1"
        )
    layers = bit_layers(model)
    if layers:
        raise UserError(
            f"layer {next(iter(layers))} is low-bit already, and {TENSOR_KEY} = {size} cuts plain layers: "
            "leave the conversion to megalowbit.initialize, with megalowbit.recipe"
        )
    for field in family.refused_when_divided:
        if getattr(config, field, False):
            raise UserError(f"{TENSOR_KEY} = {size} does not work with {field}: set it to false")
    for field in family.divided:
        value = getattr(config, field, None)
        if isinstance(value, int) and value % size:
            raise UserError(
                f"{TENSOR_KEY} = {size} does not divide the model's {field} {value}: "
                f"set it to a divisor of {value}"
            )
    return family


@torch.no_grad()
def _broadcast_initial_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all tensor ranks the weights and the generators of the first.

    Shards of different models would fit nowhere, and dropout of what all hold must be the same.
    """
    device, source = process_group.exchange_device(group), dist.get_process_group_ranks(group)[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().to(device).contiguous()
        dist.broadcast(values, source, group=group)
        tensor.copy_(values)
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


def _apply_autotp(model: nn.Module, family: Family, size: int) -> None:
    """DeepSpeed's own pass, as its engine runs it, with the family's plan."""
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    specs = [
        TPLayerSpec(
            patterns=[rf".*\.{re.escape(name)}\.weight$"],
            partition_type=PartitionType.ROW if projection.is_row else PartitionType.COLUMN,
            **({"shape": (projection.num_parts, -1), "partition_dim": 0} if projection.num_parts > 1 else {}),
        )
        for name, projection in family.projections.items()
    ]
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


def module_sizes(model: nn.Module, family: Family) -> dict[str, dict[str, int]]:
    """Sizes that modules keep for themselves, some of which AutoTP divides, by module name."""
    found = {
        module_name: {
            name: value for name, value in vars(module).items() if name in {*SIZES, *family.attention_sizes}
        }
        for module_name, module in model.named_modules()
    }
    return {name: sizes for name, sizes in found.items() if sizes}


def restore_sizes(model: nn.Module, sizes: dict[str, dict[str, int]], family: Family, size: int) -> None:
    """Divide what attention computes with, and nothing else; AutoTP divides by name, wherever it is."""
    modules = dict(model.named_modules())
    for module_name, values in sizes.items():
        is_attention = all(key in values for key in family.attention_sizes)
        for key, value in values.items():
            is_divided = is_attention and key in family.attention_sizes
            setattr(modules[module_name], key, value // size if is_divided else value)


def _exchange_layers(
    model: nn.Module, family: Family, group: TensorGroup, transposed: frozenset[str]
) -> None:
    """Our layers for AutoTP's, on the same parameters.

    Raises:
        RuntimeError: AutoTP has cut something else than the plan says.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    count = 0
    for name, layer in list(model.named_modules()):
        projection = family.projection(name)
        if isinstance(layer, TensorParallel_Layer) != (projection is not None):
            raise RuntimeError(f"DeepSpeed's AutoTP made {name} a {type(layer).__name__}, against our plan")
        if projection is not None:
            put_shard(model, name, layer.weight, layer.bias, group, projection, name in transposed)
            count += 1
    if not count:
        raise RuntimeError("DeepSpeed's AutoTP cut no layer, against our plan")
    if process_group.rank() == 0:
        logger.info("%d projections cut over %d tensor-parallel ranks", count, group.size)


def put_shard(
    model: nn.Module,
    name: str,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: TensorGroup,
    projection: Projection,
    is_transposed: bool,
) -> None:
    """Put a layer of shards into the place of the module `name`; arguments as of `parallel_linear`."""
    part = weight.shape[int(projection.is_row)] * group.size // projection.num_parts
    new = parallel_linear(
        weight,
        bias,
        group,
        is_row=projection.is_row,
        parts=(part,) * projection.num_parts,
        is_transposed=is_transposed,
    )
    new.train(model.get_submodule(name).training)
    model.set_submodule(name, new)


def _sum_head_norms(model: nn.Module, family: Family, group: TensorGroup) -> None:
    """Sum the gradients of norms on heads over the ranks, each of which has some of the heads."""
    for name, module in model.named_modules():
        if name.endswith(tuple(f".{norm}" for norm in family.head_norms)):
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: group.sum(gradient.clone()))
