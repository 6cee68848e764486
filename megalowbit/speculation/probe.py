"""Measures one use of a layer: statistics of its operands, and the noise of its products.

In a check, a layer passes its operands and products to a `ProductProbe`. The probe stores a few numbers of
each on the device, in a `RankFindings`; the host does not wait. In a verified check it also samples rows and
columns of the unquantised operands and multiplies them in float64, as the reference. It compares the
reference with

- the product of this step's quantised operands.
- the product at each candidate, of the same rows and columns quantised by the probe. Therefore a precision is
  measured before a product first runs at it.

Elements beyond 6 σ are zero in all of them, because their energy would hide the noise of the others.

Samples of input and weight are kept until backward; full tensors never are.

Random draws depend on layer, role and step. They do not use torch's generators, and data-parallel ranks draw
the same positions of their own data. Not supported: operands with a separate copy for each product or with a
low-rank part; `precisions.check_base` rejects recipes that have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.speculation.estimator import estimate, rounded, sampled_places
from megalowbit.speculation.precisions import OPERANDS, PRODUCTS, operand_quantizer
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS

ROLES = ("input", "weight", "grad_output")
# sums of squares over the compared entries; "expected": of the signal, if the operands were independent
ENERGIES = ("signal", "noise", "expected")
ROUNDING = ("noise", "expected")  # the same of the noise at each candidate, after `ENERGIES`
STANDARD_ERRORS = 3  # a smaller gain of a sample's SNR over that of independent operands is taken for chance
_AXES = {"input": ("tokens", "inputs"), "weight": ("outputs", "inputs"), "grad_output": ("tokens", "outputs")}
# axis of the left operand that gives the product's rows, and axis of the right operand that gives its columns
_SIDES = {"output": (0, 0), "grad_input": (0, 1), "grad_weight": (1, 1)}


@dataclass
class RankFindings:
    """Findings of a step's probes on this rank; all tensors stay on their device.

    Attributes:
        statistics: (layer, role) → float64, see `estimator.estimate`.
        energies: (layer, product) → float64, `ENERGIES` and then `ROUNDING` for each candidate; `None`: it
            ran but was not verified.
    """

    statistics: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    energies: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrecisionCheck:
    """The parameters of one check.

    Attributes:
        step: the optimizer step; part of every random key.
        candidates: the candidate precisions but the last.
        estimator: how operand statistics are estimated.
        verify_size: number of rows and columns to compare; 0: no verification.
        findings: where the probes store their findings.
    """

    step: int
    candidates: tuple[str, ...]
    estimator: EstimatorSettings
    verify_size: int
    findings: RankFindings


class Sample(NamedTuple):
    """Some rows or columns of an operand, each (sampled, inner).

    Attributes:
        values: not quantised, in the operand's dtype.
        rounded: at each candidate, in float32.
        statistics: of the full operand.
    """

    values: Tensor
    rounded: tuple[Tensor, ...]
    statistics: Tensor


class ProductProbe:
    """Implements the layers' `Probe` for one use.

    Args:
        check: the check.
        layer: the layer's name.
        unquantized: product → whether its left and right operand stay in high precision at every candidate.
    """

    def __init__(
        self,
        check: PrecisionCheck,
        layer: str,
        unquantized: Mapping[str, tuple[bool, bool]] = MappingProxyType({}),
    ) -> None:
        self._check = check
        self._layer = layer
        self._unquantized = unquantized
        self._places: dict[str, Tensor] = {}  # axis → indices
        self._samples: dict[tuple[str, int], Sample] = {}  # (role, axis) → sample for the comparison

    @torch.no_grad()
    def observe_operand(
        self, role: str, operand: Tensor, full_amax: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """See `layers.matmul.slots.Probe.observe_operand`."""
        x, check = operand.detach(), self._check
        key = _key(self._layer, role, check.step)
        names = [operand_quantizer(candidate, role) for candidate in check.candidates]
        found = estimate(x, check.estimator, key, quantizers=names, full_amax=full_amax)
        check.findings.statistics[self._layer, role] = found
        amax = found[COLUMNS.index("absmax")].to(torch.float32)
        if check.verify_size:
            matrix = x.reshape(matrix_shape(x.shape))
            for axis in {axis for wanted, axis in _samples_of() if wanted == role}:
                places = self._places_of(_AXES[role][axis], matrix.shape[axis], x.device)
                made = tuple(_rounded(name, matrix, axis, places, key, amax) for name in names)
                self._samples[role, axis] = Sample(_taken(matrix, axis, places), made, found)
        return amax

    @torch.no_grad()
    def observe_product(
        self,
        product: str,
        left: MatmulOperand,
        right: MatmulOperand,
        result: Tensor,  # noqa: ARG002  # has outliers, and is rounded to bf16
        bias: Tensor | None,  # noqa: ARG002
    ) -> None:
        """See `layers.matmul.slots.Probe.observe_product`; the result itself is not used."""
        self._check.findings.energies[self._layer, product] = None
        roles, axes = OPERANDS[product], _SIDES[product]
        places = [self._places.get(_AXES[role][axis]) for role, axis in zip(roles, axes, strict=True)]
        sides = [self._samples.pop((role, axis), None) for role, axis in zip(roles, axes, strict=True)]
        if sides[0] is None or sides[1] is None or places[0] is None or places[1] is None:
            return  # not verified
        rows, cols = places[0], places[1]
        masks = _is_bulk(sides[0]), _is_bulk(sides[1])
        quantized = _taken(_values(left), axes[0], rows), _taken(_values(right), axes[1], cols)
        made = _masked(quantized[0], masks[0]) @ _masked(quantized[1], masks[1]).t()
        unquantized = self._unquantized.get(product, (False, False))
        self._check.findings.energies[self._layer, product] = _energies(
            (sides[0], sides[1]), masks, made, unquantized
        )

    def _places_of(self, axis: str, length: int, device: torch.device) -> Tensor:
        places = self._places.get(axis)
        if places is None:
            key = _key(self._layer, axis, self._check.step)
            places = self._places[axis] = sampled_places(length, self._check.verify_size, key, device)
        return places


def _samples_of() -> list[tuple[str, int]]:
    """(role, axis) of all samples that verification needs."""
    return [side for product in PRODUCTS for side in zip(OPERANDS[product], _SIDES[product], strict=True)]


def _taken(matrix: Tensor, axis: int, places: Tensor) -> Tensor:
    """The rows (axis 0) or columns (axis 1) at `places`, as rows."""
    taken = matrix.index_select(axis, places)
    return taken.t() if axis else taken


def _values(factor: MatmulOperand) -> Tensor:
    """The operand's matrix as it was multiplied, including its scale."""
    assert not factor.is_transposed  # no copy for each product
    assert factor.low_rank is None
    tensor = factor.tensor
    if not isinstance(tensor, QuantizedTensor):
        return tensor.operand()
    ready = tensor.ready_operand
    values = tensor.operand(torch.float32) if ready is None else ready.float()
    return values if tensor.operand_scale is None else values * tensor.operand_scale


def _rounded(
    name: str, matrix: Tensor, axis: int, places: Tensor, key: RandomKey, tensor_amax: Tensor
) -> Tensor:
    """The rows (axis 0) or columns (axis 1) at `places`, as rows, as a quantizer rounds them."""
    chosen = quantizer(name)
    assert isinstance(chosen, BlockQuantizer)
    if axis and chosen.encoding.format.block is not None:  # blocks run along rows, so columns have parts only
        return _taken(rounded(name, matrix, key, tensor_amax), axis, places)
    return rounded(name, _taken(matrix, axis, places), key, tensor_amax)


def _is_bulk(sample: Sample) -> Tensor:
    of = dict(zip(COLUMNS, sample.statistics.unbind(), strict=False))
    return (sample.values.double() - of["center"]).abs() <= OUTLIER_SIGMAS * of["sigma"]


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rows.double(), 0.0)


def _energies(
    sides: tuple[Sample, Sample], masks: tuple[Tensor, Tensor], made: Tensor, unquantized: tuple[bool, bool]
) -> Tensor:
    """float64, `ENERGIES` and then `ROUNDING` for each candidate; `made`: the product of this step.

    A sum of squares over a product of independent matrices is that of their own, multiplied, over the length
    of the sums. Both the signal and the noise are compared with that, from the same rows and columns.
    """
    exact_left, exact_right = (_masked(side.values, mask) for side, mask in zip(sides, masks, strict=True))
    exact = exact_left @ exact_right.t()
    inner = max(exact_left.shape[1], 1)
    power_left, power_right = exact_left.square().sum(), exact_right.square().sum()
    squares, expected = exact.square(), power_left * power_right / inner
    found = [squares.sum(), (made - exact).square().sum(), expected]
    for left, right in zip(sides[0].rounded, sides[1].rounded, strict=True):
        at_left = exact_left if unquantized[0] else _masked(left, masks[0])
        at_right = exact_right if unquantized[1] else _masked(right, masks[1])
        error_left = (at_left - exact_left).square().sum()
        error_right = (at_right - exact_right).square().sum()
        noise = (at_left @ at_right.t() - exact).square()
        independent = (error_left * power_right + power_left * error_right + error_left * error_right) / inner
        found += [_cautious(noise, independent, squares, expected), independent]
    return torch.stack(found)


def _cautious(noise: Tensor, independent: Tensor, signal: Tensor, expected: Tensor) -> Tensor:
    """The sum of a noise of squares (rows, cols), raised if the sample is too small to show less noise.

    A higher SNR than that of independent operands and errors may be chance, as in sparse products, whose few
    terms a sample may miss. The gain, a logarithm, is shrunk by the nonnegative garrote (Breiman, 1995): none
    is left of one below `STANDARD_ERRORS`, and almost all of a large one.
    """
    usual = independent * signal.sum() / expected  # the noise at the SNR of independent operands and errors
    total = noise.sum()
    gain = (usual / total).log()
    share = 1 - (STANDARD_ERRORS * _standard_error(noise, signal) / gain).square()
    return torch.where(total < usual, usual * (-gain * share.clamp(min=0.0)).exp(), total)


def _standard_error(noise: Tensor, signal: Tensor) -> Tensor:
    """Relative standard error of the ratio of two sums; 0 of zeros.

    Estimated from the rows and from the columns, whichever differ more. A large row has more of both, which
    does not change the ratio.
    """
    found = []
    for axis in (0, 1):
        sums = noise.sum(axis), signal.sum(axis)
        shares = [(each / each.sum()).nan_to_num(nan=0.0) for each in sums]
        found.append((shares[0] - shares[1]).square().sum().sqrt())
    return torch.maximum(found[0], found[1])


def _key(layer: str, what: str, step: int) -> RandomKey:
    address = repr(("speculation", layer, what)).encode()
    return RandomKey(int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little"), step)
