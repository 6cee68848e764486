"""Splits weights into parameters between two optimizer steps: W → W_R + U·diag(S)·V.

The full weight (from the second split on: W_R + U·diag(S)·V of the fp32 masters) is factored, the masters of
all four parts are set, and the model's copies follow. Optimizer state is either

- projected ("project"): W_R keeps the moments of the full weight, because both have the same gradient; the
  moments of U, S and V follow by the chain rule, or
- reset ("reset"): all four parts start without state.

Data-parallel ranks share the work layer by layer and broadcast the results, so they hold the same bits even
on
different machines. All checks come before any change. Not covered: ZeRO 1-3, where no rank has a full master.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.parameter_split.masters import (
    Masters,
    largest_singular_value,
    split_masters,
    without_rule,
)
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.values import counted


@dataclass(frozen=True, kw_only=True)
class WeightSplitReport:
    """The result of a split; prints as one line.

    Attributes:
        ranks: layer name → rank of its factors, in the model's order.
        is_projected: whether optimizer state was projected; otherwise it was reset.
        lr_scale: new factor of the first group's learning rate; `None`: unchanged.
    """

    ranks: Mapping[str, int]
    is_projected: bool
    lr_scale: float | None = None

    def __str__(self) -> str:
        low, high = min(self.ranks.values()), max(self.ranks.values())
        rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
        state = "projected" if self.is_projected else "reset"
        rate = "" if self.lr_scale is None else f"; learning rate times {self.lr_scale:.4g}"
        return f"{counted(len(self.ranks), 'weight')} split at {rank}; optimizer state {state}{rate}"


@torch.no_grad()
def split_weights(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr_scheduler: Any = None,
    group: dist.ProcessGroup | None = None,
) -> WeightSplitReport:
    """Split every trained weight whose recipe has `parameter_split`, for the first time or again.

    Call it on all ranks between two optimizer steps, before each step n (from 0) with
    `parameter_split.is_due(n)`. megalowbit's pretraining loop does this. Do not call it between a forward and
    its backward: autograd would find that the factors were changed in place, and raise.

    Args:
        model: an engine from `initialize`, which provides all other arguments; or a converted model.
        optimizer: ours, or a plain torch optimizer, over the model's parameters. If you build the groups,
            give `split_u` and `split_v` no weight decay, and `split_s` that of the weight, as `initialize`
            does: then the low-rank part decays as fast as W_R.
        lr_scheduler: of the optimizer; provides the schedule's peak for `merged_lr`.
        group: data-parallel ranks that hold the same weights; by default the world.

    Raises:
        UserError: no layer can be split; the optimizer does not train its parameters, or keeps state that
            cannot be projected; gradients are waiting for a step; a weight is not finite, or its singular
            values exceed its dtype's range; torch has sharded the weights; or the schedule's peak is unknown.
            Nothing has changed then.
    """
    if optimizer is None:
        engine: Any = model
        if not hasattr(engine, "module") or not hasattr(engine, "optimizer"):
            raise UserError("split_weights needs the model's optimizer: pass it, or an engine of initialize")
        if engine.micro_steps % engine.gradient_accumulation_steps():
            raise UserError("split weights between optimizer steps, not between micro-batches of one")
        model, optimizer, lr_scheduler = engine.module, engine.optimizer, engine.lr_scheduler
        group = group or engine.seq_data_parallel_group
    layers = _layers_to_split(model)
    refuse_sharded_model("split_weights", model, "choose a recipe without parameter_split")
    settings = next(iter(layers.values())).recipe.parameter_split
    assert settings is not None  # layers without settings are not selected
    masters = _masters_of(optimizer, layers)
    _check_no_gradients(optimizer, layers)
    _check_finite(masters)
    _check_range(layers, masters)
    _check_state(optimizer, masters, settings.optimizer_state)
    scales = [] if settings.merged_lr is None else _lr_scales(optimizer, lr_scheduler, settings.merged_lr)
    is_projected = settings.optimizer_state == "project"
    _split_all(layers, masters, optimizer.state, is_projected=is_projected, group=group)
    if isinstance(optimizer, MegatronOptimizer):
        optimizer.masters_have_changed()
    is_rescaled = False  # after the first split the rates are already scaled
    if scales:
        is_rescaled = optimizer.param_groups[0].get("lr_scale") != scales[0]
        for param_group, scale in zip(optimizer.param_groups, scales, strict=True):
            param_group["lr_scale"] = scale
    for layer in layers.values():
        layer.is_split = True
        if layer.weight_slot is not None:
            layer.weight_slot.clear()
    ranks = {name: len(layer.split_s) for name, layer in layers.items()}
    lr_scale = scales[0] if is_rescaled else None
    return WeightSplitReport(ranks=ranks, is_projected=is_projected, lr_scale=lr_scale)


def forget_lr_scales(engine: Any) -> None:
    """Remove the learning-rate scales of the first split; a checkpoint to be loaded may be older than it."""
    for group in engine.optimizer.param_groups:
        group.pop("lr_scale", None)


def _layers_to_split(model: nn.Module) -> dict[str, BitLinear]:
    """Layers to split, by name: at least one, all with the same settings."""
    layers = {
        name: layer
        for name, layer in bit_layers(model).items()
        if layer.recipe.parameter_split is not None and layer.weight.requires_grad
    }
    if not layers:
        raise UserError(
            "split_weights finds no trained layer to split: convert the model with a recipe that has "
            "parameter_split"
        )
    if len({layer.recipe.parameter_split for layer in layers.values()}) > 1:
        raise UserError("layers have different parameter_split settings: convert them with one recipe")
    return layers


def _masters_of(optimizer: object, layers: Mapping[str, BitLinear]) -> dict[str, Masters]:
    """Layer name → the fp32 tensors of W_R, U, S and V that a step updates."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{type(optimizer).__name__} holds no full masters: set zero_optimization.stage 0; from stage 1 "
            "on use split_weight in the recipe (the in-time split)"
        )
    found: dict[str, Masters] = {}
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, layer in layers.items():
        assert layer.has_factors  # ensured by the recipe's setter
        parts: Masters = layer.parts()
        try:
            if isinstance(optimizer, MegatronOptimizer):
                weight, u, s, v = map(optimizer.master_of, parts)
                parts = weight, u, s, v
            is_trained = all(id(part) in trained for part in parts)
        except UserError:
            is_trained = False
        if not is_trained:
            raise UserError(
                f"layer {name} has weight, split_u, split_s or split_v outside of the optimizer: "
                "convert the model first, then collect its parameters"
            )
        found[name] = parts
    return found


def _check_finite(masters: Mapping[str, Masters]) -> None:
    is_finite = torch.stack(
        [torch.stack([part.isfinite().all() for part in parts]).all() for parts in masters.values()]
    )
    for name, finite in zip(masters, is_finite.tolist(), strict=True):
        if not finite:
            raise UserError(f"the weight of layer {name} is not finite: resume from an earlier checkpoint")


def _check_no_gradients(optimizer: torch.optim.Optimizer, layers: Mapping[str, BitLinear]) -> None:
    """Reject gradients of the old parts, which the next step would apply to the new ones.

    fp32 gradient sums always exist; after a step they are zero.
    """
    held = (name for name, layer in layers.items() if any(part.grad is not None for part in layer.parts()))
    name = next(held, None)
    if name is None and isinstance(optimizer, MegatronOptimizer) and optimizer.params_have_main_grad:
        name = next((name for name, layer in layers.items() if optimizer.has_gradient(layer.weight)), None)
    if name is not None:
        raise UserError(
            f"split weights between optimizer steps: layer {name} has gradients that no step has applied: "
            "call step or zero_grad first"
        )


def _check_range(layers: Mapping[str, BitLinear], masters: Mapping[str, Masters]) -> None:
    """Reject fp16 parameters whose S would be infinite; other dtypes have a large enough range."""
    for name, layer in layers.items():
        if layer.split_s.dtype != torch.float16:
            continue
        largest = largest_singular_value(masters[name], is_split=layer.is_split)
        if not torch.tensor(largest, dtype=torch.float32).half().isfinite():
            raise UserError(
                f"the weight of layer {name} has the singular value {largest:.4g}, but float16 ends at "
                "65504: train in bfloat16, or exclude the layer from the split with recipe.keep"
            )


def _check_state(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, Masters], optimizer_state: str
) -> None:
    """Reject state that cannot be projected, or that the optimizer would not create again."""
    inner = optimizer.optimizer if isinstance(optimizer, MegatronOptimizer) else optimizer
    kind = type(inner).__name__
    if optimizer_state == "reset":
        if isinstance(inner, torch.optim.Adagrad):
            raise UserError(f"{kind} creates its state only once and cannot be reset: use AdamW")
        return
    for weight, *_ in masters.values():
        name = without_rule(optimizer.state[weight])
        if name is not None:
            raise UserError(
                f"{kind} keeps {name!r}, which cannot be projected onto factors: "
                'use parameter_split.optimizer_state "reset", or AdamW'
            )


def _split_all(
    layers: Mapping[str, BitLinear],
    masters: Mapping[str, Masters],
    state: Any,
    *,
    is_projected: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Write masters and state: each rank computes its share of the layers and broadcasts them."""
    own_rank, size = process_group.rank(group), process_group.world_size(group)
    written = [
        split_masters(
            masters[name],
            [state[part] for part in masters[name]],
            is_split=layer.is_split,
            is_projected=is_projected,
            is_computed=index % size == own_rank,
        )
        for index, (name, layer) in enumerate(layers.items())
    ]
    if size > 1:
        for index, tensors in enumerate(written):
            _broadcast(tensors, index % size, group)


def _broadcast(tensors: Iterable[Tensor], owner: int, group: dist.ProcessGroup | None) -> None:
    source = owner if group is None else dist.get_global_rank(group, owner)
    for tensor in tensors:
        buffer = tensor.detach().contiguous()
        collectives.broadcast(buffer, source, group=group)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer)


def _lr_scales(optimizer: torch.optim.Optimizer, lr_scheduler: Any, merged_lr: float) -> list[float]:
    """For each group, the factor that brings its schedule's peak to `merged_lr`."""
    if not isinstance(optimizer, MegatronOptimizer):
        raise UserError(
            "parameter_split.merged_lr needs one of megalowbit's optimizers, because "
            f"{type(optimizer).__name__} does not support lr_scale: wrap it, or set merged_lr to null"
        )
    peaks = _peaks(optimizer, lr_scheduler)
    if any(not peak > 0 for peak in peaks):
        raise UserError(f"parameter_split.merged_lr cannot scale a learning rate that peaks at {min(peaks)}")
    return [merged_lr / peak for peak in peaks]


def _peaks(optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> list[float]:
    """The highest learning rate each group's schedule reaches."""
    for name in ("max_lrs", "org_lrs"):  # DeepSpeed's schedulers
        rates = getattr(lr_scheduler, name, None)
        if rates is not None:
            return [float(rate) for rate in rates]
    peaks = []
    for group in optimizer.param_groups:
        rate = group.get("max_lr", group.get("initial_lr"))  # torch's
        if rate is None and lr_scheduler is None:
            rate = group["lr"]
        if rate is None:
            raise UserError(
                f"parameter_split.merged_lr needs the peak of {type(lr_scheduler).__name__}, which does not "
                "provide it: set merged_lr to null, and adjust the schedule yourself"
            )
        peaks.append(float(rate))
    return peaks
