"""The settings and services of one use of a layer, and the quantisation of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.gemms import no_autocast
from megalowbit.layers.matmul.operand import LowRankPart, MatmulOperand, OperandTensor, transposed_values
from megalowbit.layers.matmul.quantizations import (
    Quantization,
    Quantizations,
    needs_exponents,
    quantizations_of,
)
from megalowbit.layers.matmul.sharded_operands import AmaxRequest, ShardedOperands
from megalowbit.layers.matmul.slots import InputRecord, Probe, StaticInput
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.siblings import InputForms, shares_input
from megalowbit.quantize.philox import RandomKey, StoredKey
from megalowbit.quantize.quantized_tensor import QuantizedTensor, masked
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer, takes_row_maximum
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.split import split, without_mean
from megalowbit.spectral.state import SplitState

Observe = Callable[[str, Tensor, Tensor], None]


class SplitOperand(NamedTuple):
    """An operand ready to be quantised, split if the recipe says so.

    Attributes:
        tensor: the operand; if it is split, its residual.
        low_rank: the low-rank part; `None` if the operand is not split.
        whole: the operand before it was split; `None` if it is not split.
        factors: U, S and V of a weight split into parameters, of which `tensor` is W_R; else `None`.
        residual_amax: see `SplitTensor`.
    """

    tensor: Tensor
    low_rank: LowRankPart | None = None
    whole: Tensor | None = None
    factors: WeightFactors | None = None
    residual_amax: Tensor | None = None

    def for_quantizer(self, quantizer: Quantizer) -> SplitOperand:
        """The operand for this quantizer: unsplit if the quantizer changes nothing."""
        return SplitOperand(self.whole) if self.whole is not None and quantizer.is_identity else self


def once(make: Callable[[], SplitOperand]) -> Callable[[], SplitOperand]:
    """A function that calls another one at its first call; `functools.cache` takes several times as long."""
    made: list[SplitOperand] = []

    def get() -> SplitOperand:
        if not made:
            made.append(make())
        return made[0]

    return get


class Made(NamedTuple):
    """A quantised operand, and its counts and error if they were requested."""

    operand: MatmulOperand
    facts: tuple[Tensor, Tensor] | None


@dataclass(kw_only=True, eq=False)  # frozen, each use of a layer would take twice as long to set it up
class MatmulContext:
    """One use of a layer: what its three products need in addition to their tensors.

    Attributes:
        recipe: quantizers of the operands, layout and GEMM.
        compute_dtype: dtype of the GEMMs and of the output.
        random_key: (role, device) → `RandomKey` of that operand's stochastic rounding, or `StoredKey`.
        hadamard_signs: signs of the random Hadamard transform, if the recipe uses one.
        observe: receives (role, counts, error) of each quantised operand; `None`: nothing is counted.
        count: receives (product, the precision it ran in) of each product; `None`: nothing is counted.
        fp8_counts: (product, device) → counts there of the products about which the device decides, see
            `ProductCounts.on_device`; `count` does not get these.
        weights: the layer's slot in the weight cache, or `None`.
        keeps_until_cleared: `until_cleared` of `WeightSlot.get`.
        is_replay: whether this forward repeats an earlier one, whose operands were already reported.
        needs_grad: whether autograd records a graph; otherwise nothing is prepared for backward.
        step: the micro-batch.
        finish: called when backward begins, or `None`.
        sizes: full in_features and out_features of the layer; a tensor-parallel rank may hold a part of them.
        title: the layer's name in messages.
        split_state: role → the state that the split of that operand keeps between uses.
        shards: which operands are shards of a tensor-parallel layer; `None`: none.
        maxima: role → amax of the full operand, of which this rank has a shard; see `exchange_maxima`.
        probe: inspects operands and products, or `None`; see `slots`.
        probed_maxima: operand → its amax, if the probe has computed it.
        input_forms: quantised forms of the input that sibling layers share, or `None`; see `siblings`.
        input_record: records the range of inputs, or `None`.
        static_input: numbers to quantise the input by, instead of those of the batch, or `None`.
        quantizations: the recipe's.
    """

    recipe: Recipe
    compute_dtype: torch.dtype
    random_key: Callable[[str, torch.device], Any]
    hadamard_signs: int = 0
    observe: Observe | None = None
    count: Callable[[str, str], None] | None = None
    fp8_counts: Callable[[str, torch.device], Tensor] | None = None
    weights: WeightSlot | None = None
    keeps_until_cleared: bool = False
    is_replay: bool = False
    needs_grad: bool = True
    step: int = 0
    finish: Callable[[], None] | None = None
    sizes: tuple[int, int] = (0, 0)
    title: str = "a low-bit layer"
    split_state: Callable[[str], SplitState] | None = None
    shards: ShardedOperands | None = None
    maxima: dict[str, Tensor] = field(default_factory=dict)
    probe: Probe | None = None
    probed_maxima: dict[str, Tensor] = field(default_factory=dict)
    input_forms: InputForms | None = None
    input_record: InputRecord | None = None
    static_input: StaticInput | None = None
    quantizations: Quantizations = field(init=False)

    def __post_init__(self) -> None:
        self.quantizations = quantizations_of(self.recipe)

    def exchange_maxima(self, wanted: Iterable[Quantization], operands: Mapping[str, Tensor]) -> None:
        """Exchange the amax of sharded operands with the other ranks before quantising them; collective.

        Skips weights that the cache holds; it holds them on all ranks or on none.
        """
        if self.shards is None:
            return
        requests = [
            AmaxRequest(each, operands[each.operand], self._signs(each))
            for each in dict.fromkeys(wanted)
            if self._static(each) is None
            and (each.operand != "weight" or self._cached_weight(operands["weight"], each) is None)
        ]
        self.maxima.update(self.shards.maxima(requests))

    def record_input(self, input: Tensor) -> None:
        """Record the range of an input, if the layer has a record."""
        if self.input_record is not None and not self.is_replay:
            with no_autocast(input.device.type):
                self.input_record.add(
                    input.detach(), None if self.input_forms is None else self.input_forms.forms
                )

    def probe_operands(self, **operands: Tensor) -> None:
        """Pass the operands to the probe, in this order, before any of them is quantised."""
        if self.probe is None or (self.is_replay and "grad_output" not in operands):
            return
        for role, operand in operands.items():
            is_shard = self.shards is not None and self.shards.group.size > 1 and self.shards.holds(role)
            full_amax = self.shards.group.largest if self.shards is not None and is_shard else None
            with no_autocast(operand.device.type):
                largest = self.probe.observe_operand(role, operand.detach(), full_amax)
            if largest is not None:
                self.probed_maxima[role] = largest

    def probe_product(
        self, product: str, left: MatmulOperand, right: MatmulOperand, result: Tensor, bias: Tensor | None
    ) -> None:
        """Pass a product to the probe; see `Probe.product`."""
        if self.probe is None or (self.is_replay and product == "output"):
            return
        with no_autocast(result.device.type):
            self.probe.observe_product(product, left, right, result, None if bias is None else bias.detach())

    def split(self, x: Tensor, role: str, factors: WeightFactors | None = None) -> SplitOperand:
        """Split an operand, in the shape in which the layer got it, as the recipe says.

        `factors` are those of the result.
        """
        settings: OperandSplit | None = getattr(self.recipe, f"split_{role}")
        if settings is None:
            return SplitOperand(x, factors=factors)
        static = self.static_input
        if role == "input" and static is not None and static.mean is not None:
            found = without_mean(x.detach(), static.mean)
        else:
            assert self.split_state is not None  # a layer whose recipe has splits provides it
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
        low_rank = LowRankPart(found.left, found.values, found.right, gain, is_row, found.products)
        return SplitOperand(found.residual, low_rank, x, factors=factors, residual_amax=found.residual_amax)

    def quantize(
        self,
        operand: SplitOperand,
        quantization: Quantization,
        *,
        operand_dtype: torch.dtype | None = None,
        is_reported: bool = True,
    ) -> MatmulOperand:
        """Quantise one operand.

        Args:
            operand: from `split`. With `is_transposed` of the quantisation, it is flattened to (rows, cols),
                and the result is stored as (cols, rows) with blocks along the original rows.
            quantization: role, quantizer and block axis.
            operand_dtype: also make the decoded operand of the GEMM, in this dtype; ignored if the result is
                stored transposed or transformed. E4M3 or E5M2 for products on FP8 tensor cores.
            is_reported: false if the observer has this operand's counts already.
        """
        observe = self._observer(quantization) if is_reported else None
        made = self._quantized(operand, quantization, operand_dtype, with_counts=observe is not None)
        return _reported(made, quantization, observe)

    def _quantized(
        self,
        operand: SplitOperand,
        quantization: Quantization,
        operand_dtype: torch.dtype | None,
        *,
        with_counts: bool,
    ) -> Made:
        quantizer = quantization.quantizer
        operand = operand.for_quantizer(quantizer)
        x = operand.tensor
        static = self._static(quantization)
        if static is not None:
            static.count(x)
        arguments: dict[str, Any] = {
            "random_key": self._key(quantization, x),
            "with_counts": with_counts,
            "tensor_amax": self._amax(operand, quantization),
            "with_exponents": needs_exponents(self.recipe, quantization.name),
        }
        result: OperandTensor
        signs = self._signs(quantization)
        if signs is not None and not quantization.is_transposed:
            assert isinstance(quantizer, BlockQuantizer)  # ensured by the recipe
            result = quantizer.quantize_transformed(x, signs=signs, **arguments)
        elif not quantization.is_transposed:
            result = quantizer.quantize(x, operand_dtype=operand_dtype, **arguments)
        elif isinstance(quantizer, BlockQuantizer):
            result = quantizer.quantize_transposed(x, signs=signs, **arguments)
        else:
            result = quantizer.quantize(transposed_values(x).values, **arguments)
        facts = _facts(result, operand) if with_counts else None
        return Made(MatmulOperand(result, quantization.is_transposed, low_rank=operand.low_rank), facts)

    def input(
        self,
        input: Tensor,
        quantization: Quantization,
        split: Callable[[], SplitOperand],
        *,
        operand_dtype: torch.dtype | None = None,
    ) -> MatmulOperand:
        """A quantised input: a form that a sibling layer has made, or a new one.

        Args:
            input: as the layer got it.
            quantization: role, quantizer and block axis.
            split: returns `input` from `split`; not called if a sibling has made this form.
            operand_dtype: as for `quantize`.
        """
        if self.input_forms is None or not self._may_be_shared(quantization):
            return self.quantize(split(), quantization, operand_dtype=operand_dtype)
        observe, forms = self._observer(quantization), self.input_forms.forms
        # all that the result depends on, besides the tensor
        request = (
            quantization,
            self.recipe.split_input,
            operand_dtype,
            self._key(quantization, input),
            self._signs(quantization),
            needs_exponents(self.recipe, quantization.name),
            self._static(quantization),
        )
        made = forms.get(request)
        if made is None or (made.facts is None and observe is not None):
            made = self._quantized(split(), quantization, operand_dtype, with_counts=observe is not None)
            forms[request] = made
        return _reported(made, quantization, observe)

    def _may_be_shared(self, quantization: Quantization) -> bool:
        """Whether the form is the same for all siblings, and more than the input itself."""
        is_own = quantization.quantizer.is_identity or quantization.role in self.maxima
        return not is_own and shares_input(self.recipe)

    def with_mask(
        self, kept: MatmulOperand, tensor: Tensor, quantization: Quantization, made: MatmulOperand
    ) -> MatmulOperand:
        """An operand kept for backward, with the mask of the gradient that is computed with it.

        Args:
            kept: the operand.
            tensor: the other operand of `output`, which gets the gradient.
            quantization: of `tensor` in `output`.
            made: its result.
        """
        if not quantization.masks_gradient:
            return kept
        assert isinstance(made.tensor, QuantizedTensor)  # only these have masks
        with no_autocast(tensor.device.type):
            mask = made.tensor.range_mask(tensor.detach(), self._signs(quantization))
        return replace(kept, gradient_mask=mask)

    def masked(self, gradient: Tensor, operand: MatmulOperand, quantization: Quantization) -> Tensor:
        """A gradient (rows, cols) after the mask of the operand that it was computed with, if it has one.

        `quantization` is that of the tensor that gets the gradient, in `output`.
        """
        if operand.gradient_mask is None:
            return gradient
        return masked(gradient, operand.gradient_mask, self._signs(quantization))

    def weight(
        self, weight: Tensor, quantization: Quantization, quantize: Callable[[], MatmulOperand]
    ) -> MatmulOperand:
        """A quantised weight: from the cache, if there is one and the quantizer may be cached."""
        if self.weights is None or not self._may_be_cached(quantization):
            return quantize()
        return self.weights.get(
            weight, quantization.role, quantization.name, quantize, **self._conditions(quantization)
        )

    def _cached_weight(self, weight: Tensor, quantization: Quantization) -> MatmulOperand | None:
        """The entry that `weight` would find in the cache."""
        if self.weights is None or not self._may_be_cached(quantization):
            return None
        return self.weights.find(
            weight, quantization.role, quantization.name, **self._conditions(quantization)
        )

    def _may_be_cached(self, quantization: Quantization) -> bool:
        """Whether the quantizer changes the weight, and always produces the same codes."""
        chosen = quantization.quantizer
        is_redrawn = quantization.is_transformed and self.recipe.redraws_signs
        return not (chosen.is_stochastic or chosen.is_identity or is_redrawn)

    def _conditions(self, quantization: Quantization) -> dict[str, bool]:
        """The conditions that a cached weight must meet."""
        is_counted = self._observer(quantization) is not None
        return {"is_counted": is_counted, "until_cleared": self.keeps_until_cleared}

    def _signs(self, quantization: Quantization) -> int | None:
        return self.hadamard_signs if quantization.is_transformed else None

    def _static(self, quantization: Quantization) -> StaticInput | None:
        """The recorded numbers for this operand: the input of `output`, if it is quantised."""
        is_input = quantization.role == "input" and not quantization.quantizer.is_identity
        return self.static_input if is_input else None

    def _amax(self, operand: SplitOperand, quantization: Quantization) -> Tensor | float | None:
        """The operand's amax: recorded, or found by other ranks or the probe if the quantizer can use it."""
        static, role = self._static(quantization), quantization.role
        if static is not None:
            return _scaled(static.maximum, quantization.quantizer)
        if role in self.maxima:
            return self.maxima[role]
        is_straight = not (quantization.is_transposed or quantization.is_transformed)
        if operand.residual_amax is not None and is_straight and takes_row_maximum(quantization.quantizer):
            return operand.residual_amax
        if not self.probed_maxima:
            return None
        largest = self.probed_maxima.get(quantization.operand)
        is_shard = self.shards is not None and self.shards.holds(role)
        if largest is None or is_shard or quantization.is_transformed or operand.low_rank is not None:
            return None
        return largest if _is_maximum_of(quantization.quantizer, largest) else None

    def _key(self, quantization: Quantization, x: Tensor) -> RandomKey | StoredKey | None:
        is_drawn = quantization.quantizer.is_stochastic and x.numel()
        key: RandomKey | StoredKey | None = self.random_key(quantization.role, x.device) if is_drawn else None
        return key

    def _observer(self, quantization: Quantization) -> Observe | None:
        """The observer of this operand's counts, or `None`.

        Each operand is reported once. When a forward is repeated, only output gradients are.
        """
        role, operand = quantization.role, quantization.operand
        is_reported = operand == "grad_output" or (role == operand and not self.is_replay)
        return self.observe if is_reported and not quantization.quantizer.is_identity else None


def _scaled(maximum: float, quantizer: Quantizer) -> float:
    """The number from which the quantizer computes its tensor scale, for a tensor with this maximum."""
    return maximum * quantizer.encoding.q_scalar if isinstance(quantizer, BlockQuantizer) else maximum


def _is_maximum_of(quantizer: Quantizer, largest: Tensor) -> bool:
    """Whether this is the number from which the quantizer would compute its tensor scale."""
    if not isinstance(quantizer, BlockQuantizer):
        return False
    encoding = quantizer.encoding
    if encoding.q_scalar != 1 or encoding.scale_from == "mean":
        return False
    if encoding.format.block is None:
        return True
    # With two levels of scales, a block with an infinity is ignored, so only a finite amax is the one that
    # the quantizer would find. Reading it on the host is free on a CPU only.
    return encoding.format.has_tensor_scale and largest.device.type == "cpu" and bool(largest.isfinite())


def _reported(made: Made, quantization: Quantization, observe: Observe | None) -> MatmulOperand:
    """Pass counts and error on to the observer, if there is one; returns the operand."""
    if observe is not None:
        assert made.facts is not None  # requested, because there is an observer
        observe(quantization.operand, *made.facts)
    return made.operand


def _facts(result: OperandTensor, operand: SplitOperand) -> tuple[Tensor, Tensor]:
    """The counts and the error; the squared norm is that of the operand before it was split."""
    assert result.counts is not None  # requested
    assert result.error is not None
    error, whole = result.error, operand.whole
    if operand.factors is not None:
        error = torch.stack([error[0], operand.factors.squared_norm(operand.tensor.detach(), error[1])])
    elif whole is not None:
        norm = torch.linalg.vector_norm(whole, dtype=torch.promote_types(whole.dtype, torch.float32)).double()
        error = torch.stack([error[0], norm.square()])
    return result.counts, error
