"""Measures one use of a layer: statistics of its operands, and the noise of its products.

In a check, a layer passes its operands and products to a `ProductProbe`. The probe stores a few numbers of
each on the device, in a `RankFindings`; the host does not wait. In a verified check it also samples rows and
columns of the unquantised operands and multiplies them in float64, as the reference. It compares the
reference with

- signal "all": the product as the layer computed it;
- signal "bulk": the product of the quantised operands, with elements beyond 6 σ set to zero on both sides.

Samples of input and weight are kept until backward; full tensors never are.

Random draws depend on layer, role and step. They do not use torch's generators, and data-parallel ranks draw
the same positions of their own data. Not supported: operands with a separate copy for each product or with a
low-rank part; `precisions.check_base` rejects recipes that have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.quantize.philox import RandomKey, random_words
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape
from megalowbit.speculation.estimator import estimate
from megalowbit.speculation.precisions import OPERANDS, PRODUCTS
from megalowbit.speculation.settings import EstimatorSettings
from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS

ROLES = ("input", "weight", "grad_output")
ENERGIES = ("signal", "noise", "expected")  # sums of squares over the compared entries
_AXES = {"input": ("tokens", "inputs"), "weight": ("outputs", "inputs"), "grad_output": ("tokens", "outputs")}
# axis of the left operand that gives the product's rows, and axis of the right operand that gives its columns
_SIDES = {"output": (0, 0), "grad_input": (0, 1), "grad_weight": (1, 1)}


@dataclass
class RankFindings:
    """Findings of a step's probes on this rank; all tensors stay on their device.

    Attributes:
        statistics: (layer, role) → float64 in the order of `COLUMNS`.
        energies: (layer, product) → float64 in the order of `ENERGIES`; `None`: it ran but was not verified.
    """

    statistics: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    energies: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrecisionCheck:
    """The parameters of one check.

    Attributes:
        step: the optimizer step; part of every random key.
        estimator: how operand statistics are estimated.
        signal: "bulk" or "all", for verification.
        verify_size: number of rows and columns to compare; 0: no verification.
        findings: where the probes store their findings.
    """

    step: int
    estimator: EstimatorSettings
    signal: Literal["bulk", "all"]
    verify_size: int
    findings: RankFindings


class Sample(NamedTuple):
    """Some rows or columns of an unquantised operand: (sampled, inner), in its dtype."""

    values: Tensor
    statistics: Tensor


class ProductProbe:
    """Implements the layers' `Probe` for one use."""

    def __init__(self, check: PrecisionCheck, layer: str) -> None:
        self._check = check
        self._layer = layer
        self._places: dict[str, Tensor] = {}  # axis → indices
        self._samples: dict[tuple[str, int], Sample] = {}  # (role, axis) → sample for the comparison

    @torch.no_grad()
    def observe_operand(self, role: str, operand: Tensor) -> Tensor | None:
        """See `layers.matmul.slots.Probe.observe_operand`."""
        x = operand.detach()
        found = estimate(x, self._check.estimator, _key(self._layer, role, self._check.step))
        self._check.findings.statistics[self._layer, role] = found
        if self._check.verify_size:
            matrix = x.reshape(matrix_shape(x.shape))
            for axis in {axis for wanted, axis in _samples_of() if wanted == role}:
                places = self._places_of(_AXES[role][axis], matrix.shape[axis], x.device)
                self._samples[role, axis] = Sample(_taken(matrix, axis, places), found)
        return found[COLUMNS.index("absmax")].to(torch.float32)

    @torch.no_grad()
    def observe_product(
        self, product: str, left: MatmulOperand, right: MatmulOperand, result: Tensor, bias: Tensor | None
    ) -> None:
        """See `layers.matmul.slots.Probe.observe_product`."""
        self._check.findings.energies[self._layer, product] = None
        roles, axes = OPERANDS[product], _SIDES[product]
        places = [self._places.get(_AXES[role][axis]) for role, axis in zip(roles, axes, strict=True)]
        sides = [self._samples.pop((role, axis), None) for role, axis in zip(roles, axes, strict=True)]
        if sides[0] is None or sides[1] is None or places[0] is None or places[1] is None:
            return  # not verified
        rows, cols = places[0], places[1]
        if self._check.signal == "all":
            matrix = result.detach().reshape(matrix_shape(result.shape))
            made = matrix.index_select(0, rows).index_select(1, cols).double()
            if bias is not None:
                made = made - bias.detach().index_select(0, cols).double()
            found = _energies_of_all(sides[0], sides[1], made)
        else:
            quantized = _taken(_values(left), axes[0], rows), _taken(_values(right), axes[1], cols)
            found = _energies_of_bulk(sides[0], sides[1], *quantized)
        self._check.findings.energies[self._layer, product] = found

    def _places_of(self, axis: str, length: int, device: torch.device) -> Tensor:
        places = self._places.get(axis)
        if places is None:
            key = _key(self._layer, axis, self._check.step)
            places = self._places[axis] = sampled_places(length, self._check.verify_size, key, device)
        return places


def sampled_places(length: int, size: int, key: RandomKey, device: torch.device) -> Tensor:
    """Ascending indices along an axis, one drawn from each of `size` equal sections: int64 (size,).

    All indices, int64 (length,), if the axis is no longer than `size`.
    """
    places = torch.arange(min(length, size), dtype=torch.int64, device=device)
    if length <= size:
        return places
    start, end = places * length // size, (places + 1) * length // size
    words = random_words(-(-size // 4), key, device).flatten()[:size]
    return start + words % (end - start)


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


def _energies_of_all(left: Sample, right: Sample, made: Tensor) -> Tensor:
    """Energies of sampled entries of a product; `made` (rows, cols) is the computed one, without bias."""
    exact = left.values.double() @ right.values.double().t()
    return _energies(exact, made, left, right, lambda of: of["power"])


def _energies_of_bulk(left: Sample, right: Sample, made_left: Tensor, made_right: Tensor) -> Tensor:
    """The same with elements beyond 6 σ set to zero, in the unquantised and in the multiplied operands."""
    is_left, is_right = _is_bulk(left), _is_bulk(right)
    exact, made = (
        torch.where(is_left, rows.double(), 0.0) @ torch.where(is_right, cols.double(), 0.0).t()
        for rows, cols in ((left.values, right.values), (made_left, made_right))
    )
    return _energies(exact, made, left, right, lambda of: of["bulk_power"] * (1 - of["outlier_share"]))


def _is_bulk(sample: Sample) -> Tensor:
    of = _columns(sample)
    return (sample.values.double() - of["center"]).abs() <= OUTLIER_SIGMAS * of["sigma"]


def _energies(
    exact: Tensor, made: Tensor, left: Sample, right: Sample, power: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """float64 in the order of `ENERGIES`; "expected" is the signal of independent operands."""
    inner = left.values.shape[1]
    expected = exact.numel() * inner * power(_columns(left)) * power(_columns(right))
    return torch.stack([exact.square().sum(), (made - exact).square().sum(), expected])


def _columns(sample: Sample) -> dict[str, Tensor]:
    return dict(zip(COLUMNS, sample.statistics.unbind(), strict=True))


def _key(layer: str, what: str, step: int) -> RandomKey:
    address = repr(("speculation", layer, what)).encode()
    return RandomKey(int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little"), step)
