"""Oscillation of weights: the path of the quantised weight against that of its master, over some steps.

A master near the border of two cells moves little, but its quantised weight may jump to and fro. Its ratio

    Σ |Q(w_t) - Q(w_{t-1})| / Σ |w_t - w_{t-1}|

is then far above 1 (TetraJet-v2, arXiv:2510.27527). `reset` sets such masters to Q(w), the middle of their
cell; `found` only measures. Q is the quantizer of the layer's forward product, applied to the master rounded
to the model's dtype, as in the forward.

Masters are read and written through DeepSpeed's functions for full values, which work at every ZeRO stage.
From stage 1 on, every measurement gathers them. Under tensor parallelism a rank measures its shards, which
are quantised with the amax of the full weight. During a window, each rank keeps four fp32 numbers for each
element of a weight or its shard; ZeRO does not partition them. Half-precision weights follow their masters
with the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.matmul.quantizations import quantizations_of
from megalowbit.layers.matmul.sharded_operands import AmaxRequest
from megalowbit.layers.recipe import Recipe


class Oscillation(NamedTuple):
    """A window's result, over all weights of all ranks.

    Attributes:
        ratio: Σ of all quantised paths / Σ of all paths of masters; 0 if no master has moved.
        share: share of the elements whose ratio reached the threshold.
    """

    ratio: float
    share: float


@dataclass
class _Path:
    """One weight: its last master and quantised form, and the paths of both since `begin`; all fp32."""

    layer: BitLinear
    master: Tensor
    quantized: Tensor
    master_length: Tensor
    quantized_length: Tensor

    def ratio(self) -> Tensor:
        moved = self.master_length > 0
        return torch.where(moved, self.quantized_length / self.master_length, 0.0)


class OscillationWindow:
    """Measures the weights of a model's low-bit layers; every rank calls every method, between steps.

    Layers that do not quantise their weight, or no longer since a late switch in the window, are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths: list[_Path] = []
        self._device = next(module.parameters()).device
        for layer in bit_layers(module).values():
            if _quantizes_weight(layer) and layer.weight.requires_grad:
                master = _master(layer)
                zeros = torch.zeros_like(master), torch.zeros_like(master)
                self._paths.append(_Path(layer, master, _quantized(layer, master), *zeros))

    def is_empty(self) -> bool:
        """Whether there is nothing to measure on any rank; a pipeline stage may have no such layer."""
        return not process_group.is_true_anywhere(bool(self._paths))

    @torch.no_grad()
    def measure(self) -> None:
        """Add the last step to the paths."""
        self._paths = [path for path in self._paths if _quantizes_weight(path.layer)]
        for path in self._paths:
            master = _master(path.layer)
            quantized = _quantized(path.layer, master)
            path.master_length += (master - path.master).abs()
            path.quantized_length += (quantized - path.quantized).abs()
            path.master, path.quantized = master, quantized

    @torch.no_grad()
    def reset(self, threshold: float) -> Oscillation:
        """Set masters with a ratio of `threshold` or more to the middle of their cell; see `found`."""
        for path in self._paths:
            is_reset = path.ratio() >= threshold
            safe_set_full_fp32_param(path.layer.weight, torch.where(is_reset, path.quantized, path.master))
            if path.layer.weight_slot is not None:  # in an fp32 model the master is the weight
                path.layer.weight_slot.clear()
        return self.found(threshold)

    @torch.no_grad()
    def found(self, threshold: float) -> Oscillation:
        """What the steps so far have shown; reads the device."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for path in self._paths:
            is_above = path.ratio() >= threshold
            counted = path.quantized_length, path.master_length, is_above, torch.ones_like(path.master)
            sums += torch.stack([each.sum(dtype=torch.float64) for each in counted]).to(self._device)
        if process_group.world_size() > 1:  # data-parallel ranks count the same, so shares are not affected
            collectives.all_reduce(sums)
        quantized, moved, above, elements = sums.tolist()
        return Oscillation(quantized / moved if moved else 0.0, above / elements if elements else 0.0)


def check_measurable(recipe: Recipe) -> None:
    """Reject a recipe whose forward does not round the weights themselves to fixed cells.

    Raises:
        UserError: no layer's weight is quantised, or one is stochastically, after a split or a transform.
    """
    rounded = [each for each in recipe.variants if not quantizations_of(each).weight.quantizer.is_identity]
    for each in rounded or [recipe]:
        _check_cells(each)


def _check_cells(recipe: Recipe) -> None:
    chosen = quantizations_of(recipe).weight
    reason = None
    if chosen.quantizer.is_identity:
        reason = "does not quantise weights in the forward product"
    elif chosen.quantizer.is_stochastic:
        reason = f"rounds weights stochastically ({chosen.name})"
    elif recipe.split_weight is not None or recipe.parameter_split is not None:
        reason = "splits weights before it quantises them"
    elif chosen.is_transformed:
        reason = "transforms weights before it quantises them (hadamard of output)"
    if reason is not None:
        raise UserError(
            f"recipe {recipe.name!r} {reason}, so weights have no cells in which they could oscillate: "
            "leave oscillation_reset out, or choose another recipe"
        )


def _quantizes_weight(layer: BitLinear) -> bool:
    return not quantizations_of(layer.recipe).weight.quantizer.is_identity


def _master(layer: BitLinear) -> Tensor:
    """A copy of the fp32 master of the weight, or of this tensor-parallel rank's shard."""
    master = safe_get_full_fp32_param(layer.weight)
    if master is None:
        raise UserError(
            f"the optimizer holds no fp32 master of {layer.title}: leave megalowbit.oscillation_reset out"
        )
    return master.detach().clone()


def _quantized(layer: BitLinear, master: Tensor) -> Tensor:
    """The weight as the forward product reads it, in fp32."""
    chosen = quantizations_of(layer.recipe).weight
    weight = master.to(layer.weight.dtype)
    maxima = {} if layer.shards is None else layer.shards.maxima([AmaxRequest(chosen, weight, None)])
    return chosen.quantizer.quantize(weight, tensor_amax=maxima.get(chosen.role)).dequantize().float()
