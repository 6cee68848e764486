"""Block formats: which elements share a scale, and what kind of number that scale is.

| scale         | stored as      | additional number per tensor         | decoded element              |
|---------------|----------------|--------------------------------------|------------------------------|
| `e4m3`        | float8_e4m3fn  | fp32 tensor scale                    | value · scale · tensor scale |
| `e8m0`        | float8_e8m0fnu | none                                 | value · scale                |
| `fp32`        | float32        | none; if `block` is `None`, only one | value · scale                |
| `signed_fp32` | float32        | none                                 | value · |scale|              |
| `ue5m3`       | uint8          | none                                 | value · scale                |
| `hif4`        | int32          | none                                 | value · scale of four        |

With signed scales, the codes of a block are E5M2 if the sign bit of its scale is set, and INT8 if not
(`INT8_E5M2`, blocks of one row). `wide_scales` describes `ue5m3` and `hif4`. E4M3 scales may have a tensor
scale for each row instead of one for the tensor. If `block` is `None`, the whole tensor is one block. How
codes and scales are chosen (rounding) is not part of the format: any decoder reads the output of any encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megalowbit.formats.element import E2M1, INT8_E5M2, S1P2, ElementFormat

ScaleKind = Literal["e4m3", "e8m0", "fp32", "signed_fp32", "ue5m3", "hif4"]
SCALE_DTYPES: dict[ScaleKind, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "fp32": torch.float32,
    "signed_fp32": torch.float32,
    "ue5m3": torch.uint8,
    "hif4": torch.int32,
}
GROUP = 16  # elements that share a Philox call and a Hadamard transform; rows are padded to a multiple of it


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements under shared scales.

    Attributes:
        element: the format of one element.
        block: (rows, cols) of the elements that share a scale; `None` is the whole tensor.
        scale: kind of the block scales, see above.
        has_row_scales: whether each row has its own second-level scale, instead of one for the tensor; E4M3
            only. Then no number depends on another row.
    """

    element: ElementFormat
    block: tuple[int, int] | None
    scale: ScaleKind
    has_row_scales: bool = False

    def __hash__(self) -> int:
        """Of two fields, because launchers look formats up at each use of a layer."""
        return hash((self.scale, self.block))

    def __post_init__(self) -> None:
        is_mixed = self.scale == "signed_fp32"
        assert is_mixed == (self.element == INT8_E5M2), (self.scale, self.element)
        assert (self.scale == "hif4") == (self.element == S1P2), (self.scale, self.element)
        is_of_one_row = self.block is not None and self.block[0] == 1
        assert is_of_one_row or not (is_mixed or self.has_row_scales), self.block
        assert self.scale == "e4m3" or not self.has_row_scales, self.scale
        assert self.scale != "hif4" or self.block == (1, 64), self.block

    @property
    def has_tensor_scale(self) -> bool:
        """Whether there is a scale of the whole tensor, with or without block scales."""
        return (self.scale == "e4m3" and not self.has_row_scales) or self.block is None

    def tensor_scale_shape(self, rows: int) -> tuple[int, ...] | None:
        """The shape of the scales above the block scales; `None` if there are none."""
        if self.has_row_scales:
            return rows, 1
        return () if self.has_tensor_scale else None

    @property
    def is_mxfp4(self) -> bool:
        """Whether this is MXFP4."""
        return self == MXFP4

    @property
    def is_native(self) -> bool:
        """Whether FP4 tensor cores read this format."""
        return self in (NVFP4, MXFP4)

    @property
    def scale_block(self) -> tuple[int, int] | None:
        """(rows, cols) of the elements with the same decoded scale: a part of a block in HiF4."""
        return (1, 4) if self.scale == "hif4" else self.block

    def __str__(self) -> str:
        if self.block is None:
            return f"{self.element.name} under one {self.scale} scale"
        second = ", by row" if self.has_row_scales else ""
        return f"{self.element.name} under {self.scale} scales for {self.block[0]} × {self.block[1]}{second}"

    def padded(self, rows: int, cols: int) -> tuple[int, int]:
        """The size of the matrix padded to whole blocks, and to whole groups of 16 along a row."""
        block_rows, block_cols = self.block or (1, GROUP)
        width = max(block_cols, GROUP)  # both powers of two
        return -(-rows // block_rows) * block_rows, -(-cols // width) * width

    def scales_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """(block rows, block columns) of such a matrix; (0, 0) if the tensor has only one scale."""
        if self.block is None:
            return 0, 0
        padded_rows, padded_cols = self.padded(rows, cols)
        return padded_rows // self.block[0], padded_cols // self.block[1]

    def codes_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """(rows, bytes of one padded row)."""
        return rows, self.padded(rows, cols)[1] * self.element.bits // 8

    @property
    def bits_per_element(self) -> float:
        """Codes and block scales, without padding: 4.5 for NVFP4."""
        if self.block is None:
            return float(self.element.bits)
        scale_bits = 8 * SCALE_DTYPES[self.scale].itemsize
        return self.element.bits + scale_bits / (self.block[0] * self.block[1])


NVFP4 = BlockFormat(element=E2M1, block=(1, 16), scale="e4m3")
NVFP4_TILED = BlockFormat(element=E2M1, block=(16, 16), scale="e4m3")
MXFP4 = BlockFormat(element=E2M1, block=(1, 32), scale="e8m0")
UE5M3_FP4 = BlockFormat(element=E2M1, block=(1, 16), scale="ue5m3")
HIF4 = BlockFormat(element=S1P2, block=(1, 64), scale="hif4")
MIXED_INT8 = BlockFormat(element=INT8_E5M2, block=(1, 128), scale="signed_fp32")
