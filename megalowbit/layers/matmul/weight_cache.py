"""Cache of quantised weights, kept over the micro-batches of one optimizer step.

A weight changes once a step but is quantised at each use: in every micro-batch, and again if activation
checkpointing repeats a forward. A slot on the layer keeps the packed operand (4.5 bits an element for NVFP4:
codes and scales, row-major as `quantizations` describes), and a second one of the same size if backward has
its own copy. The decoded operand of the GEMM is not kept.

After every update of the weights, the caller must run `WeightCache.clear`. Entries also record the weight's
storage, address and version, but torch's fused optimizers and writes through `.data` change none of them. (A
hook on torch's optimizers would notice steps, but an optimizer with hooks cannot step in one pass.) Two kinds
of weights depend on clearing alone:

- Weights that ZeRO 3 gathers for each use: their address differs each time.
- Shards of a tensor-parallel layer. Ranks exchange the amax of what they are about to quantise, so all must
  have the same entries, but address and version differ from rank to rank. For the same reason, observers must
  be set on all ranks or on none.

Weights that torch's `fully_shard` gathers would depend on it too; `cache_weights` refuses a sharded model.

Not cached: weights with stochastic rounding, which need new random numbers in each micro-batch. An entry made
without counts (in evaluation) is replaced when counts are needed. An entry made in inference mode is used in
inference mode only, because autograd cannot save it.

`quantizations.py` defines how a weight is quantised; `context.py` looks it up here first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.operand import MatmulOperand

Key = tuple[object, ...]


class Entry(NamedTuple):
    """A quantised weight, its key, whether it was counted, and whether it was made in inference mode."""

    key: Key
    operand: MatmulOperand
    is_counted: bool
    is_inference: bool


class WeightSlot:
    """The quantised forms of one layer's weight."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def __getstate__(self) -> dict[str, object]:
        """A copied or pickled slot is empty: it belongs to another weight."""
        return {"_entries": {}}

    def get(
        self,
        weight: Tensor,
        role: str,
        name: str,
        quantize: Callable[[], MatmulOperand],
        *,
        is_counted: bool = False,
        until_cleared: bool = False,
    ) -> MatmulOperand:
        """The cached operand for this role and quantizer, or a new one.

        Args:
            weight: the layer's weight.
            role: the role of the quantisation.
            name: the quantizer's name.
            quantize: makes the operand. A decoded operand that comes with it is not cached.
            is_counted: whether `quantize` reports counts; an entry made without counts is then not used.
            until_cleared: ignore address and version; for weights that ZeRO 3 gathers, and for shards.
        """
        found = self.find(weight, role, name, is_counted=is_counted, until_cleared=until_cleared)
        if found is not None:
            return found
        operand = quantize()
        is_inference = torch.is_inference_mode_enabled()
        key = _key(weight, until_cleared=until_cleared)
        self._entries[role, name] = Entry(key, operand.packed(), is_counted, is_inference)
        return operand

    def find(
        self,
        weight: Tensor,
        role: str,
        name: str,
        *,
        is_counted: bool = False,
        until_cleared: bool = False,
    ) -> MatmulOperand | None:
        """The cached operand for this role and quantizer, if it is valid."""
        entry = self._entries.get((role, name))
        if (
            entry is not None
            and entry.key == _key(weight, until_cleared=until_cleared)
            and (entry.is_counted or not is_counted)
            and (torch.is_inference_mode_enabled() or not entry.is_inference)
        ):
            return entry.operand
        return None

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def _key(weight: Tensor, *, until_cleared: bool) -> Key:
    if until_cleared:
        return weight.shape, weight.dtype
    version = None if weight.is_inference() else weight._version
    # references to one storage are equal while it lives; an address alone may be that of a freed weight
    storage = weakref.ref(weight.untyped_storage())
    return storage, weight.data_ptr(), version, weight.shape, weight.stride(), weight.dtype


class WeightCache:
    """The slots of a model's layers; made by `conversion.convert.cache_weights`."""

    def __init__(self, slots: Iterable[WeightSlot]) -> None:
        self._slots = tuple(slots)

    def clear(self) -> None:
        """Remove all quantised weights; call it after every update of the weights."""
        for slot in self._slots:
            slot.clear()

    def __len__(self) -> int:
        return sum(map(len, self._slots))
