"""Quantised weights kept over the micro-batches of one optimizer step.

A weight changes once a step, but is quantised at each use: by every micro-batch, and again where activation
checkpointing repeats a forward. A slot on the layer keeps the packed codes (4.5 bits an element, and as
much again where backward has its own) until whoever updates the weights calls `WeightCache.clear`. Entries
also remember the weight's memory and version, but optimizers that write through `.data` change neither, so
clearing is a duty, not a courtesy. It is all there is for weights that ZeRO 3 gathers anew for each use, and
for shards: their memory and version are a rank's own affair, and tensor ranks exchange the largest magnitudes
of what they are about to quantise, so each must find what the others find: their observers, too, are set on
all or on none. Weights rounded stochastically are not kept: they must be drawn anew each micro-batch. What
was quantised without counts (in evaluation) is quantised again for who wants them, and what was quantised in
inference mode, which autograd may not save, is found in inference mode only.

Which weight is quantised how stands in `quantizations.py`; `context.py` asks for it here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.operand import MatmulOperand

Key = tuple[object, ...]


class Entry(NamedTuple):
    """One quantised form, what it was made from, whether it was counted, and whether in inference mode."""

    key: Key
    operand: MatmulOperand
    is_counted: bool
    is_inference: bool


class WeightSlot:
    """The quantised forms of one layer's weight."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

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
        """The operand kept for this role and quantiser, or a new one.

        Args:
            weight: the layer's weight.
            role: which of its operands.
            name: of the quantiser.
            quantize: makes the operand; what it returns may carry a ready operand, which is not kept.
            is_counted: whether `quantize` reports counts; an operand made without any will then not do.
            until_cleared: whether an operand will do wherever the weight lies now; for weights that are
                gathered anew, and for shards.
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
        """The operand kept for this role and quantiser, if it will do."""
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
        """Forget all."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def _key(weight: Tensor, *, until_cleared: bool) -> Key:
    if until_cleared:
        return weight.shape, weight.dtype
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.shape, weight.stride(), weight.dtype


class WeightCache:
    """The slots of a model's layers; made by `conversion.convert.cache_weights`."""

    def __init__(self, slots: Iterable[WeightSlot]) -> None:
        self._slots = tuple(slots)

    def clear(self) -> None:
        """Forget all quantised weights: call it after every update of the weights."""
        for slot in self._slots:
            slot.clear()

    def __len__(self) -> int:
        return sum(map(len, self._slots))
