"""What one use of a layer needs beside its tensors, and how it quantises its operands with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.chooser import Probe
from megalowbit.layers.matmul.gemms import no_autocast
from megalowbit.layers.matmul.operand import (
    Factor,
    LowRankPart,
    OperandTensor,
    serves_both_axes,
    transposed_values,
)
from megalowbit.layers.matmul.sharded_operands import Asked, ShardedOperands
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import split
from megalowbit.spectral.state import SplitState

REPORTED_ROLES = frozenset({"input", "weight", "grad_output"})
WEIGHT_ROLES = frozenset({"weight", "backward_weight", "weight_split"})
OPERANDS = {  # role of a quantisation → what it quantises
    "input": "input",
    "backward_input": "input",
    "weight": "weight",
    "backward_weight": "weight",
    "grad_output": "grad_output",
    "grad_output_transposed": "grad_output",
    "grad_output_for_weight": "grad_output",
}


class Prepared(NamedTuple):
    """An operand ready to be quantised.

    Attributes:
        tensor: the operand, or what its low-rank part leaves of it.
        low_rank: the low-rank part; `None` where the operand is not split.
        whole: the operand before it was split.
        factors: of a weight split into parameters, of which `tensor` is W_R; else `None`.
    """

    tensor: Tensor
    low_rank: LowRankPart | None = None
    whole: Tensor | None = None
    factors: WeightFactors | None = None

    def for_quantizer(self, name: str) -> Prepared:
        """What this quantiser gets: an operand that it leaves as it is, is not split either."""
        return Prepared(self.whole) if self.whole is not None and quantizer(name).is_identity else self


@dataclass(frozen=True, kw_only=True)
class Call:
    """One use of a layer.

    Attributes:
        recipe: quantisers of the five operands, layout and GEMM.
        compute_dtype: of the GEMMs and of the output.
        random_key: (role, device) → the key of that operand's stochastic rounding.
        hadamard_signs: of the random Hadamard transform, where the recipe asks for one.
        observe: takes (role, counts, error) of each quantised operand; `None` counts nothing.
        count: takes (product, what it ran in) of each product; `None` counts nothing.
        weights: where quantised weights are kept, or `None`.
        keeps_until_cleared: see `WeightSlot.get`.
        is_replay: whether this forward repeats an earlier one, whose operands have been reported already.
        needs_grad: whether a graph is being recorded; without one nothing is prepared for backward.
        step: the micro-batch.
        sizes: in_features and out_features of the layer, of which a rank may be a fraction.
        split_state: role → what the split of that operand keeps from use to use.
        shards: which operands are shards of a tensor-parallel layer; `None`: none is.
        maxima: role → largest magnitude of the whole operand, of which this rank has a shard; see `agree_on`.
        probe: looks at operands and products, or `None`; see `chooser`.
        looked: operand → its largest magnitude, where the probe has found it.
    """

    recipe: Recipe
    compute_dtype: torch.dtype
    random_key: Callable[[str, torch.device], RandomKey]
    hadamard_signs: int = 0
    observe: Callable[[str, Tensor, Tensor], None] | None = None
    count: Callable[[str, str], None] | None = None
    weights: WeightSlot | None = None
    keeps_until_cleared: bool = False
    is_replay: bool = False
    needs_grad: bool = True
    step: int = 0
    sizes: tuple[int, int] = (0, 0)
    split_state: Callable[[str], SplitState] | None = None
    shards: ShardedOperands | None = None
    maxima: dict[str, Tensor] = field(default_factory=dict)
    probe: Probe | None = None
    looked: dict[str, Tensor] = field(default_factory=dict)

    def agree_on(self, asked: Callable[[], list[Asked]]) -> None:
        """Learn from other ranks how large sharded operands are, before they are quantised; collective."""
        if self.shards is not None:
            self.maxima.update(self.shards.maxima(asked()))

    def look(self, **operands: Tensor) -> None:
        """Show the probe what will be multiplied, in this order, before any of it is quantised."""
        if self.probe is None or (self.is_replay and "grad_output" not in operands):
            return
        for role, operand in operands.items():
            with no_autocast(operand.device.type):
                largest = self.probe.look(role, operand.detach())
            if largest is not None:
                self.looked[role] = largest

    def show(self, product: str, left: Factor, right: Factor, result: Tensor, bias: Tensor | None) -> None:
        """Show the probe a product; see `Probe.product`."""
        if self.probe is None or (self.is_replay and product == "output"):
            return
        with no_autocast(result.device.type):
            self.probe.product(product, left, right, result, None if bias is None else bias.detach())

    def prepare(self, x: Tensor, role: str) -> Prepared:
        """Split an operand as the recipe says.

        Args:
            x: the operand, in the shape the layer got it in.
            role: "input", "weight" or "grad_output".
        """
        settings: OperandSplit | None = getattr(self.recipe, f"split_{role}")
        if settings is None:
            return Prepared(x)
        assert self.split_state is not None  # whoever has a recipe with splits has states for them
        found = split(
            x.detach(),
            settings,
            self.split_state(role),
            rank=settings.rank_of(*self.sizes),
            step=self.step,
            is_replay=self.is_replay and role != "grad_output",
            random_key=self.random_key(f"{role}_split", x.device),
        )
        gain = None
        if settings.gains != "none":
            gain = torch.full((), found.residual_gain, dtype=torch.float32, device=x.device)
        is_row = settings.method == "mean"
        low_rank = LowRankPart(found.left, found.values, found.right, gain, is_row)
        return Prepared(found.residual, low_rank, x)

    def quantize(
        self,
        operand: Prepared,
        name: str,
        role: str,
        *,
        operand_dtype: torch.dtype | None = None,
        is_reported: bool | None = None,
        reported_as: str | None = None,
    ) -> Factor:
        """Quantise one operand in blocks along its last axis.

        Args:
            operand: from `prepare`.
            name: of the quantiser.
            role: part of the random key; repeated quantisations of a tensor have roles of their own.
            operand_dtype: make the GEMM's operand on the way, in this dtype.
            is_reported: whether the observer hears of it; by default as the role says.
            reported_as: the role the observer hears of it as, where that is not its own.
        """
        operand = operand.for_quantizer(name)
        chosen, x = quantizer(name), operand.tensor
        observe = self._observer(reported_as or role, name, is_reported)
        key = self._key(name, role, x)
        result = chosen.quantize(
            x,
            random_key=key,
            with_counts=observe is not None,
            operand_dtype=operand_dtype,
            tensor_amax=self._maximum(operand, name, role),
        )
        if observe is not None:
            _report(observe, reported_as or role, result, operand)
        return Factor(result, low_rank=operand.low_rank)

    def quantize_transposed(
        self,
        operand: Prepared,
        name: str,
        role: str,
        *,
        is_transformed: bool,
        reported_as: str | None = None,
    ) -> Factor:
        """Quantise one operand in blocks along its rows (tokens, or output features).

        Args:
            operand: from `prepare`; its tensor is taken as a matrix (rows, cols).
            name: of the quantiser.
            role: as for `quantize`.
            is_transformed: whether the recipe's Hadamard transform applies to it.
            reported_as: the role the observer hears of it as; `None`: not at all.
        """
        operand = operand.for_quantizer(name)
        chosen, x = quantizer(name), operand.tensor
        key = self._key(name, role, x)
        observe = None if reported_as is None else self._observer(reported_as, name, True)
        signs = self.signs if is_transformed else None
        with_counts, amax = observe is not None, self._maximum(operand, name, role, signs)
        result: OperandTensor
        if isinstance(chosen, BlockQuantizer):
            result = chosen.quantize_transposed(
                x, signs=signs, random_key=key, with_counts=with_counts, tensor_amax=amax
            )
        else:
            values = transposed_values(x).values
            result = chosen.quantize(values, random_key=key, with_counts=with_counts, tensor_amax=amax)
        if observe is not None:
            _report(observe, reported_as or role, result, operand)
        return Factor(result, is_transposed=True, low_rank=operand.low_rank)

    @property
    def signs(self) -> int | None:
        """Signs of the recipe's Hadamard transform, or `None` where there is none."""
        return self.hadamard_signs if self.recipe.hadamard else None

    def needs_weight(self, weight: Tensor, name: str, role: str) -> bool:
        """Whether `weight` will quantise, and not find the factor in the cache."""
        if self.weights is None or quantizer(name).is_stochastic or quantizer(name).is_identity:
            return True
        is_counted = self._observer(role, name, None) is not None
        found = self.weights.find(
            weight, role, name, is_counted=is_counted, until_cleared=self.keeps_until_cleared
        )
        return found is None

    def weight(self, weight: Tensor, name: str, role: str, quantize: Callable[[], Factor]) -> Factor:
        """A weight's factor: out of the cache, where there is one and the quantiser may be cached."""
        if self.weights is None or quantizer(name).is_stochastic or quantizer(name).is_identity:
            return quantize()
        is_counted = self._observer(role, name, None) is not None
        return self.weights.get(
            weight, role, name, quantize, is_counted=is_counted, until_cleared=self.keeps_until_cleared
        )

    def _maximum(self, operand: Prepared, name: str, role: str, signs: int | None = None) -> Tensor | None:
        """The operand's largest magnitude, where other ranks or the probe have told it and it is of use."""
        if role in self.maxima or not self.looked:
            return self.maxima.get(role)
        largest = self.looked.get(OPERANDS[role])
        is_shard = self.shards is not None and self.shards.holds(role)
        if largest is None or is_shard or signs is not None or operand.low_rank is not None:
            return None
        return largest if _is_maximum_of(name, largest) else None

    def _key(self, name: str, role: str, x: Tensor) -> RandomKey | None:
        return self.random_key(role, x.device) if quantizer(name).is_stochastic and x.numel() else None

    def _observer(
        self, role: str, name: str, is_reported: bool | None
    ) -> Callable[[str, Tensor, Tensor], None] | None:
        if is_reported is None:
            is_reported = role == "grad_output" or (role in REPORTED_ROLES and not self.is_replay)
        return self.observe if is_reported and not quantizer(name).is_identity else None


def _is_maximum_of(name: str, largest: Tensor) -> bool:
    """Whether a quantiser, left alone, would find this largest magnitude and choose its scale by it."""
    chosen = quantizer(name)
    if not isinstance(chosen, BlockQuantizer):
        return False
    encoding = chosen.encoding
    if encoding.q_scalar != 1 or encoding.scale_from == "mean":
        return False
    if encoding.format.block is None:
        return True
    # Under two levels a block with an infinity does not count, so only a finite number is what it would
    # find; to ask is free on a CPU alone.
    return encoding.format.scale == "e4m3" and largest.device.type == "cpu" and bool(largest.isfinite())


def _report(
    observe: Callable[[str, Tensor, Tensor], None],
    role: str,
    result: OperandTensor,
    operand: Prepared,
) -> None:
    """Hand on the counts; the squared norm beside a residual's error is that of the whole operand."""
    assert result.counts is not None  # asked for
    assert result.error is not None
    error, whole = result.error, operand.whole
    if operand.factors is not None:
        error = torch.stack([error[0], operand.factors.squared_norm(operand.tensor.detach(), error[1])])
    elif whole is not None:
        norm = torch.linalg.vector_norm(whole, dtype=torch.promote_types(whole.dtype, torch.float32)).double()
        error = torch.stack([error[0], norm.square()])
    observe(role, result.counts, error)


def keeps_weight_codes(recipe: Recipe) -> bool:
    """Whether forward's codes of the weight serve backward as well."""
    same = recipe.q_forward_weight == recipe.q_backward_weight
    return same and (recipe.layout == "single_copy" or serves_both_axes(recipe.q_forward_weight))
