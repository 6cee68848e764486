"""The arithmetic of the Metis repository (mid-2026) under these names, to repeat or explain its runs.

Each rule keeps the repository's order of operations, so results are bit-equal for the same uniform random
numbers; here those come from Philox. Values are rounded but not packed, because these are not number formats.
Each rule's docstring describes its faults. Two faults occur in several rules:

- an offset on the scale (`+ 1e-6` …): harmless near 1, but it flattens tensors of its own magnitude and sets
  smaller ones to zero;
- random steps are u - ½ rounded half to even. If u is exactly 0 (one draw in 2²⁴), a number on an odd code
  moves, although it needs no rounding.

Blocks are 1 × 16 along the last axis, which must consist of whole blocks. A NaN makes its block NaN (with one
scale, the tensor), and so does an infinity. Exception: for MX, an infinity becomes NaN, and its neighbours
become 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.formats.block_format import GROUP
from megalowbit.quantize.encoding import no_counts
from megalowbit.quantize.philox import RandomKey, random_words
from megalowbit.quantize.quantized_tensor import UnquantizedTensor, matrix_shape
from megalowbit.quantize.quantizer import Options, Quantizer, fresh_key


class Rounded(NamedTuple):
    """Values in the shape of the blocks they were given, and the scale, broadcastable to them."""

    values: Tensor
    scale: Tensor


class Rule(NamedTuple):
    """One of the repository's quantizers.

    Attributes:
        round: from fp32 (rows, blocks, elements of a block) and as many uniform numbers.
        is_blockwise: whether blocks have 16 elements; otherwise the whole tensor is one block.
        is_stochastic: whether the uniform numbers are used.
    """

    round: Callable[[Tensor, Tensor | None], Rounded]
    is_blockwise: bool
    is_stochastic: bool = False


def _e2m1_steps(magnitude: Tensor, noise: Tensor | None) -> Tensor:
    """E2M1 magnitudes in half units: bend to codes, add u - ½, round half to even, bend back."""
    codes = magnitude - ((magnitude - 4).relu() / 2 + (magnitude - 8).relu() / 4)
    if noise is not None:
        codes = codes + (noise - 0.5)
    codes = codes.round()
    return codes + ((codes - 4).relu() + 2 * (codes - 6).relu())


def _e2m1(x: Tensor, scale: Tensor, noise: Tensor | None, decode_scale: Tensor) -> Tensor:
    return _e2m1_steps(x.abs() / (scale / 2), noise) * x.sign() / 2 * decode_scale


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def fp4e2m1(x: Tensor, _noise: Tensor | None) -> Rounded:
    """E2M1 under one scale, nearest. The offset 1e-6 sets tensors with a maximum below 2.6e-7 to zero."""
    scale = _amax(x) / 6 + 1e-6
    return Rounded(_e2m1(x, scale, None, scale), scale)


def fp4e2m1b(x: Tensor, noise: Tensor | None) -> Rounded:
    """E2M1 under fp32 block scales, stochastic. The offset 1e-9 sets blocks below 2.6e-10 to zero."""
    scale = _amax(x) / 6 + 1e-9
    return Rounded(_e2m1(x, scale, noise, scale), scale)


def nvfp4e2m1b(x: Tensor, noise: Tensor | None) -> Rounded:
    """NVFP4 in name: the cast of the block scales to E4M3 is computed and discarded.

    The scales are divided by (their maximum over the rows)/448 and multiplied by it again, before rounding
    and once more before decoding, so they remain fp32, moved by a rounding error. Memory is that of fp32
    scales and so is the error. A non-finite block spoils all blocks above and below it. The scale reported
    is the one before all that.
    """
    scale = _amax(x) / 6 + 1e-9
    encode_scale = _there_and_back(scale)
    return Rounded(_e2m1(x, encode_scale, noise, _there_and_back(encode_scale)), scale)


def _there_and_back(scale: Tensor) -> Tensor:
    unit = scale.amax(0, keepdim=True) / 448
    return scale / unit * unit


def mxfp4e2m1b(x: Tensor, noise: Tensor | None) -> Rounded:
    """MXFP4 on one side only: quantised with an fp32 scale, decoded with the nearest power of two.

    Blocks of 16, not 32. Whole blocks come back up to √2 too large or too small: relative error .26 on a
    Gaussian, against .12 where both sides use the same scale.
    """
    scale = _amax(x) / 6 + 1e-9
    exponent = torch.log2(scale + 1e-127).clamp(-127, 127).round()
    return Rounded(_e2m1(x, scale, noise, scale.sign() * 2.0**exponent), scale)


def _fourth_power_e5m2(x: Tensor, scale: Tensor) -> Tensor:
    root = (x / scale).clamp(-625, 625).abs() ** 0.25
    return root.to(torch.float8_e5m2).to(torch.float32) ** 4 * x.sign() * scale


def fp6e3m2(x: Tensor, _noise: Tensor | None) -> Rounded:
    """Not E3M2: the fourth root rounded to E5M2, raised again. Errs by up to 52 %, E3M2 by 12.5 %."""
    scale = _amax(x) / 625 + 1e-7
    return Rounded(_fourth_power_e5m2(x, scale), scale)


def fp6e3m2b(x: Tensor, _noise: Tensor | None) -> Rounded:
    """The same by blocks, the scale rounded to fp16: infinite beyond 4.1e7, where blocks become NaN."""
    scale = (_amax(x) / 625 + 1e-7).to(torch.float16).to(torch.float32)
    return Rounded(_fourth_power_e5m2(x, scale), scale)


def fp8e4m3(x: Tensor, _noise: Tensor | None) -> Rounded:
    """E4M3 under one scale, nearest; below a maximum of 4.5e-4 the offset 1e-6 costs half of the range."""
    scale = _amax(x) / 448 + 1e-6
    return Rounded((x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale, scale)


def fp8e4m3b(x: Tensor, _noise: Tensor | None) -> Rounded:
    """The same by blocks, the scale rounded to fp16: infinite beyond 2.9e7, where blocks become NaN."""
    scale = (_amax(x) / 448 + 1e-7).to(torch.float16).to(torch.float32)
    return Rounded((x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale, scale)


def ternary(x: Tensor, _noise: Tensor | None) -> Rounded:
    """`1p58bit`: clamp(round(x/q)/2, ±1) has five levels (2.3 bits), not three, ±½ among them."""
    mean = x.abs().mean().view(1, 1, 1)
    step = (2 * x.abs().std() + 1e-6) / 2
    return Rounded(((x / step).round() / 2).clamp(-1, 1) * mean, mean)


RULES = {
    "fp4e2m1": Rule(fp4e2m1, is_blockwise=False),
    "fp4e2m1b": Rule(fp4e2m1b, is_blockwise=True, is_stochastic=True),
    "nvfp4e2m1b": Rule(nvfp4e2m1b, is_blockwise=True, is_stochastic=True),
    "mxfp4e2m1b": Rule(mxfp4e2m1b, is_blockwise=True, is_stochastic=True),
    "fp6e3m2": Rule(fp6e3m2, is_blockwise=False),
    "fp6e3m2b": Rule(fp6e3m2b, is_blockwise=True),
    "fp8e4m3": Rule(fp8e4m3, is_blockwise=False),
    "fp8e4m3b": Rule(fp8e4m3b, is_blockwise=True),
    "1p58bit": Rule(ternary, is_blockwise=False),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class SeedCompatQuantizer(Quantizer):
    """One of the repository's rules as a `Quantizer`."""

    name: str
    rule: Rule

    @property
    def is_stochastic(self) -> bool:  # type: ignore[override]
        """Whether rounding draws random numbers."""
        return self.rule.is_stochastic

    @property
    def needs_multiple_of(self) -> int:
        """What the size of the last axis must be a multiple of."""
        return GROUP if self.rule.is_blockwise else 1

    def _quantize(self, x: Tensor, options: Options) -> UnquantizedTensor:
        """Computed in fp32 for every dtype of x.

        Counts hold elements, underflow (x ≠ 0 became 0) and non-finite elements. Each tensor has its own
        scale: `tensor_amax` is rejected.

        Raises:
            UserError: the last axis does not consist of whole blocks, or `tensor_amax` is given.
        """
        if options.tensor_amax is not None:
            raise UserError(f"quantizer {self.name!r} does not support tensor_amax: leave seed_compat out")
        uniform = self._uniform(x, options.random_key) if self.is_stochastic else None
        values = self.rounded(x, uniform).values.to(x.dtype)
        if not options.with_counts:
            return UnquantizedTensor(values=values)
        counts, error = _counted(x, values)
        return UnquantizedTensor(values=values, counts=counts, error=error)

    @torch.no_grad()
    def rounded(self, x: Tensor, uniform: Tensor | None) -> Rounded:
        """Round with given random numbers.

        Args:
            x: floating-point, any shape whose last axis consists of whole blocks.
            uniform: fp32 in [0, 1), in the shape of x; unused for rounding to nearest.

        Returns:
            fp32 values in the shape of x, and the scales, one for each block.

        Raises:
            UserError: the last axis does not consist of whole blocks.
        """
        rows, cols = matrix_shape(x.shape)
        if cols % self.needs_multiple_of:
            raise UserError(
                f"quantizer {self.name!r} needs a last axis of whole blocks of {GROUP}, not {cols}: "
                "leave seed_compat out, which pads"
            )
        if x.numel() == 0:
            return Rounded(x.detach().to(torch.float32), x.new_zeros(0, dtype=torch.float32))
        blocks = (rows, cols // GROUP, GROUP) if self.rule.is_blockwise else (1, 1, rows * cols)
        noise = None if uniform is None else uniform.reshape(blocks)
        values, scale = self.rule.round(x.detach().to(torch.float32).reshape(blocks), noise)
        return Rounded(values.view(x.shape), scale.flatten())

    def _uniform(self, x: Tensor, random_key: RandomKey | None) -> Tensor:
        """24 bits of a Philox word each, the words of the groups one after the other."""
        words = random_words(-(-x.numel() // 4), random_key or fresh_key(), x.device)
        return (words >> 8).to(torch.float32).mul_(2.0**-24).flatten()[: x.numel()].view(x.shape)


def _counted(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    counts, error = no_counts(x.device)
    is_lost = ~(x.isfinite() & values.isfinite())
    counts[0] = x.numel()
    counts[3] = ((x != 0) & (values == 0)).sum()
    counts[4] = (~x.isfinite()).sum()
    exact, rounded = (each.to(torch.float64).masked_fill(is_lost, 0.0) for each in (x, values))
    error[0] = (exact - rounded).square().sum()
    error[1] = exact.square().sum()
    return counts, error


SEED_COMPAT: dict[str, Callable[..., Quantizer]] = {
    name: functools.partial(SeedCompatQuantizer, rule=rule) for name, rule in RULES.items()
}
