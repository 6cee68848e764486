"""The dtype in which bf16 models multiply on a CPU: bf16, or fp32 where that is faster.

CPUs without bf16 instructions emulate bf16 GEMMs. With AVX-512, fp32 takes about half the time there; with
AVX2 alone, a tenth. Operands have the same numbers in both dtypes (fp32 or mixed ones of low-bit layers are
rounded to bf16), sums are fp32 in both, and the result is rounded to bf16. But results differ in the last
digit, so a run must not depend on how a measurement turns out:

- `MEGALOWBIT_CPU_GEMM` (`bf16`, `fp32`) sets the dtype.
- Otherwise it is measured once a machine and logged. The result is kept beside the compiled kernels, for this
  CPU and this version of torch.
- An engine uses rank 0's choice on all ranks. Its checkpoints record the choice, and a resumed run uses it.

A process has one choice, for all its models. fp32 is chosen only if it saves 15 % of the time of the GEMM,
because its operands and products have twice the bytes.

Low-bit layers always follow the choice. Torch multiplies the rest of a model: its head, attention, layers
that are not converted. `let_torch_follow` lets torch's operators follow the choice too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.c_library import cache_folder
from megalowbit.durable_files import atomic_file
from megalowbit.errors import unknown_name
from megalowbit.json_text import read_json_object
from megalowbit.processor import cpu_lines

VARIABLE = "MEGALOWBIT_CPU_GEMM"
DTYPES = MappingProxyType({"bf16": torch.bfloat16, "fp32": torch.float32})
UNRECORDED = "bf16"  # the dtype of checkpoints that record none
WORTHWHILE = 0.85  # fp32 is chosen below this share of the time of bf16
SIZES = (512, 768, 768)  # of the measured GEMM: about 5 ms on one core
ROUNDS = 7

# Operators of torch that multiply on a CPU: how many leading arguments must be bf16, and which of them has
# the rows of the product; the next one has its columns. `nn.Linear`, `torch.matmul` and their gradients
# consist of the first four operators, `scaled_dot_product_attention` and its gradient of the last two.
OPERATORS = MappingProxyType(
    {
        "mm": (2, 0),
        "addmm": (3, 1),
        "bmm": (2, 0),
        "baddbmm": (3, 1),
        "_scaled_dot_product_flash_attention_for_cpu": (3, 0),
        "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 0),
    }
)
# With fewer, as when text is generated, copying the other operand takes longer than the product.
FEWEST_ROWS_AND_COLUMNS = 8
logger = logging.getLogger("megalowbit")


@dataclass
class _Choice:
    name: str | None = None
    torch_follows: bool = False
    library: Library | None = field(default=None, repr=False)  # what replaces torch's operators


@functools.lru_cache(maxsize=1)
def _of_process() -> _Choice:
    """The choice in use: deliberately state of the process, like the backend of a device."""
    return _Choice()


def cpu_gemm() -> str:
    """The choice in use, `"bf16"` or `"fp32"`; measures it if nothing says it yet.

    Raises:
        UserError: `MEGALOWBIT_CPU_GEMM` is neither.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return _checked(VARIABLE, named)
    choice = _of_process()
    if choice.name is None:
        choice.name = _of_machine()
    return choice.name


def use_cpu_gemm(name: str) -> None:
    """Use rank 0's choice, or that of a checkpoint; `MEGALOWBIT_CPU_GEMM` has priority, with a warning."""
    _checked("recorded dtype of products", name)
    named = os.environ.get(VARIABLE)
    if named and named != name:
        logger.warning(
            "%s=%s: this run multiplied in %s so far, so its losses change in the last digits",
            VARIABLE,
            named,
            name,
        )
    choice = _of_process()
    choice.name = name
    if choice.torch_follows:
        let_torch_follow()


def let_torch_follow() -> None:
    """Let torch's operators follow the choice of this process, too, and later changes of it.

    Only the operators in `OPERATORS`: not convolutions, products with `out=` or in place, and those of models
    that inductor compiles.
    """
    choice = _of_process()
    choice.torch_follows = True
    if cpu_gemm() == "fp32" and choice.library is None:
        choice.library = _replaced_operators()


def _replaced_operators() -> Library:
    """Let torch multiply bf16 operands in fp32 on a CPU, for as long as that is the choice of the process.

    Operators are replaced below autograd, which saves the bf16 operands as before. Only one product at a time
    has fp32 copies of its operands.
    """
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every replaced operator
        for name in OPERATORS:
            library.impl(name, _following_choice(name), "CPU", with_keyset=True)
    return library


def _following_choice(name: str) -> Callable[..., Any]:
    compute = _attention(name) if "attention" in name else _product(name)
    leading, rows = OPERATORS[name]

    def multiply(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        is_bf16 = all(each.dtype == torch.bfloat16 for each in arguments[:leading])
        if not is_bf16 or not _is_large(*arguments[rows : rows + 2]) or cpu_gemm() != "fp32":
            return compute(keys, *arguments, **options)
        wide_options = {key: _wide(value) for key, value in options.items()}
        result = compute(keys, *map(_wide, arguments), **wide_options)
        if isinstance(result, Tensor):
            return result.bfloat16()
        if name.endswith("_backward"):
            return tuple(gradient.bfloat16() for gradient in result)
        attention, logsumexp = result  # logsumexp is fp32 in both
        return attention.bfloat16(), logsumexp

    return multiply


def _product(name: str) -> Callable[..., Tensor]:
    """The operator that writes into a given tensor; it is not replaced, and other threads run meanwhile."""
    operator = getattr(torch.ops.aten, name).out
    _, rows = OPERATORS[name]

    def compute(_keys: torch.DispatchKeySet, *arguments: Tensor, **options: Any) -> Tensor:
        return cast(Tensor, operator(*arguments, **options, out=arguments[rows].new_empty(0)))

    return compute


def _attention(name: str) -> Callable[..., Any]:
    """The replaced operator itself, as no other one computes the same: it keeps other threads waiting."""
    return get_kernel(f"aten::{name}", "CPU").call_boxed


def _is_large(left: Tensor, right: Tensor) -> bool:
    if left.dim() < 2 or right.dim() < 2:  # an error, which torch reports
        return False
    return min(left.shape[-2], right.shape[-1]) >= FEWEST_ROWS_AND_COLUMNS


def _wide(value: Any) -> Any:
    """A bf16 tensor in fp32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _checked(what: str, name: str) -> str:
    if name not in DTYPES:
        raise unknown_name(what, name, tuple(DTYPES))
    return name


def _of_machine() -> str:
    """The kept choice of this machine; without one, measure and keep it."""
    folder = cache_folder()
    key = hashlib.sha256(repr((cpu_lines(), torch.__version__)).encode()).hexdigest()[:24]
    path = None if folder is None else folder / f"cpu-gemm-{key}.json"
    kept = None if path is None else _read(path)
    if kept is not None:
        return kept
    times = measure()
    name = "fp32" if times["fp32"] < WORTHWHILE * times["bf16"] else "bf16"
    logger.info(
        "bf16 models multiply in %s on this CPU: a GEMM takes %.3g ms in bf16 and %.3g ms in fp32 "
        "(measured once; %s=bf16 or fp32 sets it)",
        name,
        times["bf16"],
        times["fp32"],
        VARIABLE,
    )
    if path is not None:
        try:
            with atomic_file(path) as file:
                json.dump({"gemm": name, "milliseconds": times}, file)
        except OSError as error:
            logger.warning("%s cannot be written (%s): measured again next time", path, error.strerror)
    return name


def _read(path: Path) -> str | None:
    """The choice in a file; `None` if there is no file, or it is damaged."""
    if not path.exists():
        return None
    try:
        name = read_json_object(path).get("gemm")
    except (ValueError, OSError):
        return None
    return name if isinstance(name, str) and name in DTYPES else None


def measure() -> dict[str, float]:
    """Milliseconds of a GEMM in each dtype: the fastest of interleaved rounds, without random numbers."""
    rows, inner, cols = SIZES
    times = dict.fromkeys(DTYPES, float("inf"))
    with _disable_current_modes(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        operands = {
            name: (
                torch.full((rows, inner), 0.5, dtype=dtype, device="cpu"),
                torch.full((cols, inner), 0.5, dtype=dtype, device="cpu").t(),
            )
            for name, dtype in DTYPES.items()
        }
        for _ in range(ROUNDS):
            for name, (a, b) in operands.items():
                start = time.perf_counter()
                torch.mm(a, b)
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    return times
