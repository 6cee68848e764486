"""What a layout of packed weights defines: names of tensors, their meaning, and its blocks of configuration.

All layouts here store two E2M1 codes in a byte, the first one in the low four bits, along in_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalowbit.hf.packed.recipes import PackedFormat
from megalowbit.quantize.quantized_tensor import QuantizedTensor

# by code; the highest bit is the sign
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedLayout(ABC):
    """A layout of packed weights.

    Attributes:
        name: its name.
        formats: names of the formats that it can hold.
        usage: who reads it, in a model card.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    usage: ClassVar[str]

    @abstractmethod
    def tensors(self, layer: str, packed: QuantizedTensor, input_scale: Tensor | None) -> dict[str, Tensor]:
        """The tensors of one layer by name.

        Args:
            layer: its name.
            packed: codes and scales in blocks of one row; may be on the meta device.
            input_scale: tensor scale of the input (fp32, 0-dim, to multiply with), if servers round it.
        """

    @abstractmethod
    def decoded(self, layer: str, read: Callable[[str], Tensor]) -> Tensor:
        """The weight in fp32, from the tensors that `read` returns by name, as the layout defines it."""

    @abstractmethod
    def quantization_config(self, format: PackedFormat, ignored: Sequence[str]) -> dict[str, Any]:
        """The block `quantization_config` of `config.json`; `ignored` are layers in high precision."""

    def further_files(
        self,
        format: PackedFormat,  # noqa: ARG002
        ignored: Sequence[str],  # noqa: ARG002
    ) -> dict[str, dict[str, Any]]:
        """Contents of further JSON files, by name; there are none by default."""
        return {}


def element_values(codes: Tensor) -> Tensor:
    """Decode bytes of two codes: (rows, bytes) → fp32 (rows, 2 · bytes)."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)
    return table[pairs.to(torch.int32)].flatten(1)


def times_block_scales(values: Tensor, scales: Tensor) -> Tensor:
    """(rows, columns) times the scale of each block, (rows, blocks), in fp32."""
    return (values.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).flatten(1)
