"""Quantizers, which turn a tensor into codes and scales.

A tensor of any shape is flattened to (rows, cols) and divided into blocks. Partial blocks are padded with
zeros, which decoding removes. The `Encoding` defines how a block is quantised; the backend computes it.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError, shown
from megalowbit.formats.block_format import GROUP, NVFP4
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import (
    Encoded,
    EncodeRequest,
    Encoding,
    new_encoded,
    no_counts,
    no_exponents,
)
from megalowbit.quantize.philox import NO_KEY, RandomKey
from megalowbit.quantize.quantized_tensor import QuantizedTensor, UnquantizedTensor, matrix_shape


class Options(NamedTuple):
    """Arguments of `Quantizer.quantize`, and `signs` of `BlockQuantizer.quantize_transposed`."""

    random_key: RandomKey | None = None
    with_counts: bool = False
    tensor_amax: Tensor | float | None = None
    operand_dtype: torch.dtype | None = None
    signs: int | None = None
    with_exponents: bool = False


class Quantizer(ABC):
    """Base of all quantizers. Stateless: one object can quantise any number of tensors.

    Attributes:
        name: name in configurations, see `names`.
        is_stochastic: whether rounding draws random numbers.
        is_identity: whether tensors pass through unchanged.
    """

    name: str
    is_stochastic: bool = False
    is_identity: bool = False

    def quantize(
        self,
        x: Tensor,
        *,
        random_key: RandomKey | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | float | None = None,
        operand_dtype: torch.dtype | None = None,
        with_exponents: bool = False,
    ) -> QuantizedTensor | UnquantizedTensor:
        """Quantise a tensor, without gradient.

        Args:
            x: floating-point, any shape and strides, may be empty. fp64 is rounded to fp32 first.
            random_key: key for stochastic rounding; `None` draws one from torch's default CPU generator.
            with_counts: fill the result's `counts` and `error`.
            tensor_amax: largest magnitude of the full tensor, if x is one shard of it: a number, or a
                floating-point 0-dim tensor on x's device, rounded to fp32. If it is not finite, x becomes
                NaN. If it is ≤ 0, x is treated as a tensor of zeros. Formats without a tensor scale ignore
                it.
            operand_dtype: also compute the operand of the GEMM, in this dtype. E4M3 and E5M2 are for MXFP4:
                the result's `fp8` and `exponents`.
            with_exponents: fill the result's `exponents`; MXFP4 only.

        Raises:
            UserError: x is not a dense floating-point tensor, `tensor_amax` is not valid, or FP8 or exponents
                are asked of another format than MXFP4.
        """
        self._check(x)
        options = Options(random_key, with_counts, tensor_amax, operand_dtype, with_exponents=with_exponents)
        return self._quantize(x.detach(), options)

    @abstractmethod
    def _quantize(self, x: Tensor, options: Options) -> QuantizedTensor | UnquantizedTensor:
        """Quantise a validated, detached tensor."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __call__(self, x: Tensor, *, random_key: RandomKey | None = None) -> Tensor:
        """Fake quantisation: quantise and dequantise; same shape and dtype, detached."""
        return self.quantize(x, random_key=random_key).dequantize()

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise UserError(f"quantizer {self.name!r} got {shown(x)}, not a tensor: write torch.as_tensor(…)")
        if x.layout != torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout)
            raise UserError(f"quantizer {self.name!r} got a tensor that is {kind}: pass a dense one")
        if type(x) is not Tensor and hasattr(x, "to_local"):
            raise UserError(
                f"quantizer {self.name!r} got a distributed tensor: pass x.to_local(), and tensor_amax"
            )
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise UserError(
                f"quantizer {self.name!r} got a tensor of {x.dtype}: cast it to float32, bfloat16 or float16"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockQuantizer(Quantizer):
    """Elements of few bits under block scales."""

    name: str
    encoding: Encoding

    @property
    def is_stochastic(self) -> bool:  # type: ignore[override]
        """Whether rounding draws random numbers."""
        return self.encoding.is_stochastic

    def _quantize(self, x: Tensor, options: Options) -> QuantizedTensor:
        encoded = self._encode(_as_matrix(x), options)
        return self.tensor_of(encoded, x.shape, x.dtype)

    def quantize_transposed(
        self,
        x: Tensor,
        *,
        signs: int | None = None,
        random_key: RandomKey | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | float | None = None,
        with_exponents: bool = False,
    ) -> QuantizedTensor:
        """Quantise xᵀ, in blocks along x's rows, after a Hadamard transform if `signs` is given.

        Args:
            x: floating-point, any shape; flattened to (rows, cols).
            signs: 16 bits, see `hadamard`; the rows are padded with zeros to a multiple of 16.
            random_key: as for `quantize`.
            with_counts: as for `quantize`.
            tensor_amax: as for `quantize`, but of the full transformed tensor, times `q_scalar`.
            with_exponents: as for `quantize`.

        Returns:
            A matrix (cols, rows), with rows padded to a multiple of 16 if there is a transform.

        Raises:
            UserError: x is not a floating-point tensor.
        """
        self._check(x)
        options = Options(random_key, with_counts, tensor_amax, signs=signs, with_exponents=with_exponents)
        matrix = _as_matrix(x.detach())
        if signs is not None and matrix.shape[0] % GROUP:
            matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % GROUP))
        return self.tensor_of(self._encode(matrix.t(), options), matrix.t().shape, x.dtype)

    def quantize_transformed(
        self,
        x: Tensor,
        *,
        signs: int,
        random_key: RandomKey | None = None,
        with_counts: bool = False,
        tensor_amax: Tensor | float | None = None,
        with_exponents: bool = False,
    ) -> QuantizedTensor:
        """Quantise x after a Hadamard transform of its rows, in blocks along them.

        The arguments are those of `quantize_transposed`.

        Returns:
            A matrix (rows, cols), with cols padded to a multiple of 16.

        Raises:
            UserError: x is not a floating-point tensor.
        """
        self._check(x)
        options = Options(random_key, with_counts, tensor_amax, signs=signs, with_exponents=with_exponents)
        matrix = _as_matrix(x.detach())
        if matrix.shape[1] % GROUP:
            matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % GROUP))
        return self.tensor_of(self._encode(matrix, options), matrix.shape, x.dtype)

    def _encode(self, matrix: Tensor, options: Options) -> Encoded:
        if torch.is_grad_enabled():  # not so in an autograd function, where changing the mode is wasted time
            with torch.no_grad():
                return self._encode(matrix, options)
        random_key, amax = options.random_key, options.tensor_amax
        is_empty = matrix.numel() == 0
        if random_key is None:
            random_key = fresh_key() if self.is_stochastic and not is_empty else NO_KEY
        request = EncodeRequest(
            matrix,
            self.encoding,
            random_key,
            options.signs,
            None if amax is None else self._maximum(amax, matrix.device),
            options.operand_dtype,
            options.with_counts,
            options.with_exponents,
        )
        return _nothing(request) if is_empty else backends.encode(request)

    def _maximum(self, given: Tensor | float, device: torch.device) -> Tensor:
        """`tensor_amax` as fp32, 0-dim."""
        if isinstance(given, (int, float)):
            return torch.full((), ctypes.c_float(given).value, dtype=torch.float32, device=device)
        is_tensor = isinstance(given, Tensor) and given.is_floating_point() and given.ndim == 0
        if not is_tensor or given.device != device:
            raise UserError(
                f"quantizer {self.name!r} got tensor_amax={shown(given)}: "
                f"pass a number, or a floating tensor without dimensions on {device}"
            )
        return given.detach().to(torch.float32)

    def tensor_of(self, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> QuantizedTensor:
        """The result of quantising a tensor of this shape and dtype."""
        return QuantizedTensor(
            codes=encoded.codes,
            scales=encoded.scales,
            tensor_scale=encoded.tensor_scale,
            shape=shape,
            dtype=dtype,
            format=self.encoding.format,
            is_power_of_two=self.encoding.is_power_of_two,
            counts=encoded.counts,
            error=encoded.error,
            ready_operand=encoded.operand,
            exponents=encoded.exponents,
            fp8=encoded.fp8,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class IdentityQuantizer(Quantizer):
    """Leaves tensors unchanged: the operand stays in high precision."""

    name: str
    is_identity: bool = True

    def _quantize(self, x: Tensor, options: Options) -> UnquantizedTensor:
        """Return x unchanged; only elements and non-finite elements are counted, and the error is 0."""
        counts = error = None
        if options.with_counts:
            counts, error = no_counts(x.device)
            finite = x.isfinite()
            counts[0] = x.numel()
            counts[4] = x.numel() - finite.sum()
            error[1] = torch.where(finite, x, 0).to(torch.float64).square().sum()
        return UnquantizedTensor(values=x, counts=counts, error=error)


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(matrix_shape(x.shape))


def _nothing(request: EncodeRequest) -> Encoded:
    """The result for an empty matrix, with scales of the right shape."""
    encoded = new_encoded(request)._replace(operand=None)
    if encoded.tensor_scale is not None:
        encoded.tensor_scale.fill_(1)
    counts, error = no_counts(request.x.device) if request.with_counts else (None, None)
    needs_exponents = request.with_exponents or request.fp8_dtype is not None
    exponents = no_exponents(request.x.device) if needs_exponents else None
    return encoded._replace(counts=counts, error=error, exponents=exponents)


def takes_row_maximum(quantizer: Quantizer) -> bool:
    """Whether its `tensor_amax` is the largest maximum of a finite block of 16 in a row."""
    if not isinstance(quantizer, BlockQuantizer):
        return False
    encoding = quantizer.encoding
    return encoding.format == NVFP4 and encoding.q_scalar == 1 and encoding.scale_from == "amax"


def fresh_key() -> RandomKey:
    """A new key, drawn from torch's default CPU generator."""
    drawn = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    # a fake tensor has no value
    return NO_KEY if isinstance(drawn, FakeTensor) else RandomKey(int(drawn))
