"""Model surgery: linear layers out, BitLinear in, and back.

`convert` swaps every `nn.Linear` and every transformers `Conv1D` (a linear layer with its weight
transposed) of a model in place. It keeps the output head, layers with tied weights, subclasses of
`nn.Linear`, what the recipe's `keep` names and the blocks it leaves out, and says so (`kept_layers`). A
matrix that is in no linear layer, such as experts in one parameter, is reported as missed; who starts a run
refuses it. A linear layer's parameters stay the same objects; a Conv1D's weight becomes a new parameter,
(out, in), so convert before building an optimizer. No data is touched on the meta device.

The model also gets one random stream, advanced by a hook at each training forward of the model converted: one
forward is one micro-batch. Embeddings and norms are never touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.compiled import advance
from megalowbit.layers.conversion.bare_weights import bare_weights
from megalowbit.layers.conversion.kept_layers import (
    conv1d_class,
    is_linear,
    linear_layers,
    missed_among,
    output_heads,
    reasons_to_keep,
)
from megalowbit.layers.conversion.other_loops import check_engine
from megalowbit.layers.conversion.partitioned import refuse_partitioned
from megalowbit.layers.conversion.replicas import check_replica
from megalowbit.layers.conversion.report import ConversionReport, KeptLayer, SwappedLayer, describe_missed
from megalowbit.layers.matmul.chooser import Chooser
from megalowbit.layers.matmul.use_counter import is_recomputing
from megalowbit.layers.matmul.weight_cache import WeightCache, WeightSlot
from megalowbit.layers.observer import Observer
from megalowbit.layers.parameter_split.parameters import SPLIT_NAMES, merged_weight
from megalowbit.layers.parameter_split.state_dict import RESIDUAL
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.tensor_parallel.bitlinear import LOW_BIT, ParallelBitLinear
from megalowbit.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, TensorGroup
from megalowbit.quantize.random_stream import RandomStream

logger = logging.getLogger(__name__)

_BITLINEAR_SLOTS = (
    "_recipe",
    "_needed_blocks",
    "layer_name",
    "is_transposed",
    "observer",
    "chooser",
    "_chosen",
    "_waiting",
    "random_stream",
    "_own_stream",
    "_own_rank",
    "_seeded_at",
    "_uses",
    "weight_slot",
    "split_states",
    "is_split",
    "product_counts",
    "_handle",
)


class AdvanceStream:
    """Forward pre-hook: each training forward is one micro-batch.

    An object rather than a closure, so that deepcopy and pickle take the stream along. It also runs where
    nothing else of ours does, so it looks who trains the model: at the first forward, and where other hooks
    have come or gone since, as an engine's do.
    """

    layer_names: tuple[str, ...] = ()
    hooks_seen = 0

    def __init__(self, stream: RandomStream, layer_names: tuple[str, ...] = ()) -> None:
        self.stream = stream
        self.layer_names = layer_names

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Advance the stream, except where checkpointing repeats a forward."""
        del args
        if not module.training:
            return
        if torch.compiler.is_compiling():
            advance(self.stream.step_tensor)
        elif not is_recomputing():
            check_replica(self.stream)
            if len(module._forward_pre_hooks) != self.hooks_seen:
                check_engine(module, self.layer_names)
                self.hooks_seen = len(module._forward_pre_hooks)
            self.stream.advance()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: a copy is another engine's."""
        return {name: value for name, value in self.__dict__.items() if name != "hooks_seen"}


def convert(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any] = "nvfp4",
    *,
    seed: int = 0,
    rank: int | None = None,
) -> ConversionReport:
    """Swap a model's linear layers for `BitLinear`, in place.

    Args:
        model: any module with linear layers below it.
        recipe: a recipe, its name, or a configuration block.
        seed: of the random stream for stochastic rounding; the same on all ranks.
        rank: data-parallel rank: ranks draw different numbers for their own data. `None`: this process's in
            torch.distributed's default group, as soon as there is one, or in the group that `LocalDDP` got.
            `megalowbit.initialize` sets it whatever was given. Pass it where tensor-parallel ranks of your
            own hold the same data: they need the same rank.

    Returns:
        What was swapped, kept and missed, by name.

    Raises:
        UserError: the recipe quantises but nothing could be swapped, a `keep` pattern matches nothing, the
            blocks to keep cannot be told, the model is itself a linear layer, it has been converted before,
            or seed or rank is no whole number.
    """
    chosen = recipe_of(recipe)
    stream = RandomStream(seed, rank)
    _refuse_unfit(model)
    layers = linear_layers(model)
    bare = bare_weights(model, layers, output_heads(model))
    reasons = reasons_to_keep(model, layers, chosen, bare)
    if not chosen.quantizes:
        reasons = {name: reasons.get(name, "the recipe quantises nothing") for name in layers}
    kept = [KeptLayer(name, _kind(layer), reasons[name]) for name, layer in layers.items() if name in reasons]
    if not chosen.quantizes:
        return ConversionReport(recipe=chosen, swapped=(), kept=tuple(kept))
    kept += [KeptLayer(name, each.kind, reasons[name]) for name, each in bare.items() if name in reasons]
    missed = missed_among(bare, reasons)
    to_swap = {name: layer for name, layer in layers.items() if name not in reasons}
    if not to_swap:
        left = [(each.name, each.reason) for each in kept] + [(each.name, each.reason) for each in missed]
        found = "; ".join(f"{name}: {reason}" for name, reason in left[:4]) or "it has no linear layers"
        raise UserError(
            f"recipe {chosen.name!r} swaps no layer of {type(model).__name__} ({found}): "
            "change `keep`, or use the recipe 'bf16' to train unquantised"
        )
    replacements = {id(layer): _to_bitlinear(layer, chosen, name) for name, layer in to_swap.items()}
    _replace_children(model, replacements)
    for name, layer in bit_layers(model).items():
        layer.layer_name, layer.random_stream = name, stream
    model.register_forward_pre_hook(AdvanceStream(stream, tuple(to_swap)))
    swapped = [
        SwappedLayer(name, _kind(old), new.in_features, new.out_features)
        for name, old in to_swap.items()
        for new in [replacements[id(old)]]
    ]
    if missed:
        logger.warning("%s; it stays in high precision", describe_missed(missed, chosen))
    return ConversionReport(recipe=chosen, swapped=tuple(swapped), kept=tuple(kept), missed=missed)


def restore(model: nn.Module) -> None:
    """Put plain `nn.Linear` and `Conv1D` back, with the values trained since, and remove the stream's hook.

    The weight of a layer split into parameters is merged, in a new parameter.

    Raises:
        UserError: the model is itself a BitLinear, or a Conv1D is due and transformers is not imported.
    """
    if isinstance(model, BitLinear):
        raise UserError(
            "restore cannot replace the model itself: pass the module that contains this BitLinear"
        )
    _replace_children(model, {id(layer): _from_bitlinear(layer) for layer in bit_layers(model).values()})
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, AdvanceStream):
                del module._forward_pre_hooks[key]


def bit_layers(model: nn.Module) -> dict[str, BitLinear]:
    """All BitLinear layers of a model by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitLinear)}


def plain_state_dict(model: nn.Module, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the model with all its layers plain, copied to the CPU; the model stays as it is.

    Args:
        model: converted or not.
        whole: its state dict where ranks hold parts of it, whole and on the CPU, as
            `engine.whole_weights.whole_state_dict` returns it.

    Raises:
        UserError: the model is cut over tensor-parallel ranks, and `whole` is missing.
    """
    given = model.state_dict() if whole is None else whole
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
                "pass whole_state_dict(engine), which every rank must call"
            )
        prefix = f"{name}." if name else ""
        for part in (*SPLIT_NAMES, RESIDUAL):
            state.pop(prefix + part, None)
    return state


def set_observer(model: nn.Module, observer: Observer | None) -> None:
    """Attach an observer to every BitLinear of a model, or detach it with `None`."""
    for layer in bit_layers(model).values():
        layer.observer = observer


def set_chooser(model: nn.Module, chooser: Chooser | None) -> None:
    """Let a chooser say what the BitLinear layers of a model run with, or take it off again with `None`.

    Raises:
        UserError: there is a chooser, but the model has no BitLinear.
    """
    layers = bit_layers(model).values()
    if chooser is not None and not layers:
        raise UserError(
            f"{type(model).__name__} has no BitLinear layer whose precision could be chosen: convert it first"
        )
    for layer in layers:
        layer.chooser, layer._waiting = chooser, None


def random_stream(model: nn.Module) -> RandomStream | None:
    """The stream `convert` gave this model; `None` where it swapped nothing."""
    for layer in bit_layers(model).values():
        if layer.random_stream is not None:
            return layer.random_stream
    return None


def cache_weights(model: nn.Module) -> WeightCache:
    """Let every BitLinear of a model keep its quantised weight until the cache returned is cleared.

    Whoever updates the weights must clear it each time, see `weight_cache`. A second call starts anew.
    """
    layers = bit_layers(model).values()
    for layer in layers:
        layer.weight_slot = WeightSlot()
    return WeightCache(layer.weight_slot for layer in layers if layer.weight_slot is not None)


def product_counts(model: nn.Module) -> dict[str, dict[str, int]]:
    """How many products of a model's layers have run in what, by product: `{"output": {"fp8": 24}, …}`."""
    total: dict[str, dict[str, int]] = {}
    for layer in bit_layers(model).values():
        for product, paths in layer.product_counts.items():
            sums = total.setdefault(product, {})
            for path, count in paths.items():
                sums[path] = sums.get(path, 0) + count
    return total


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _refuse_unfit(model: nn.Module) -> None:
    refuse_partitioned(model)
    if is_linear(model):
        raise UserError(
            f"the model is itself a {_kind(model)}, which cannot be replaced in place: "
            "wrap it in nn.Sequential, or build a BitLinear"
        )
    if random_stream(model) is not None:
        raise UserError(
            f"this {type(model).__name__} has been converted before: call megalowbit.restore(model) first"
        )


def _replace_children(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    # A module registered in two places must be replaced in both.
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[name] = replacements[id(child)]


def _to_bitlinear(layer: nn.Module, recipe: Recipe, name: str) -> BitLinear:
    # The whole state moves over: parameters, hooks, training mode, attributes others have hung on the layer.
    target = LOW_BIT.get(type(layer), BitLinear)
    new = target.__new__(target)
    new.__dict__.update(layer.__dict__)
    is_conv1d = not isinstance(layer, nn.Linear)
    if is_conv1d:
        weight = _transposed(layer._parameters["weight"])
        new._parameters = {**layer._parameters, "weight": weight}
        new.out_features, new.in_features = weight.shape
    # a shard of a Conv1D's weight has been transposed already, and says so
    is_transposed = is_conv1d or layer.__dict__.get("is_transposed", False)
    new.fill_slots(recipe, layer_name=name, is_transposed=is_transposed)
    return new


def _from_bitlinear(layer: BitLinear) -> nn.Module:
    target = _plain_class(layer)
    new = target.__new__(target)
    new.__dict__.update(layer.__dict__)
    for slot in _BITLINEAR_SLOTS:
        del new.__dict__[slot]
    if isinstance(layer, ParallelBitLinear):
        new.__dict__["is_transposed"] = layer.is_transposed
        return new
    own = {name: value for name, value in layer._parameters.items() if name not in SPLIT_NAMES}
    if layer.is_split:
        own["weight"] = nn.Parameter(merged_weight(layer), requires_grad=layer.weight.requires_grad)
    if layer.is_transposed:
        own["weight"] = _transposed(own["weight"])
        del new.__dict__["in_features"], new.__dict__["out_features"]
    new._parameters = own
    return new


def _plain_class(layer: BitLinear) -> type[nn.Module]:
    if isinstance(layer, ParallelBitLinear):
        return layer.plain_class  # of a Conv1D too: a shard of it is a linear layer
    conv1d = conv1d_class()
    if layer.is_transposed and conv1d is None:
        raise UserError(f"layer {layer.layer_name!r} was a Conv1D: import transformers before restoring it")
    return conv1d if layer.is_transposed and conv1d is not None else nn.Linear


def _transposed(weight: nn.Parameter | None) -> nn.Parameter:
    assert weight is not None  # both layer classes register one
    return nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
