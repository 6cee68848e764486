"""Products of MXFP4 operands on FP8 tensor cores, without a second rounding.

How it works. An MXFP4 number is an E2M1 element times its block's power of two 2^e. FP8 tensor cores have no
block scales, so each operand is rewritten as FP8 numbers under *one* power of two for the whole tensor:

    FP8 number = element · 2^(e − e_max + shift)        tensor factor = 2^(e_max − shift)

This is exact if the block exponents e lie close enough together. E4M3 holds exponents up to 14 below the
largest (shift 6: numbers from 384 down to 2⁻⁹), E5M2 up to 28 (shift 13). Blocks of zeros do not count.
Inputs and weights are E4M3, output gradients E5M2, because their exponents are spread more. (The hardware has
no product of E5M2 and E5M2.)

A product runs in FP8 if

- both operands are MXFP4, and all sizes are multiples of 16,
- both operands fit,
- the tensor factors and their product are normal fp32 numbers.

Otherwise it runs in bf16, and the layer counts that.

Who decides. Formats and sizes are known to the host: if they rule FP8 out, `multiply` returns `None`, and the
layer multiplies in bf16. The exponents are on the device, and the host does not wait for them:

- With Triton kernels, the quantizer writes the range of the exponents next to codes and scales. The FP8
  product is computed in any case. A kernel after it reads both ranges: it ends if they fit, and otherwise
  overwrites the product with the one of the bf16 operands, and counts it. So a product is right at once, not
  from the next step on, and a product that does not fit costs more than one in bf16.
- Elsewhere the host reads the ranges, which is a plain memory access on a CPU. If they do not fit, `multiply`
  returns `None`. (A GPU without Triton waits here; its quantizers are slow anyway.)

Layouts. `torch._scaled_mm(a, b)` takes a (m, k) row-major and b (k, n) *column-major*, that is strides (1,
k). Both therefore have the summed axis contiguous. `decode_fp8` writes row-major matrices, so a is decoded as
(m, k), and b as (n, k) and passed as its transpose, a view:

    product        a, decoded from              b.t(), decoded from
    output         input (M, K)                 weight (N, K)
    grad_input     grad_output (M, N)           weight, transposed to (K, N)
    grad_weight    grad_output, to (N, M)       input, transposed to (K, M)

That is the stored order for `output` and a transposing decode where another axis is summed over. (With the
layout `per_gemm` the stored operands of backward are transposed already.)

Dtypes. Operands are E4M3 or E5M2 with an fp32 factor each, 0-dim on the device. The result has the dtype
of the output or gradient; with a bias it is fp32 first. Operands are kept for backward as
MXFP4, 4.25 bits an element, with 8 bytes for the range of their exponents.

Operands are exact, but sums need not be. Hopper's tensor cores are reported to keep about 14 bits while
adding up FP8 products; a remedy is to add partial sums in fp32 every 128 elements (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2). `use_fast_accum=False` asks PyTorch for its more exact sums. The remaining
error of a sum of 4,096 products is below 10⁻³ of its norm on an H100: a test measures it if there is a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.matmul.gemms import finish, no_autocast
from megalowbit.layers.matmul.operand import MatmulOperand, OperandTensor
from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import DEPTH, E4M3, E5M2, SHIFT, Fp8Operand
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape
from megalowbit.quantize.triton import launch_fp8

SIZE_MULTIPLE = 16
DTYPES = MappingProxyType(  # of the left and the right operand of each product
    {"output": (E4M3, E4M3), "grad_input": (E5M2, E4M3), "grad_weight": (E5M2, E4M3)}
)
_BIAS = 127  # E8M0 code of 2^0
_HIGHEST = _BIAS + 125  # above it an element may decode to infinity in bf16, see `gemms`


def why_unavailable(device: torch.device) -> str | None:
    """Why a device cannot multiply FP8 matrices; `None` if it can."""
    return _why_unavailable(device)


@functools.lru_cache(maxsize=64)  # each product asks
def _why_unavailable(device: torch.device) -> str | None:
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return "FP8 needs compute capability 8.9 (Ada, Hopper) or later"
    return None if device.type in ("cpu", "cuda") else "PyTorch multiplies FP8 matrices on CPU and CUDA only"


def may_fit(formats: Sequence[str | None], sizes: Sequence[int]) -> bool:
    """Whether formats of scales and sizes of a product allow FP8; the exponents may still rule it out."""
    return all(scale == "e8m0" for scale in formats) and all(n > 0 and n % SIZE_MULTIPLE == 0 for n in sizes)


def fits(left: Tensor, right: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Whether the product of operands with these exponents (see `Encoded`) is exact in FP8; a host read.

    `product_kernel` of `triton.fp8` has the same rules.
    """
    ends = []
    for (highest, negated), dtype in zip(torch.stack([left, right]).tolist(), dtypes, strict=True):
        if highest < 0:  # no block but zeros and NaN
            ends.append(0)
        elif highest + negated > DEPTH[dtype] or highest > _HIGHEST:
            return False
        else:
            ends.append(highest - _BIAS - SHIFT[dtype])
    return all(-126 <= end <= 127 for end in (*ends, sum(ends)))


def multiply(
    left: MatmulOperand,
    right: MatmulOperand,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    transpose_left: bool,
    transpose_right: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    counts: Callable[[torch.device], Tensor] | None = None,
) -> Tensor | None:
    """Multiply in FP8, with the arguments of `gemms.multiply`; `None` if the host knows that bf16 has to.

    Args:
        left: see `gemms.multiply`, as for the other arguments.
        right: see there.
        dtypes: FP8 dtypes of both operands, see `DTYPES`.
        transpose_left: refers to the stored matrix.
        transpose_right: refers to the stored matrix.
        out_dtype: see there.
        bias: see there.
        counts: device → int32 (2,) there, see `launch_fp8.correct`; called if the device decides. Or `None`.

    Raises:
        UserError: the device has no FP8.
    """
    tensors, transposes = (left.tensor, right.tensor), (transpose_left, transpose_right)
    codes = tensors[0].codes
    if codes is None or isinstance(codes, FakeTensor):
        return None  # not quantised, or a memory estimate
    reason = why_unavailable(codes.device)
    if reason is not None:  # checked before the sizes: a run must not end up all in bf16 without an error
        raise UserError(
            f'gemm "fp8" cannot run on {codes.device}: {reason}; set gemm to "bf16" in the recipe'
        )
    sizes = (*matrix_shape(tensors[0].shape), *matrix_shape(tensors[1].shape))
    if not may_fit([_scale_format(each) for each in tensors], sizes):
        return None
    sides = [_side(*each) for each in zip(tensors, dtypes, transposes, strict=True)]
    is_decided_here = backends.backend_of(*(side.codes for side in sides)) != "triton"
    if is_decided_here and not fits(sides[0].exponents, sides[1].exponents, dtypes):
        return None
    a = _decoded(tensors[0], sides[0], transpose=transpose_left)  # (m, k) row-major
    # _scaled_mm needs its second operand (k, n) column-major, so decode (n, k) row-major and pass the
    # transposed view. For `output` the stored weight is (N, K) already and is not transposed.
    b = _decoded(tensors[1], sides[1], transpose=not transpose_right)
    with no_autocast(codes.device.type):
        product = torch._scaled_mm(
            a.numbers,
            b.numbers.t(),
            scale_a=a.scale,
            scale_b=b.scale,
            out_dtype=torch.float32 if bias is not None else out_dtype,  # `finish` adds the bias in fp32
            use_fast_accum=False,
        )
        if not is_decided_here:
            launch_fp8.correct(product, sides[0], sides[1], (counts or _new_counts)(product.device))
        return finish(product, None, bias, out_dtype)


def _new_counts(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def _scale_format(tensor: OperandTensor) -> str | None:
    return tensor.format.scale if isinstance(tensor, QuantizedTensor) else None


def _side(tensor: OperandTensor, dtype: torch.dtype, transpose: bool) -> launch_fp8.Fp8Side:
    assert isinstance(tensor, QuantizedTensor)
    codes, scales, exponents = tensor.codes, tensor.scales, tensor.exponents
    if exponents is None:  # quantised without asking for them
        exponents = reference.block_exponents(codes, scales)
    return launch_fp8.Fp8Side(codes, scales, exponents, matrix_shape(tensor.shape), dtype, transpose)


def _decoded(tensor: OperandTensor, side: launch_fp8.Fp8Side, *, transpose: bool) -> Fp8Operand:
    """The operand in FP8, in its stored order or transposed; the quantizer may have made it already."""
    assert isinstance(tensor, QuantizedTensor)
    if tensor.fp8 is not None and tensor.fp8.numbers.dtype == side.dtype and not transpose:
        return tensor.fp8
    return backends.decode_fp8(
        side.codes, side.scales, side.exponents, *side.shape, dtype=side.dtype, transpose=transpose
    )
