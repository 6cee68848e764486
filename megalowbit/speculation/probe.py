"""What is taken from one use of a layer: statistics of its operands, and how far its products are off.

A `ProductProbe` is what a layer shows its operands to in a step that is looked at. It keeps a few numbers of
each on the device, in a `RankFindings`, and waits for nothing. Where products are verified too, it takes
sampled rows and columns of the operands and compares their product in float64, from the operands as they
were, with what the layer made of them: signal "all" with the product as it came out, signal "bulk" with that
of the quantised operands, elements beyond 6 σ set to zero in both. Samples of input and weight are kept until
backward; whole tensors never are.

All draws are addressed by layer, role and step: they touch no generator of torch's, and data-parallel ranks
take the same places of their own data. Not covered: operands with a copy for each product, or with a low-rank
part; `precisions.check_base` refuses recipes that have them.
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
ENERGIES = ("signal", "noise", "expected")  # of the compared entries
_AXES = {"input": ("tokens", "inputs"), "weight": ("outputs", "inputs"), "grad_output": ("tokens", "outputs")}
# along which axis of its left and right operand a product has its rows and columns
_SIDES = {"output": (0, 0), "grad_input": (0, 1), "grad_weight": (1, 1)}


@dataclass
class RankFindings:
    """What a step's probes have found on this rank; all tensors stay on their device.

    Attributes:
        statistics: (layer, role) → float64 in the order of `COLUMNS`.
        energies: (layer, product) → float64 in the order of `ENERGIES`; `None`: it ran, and was not verified.
    """

    statistics: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    energies: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrecisionCheck:
    """How a step is looked at.

    Attributes:
        step: the optimizer step, part of all addresses of random numbers.
        estimator: how operands are described.
        signal: "bulk" or "all", of verifications.
        verify_size: rows and columns compared; 0: no product is.
        sheet: where findings go.
    """

    step: int
    estimator: EstimatorSettings
    signal: Literal["bulk", "all"]
    verify_size: int
    sheet: RankFindings


class Sample(NamedTuple):
    """Some rows or columns of an operand as the layer got it: (sampled, inner), in its dtype."""

    values: Tensor
    statistics: Tensor


class ProductProbe:
    """The layers' `Probe` of one use."""

    def __init__(self, look: PrecisionCheck, layer: str) -> None:
        self._look = look
        self._layer = layer
        self._places: dict[str, Tensor] = {}  # axis → indices
        self._samples: dict[tuple[str, int], Sample] = {}  # (role, axis) → what a product will be compared of

    @torch.no_grad()
    def look(self, role: str, operand: Tensor) -> Tensor | None:
        """See `layers.matmul.slots.Probe.look`."""
        x = operand.detach()
        found = estimate(x, self._look.estimator, _key(self._layer, role, self._look.step))
        self._look.sheet.statistics[self._layer, role] = found
        if self._look.verify_size:
            matrix = x.reshape(matrix_shape(x.shape))
            for axis in {axis for wanted, axis in _samples_of() if wanted == role}:
                places = self._places_of(_AXES[role][axis], matrix.shape[axis], x.device)
                self._samples[role, axis] = Sample(_taken(matrix, axis, places), found)
        return found[COLUMNS.index("absmax")].to(torch.float32)

    @torch.no_grad()
    def product(
        self, product: str, left: MatmulOperand, right: MatmulOperand, result: Tensor, bias: Tensor | None
    ) -> None:
        """See `layers.matmul.slots.Probe.product`."""
        self._look.sheet.energies[self._layer, product] = None
        roles, axes = OPERANDS[product], _SIDES[product]
        places = [self._places.get(_AXES[role][axis]) for role, axis in zip(roles, axes, strict=True)]
        sides = [self._samples.pop((role, axis), None) for role, axis in zip(roles, axes, strict=True)]
        if sides[0] is None or sides[1] is None or places[0] is None or places[1] is None:
            return  # not verified
        rows, cols = places[0], places[1]
        if self._look.signal == "all":
            matrix = result.detach().reshape(matrix_shape(result.shape))
            made = matrix.index_select(0, rows).index_select(1, cols).double()
            if bias is not None:
                made = made - bias.detach().index_select(0, cols).double()
            found = _energies_of_all(sides[0], sides[1], made)
        else:
            quantized = _taken(_values(left), axes[0], rows), _taken(_values(right), axes[1], cols)
            found = _energies_of_bulk(sides[0], sides[1], *quantized)
        self._look.sheet.energies[self._layer, product] = found

    def _places_of(self, axis: str, length: int, device: torch.device) -> Tensor:
        places = self._places.get(axis)
        if places is None:
            key = _key(self._layer, axis, self._look.step)
            places = self._places[axis] = sampled_places(length, self._look.verify_size, key, device)
        return places


def sampled_places(length: int, size: int, key: RandomKey, device: torch.device) -> Tensor:
    """Ascending places along an axis, one drawn from each of `size` equal stretches: int64 (size,).

    All of it, int64 (length,), where it is no longer than `size`.
    """
    places = torch.arange(min(length, size), dtype=torch.int64, device=device)
    if length <= size:
        return places
    start, end = places * length // size, (places + 1) * length // size
    words = random_words(-(-size // 4), key, device).flatten()[:size]
    return start + words % (end - start)


def _samples_of() -> list[tuple[str, int]]:
    """(role, axis) of all samples that products are compared of."""
    return [side for product in PRODUCTS for side in zip(OPERANDS[product], _SIDES[product], strict=True)]


def _taken(matrix: Tensor, axis: int, places: Tensor) -> Tensor:
    """Rows or columns at `places`, as rows."""
    taken = matrix.index_select(axis, places)
    return taken.t() if axis else taken


def _values(factor: MatmulOperand) -> Tensor:
    """The operand's matrix as it was multiplied, its scale included."""
    assert not factor.is_transposed  # no copy for each product
    assert factor.low_rank is None
    tensor = factor.tensor
    if not isinstance(tensor, QuantizedTensor):
        return tensor.operand()
    ready = tensor.ready_operand
    values = tensor.operand(torch.float32) if ready is None else ready.float()
    return values if tensor.tensor_scale is None else values * tensor.tensor_scale


def _energies_of_all(left: Sample, right: Sample, made: Tensor) -> Tensor:
    """Energies of a product's entries, of which `made` (rows, cols) is what the layer computed, no bias."""
    exact = left.values.double() @ right.values.double().t()
    return _energies(exact, made, left, right, lambda of: of["power"])


def _energies_of_bulk(left: Sample, right: Sample, made_left: Tensor, made_right: Tensor) -> Tensor:
    """The same where elements beyond 6 σ are zero, in operands as they were and as they were multiplied."""
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
    """float64 in the order of `ENERGIES`; what is expected is the signal of operands that are independent."""
    inner = left.values.shape[1]
    expected = exact.numel() * inner * power(_columns(left)) * power(_columns(right))
    return torch.stack([exact.square().sum(), (made - exact).square().sum(), expected])


def _columns(sample: Sample) -> dict[str, Tensor]:
    return dict(zip(COLUMNS, sample.statistics.unbind(), strict=True))


def _key(layer: str, what: str, step: int) -> RandomKey:
    address = repr(("speculation", layer, what)).encode()
    return RandomKey(int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little"), step)
