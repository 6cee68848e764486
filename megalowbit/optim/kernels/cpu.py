"""Optimizer passes over memory on CPUs: `cpu.c`, called through ctypes; `c_library` compiles it on first use.

A step of Adam reads gradient, master and moments once. In the same pass it writes the half-precision weight
and, if requested, zeroes an fp32 gradient while it is in the L1 cache. The bits of a step are those of
torch's fused Adam on one thread. With more threads torch rounds the last few elements of a tensor
differently; here the result does not change. Sums are float64, so no finite gradient has an infinite norm.

The library is checked against known bits before use. If it is not available, `why_unavailable` returns the
reason, and callers use torch. Not covered: tensors that are not contiguous, other dtypes, AMSGrad,
`maximize`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalowbit.c_library import KernelLibrary, address
from megalowbit.errors import UserError

SOURCE = Path(__file__).with_suffix(".c")
BLOCK = 1 << 16  # elements of a task; the same as in the C file
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FUSED = ("AVX2", "AVX512")  # CPU capabilities for which torch's Adam is compiled with fused multiply-adds

_POINTERS = "master", "exp_avg", "exp_avg_sq", "step", "gradient", "half"
_INTEGERS = "gradient_dtype", "half_dtype", "is_decoupled", "count"
_REALS = "learning_rate", "beta1", "beta2", "epsilon", "weight_decay"


class _Numbers(ctypes.Structure):
    """The `Numbers` of cpu.c, field by field."""

    _fields_ = [("x", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("count", ctypes.c_int64)]


class _Step(ctypes.Structure):
    """The `Step` of cpu.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_double) for name in _REALS),
    ]


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Hyperparameters; `is_decoupled`: AdamW's weight decay, else Adam's, which is added to the gradient."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    is_decoupled: bool


@dataclass(frozen=True, kw_only=True)
class AdamTensors:
    """The tensors of one parameter's step; all are `supports`ed and have one shape.

    Attributes:
        master: fp32, updated.
        gradient: fp32, fp16 or bf16, scaled; read, and if fp32 zeroed on request.
        exp_avg: fp32, updated.
        exp_avg_sq: fp32, updated.
        step: 0-dim fp32, number of steps, updated.
        half: fp16 or bf16, receives the master rounded to nearest even; or `None`.
    """

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    half: Tensor | None
    settings: AdamSettings


def is_available() -> bool:
    """Whether the library can be used; the first call compiles it."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Why the library is not available, with the remedy; `None` if it is."""
    return LIBRARY.why_unavailable()


def supports(tensor: Tensor) -> bool:
    """Whether the library supports this tensor: contiguous fp32, fp16 or bf16 in CPU memory."""
    is_plain = tensor.is_cpu and tensor.dtype in DTYPES and tensor.layout is torch.strided
    return is_plain and tensor.is_contiguous() and not tensor.is_neg()


def can_accumulate(main: Tensor, gradient: Tensor) -> bool:
    """Whether `accumulate` supports this pair; otherwise use torch."""
    is_main = main.dtype == torch.float32 and main.shape == gradient.shape
    return is_main and supports(main) and supports(gradient)


def sums_of_squares(tensors: Sequence[Tensor], *, library: ctypes.CDLL | None = None) -> Tensor:
    """Σ x² of each tensor, (len(tensors),) float64; infinite or NaN exactly if the tensor has such an
    element.

    All tensors are `supports`ed. `library`: another library than the one in use, to check it.
    """
    first_blocks, blocks = _blocks(tensors)
    items = (_Numbers * len(tensors))(*(_Numbers(_address(x), DTYPES[x.dtype], x.numel()) for x in tensors))
    sums = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    if blocks:
        partial = torch.empty(blocks, dtype=torch.float64, device="cpu")
        (library or LIBRARY.get()).megalowbit_sums_of_squares(
            items, first_blocks, _integer(len(tensors)), _pointer(partial), _pointer(sums), _threads()
        )
    return sums


def accumulate(main: Tensor, gradient: Tensor, factor: float, *, library: ctypes.CDLL | None = None) -> None:
    """Add gradient · factor to `main`, each operation rounded to fp32.

    Both are supported by `can_accumulate`. The version counter of `main` does not change, and `factor` is
    rounded to fp32. `library`: another library than the one in use, to check it.
    """
    (library or LIBRARY.get()).megalowbit_accumulate(
        _pointer(main),
        _pointer(gradient),
        _integer(DTYPES[gradient.dtype]),
        _integer(main.numel()),
        ctypes.c_float(factor),
        _threads(),
    )


def adam_step(
    items: Sequence[AdamTensors],
    grad_scale: Tensor,
    found_inf: Tensor,
    *,
    clears_gradients: bool = False,
    is_fused: bool | None = None,
    library: ctypes.CDLL | None = None,
) -> None:
    """Take one step of Adam on gradients ÷ `grad_scale`, or change nothing if `found_inf` is 1.

    Args:
        items: one for each parameter.
        grad_scale: 0-dim fp32.
        found_inf: 0-dim fp32, 0 or 1.
        clears_gradients: whether a step that is taken sets fp32 gradients to zero.
        is_fused: whether to use fused multiply-adds (one rounding); default: as torch does on this CPU.
        library: another library than the one in use, to check it.

    Raises:
        UserError: the tensors of an item differ in shape, or have no memory.
    """
    for flag in (grad_scale, found_inf):
        assert flag.dtype == torch.float32, flag.dtype
        assert flag.device.type == "cpu", flag.device
    first_blocks, _ = _blocks([item.master for item in items])
    rows = (_Step * len(items))(*(_Step(*_row(item)) for item in items))
    if is_fused is None:
        is_fused = torch.backends.cpu.get_cpu_capability() in FUSED
    if items:
        (library or LIBRARY.get()).megalowbit_adam_step(
            rows,
            first_blocks,
            _integer(len(items)),
            _pointer(grad_scale),
            _pointer(found_inf),
            _integer(is_fused),
            _integer(clears_gradients),
            _threads(),
        )


def _check_shapes(item: AdamTensors) -> None:
    """Check that shapes are equal: the library has one size, and would write past smaller tensors."""
    shape = item.master.shape
    for name in ("gradient", "exp_avg", "exp_avg_sq", "half"):
        tensor: Tensor | None = getattr(item, name)
        if tensor is not None and tensor.shape != shape:
            raise UserError(
                f"{name} has shape {tuple(tensor.shape)} and its fp32 weight {tuple(shape)}: "
                "give both the same shape"
            )
    if item.step.numel() != 1:
        raise UserError(f"step has shape {tuple(item.step.shape)}: it must be one number, the count of steps")


def _row(item: AdamTensors) -> tuple[Any, ...]:
    _check_shapes(item)
    half, settings, single = item.half, item.settings, torch.float32
    assert item.master.dtype is item.exp_avg.dtype is item.exp_avg_sq.dtype is item.step.dtype is single, item
    return (
        _address(item.master),
        _address(item.exp_avg),
        _address(item.exp_avg_sq),
        _address(item.step),
        _address(item.gradient),
        _address(half),
        DTYPES[item.gradient.dtype],
        0 if half is None else DTYPES[half.dtype],
        settings.is_decoupled,
        item.master.numel(),
        settings.learning_rate,
        settings.beta1,
        settings.beta2,
        settings.epsilon,
        settings.weight_decay,
    )


def _blocks(tensors: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    """The first block of each tensor followed by the number of all blocks; and that number."""
    counts = (-(-tensor.numel() // BLOCK) for tensor in tensors)
    first = [0, *itertools.accumulate(counts)]
    return (ctypes.c_int64 * len(first))(*first), first[-1]


def _address(tensor: Tensor | None) -> int | None:
    if tensor is not None:
        is_known = supports(tensor) or tensor.dtype == torch.float64
        assert is_known, (tensor.dtype, tensor.stride(), tensor.device)
    return address(tensor)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(_address(tensor))


def _integer(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())


# Checksums of the results of `_answers`, the same on every machine.
KNOWN_BITS = {
    "sums of squares of fp32": 475842458281872181,
    "adding up fp32": 274368220013254,
    "Adam on fp32": 2669305775994822,
    "sums of squares of bf16": 475873700525290283,
    "adding up bf16": 274371708230622,
    "Adam on bf16": 2669331624505084,
    "sums of squares of fp16": 475845983774163115,
    "adding up fp16": 274367775677244,
    "Adam on fp16": 2669324085914892,
}


def _answers(library: ctypes.CDLL) -> dict[str, int]:
    new = functools.partial(torch.arange, dtype=torch.float32, device="cpu")
    numbers = (new(1, 1109) * 0.37 - 171.0) * 2.0 ** (new(1, 1109) % 23 - 18)  # exact, or rounded once
    answers = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        gradient = numbers.to(dtype)
        main = numbers.flip(0).contiguous()
        accumulate(main, gradient, 0.375, library=library)
        squares = sums_of_squares([gradient[:700], gradient], library=library)
        answers[f"sums of squares of {name}"] = _bits(squares)
        answers[f"adding up {name}"] = _bits(main)
        answers[f"Adam on {name}"] = _adam_bits(numbers, gradient, library)
    return answers


def _adam_bits(numbers: Tensor, gradient: Tensor, library: ctypes.CDLL) -> int:
    bits = 0
    halves = torch.float16 if gradient.dtype == torch.float16 else torch.bfloat16
    for is_decoupled, is_fused, beta1, scale in ((True, False, 0.9, 96.0), (False, True, 0.4, 128.0)):
        item = AdamTensors(
            master=numbers.flip(0).contiguous(),
            gradient=gradient.clone(),
            exp_avg=numbers * 0.25,
            exp_avg_sq=numbers * numbers,
            step=torch.full((), 6.0, dtype=torch.float32, device="cpu"),
            half=torch.zeros_like(numbers, dtype=halves),
            settings=AdamSettings(
                learning_rate=0.01,
                beta1=beta1,
                beta2=0.95,
                epsilon=1e-8,
                weight_decay=0.1,
                is_decoupled=is_decoupled,
            ),
        )
        tensors = (item.master, item.gradient, item.exp_avg, item.exp_avg_sq, item.step, item.half)
        for found_inf in (0.0, 1.0):
            flags = (torch.full((), value, dtype=torch.float32, device="cpu") for value in (scale, found_inf))
            adam_step([item], *flags, clears_gradients=True, is_fused=is_fused, library=library)
        bits += sum(_bits(tensor) for tensor in tensors if tensor is not None)
    return bits


def _bits(tensor: Tensor) -> int:
    """A checksum that depends on every bit of a tensor and on its position."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    integers = tensor.reshape(-1).view(kinds[tensor.element_size()]).to(torch.int64)
    return int((integers * torch.arange(1, 2 * len(integers), 2, device="cpu")).sum())


LIBRARY = KernelLibrary(
    SOURCE,
    (),
    _answers,
    KNOWN_BITS,
    fallback="optimizer steps use several passes of torch, which is slower",
)
