"""Static inputs: quantise inputs by recorded numbers, so that no token depends on another one.

Most recipes of NVFP4, FP8 and INT8 take one scale for a tensor from its largest magnitude, and some subtract
the mean over its tokens. Both depend on later tokens, on the other sequences of a batch and on padding.
Servers use recorded ("static") numbers instead. So can a model in evaluation mode:

    with mlb.record_inputs(model) as ranges:         # forwards of some typical text, in any mode
        model(input_ids)
    mlb.use_static_inputs(model, ranges.result())    # from now on in evaluation mode; None: as before

A run of the trainer records its last steps and saves the result in its checkpoints
(`hf.training_checkpoint.TrainingCheckpoint.static_inputs`).

A record holds the largest magnitude of each layer's input. For recipes that split the mean, it holds the sum,
maximum and minimum of each feature. The range of the input without the mean then follows exactly for the mean
over all recorded tokens, which is known only at the end. Numbers that are not finite are left out. Records
stay on the device; only `result` and `state_dict` read them.

Elements far beyond the recorded range saturate; `count_beyond` counts all beyond it. Not covered, and
refused: splits along directions other than the mean, which follow from the batch; a Hadamard transform before
the forward product; scales from the mean magnitude. Training always uses the numbers of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError, shown
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.matmul.slots import StaticInput
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

Found = dict[tuple[object, ...], Any]
NOTHING = -math.inf  # the maximum of no elements


@dataclass(frozen=True, kw_only=True)
class StaticInputs:
    """What was recorded, by name of the layer in the plain model; layers without any input are missing.

    Attributes:
        maxima: largest magnitude of the input; equal for layers that read the same tensor.
        means: (in_features,) fp32 on the CPU, the mean over tokens; only for recipes that split it.
        residual_maxima: largest magnitude of the input without that mean; for the same layers.
    """

    maxima: Mapping[str, float]
    means: Mapping[str, Tensor] = field(default_factory=dict)
    residual_maxima: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        return {name: dict(getattr(self, name)) for name in ("maxima", "means", "residual_maxima")}

    @classmethod
    def from_dict(cls, values: object) -> StaticInputs:
        """Read what `to_dict` returned.

        Raises:
            UserError: it is something else.
        """
        if not isinstance(values, Mapping) or not all(isinstance(each, Mapping) for each in values.values()):
            raise UserError(f"static inputs are {shown(values)}: use an older checkpoint")
        found = cls(**{name: dict(values.get(name, {})) for name in ("maxima", "means", "residual_maxima")})
        for name, maximum in (*found.maxima.items(), *found.residual_maxima.items()):
            if not isinstance(maximum, float) or not 0 <= maximum < math.inf:
                raise UserError(f"the maximum of the inputs of {name} is {shown(maximum)}: record it again")
        for name, mean in found.means.items():
            if not isinstance(mean, Tensor) or mean.ndim != 1 or not mean.isfinite().all():
                raise UserError(f"the mean of the inputs of {name} is {shown(mean)}: record it again")
        return found


class _Range:
    """The range of one layer's inputs: an `InputRecord`.

    Attributes:
        bounds: fp32; (1,): largest magnitude, or (2, in_features): maximum and negated minimum. `None`: no
            input yet.
        sums: float64 (2, in_features): sum and number of tokens; `None` without means.
    """

    def __init__(self, *, has_mean: bool) -> None:
        self._has_mean = has_mean
        self.bounds: Tensor | None = None
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(self, input: Tensor, found_before: Found | None) -> None:
        """Add the tokens of an input."""
        if input.numel() == 0:
            return
        key = ("range", self._has_mean)
        found = None if found_before is None else found_before.get(key)
        if found is None:
            found = _by_feature(input) if self._has_mean else (_largest(input), None)
            if found_before is not None:
                found_before[key] = found
        bounds, sums = found
        with torch.inference_mode(mode=False):  # a record made there could not be changed later
            if self.bounds is None:
                self.bounds = torch.full_like(bounds, NOTHING)
                self.sums = None if sums is None else torch.zeros_like(sums)
            self.bounds = self.bounds.to(bounds.device)  # a loaded one is where ZeRO 3 keeps the weight
            torch.maximum(self.bounds, bounds.clone(), out=self.bounds)
            if sums is not None and self.sums is not None:
                self.sums = self.sums.to(sums.device).add_(sums.clone())


def _largest(input: Tensor) -> Tensor:
    """The largest magnitude, fp32 (1,); `NOTHING` if an element is not finite."""
    low, high = torch.aminmax(input)
    largest = torch.maximum(low.neg(), high).to(torch.float32).reshape(1)
    return torch.where(largest.isfinite(), largest, NOTHING)


def _by_feature(input: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and negated minimum of each feature, fp32, and sum and count, float64; each (2, features).

    Features with an element that is not finite are left out.
    """
    tokens = input.reshape(-1, input.shape[-1])
    low, high = torch.aminmax(tokens, dim=0)
    bounds = torch.stack([high, low.neg()]).to(torch.float32)
    is_finite = bounds.isfinite().all(0)
    sums = tokens.sum(0, dtype=torch.promote_types(tokens.dtype, torch.float32)).double()
    sums = torch.stack([sums, torch.full_like(sums, len(tokens))])
    return torch.where(is_finite, bounds, NOTHING), torch.where(is_finite, sums, 0.0)


class InputRanges:
    """Records the ranges of the inputs of a model's low-bit layers.

    Args:
        model: a converted model, or a stage of a pipeline, which may have no low-bit layer.
        recipe: of the layers, before a late switch; `None`: each layer's own, as it is now.
    """

    def __init__(self, model: nn.Module, recipe: Recipe | None = None) -> None:
        self._layers = bit_layers(model)
        self._with_mean = [
            name
            for name, layer in self._layers.items()
            if splits_mean(layer.recipe if recipe is None else recipe.of_layer(layer.layer_name))
        ]
        self._ranges = {name: _Range(has_mean=name in self._with_mean) for name in self._layers}

    def record(self, *, is_on: bool) -> None:
        """Begin to record the layers' inputs, or stop."""
        for name, layer in self._layers.items():
            layer.input_record = self._ranges[name] if is_on else None

    def clear(self) -> None:
        """Forget all inputs."""
        for each in self._ranges.values():
            each.bounds = each.sums = None

    def state_dict(self, group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Tensor]]:
        """The ranges over all ranks of `group` (None: all), on the CPU; collective.

        The ranks must have the same layers, or shards of them.
        """
        if not self._ranges:
            return {}
        bounds = torch.cat([self._bounds_of(name).flatten() for name in self._ranges])
        sums = None
        if self._with_mean:
            sums = torch.cat([self._sums_of(name).flatten() for name in self._with_mean])
        if process_group.world_size(group) > 1:
            device = process_group.exchange_device(group, bounds.device)
            bounds = bounds.to(device)
            collectives.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
            if sums is not None:
                sums = sums.to(device)
                collectives.all_reduce(sums, group=group)
        bounds, sums = bounds.cpu(), None if sums is None else sums.cpu()
        state, at, at_sums = {}, 0, 0
        for name in self._ranges:
            shape = self._shape_of(name)
            size = math.prod(shape)
            found = {"bounds": bounds[at : at + size].view(shape).clone()}
            at += size
            if sums is not None and name in self._with_mean:
                found["sums"] = sums[at_sums : at_sums + size].view(shape).clone()
                at_sums += size
            if found["bounds"].amax() > NOTHING:
                state[name] = found
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], *, is_first: bool) -> None:
        """Continue from what `state_dict` returned; it may name more layers than this rank has.

        Args:
            state: as saved, on any number of ranks.
            is_first: true on one of the ranks whose sums are added up, which continues with the sums.

        Raises:
            UserError: it is not of this model and recipe.
        """
        self.clear()
        for name, each in self._ranges.items():
            saved = state.get(name)
            if saved is None:
                continue
            shape, device = self._shape_of(name), self._layers[name].weight.device
            if saved["bounds"].shape != shape or ("sums" in saved) != (name in self._with_mean):
                raise UserError(
                    f"the recorded inputs of {name} do not fit the recipe: start a new run from the weights "
                    "with megalowbit.model.checkpoint"
                )
            each.bounds = saved["bounds"].to(device, copy=True)
            if name in self._with_mean:
                each.sums = saved["sums"].to(device, copy=True) * float(is_first)

    def result(self) -> StaticInputs:
        """What was recorded; every rank must call it, if there are several."""
        return static_inputs_of(self.state_dict())

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return (2, self._layers[name].in_features) if name in self._with_mean else (1,)

    def _bounds_of(self, name: str) -> Tensor:
        found, device = self._ranges[name].bounds, self._layers[name].weight.device
        if found is None:
            return torch.full(self._shape_of(name), NOTHING, dtype=torch.float32, device=device)
        return found.to(device)

    def _sums_of(self, name: str) -> Tensor:
        found, device = self._ranges[name].sums, self._layers[name].weight.device
        if found is None:
            return torch.zeros(self._shape_of(name), dtype=torch.float64, device=device)
        return found.to(device)


def static_inputs_of(state: Mapping[str, Mapping[str, Tensor]]) -> StaticInputs:
    """The result of ranges that `InputRanges.state_dict` has returned."""
    maxima, means, residual_maxima = {}, {}, {}
    for name, found in state.items():
        bounds = found["bounds"]
        maxima[name] = float(bounds.amax().clamp(min=0))
        if "sums" not in found:
            continue
        total, count = found["sums"]
        means[name] = mean = torch.where(count > 0, total / count.clamp(min=1), 0.0).float()
        residual_maxima[name] = float((bounds - torch.stack([mean, -mean])).amax().clamp(min=0))
    return StaticInputs(maxima=maxima, means=means, residual_maxima=residual_maxima)


@contextmanager
def record_inputs(model: nn.Module) -> Iterator[InputRanges]:
    """Context in which the inputs of a converted model's low-bit layers are recorded.

    Yields:
        The ranges; call their `result` afterwards.

    Raises:
        UserError: the model has no low-bit layer.
    """
    layers = bit_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no BitLinear layer: convert it first")
    ranges = InputRanges(model)
    before = {name: layer.input_record for name, layer in layers.items()}
    ranges.record(is_on=True)
    try:
        yield ranges
    finally:
        for name, layer in layers.items():
            layer.input_record = before[name]


def use_static_inputs(model: nn.Module, static: StaticInputs | None, *, count_beyond: bool = False) -> None:
    """Make a model's layers quantise their inputs by recorded numbers in evaluation mode.

    The numbers do not follow later changes of the weights: record again after more training.

    Args:
        model: converted. It may be a part of the recorded model.
        static: what was recorded; `None`: the layers use the numbers of the batch again.
        count_beyond: also count elements beyond the recorded range, see `beyond_range`.

    Raises:
        UserError: inputs of the recipe cannot be static (`why_not_static`), or those of a layer that needs
            them are missing.
    """
    layers = bit_layers(model)
    if static is not None and not isinstance(static, StaticInputs):
        raise UserError(
            f"use_static_inputs takes what record_inputs has recorded, not {shown(static)}: pass "
            "ranges.result(), or None"
        )
    found = {} if static is None else {name: _of_layer(layer, name, static) for name, layer in layers.items()}
    made: dict[tuple[object, ...], StaticInput] = {}
    for name, layer in layers.items():
        numbers = found.get(name)
        if numbers is None:
            layer.static_input = None
            continue
        maximum, mean = numbers
        device = layer.weight.device
        # siblings share what they quantise if they have the same object
        key = (layer.siblings or name, maximum, device, None if mean is None else tuple(mean.tolist()))
        if key not in made:
            counts = torch.zeros(2, dtype=torch.int64, device=device) if count_beyond else None
            mean = None if mean is None else mean.to(device)
            made[key] = StaticInput(maximum=maximum, mean=mean, counts=counts)
        layer.static_input = made[key]


def _of_layer(layer: BitLinear, name: str, static: StaticInputs) -> tuple[float, Tensor | None] | None:
    """Maximum and mean for one layer; `None`: it needs none."""
    if not needs_static_inputs(layer.recipe) and layer.chooser is None:
        return None
    reason, has_mean = why_not_static(layer.recipe), splits_mean(layer.recipe)
    if reason is not None:
        raise UserError(f"recipe {layer.recipe.name!r}: {reason}")
    maxima = static.residual_maxima if has_mean else static.maxima
    if name not in maxima:
        what = "the mean of the inputs" if has_mean else "the inputs"
        raise UserError(f"{what} of {name} were not recorded: record them with mlb.record_inputs")
    mean = static.means[name] if has_mean else None
    if mean is not None and len(mean) != layer.in_features:
        raise UserError(
            f"the recorded mean of the inputs of {name} has {len(mean)} features, and the layer "
            f"{layer.in_features}: record them with mlb.record_inputs"
        )
    return maxima[name], mean


def beyond_range(model: nn.Module) -> Tensor:
    """Elements of inputs quantised so far by recorded numbers, and how many were beyond them: (2,) int64.

    Of this rank, on its device. Zeros without `count_beyond`.
    """
    static = (layer.static_input for layer in bit_layers(model).values())
    counts = {id(each): each.counts for each in static if each is not None and each.counts is not None}
    return torch.stack(list(counts.values())).sum(0) if counts else torch.zeros(2, dtype=torch.int64)


def splits_mean(recipe: Recipe) -> bool:
    """Whether a recipe subtracts the mean over tokens from its inputs."""
    return recipe.split_input is not None and recipe.split_input.method == "mean"


def needs_static_inputs(recipe: Recipe) -> bool:
    """Whether the forward of a layer quantises its input by numbers of all its tokens."""
    chosen = quantizer(recipe.q_forward_input)
    if chosen.is_identity:
        return False
    has_tensor_scale = isinstance(chosen, BlockQuantizer) and chosen.encoding.format.has_tensor_scale
    return has_tensor_scale or recipe.split_input is not None


def why_not_static(recipe: Recipe) -> str | None:
    """Why inputs of this recipe cannot be quantised by recorded numbers; `None`: they can."""
    if not needs_static_inputs(recipe):
        return None
    if recipe.split_input is not None and not splits_mean(recipe):
        return (
            f"split_input {recipe.split_input.method!r} takes directions from each batch, and these are not "
            "recorded: evaluate with the numbers of the batch"
        )
    chosen = quantizer(recipe.q_forward_input)
    if isinstance(chosen, BlockQuantizer) and chosen.encoding.scale_from == "mean":
        return f"{chosen.name!r} scales by the mean magnitude, which is not recorded"
    if "output" in recipe.transformed_products:
        return "the range of inputs after a Hadamard transform is not recorded"
    return None
