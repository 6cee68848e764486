"""Conversion of models: replaces linear layers by BitLinear layers and back.

`convert` replaces every `nn.Linear` and every transformers `Conv1D` (a linear layer with a transposed weight)
of a model in place. It keeps, and lists in its report, the output head, layers with tied weights, subclasses
of `nn.Linear`, layers named in the recipe's `keep`, and the blocks that the recipe excludes (`kept_layers`).
A matrix outside linear layers, such as experts in one parameter, is reported as missed; a training run
rejects such a model. Embeddings and norms are never changed.

A linear layer's parameters stay the same objects. A Conv1D's weight (in, out) becomes a new parameter (out,
in), so convert before building an optimizer. On the meta device no data is touched.

The model also gets one random stream. A hook advances it at each training forward of the converted model: one
forward is one micro-batch. Where only parts of the model are called, its layers advance it (`random_stream`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.distributed.sharded_parameters import refuse_sharded, refuse_sharded_model
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import SLOTS, BitLinear
from megalowbit.layers.conversion.kept_layers import Selection, conv1d_class, is_linear, select_layers
from megalowbit.layers.conversion.refusals import (
    refuse_adapters,
    refuse_bound_layers,
    refuse_partitioned,
    warn_of_new_parameters,
)
from megalowbit.layers.conversion.report import ConversionReport, SwappedLayer, describe_missed
from megalowbit.layers.conversion.stream_hook import AdvanceStream
from megalowbit.layers.matmul.slots import Chooser, Observer
from megalowbit.layers.matmul.weight_cache import WeightCache, WeightSlot
from megalowbit.layers.parameter_split.split_linear import RESIDUAL, SPLIT_NAMES
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.layers.siblings import SharedInput, find_siblings
from megalowbit.layers.tensor_parallel.bitlinear import LOW_BIT, ParallelBitLinear
from megalowbit.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.values import require_module

logger = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any] = DEFAULT_RECIPE,
    *,
    seed: int = 0,
    rank: int | None = None,
) -> ConversionReport:
    """Replace a model's linear layers by `BitLinear`, in place.

    Args:
        model: any module that contains linear layers.
        recipe: a recipe, the name of one, or a configuration block.
        seed: seed of the random stream for stochastic rounding; the same on all ranks.
        rank: data-parallel rank; ranks draw different numbers for their data. `None`: this process's rank in
            torch.distributed's default group, once it exists, or in the group passed to `LocalDDP`.
            `megalowbit.initialize` always overrides it. Pass it if tensor-parallel ranks, made without
            megalowbit, hold the same data: they need the same rank.

    Returns:
        The converted layers, kept layers and missed weights, by name.

    Raises:
        UserError: the recipe quantises but nothing could be converted, a pattern of `keep` or `layers` has
            no effect, the blocks to keep cannot be found, the model is itself a linear layer, it was
            converted or sharded before, PEFT has added adapters to it, a layer is bound to what would be
            replaced (`refuse_bound_layers`), or seed or rank is not a whole number.
    """
    require_module(model, "convert")
    chosen = recipe_of(recipe)
    stream = RandomStream(seed, rank)
    _refuse_unfit(model)
    selection = select_layers(model, chosen)
    if not chosen.quantizes:
        return ConversionReport(recipe=chosen, swapped=(), kept=selection.kept)
    if not selection.to_swap:
        raise _nothing_to_swap(model, chosen, selection)
    refuse_bound_layers(selection.to_swap, "convert")
    swapped = _swap(model, selection.to_swap, chosen)
    for name, layer in bit_layers(model).items():
        layer.layer_name, layer.random_stream = name, stream
    share_inputs(model)
    model.register_forward_pre_hook(AdvanceStream(stream, tuple(selection.to_swap)))
    if selection.missed:
        logger.warning("%s; it stays in high precision", describe_missed(selection.missed, chosen))
    return ConversionReport(
        recipe=chosen,
        swapped=swapped,
        kept=selection.kept,
        missed=selection.missed,
        unmatched=selection.unmatched,
    )


def restore(model: nn.Module) -> None:
    """Convert back to plain `nn.Linear` and `Conv1D` with the trained values, and remove the stream's hook.

    The weight of a layer split into parameters is merged into a new parameter, and a Conv1D gets a new one,
    too, which a warning says if the model has been trained. To train on in high precision with the same
    optimizer, use `switch_precision(model, "all")`.

    Raises:
        UserError: the model is itself a BitLinear, or was a Conv1D and transformers is not imported; PEFT has
            added adapters to it, torch has sharded it, or a layer is bound to the module that would be
            replaced (`refuse_bound_layers`).
    """
    require_module(model, "restore")
    refuse_adapters(model, "restore", "merge_and_unload them first")
    refuse_sharded_model("restore", model, "its full state dict is that of the plain model")
    if isinstance(model, BitLinear):
        raise UserError(
            "restore cannot replace the model itself: pass the module that contains this BitLinear"
        )
    layers = bit_layers(model)
    refuse_bound_layers(layers, "restore")
    stream = random_stream(model)
    _replace_children(model, {id(layer): _from_bitlinear(layer) for layer in layers.values()})
    if stream is not None and stream.step > 0:  # it has been trained
        plain = [layer for layer in layers.values() if not isinstance(layer, ParallelBitLinear)]
        warn_of_new_parameters([layer for layer in plain if layer.is_transposed or layer.is_split])
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, AdvanceStream):
                del module._forward_pre_hooks[key]


def bit_layers(model: nn.Module) -> dict[str, BitLinear]:
    """All BitLinear layers of a model by name, in the model's order.

    Raises:
        UserError: `model` is not a module.
    """
    require_module(model, "this function")
    return {name: module for name, module in model.named_modules() if isinstance(module, BitLinear)}


def plain_state_dict(model: nn.Module, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the model with all its layers plain, copied to the CPU; the model does not change.

    Args:
        model: converted or not.
        whole: its state dict where ranks hold parts of it, whole and on the CPU, as
            `engine.parameters.full_weights.full_state_dict` returns it.

    Raises:
        UserError: the model is sharded, over tensor-parallel ranks or by torch, and `whole` is missing.
    """
    given = model.state_dict() if whole is None else whole
    refuse_sharded("a plain state dict", given.items(), "pass a full state dict, on the CPU")
    state = {
        name: value.detach().to("cpu", copy=whole is None, memory_format=torch.contiguous_format).contiguous()
        for name, value in given.items()
    }
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, (BitLinear, ColumnParallelLinear, RowParallelLinear)):
            continue
        group: TensorGroup | None = layer.__dict__.get("tensor_group")
        if whole is None and group is not None and group.size > 1:
            raise UserError(
                f"layer {name} is a shard, and a plain state dict is whole: "
                "pass full_state_dict(engine), which every rank must call"
            )
        prefix = f"{name}." if name else ""
        for part in (*SPLIT_NAMES, RESIDUAL):
            state.pop(prefix + part, None)
    return state


def set_observer(model: nn.Module, observer: Observer | None) -> None:
    """Attach an observer to every BitLinear of a model; `None` detaches it."""
    for layer in bit_layers(model).values():
        layer.observer = observer


def set_chooser(model: nn.Module, chooser: Chooser | None) -> None:
    """Attach a chooser, which picks the precision of a model's BitLinear layers; `None` detaches it.

    Raises:
        UserError: there is a chooser, but the model has no BitLinear.
    """
    layers = bit_layers(model).values()
    if chooser is not None and not layers:
        raise UserError(
            f"{type(model).__name__} has no BitLinear layer whose precision could be chosen: convert it first"
        )
    for layer in layers:
        layer.chooser, layer._pending_probe = chooser, None


def random_stream(model: nn.Module) -> RandomStream | None:
    """The stream that `convert` gave this model; `None` if it converted nothing."""
    for layer in bit_layers(model).values():
        if layer.random_stream is not None:
            return layer.random_stream
    return None


def share_inputs(model: nn.Module, *, is_on: bool = True) -> None:
    """Make sibling layers of a model share the quantised forms of their input; `convert` does it.

    With `is_on=False`, every layer quantises and keeps its own. The codes are the same in both cases.
    """
    layers = bit_layers(model)
    siblings = find_siblings(
        {name: layer.in_features for name, layer in layers.items() if not getattr(layer, "is_row", False)}
    )
    shared = SharedInput() if is_on and siblings else None
    for name, layer in layers.items():
        layer.siblings, layer.shared_input = siblings.get(name, ()), shared


def cache_weights(model: nn.Module) -> WeightCache:
    """Make every BitLinear of a model keep its quantised weight until the returned cache is cleared.

    Clear it after every update of the weights, see `weight_cache`. A second call starts with empty caches.

    Raises:
        UserError: `model` is not a module, or torch has sharded it.
    """
    layers = bit_layers(model).values()
    refuse_sharded_model("cache_weights", model, "leave it out, because each forward gathers weights anew")
    for layer in layers:
        layer.weight_slot = WeightSlot()
    return WeightCache(layer.weight_slot for layer in layers if layer.weight_slot is not None)


def product_counts(model: nn.Module) -> dict[str, dict[str, int]]:
    """Number of products of a model's layers by product and precision: `{"output": {"fp8": 24}, …}`.

    In a CUDA graph, only products on FP8 tensor cores are counted.
    """
    return added_counts(layer.product_counts for layer in bit_layers(model).values())


def added_counts(tables: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Sum tables of the form that `product_counts` returns."""
    total: dict[str, dict[str, int]] = {}
    for table in tables:
        for product, paths in table.items():
            sums = total.setdefault(product, {})
            for path, count in paths.items():
                sums[path] = sums.get(path, 0) + count
    return total


def _refuse_unfit(model: nn.Module) -> None:
    refuse_partitioned(model)
    refuse_sharded_model("convert", model, "call convert before the model is sharded")
    refuse_adapters(model, "convert", "convert the model before get_peft_model")
    if is_linear(model):
        raise UserError(
            f"the model is itself a {type(model).__name__}, which cannot be replaced in place: "
            "wrap it in nn.Sequential, or build a BitLinear"
        )
    if random_stream(model) is not None:
        raise UserError(
            f"this {type(model).__name__} was converted before: call megalowbit.restore(model) first"
        )


def _nothing_to_swap(model: nn.Module, recipe: Recipe, selection: Selection) -> UserError:
    left = [f"{each.name}: {each.reason}" for each in selection.kept]
    left += [f"{each.name}: {each.reason}" for each in selection.missed]
    found = "; ".join(left[:4]) or "it has no linear layers"
    fields = "`keep` or `layers`" if recipe.layers else "`keep`"
    return UserError(
        f"recipe {recipe.name!r} converts no layer of {type(model).__name__} ({found}): "
        f"change {fields}, or use the recipe 'bf16' to train unquantised"
    )


def _swap(model: nn.Module, layers: Mapping[str, nn.Module], recipe: Recipe) -> tuple[SwappedLayer, ...]:
    """Replace each layer by a BitLinear."""
    made = {name: _to_bitlinear(layer, recipe, name) for name, layer in layers.items()}
    _replace_children(model, {id(layer): made[name] for name, layer in layers.items()})
    return tuple(
        SwappedLayer(name, type(layers[name]).__name__, new.in_features, new.out_features)
        for name, new in made.items()
    )


def _replace_children(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    # A module registered in two places must be replaced in both.
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[name] = replacements[id(child)]


def _to_bitlinear(layer: nn.Module, recipe: Recipe, name: str) -> BitLinear:
    # Copy the whole state: parameters, hooks, training mode, and attributes that other code has added.
    target = LOW_BIT.get(type(layer), BitLinear)
    new = target.__new__(target)
    new.__dict__.update(_unbound(layer))
    is_conv1d = not isinstance(layer, nn.Linear)
    if is_conv1d:
        weight = _transposed(layer._parameters["weight"])
        new._parameters = {**layer._parameters, "weight": weight}
        new.out_features, new.in_features = weight.shape
    # a shard of a Conv1D's weight was transposed when it was made, and its attribute says so
    is_transposed = is_conv1d or layer.__dict__.get("is_transposed", False)
    new.fill_slots(recipe.of_layer(name), layer_name=name, is_transposed=is_transposed)
    return new


def _from_bitlinear(layer: BitLinear) -> nn.Module:
    target = _plain_class(layer)
    new = target.__new__(target)
    new.__dict__.update(_unbound(layer))
    for slot in SLOTS:
        del new.__dict__[slot]
    if isinstance(layer, ParallelBitLinear):
        new.__dict__["is_transposed"] = layer.is_transposed
        return new
    own = {name: value for name, value in layer._parameters.items() if name not in SPLIT_NAMES}
    if layer.is_split:
        own["weight"] = nn.Parameter(layer.merged_weight(), requires_grad=layer.weight.requires_grad)
    if layer.is_transposed:
        own["weight"] = _transposed(own["weight"])
        del new.__dict__["in_features"], new.__dict__["out_features"]
    new._parameters = own
    return new


def _unbound(layer: nn.Module) -> dict[str, Any]:
    """The state of a layer without what calls that layer: compiled code, and what removed hooks leave."""
    bound = ("forward", "_old_forward", "_compiled_call_impl")
    return {name: value for name, value in layer.__dict__.items() if name not in bound}


def _plain_class(layer: BitLinear) -> type[nn.Module]:
    if isinstance(layer, ParallelBitLinear):
        return layer.plain_class  # also for a Conv1D: its shard is a linear layer
    conv1d = conv1d_class()
    if layer.is_transposed and conv1d is None:
        raise UserError(f"layer {layer.layer_name!r} was a Conv1D: import transformers before restoring it")
    return conv1d if layer.is_transposed and conv1d is not None else nn.Linear


def _transposed(weight: nn.Parameter | None) -> nn.Parameter:
    assert weight is not None  # both layer classes register one
    return nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
