"""Tensor parallelism: DeepSpeed's AutoTP shards the model, and our layers replace its layers.

`deepspeed.initialize` runs AutoTP, which replaces layers that it does not recognise: it would silently turn
low-bit layers into plain ones. Therefore AutoTP runs here first, with the plan of the model's family. Its
layers are replaced by those of `layers.tensor_parallel` with the same parameters, which `convert` then makes
low-bit. A mark on the model makes the engine skip its AutoTP pass. A model on the meta device has no values
that AutoTP could move: `cut_layers` gives its layers the shapes of the same plan.

| part of the model | on each rank |
|---|---|
| attention and MLP projections | sharded, by heads in attention |
| embeddings, norms, output head (tied or not) | full copies with equal gradients; counted once in the norm |
| norms on heads | full copies that see only the rank's heads; gradients are summed over the ranks |

Copies and random generators are initialised from the first rank of the group, because dropout must draw the
same masks. Anyone who seeds generators later must use the same seed on these ranks. Attention dropout draws
the same masks for each rank's heads.

A single process can have the shard of rank 0, to estimate its memory (`keep_first_shard`): without process
groups, sums over ranks return this rank's tensor. Shapes and the tensors that autograd saves are correct, and
values are not, so that shard cannot be used to compute.

Not covered: models of unknown families, uneven heads, cross-attention, vocabulary parallelism, DeepSpeed's
plans (`tensor_parallel.partition_config` and similar keys are rejected with the configuration).
"""

from __future__ import annotations

import logging
import re

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.distributed.process_grid import TENSOR_KEY, ProcessGrid
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.families.base import Family, Projection
from megalowbit.families.registry import FAMILIES
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.matmul.sharded_operands import SumOutput
from megalowbit.layers.tensor_parallel.linear import Sharding, parallel_linear

logger = logging.getLogger(__name__)

IS_SHARDED = "ds_autotp_parsed"  # DeepSpeed's mark on a model
# attributes of our families' modules that AutoTP divides wherever a module has them
SIZES = ("num_heads", "embed_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")


def shard_model(model: nn.Module, parts: DeepSpeedConfigParts) -> GroupsOfRank | None:
    """Shard a full model over the tensor-parallel ranks, in place; collective. Does nothing on one rank.

    The model must belong to a known family and have plain layers. A model that is already sharded is not
    changed. Parameters remain the same objects with smaller tensors. Only a transformers `Conv1D` becomes a
    linear layer with a new weight. On the meta device, the parameters of all projections are new.

    Raises:
        UserError: the model's family is unknown, it already has low-bit layers, or it cannot be divided
            evenly.
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
    group = TensorGroup(units.tensor)
    if any(parameter.is_meta for parameter in model.parameters()):
        count = cut_layers(model, family, group)
    else:
        transposed = replace_conv1d(model)
        sizes = module_sizes(model, family)
        _apply_autotp(model, family, size)
        restore_sizes(model, sizes, family, size)
        count = _exchange_layers(model, family, group, transposed)
    if process_group.rank() == 0:
        logger.info("%d projections sharded over %d tensor-parallel ranks", count, group.size)
    sum_head_norms(model, family, group)
    setattr(model, IS_SHARDED, True)
    return units


def _groups(size: int) -> GroupsOfRank:
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    found = groups.get_tensor_model_parallel_world_size()
    if found != size:
        raise UserError(
            f"{TENSOR_KEY} = {size}, but this process already has tensor-parallel groups of {found} ranks: "
            "use one size per process"
        )
    return GroupsOfRank(
        data=groups.get_data_parallel_group(),
        model=groups.get_model_parallel_group(),
        tensor=groups.get_tensor_model_parallel_group(),
    )


def divisible_family(model: nn.Module, size: int) -> Family:
    """The family of a model; raises a `UserError` if `size` ranks cannot share the model."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UserError(
            f"{TENSOR_KEY} = {size} cannot shard a {type(model).__name__}: "
            f"use a transformers model of type {' or '.join(FAMILIES)}, or set it to 1"
        )
    layers = bit_layers(model)
    if layers:
        raise UserError(
            f"layer {next(iter(layers))} is already low-bit, but {TENSOR_KEY} = {size} shards plain layers: "
            "let megalowbit.initialize convert the model, with megalowbit.recipe"
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
    """Broadcast the first tensor rank's weights, if it has any, and generators to the others.

    All shards must come from the same model, and dropout must be the same on copies.
    """
    device, source = process_group.exchange_device(group), dist.get_process_group_ranks(group)[0]
    for tensor in (each for each in [*model.parameters(), *model.buffers()] if not each.is_meta):
        values = tensor.detach().to(device).contiguous()
        collectives.broadcast(values, source, group=group)
        tensor.copy_(values)
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    for generator in generators:
        state = generator.get_state().to(device)
        collectives.broadcast(state, source, group=group)
        generator.set_state(state.cpu())


def replace_conv1d(model: nn.Module) -> frozenset[str]:
    """Replace every transformers `Conv1D`, which AutoTP cannot shard, by `nn.Linear`; returns their names."""
    from transformers.pytorch_utils import Conv1D

    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        weight = module.weight
        new = nn.Linear(weight.shape[0], weight.shape[1], bias=module.bias is not None, device="meta")
        values = weight.detach().t().contiguous()  # Conv1D is (in, out), Linear (out, in)
        new.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
        new.bias = module.bias
        new.train(module.training)
        model.set_submodule(name, new)
    return frozenset(found)


def _apply_autotp(model: nn.Module, family: Family, size: int) -> None:
    """Run AutoTP as DeepSpeed's engine does, with the family's plan."""
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
    """Module name → its size attributes, some of which AutoTP divides."""
    found = {
        module_name: {
            name: value for name, value in vars(module).items() if name in {*SIZES, *family.attention_sizes}
        }
        for module_name, module in model.named_modules()
    }
    return {name: sizes for name, sizes in found.items() if sizes}


def restore_sizes(model: nn.Module, sizes: dict[str, dict[str, int]], family: Family, size: int) -> None:
    """Restore all sizes but those of attention, which are divided; AutoTP divides every attribute by name."""
    modules = dict(model.named_modules())
    for module_name, values in sizes.items():
        is_attention = all(key in values for key in family.attention_sizes)
        for key, value in values.items():
            is_divided = is_attention and key in family.attention_sizes
            setattr(modules[module_name], key, value // size if is_divided else value)


def _exchange_layers(model: nn.Module, family: Family, group: TensorGroup, transposed: frozenset[str]) -> int:
    """Replace AutoTP's layers by ours, with the same parameters; returns their number.

    Raises:
        RuntimeError: AutoTP has not followed the plan.
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
        raise RuntimeError("DeepSpeed's AutoTP sharded no layer, against our plan")
    return count


def cut_layers(model: nn.Module, family: Family, group: TensorGroup) -> int:
    """Replace each projection by this rank's shard, in place and without AutoTP; returns their number.

    The model is full, with plain layers; its tensors may be on the meta device, or fake.
    """
    transposed = replace_conv1d(model)
    sizes = module_sizes(model, family)
    count = 0
    for name, layer in list(model.named_modules()):
        projection = family.projection(name)
        if projection is None or not isinstance(layer, nn.Linear):
            continue
        is_row, num_parts = projection
        parts = (layer.weight.shape[int(is_row)] // num_parts,) * num_parts
        weight, bias = _shard(layer.weight, Sharding(int(is_row), parts), group), layer.bias
        if bias is not None and not is_row:
            bias = _shard(bias, Sharding(0, parts), group)
        put_shard(model, name, weight, bias, group, projection, name in transposed)
        count += 1
    restore_sizes(model, sizes, family, group.size)
    return count


def _shard(parameter: Tensor, sharding: Sharding, group: TensorGroup) -> nn.Parameter:
    shard = sharding.shard(parameter.detach(), group.rank, group.size)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def put_shard(
    model: nn.Module,
    name: str,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: TensorGroup,
    projection: Projection,
    is_transposed: bool,
) -> None:
    """Replace module `name` by a sharded layer; see `parallel_linear` for the arguments."""
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


def sum_head_norms(model: nn.Module, family: Family, group: TensorGroup) -> None:
    """Sum the gradients of norms on heads over the ranks, because each rank has only some heads."""
    for name, module in model.named_modules():
        if name.endswith(tuple(f".{norm}" for norm in family.head_norms)):
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: SumOutput.apply(gradient, group))


class SimulatedGroup(TensorGroup):
    """Rank 0 of a group of `size` ranks, of which only this one exists."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> None:
        """Returns None: there is nothing to wait for."""

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This rank's tensor, `size` times."""
        return [tensor] * self.size


def keep_first_shard(model: nn.Module, size: int) -> None:
    """Reduce a full model to rank 0's shard, in place.

    The model must belong to a known family and have plain layers; its tensors may be fake.
    """
    if size == 1:
        return
    cut_layers(model, divisible_family(model, size), SimulatedGroup(size))
