"""Quantisers: from a tensor to codes and scales, in one of the named ways.

A tensor of any shape is flattened to (rows, cols); each row is cut into blocks of 16 along the last axis,
the last one padded with zeros that are cropped again on the way out. Scales are NVFP4's
(`formats.block_scale`), rounding is nearest even or stochastic. A non-finite element makes its block NaN
and leaves the others as they are.

On a CPU the elements go through in pieces that fit a core's cache (`in_pieces`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.formats.block_scale import BLOCK_SIZE, BlockScales, block_amax, two_level_scales
from megalowbit.formats.element import E2M1, ElementFormat
from megalowbit.formats.packing import in_pieces, pack_keys
from megalowbit.formats.rounding import (
    nearest_key_codes,
    nearest_keys,
    stochastic_key_codes,
    stochastic_keys,
)
from megalowbit.quantize.counts import count_errors, no_counts
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape
from megalowbit.quantize.random_stream import fill_uniform


class Quantizer(ABC):
    """What all quantisers share. Stateless: one object serves any number of tensors.

    Attributes:
        name: what users type.
        is_stochastic: whether rounding draws random numbers.
        is_identity: whether tensors pass through as they are.
    """

    name: str
    is_stochastic: bool = False
    is_identity: bool = False

    @abstractmethod
    def quantize(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | None = None,
    ) -> QuantizedTensor | UnquantizedTensor:
        """Quantise a tensor; no gradient flows.

        Args:
            x: floating, any shape and strides, may be empty. fp64 is rounded to fp32 first.
            generator: for stochastic rounding, on x's device; `None` is torch's default generator.
            with_counts: fill the result's `counts` and `error`; costs about as much as quantising.
            tensor_amax: fp32, 0-dim: largest magnitude of the whole tensor, where x is one shard of it.

        Raises:
            UserError: x is not a floating tensor.
        """

    def __call__(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Quantise and dequantise: x as its codes represent it, same shape and dtype, detached."""
        return self.quantize(x, generator=generator).dequantize()

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise UserError(
                f"quantizer {self.name!r} got a tensor of {x.dtype}: cast it to float32, bfloat16 or float16"
            )


@dataclass(frozen=True, kw_only=True)
class BlockQuantizer(Quantizer):
    """E2M1 elements under two-level scales: NVFP4."""

    name: str
    is_stochastic: bool = False
    element: ElementFormat = E2M1

    @torch.no_grad()
    def quantize(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """See `Quantizer.quantize`."""
        self._check(x)
        rows, cols = matrix_shape(x.shape)
        blocks_per_row = -(-cols // BLOCK_SIZE)
        counts = error = None
        if x.numel() == 0:
            packed = torch.empty(0, dtype=torch.uint8, device=x.device)
            scales = torch.empty(0, dtype=torch.float8_e4m3fn, device=x.device)
            tensor_scale = torch.ones((), device=x.device)
            if with_counts:
                counts, error = no_counts(x.device)
        else:
            blocks = _to_blocks(x, rows, cols)
            all_scales = two_level_scales(block_amax(blocks), self.element, tensor_amax)
            packed = self._encode(blocks, all_scales, generator)
            scales, tensor_scale = all_scales.codes, all_scales.tensor_scale
            if with_counts:
                counts, error = count_errors(blocks, packed, all_scales, self.element, x.numel())
        return QuantizedTensor(
            codes=packed.view(rows, blocks_per_row * BLOCK_SIZE // 2),
            scales=scales.view(rows, blocks_per_row),
            tensor_scale=tensor_scale,
            shape=x.shape,
            dtype=x.dtype,
            element=self.element,
            counts=counts,
            error=error,
        )

    def _encode(self, blocks: Tensor, scales: BlockScales, generator: torch.Generator | None) -> Tensor:
        packed = torch.empty(blocks.numel() // 2, dtype=torch.uint8, device=blocks.device)
        # Nearest rounding counts in quanta; a power of two, so the scale absorbs it exactly.
        encode = scales.encode if self.is_stochastic else scales.encode / self.element.quantum
        scratch: list[Tensor] = []
        for chunk, chunk_encode, out in in_pieces(len(blocks), blocks.device, blocks, encode, packed):
            if not scratch:  # the first piece is the largest; the others reuse its memory
                scratch = [
                    torch.empty(chunk.shape, device=chunk.device) for _ in range(2 + self.is_stochastic)
                ]
            scaled, spare, *uniform = (each[: len(chunk)] for each in scratch)
            scaled.copy_(chunk).mul_(chunk_encode)
            if uniform:
                keys = stochastic_keys(scaled, spare, fill_uniform(uniform[0], generator), self.element)
                pack_keys(keys, stochastic_key_codes(self.element), out=out)
            else:
                keys = nearest_keys(scaled, spare, self.element)
                pack_keys(keys, nearest_key_codes(self.element), out=out)
        return packed


@dataclass(frozen=True, kw_only=True)
class IdentityQuantizer(Quantizer):
    """Leaves tensors as they are: the operand stays in high precision."""

    name: str
    is_identity: bool = True

    def quantize(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | None = None,
    ) -> UnquantizedTensor:
        """See `Quantizer.quantize`; counts hold elements and non-finite ones, the error is 0."""
        del generator, tensor_amax
        self._check(x)
        counts = error = None
        if with_counts:
            counts, error = no_counts(x.device)
            finite = x.isfinite()
            counts[0] = x.numel()
            counts[4] = x.numel() - finite.sum()
            error[1] = torch.where(finite, x, 0).to(torch.float64).square().sum()
        return UnquantizedTensor(values=x.detach(), counts=counts, error=error)


def _to_blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """Shape x as (blocks, 16), contiguous, fp32 or 16-bit; a copy only where it must be."""
    matrix = x.detach().reshape(rows, cols)
    if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        matrix = matrix.to(torch.float32)
    if cols % BLOCK_SIZE:
        matrix = torch.nn.functional.pad(matrix, (0, -cols % BLOCK_SIZE))
    return matrix.contiguous().view(-1, BLOCK_SIZE)
