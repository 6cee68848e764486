"""Arguments of the Triton kernels, shared by all launchers: matrices, tiles, counts, and the launch.

bf16 is passed to the kernels as int16 bits, because shifting those is exact in Triton's interpreter too. A
program processes 2,048 to 8,192 elements, so each of its 128 threads has whole groups of 16. For column-major
matrices its tile is tall.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalowbit import cuda_graphs
from megalowbit.formats.block_format import GROUP, BlockFormat
from megalowbit.quantize.encoding import (
    COUNT_NAMES,
    ERROR_NAMES,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    Encoding,
)
from megalowbit.quantize.philox import WORD, RandomKey, StoredKey, signed
from megalowbit.quantize.triton.fixed_arguments import FixedArguments, as_stored
from megalowbit.quantize.triton.step_counters import CountedStep, counter_at

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Partial = tuple[Tensor | None, Tensor | None]  # counts and error of each program
TILE = (16, 16)  # rows and 16-groups of a program, for row-major matrices
NOTHING_DRAWN: Mapping[str, Any] = MappingProxyType({"key_low": 0, "key_high": 0, "step": None, "lag": 0})
COUNTED_ELEMENTS = 2048  # most elements of a program that counts


def programs_of(width: int, rows: int, tile_width: int, tile_rows: int) -> int:
    """Number of tiles that cover a matrix."""
    return -(-width // tile_width) * -(-rows // tile_rows)


def reading(request: EncodeRequest, tall_rows: int) -> tuple[dict[str, Any], int]:
    """Common arguments of all encoding kernels (matrix, strides, blocks, tile), and the number of programs.

    For column-major matrices, a tile is one block wide and has `tall_rows` rows. With counts, a tile has only
    `COUNTED_ELEMENTS`: with more, a thread would need more registers than there are.
    """
    x, signs = request.x.resolve_neg(), request.signs
    source, programs = reading_of(
        x.shape, x.stride(), x.dtype, request.encoding, signs is not None, request.with_counts, tall_rows
    )
    return {**source, "x": as_stored(x), "signs": signs or 0}, programs


@functools.lru_cache(maxsize=4096)
def reading_of(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    encoding: Encoding,
    has_signs: bool,
    with_counts: bool,
    tall_rows: int,
) -> tuple[dict[str, Any], int]:
    """What `reading` finds, without the tensor; a layer asks the same at each step."""
    format, (rows, cols) = encoding.format, shape
    block_rows, block_cols = format.block or (1, GROUP)
    is_row_major = strides[1] <= strides[0]
    tile_rows, tile_groups = TILE if is_row_major else (tall_rows, block_cols // GROUP)
    if with_counts and is_row_major:
        tile_groups = COUNTED_ELEMENTS // (tile_rows * GROUP)
    elif with_counts:
        tile_rows = min(tile_rows, COUNTED_ELEMENTS // block_cols)
    return {
        "rows": rows,
        "cols": cols,
        "row_stride": strides[0],
        "col_stride": strides[1],
        "q_scalar": encoding.q_scalar,
        "DTYPE": DTYPES[dtype],
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "HAS_SIGNS": has_signs,
        "TILE_ROWS": tile_rows,
        "TILE_GROUPS": tile_groups,
    }, programs_of(format.padded(rows, cols)[1] // GROUP, rows, tile_groups, tile_rows)


def rounding(request: EncodeRequest, encoded: Encoded, partial: Partial) -> dict[str, Any]:
    """Additional arguments of the kernels that write codes: rounding and results."""
    encoding, operand, drawn = request.encoding, encoded.operand, NOTHING_DRAWN
    if encoding.is_stochastic:
        drawn = random_arguments(request.random_key, request.x.device)
    return {
        **drawn,
        "codes": encoded.codes.view(torch.int32),
        "operand": None if operand is None else as_stored(operand),
        "counts": partial[0],
        "errors": partial[1],
        "IS_STOCHASTIC": encoding.is_stochastic,
        "OPERAND": "none" if operand is None else DTYPES[operand.dtype],
        "HAS_COUNTS": request.with_counts,
    }


def unpacking(
    codes: Tensor, rows: int, transpose: bool, tile: tuple[int, int], tall_tile: tuple[int, int]
) -> tuple[dict[str, Any], int]:
    """Common arguments of all decoding kernels (codes as words, tile), and the number of programs.

    A tile is (rows, words) of a program; `tall_tile` is used for a transposed result.
    """
    words = as_words(codes)
    tile_rows, tile_words = tall_tile if transpose else tile
    return {
        "codes": words,
        "rows": rows,
        "words": words.shape[1],
        "TILE_ROWS": tile_rows,
        "TILE_WORDS": tile_words,
    }, programs_of(words.shape[1], rows, tile_words, tile_rows)


def decode_with(
    kernel: Any,
    request: DecodeRequest,
    tile: tuple[int, int],
    tall_tile: tuple[int, int],
    tensors: dict[str, Tensor | None],
    **others: Any,
) -> Tensor:
    """Codes × block scale by a kernel of one of the families; as `reference.decode`.

    The kernel takes `tensors` and, as constants or numbers, `others`.
    """
    out, words = request.new_matrix(), as_words(request.codes)
    fixed = _decoding(request.without_tensors, words.shape[1], tile, tall_tile, tuple(others.items()))
    launch_fixed(kernel, out.device, fixed, codes=words, out=out, **tensors)
    return out


@functools.lru_cache(maxsize=4096)
def _decoding(
    matrix: tuple[BlockFormat, int, int, torch.dtype, bool],
    words: int,
    tile: tuple[int, int],
    tall_tile: tuple[int, int],
    others: tuple[tuple[str, Any], ...],
) -> FixedArguments:
    """What `decode_with` launches besides tensors, for `DecodeRequest.without_tensors`."""
    format, rows, cols, dtype, transpose = matrix
    tile_rows, tile_words = tall_tile if transpose else tile
    block_rows, block_cols = format.block or (1, GROUP)
    values = {
        "rows": rows,
        "words": words,
        "cols": cols,
        "row_stride": 1 if transpose else cols,
        "col_stride": rows if transpose else 1,
        "TILE_ROWS": tile_rows,
        "TILE_WORDS": tile_words,
        "DTYPE": DTYPES[dtype],
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        **dict(others),
    }
    return FixedArguments(values, programs_of(words, rows, tile_words, tile_rows))


def writing(out: Tensor, transpose: bool) -> dict[str, Any]:
    """The matrix that a decoding kernel writes, and its strides."""
    row_stride, col_stride = (1, out.shape[1]) if transpose else (out.shape[1], 1)
    return {"out": as_stored(out), "row_stride": row_stride, "col_stride": col_stride}


def as_words(codes: Tensor) -> Tensor:
    """Codes as passed to decoding kernels: int32 (rows, words per row)."""
    codes = codes.contiguous()
    if codes.data_ptr() % 4:  # an unaligned part of a larger buffer
        codes = codes.clone()
    return codes.view(torch.int32)


def random_arguments(random_key: RandomKey | StoredKey, device: torch.device) -> Mapping[str, Any]:
    """The key as two signed 32-bit numbers, and the micro-batch as a tensor on the device and a difference.

    A key that is stored on the device is in that tensor too.

    A fixed type avoids recompilation. A layer's key is the same at each step, and so is the difference. No
    argument of a layer's kernels changes from step to step, except addresses.

    Raises:
        UserError: a CUDA graph is being captured, and the micro-batch is only a number, so replays would
            repeat it.
    """
    if isinstance(random_key, StoredKey):
        return {**NOTHING_DRAWN, "step": random_key.memory}
    key, step = random_key
    if isinstance(step, CountedStep):
        counter, lag, change = step.counters.at(step, device)
        key ^= change
    else:
        cuda_graphs.refuse(device, "the random numbers of this key", "take keys from a RandomStream")
        counter, lag = counter_at(signed(step), device), 0
    return {"key_low": _signed(key), "key_high": _signed(key >> 32), "step": counter, "lag": lag}


def _signed(word: int) -> int:
    return (word & WORD) - (((word & WORD) >> 31) << 32)


def partial_counts(request: EncodeRequest, programs: int) -> Partial:
    """Uninitialised counts and errors of each program, if requested."""
    if not request.with_counts:
        return None, None
    device = request.x.device
    return (
        torch.empty(programs, len(COUNT_NAMES), dtype=torch.int32, device=device),
        torch.empty(programs, len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def with_counts(encoded: Encoded, partial: Partial) -> Encoded:
    """The result with the counts summed over programs."""
    counts, error = partial
    if counts is None or error is None:
        return encoded
    return encoded._replace(counts=counts.sum(0, dtype=torch.int64), error=error.sum(0))


@functools.lru_cache(maxsize=1)
def is_interpreted() -> bool:
    """Whether Triton read the variable when the kernels were defined; a later change of it has no effect."""
    from triton.runtime.interpreter import InterpretedFunction

    from megalowbit.quantize.triton.fp4 import encode_kernel

    return isinstance(encode_kernel, InterpretedFunction)


def launch(kernel: Any, programs: int, device: torch.device, **arguments: Any) -> None:
    """Run a kernel on the tensors' device, without contraction to fused multiply-add."""
    _plans().launch(kernel, programs, device, arguments)


def launch_fixed(kernel: Any, device: torch.device, fixed: FixedArguments, **given: Any) -> None:
    """As `launch`, with arguments that are kept, and tensors and numbers that are not.

    One `fixed` always comes with the same kernel, dtypes and order of names.
    """
    _plans().launch_fixed(kernel, device, fixed, given)


@functools.lru_cache(maxsize=1)
def _plans() -> Any:
    from megalowbit.quantize.triton import launch_plans  # imports Triton

    return launch_plans
