"""The fast path of CPUs: `kernels_cpu.c`, compiled on first use and called through ctypes.

It covers NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 of any strides,
bit for bit as `reference`; and two passes around a GEMM. One build (about two seconds) serves all shapes.

The library is kept in `$MEGALOWBIT_CACHE`, else `$XDG_CACHE_HOME/megalowbit`, else `~/.cache/megalowbit`. Its
name is made of sources, flags, compiler and CPU; it is written by atomic rename and ends in its own checksum.
A folder that others may write is passed over for a private temporary one: code is not loaded from there.
Before use the library is checked against known bits. `why_unavailable` tells what fails, with the remedy;
the caller then uses plain torch, and says so. Threads are those of torch: both ask for the same libgomp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.quantize.encoding import Encoded, Encoding
from megalowbit.quantize.philox import RandomKey

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = ("kernels_cpu_codes.h", "kernels_cpu_lanes.h")  # beside it
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Tried in this order: not every compiler knows the machine it runs on, or has OpenMP.
NATIVE, WIDE, THREADS = "-march=native", "-mprefer-vector-width=512", "-fopenmp"
EXTRA_FLAGS = ((NATIVE, WIDE, THREADS), (NATIVE, THREADS), (THREADS,), (NATIVE,), ())
COMPILE_TIMEOUT_S = 120.0  # for all attempts together
CHECKSUM_BYTES = 32  # of SHA-256, behind the library, where loaders do not look
SUM_ROWS = 256  # rows that `column_sums` adds one after the other
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
NO_KEY = RandomKey(0)
logger = logging.getLogger("megalowbit")


_FIELDS = (
    (ctypes.c_void_p, "x"),
    (ctypes.c_int64, "dtype rows cols row_stride col_stride block_rows block_cols scale_kind is_up"),
    (ctypes.c_int64, "is_stochastic four_over_six has_signs signs"),
    (ctypes.c_uint64, "key step"),
    (ctypes.c_double, "q_scalar"),
    (ctypes.c_void_p, "tensor_amax codes scales tensor_scale operand"),
    (ctypes.c_int64, "operand_dtype"),
    (ctypes.c_void_p, "counts error"),
    (ctypes.c_int64, "threads"),
)


class _Job(ctypes.Structure):
    """The `Job` of kernels_cpu.c, field by field."""

    _fields_ = [(name, kind) for kind, names in _FIELDS for name in names.split()]


class _UnavailableError(Exception):
    """Why there is no library; the message is a clause with the remedy."""


def is_available() -> bool:
    """Whether the library works here; the first call compiles it."""
    return _loaded()[0] is not None


def why_unavailable() -> str | None:
    """Why there is no library, with the remedy; `None` if there is one."""
    return _loaded()[1]


def supports(dtype: torch.dtype, encoding: Encoding, operand_dtype: torch.dtype | None = None) -> bool:
    """Whether `encode` takes this; what it does not take, `reference` does."""
    is_covered = dtype in DTYPES and encoding.scale_from == "amax"
    return is_covered and supports_decoding(encoding.format, operand_dtype or torch.bfloat16)


def supports_decoding(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `decode` takes this."""
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in (torch.bfloat16, torch.float32)


def encode(
    x: Tensor,
    encoding: Encoding,
    *,
    random_key: RandomKey = NO_KEY,
    signs: int | None = None,
    tensor_amax: Tensor | None = None,
    operand_dtype: torch.dtype | None = None,
    with_counts: bool = False,
    library: ctypes.CDLL | None = None,
) -> Encoded:
    """Quantise a matrix that `supports` agrees to; as `reference.encode`, which explains the arguments."""
    format, (rows, cols) = encoding.format, x.shape
    new = functools.partial(torch.empty, device="cpu")
    codes = new(format.codes_shape(rows, cols), dtype=torch.uint8)
    scales = new(format.scales_shape(rows, cols), dtype=SCALE_DTYPES[format.scale])
    tensor_scale = new((), dtype=torch.float32) if format.scale == "e4m3" else None
    operand = None if operand_dtype is None else new((rows, cols), dtype=operand_dtype)
    counts = new(8, dtype=torch.int64) if with_counts else None
    error = new(2, dtype=torch.float64) if with_counts else None
    x = x.resolve_neg()
    amax = None if tensor_amax is None else tensor_amax.to(torch.float32)
    job = _job(
        x,
        operand,
        format,
        codes=_address(codes),
        scales=_address(scales),
        is_up=encoding.scale_rounding == "up",
        is_stochastic=encoding.is_stochastic,
        four_over_six=encoding.four_over_six,
        has_signs=signs is not None,
        signs=signs or 0,
        key=random_key.key,  # ctypes takes both modulo 2⁶⁴
        step=random_key.step,
        q_scalar=encoding.q_scalar,
        tensor_amax=_address(amax),
        tensor_scale=_address(tensor_scale),
        counts=_address(counts),
        error=_address(error),
    )
    if (library or _library()).megalowbit_encode(ctypes.byref(job)):
        raise MemoryError(f"no memory left to count a matrix of {rows} × {cols}")
    return Encoded(codes, scales, tensor_scale, operand, counts, error)


def decode(
    codes: Tensor,
    scales: Tensor,
    format: BlockFormat,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> Tensor:
    """Codes × block scale; as `reference.decode`."""
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device="cpu")
    codes, scales = codes.contiguous(), scales.contiguous()
    job = _job(out, out, format, codes=_address(codes), scales=_address(scales))
    job.rows, job.cols = rows, cols
    _library().megalowbit_decode(ctypes.byref(job), ctypes.c_int64(transpose))
    return out


def scale_and_bias(product: Tensor, scale: float, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write cast(product · scale + bias) to `out` and return it; each operation is rounded to fp32.

    Args:
        product: fp32, bf16 or fp16 (m, n).
        scale: rounded to fp32.
        bias: floating (n,), or `None`.
        out: fp32, bf16 or fp16 (m, n), the last stride 1; `product` itself, or memory apart from it.
    """
    assert product.shape == out.shape, (product.shape, out.shape)
    assert out.stride(1) == 1 or out.shape[1] <= 1, out.stride()
    product = product if product.stride(1) == 1 else product.contiguous()
    if bias is not None:
        assert bias.shape == out.shape[1:], (bias.shape, out.shape)
        bias = bias.detach().to(torch.float32).contiguous()
    arguments = ctypes.c_float(scale), ctypes.c_void_p(_address(bias)), ctypes.c_int64(out.stride(0))
    _library().megalowbit_scale_and_bias(ctypes.byref(_job(product, out)), *arguments)
    return out


def column_sums(matrix: Tensor) -> Tensor:
    """Sums over the rows of an fp32, bf16 or fp16 matrix (m, n): fp32 (n,), in an order set by m alone."""
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, cols = matrix.shape
    out = torch.empty(cols, dtype=torch.float32, device="cpu")
    partial = torch.empty(-(-rows // SUM_ROWS), cols, dtype=torch.float32, device="cpu")
    arguments = ctypes.c_int64(SUM_ROWS), ctypes.c_void_p(_address(partial))
    _library().megalowbit_column_sums(ctypes.byref(_job(matrix, out)), *arguments)
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _job(x: Tensor, out: Tensor | None, format: BlockFormat = NVFP4, **fields: Any) -> _Job:
    """What all calls have in common; the tensors must outlive the call."""
    assert format.block is not None
    return _Job(
        x=x.data_ptr(),
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        cols=x.shape[1],
        row_stride=x.stride(0),
        col_stride=1 if x.shape[1] == 1 else x.stride(1),  # of a single column it means nothing
        operand=_address(out),
        operand_dtype=0 if out is None else DTYPES[out.dtype],
        block_rows=format.block[0],
        block_cols=format.block[1],
        scale_kind=format.scale == "e8m0",
        threads=torch.get_num_threads(),
        **fields,
    )


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason."""
    try:
        library = _find_or_build()
        _check_known_bits(library)
    except (_UnavailableError, OSError) as error:  # OSError: there is no place for temporary files
        return None, str(error)  # `backends` warns
    if not library.megalowbit_has_threads():
        logger.warning("the CPU kernel was compiled without OpenMP and uses one thread: install libgomp")
    return library, None


def _find_or_build() -> ctypes.CDLL:
    """Load the cached library, or build it, in a private folder if need be."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    compiler = _compiler()
    version = _run([*compiler, "--version"], deadline)
    settings = repr((FLAGS, EXTRA_FLAGS, compiler, version, platform.machine(), _cpu())).encode()
    sources = [SOURCE.read_bytes(), *(SOURCE.with_name(header).read_bytes() for header in HEADERS)]
    name = f"kernels_cpu-{hashlib.sha256(b''.join(sources) + settings).hexdigest()[:24]}.so"
    folder = _cache_folder()
    if folder is not None:
        kept = _load(folder / name) or _build(compiler, folder, name, deadline)
        if kept is not None:
            return kept
    with tempfile.TemporaryDirectory(
        prefix="megalowbit-"
    ) as private:  # a loaded library needs its file no more
        library = _build(compiler, Path(private), name, deadline)
    if library is None:
        raise _UnavailableError("the compiled library does not load: set MEGALOWBIT_CACHE to another disk")
    return library


def _build(compiler: list[str], folder: Path, name: str, deadline: float) -> ctypes.CDLL | None:
    """Compile, then rename, so that others see a whole file; `None` if the folder takes or loads no files."""
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as temporary:  # ours alone
            path = Path(temporary) / name
            _compile(compiler, path, deadline)
            content = path.read_bytes()
            path.write_bytes(content + hashlib.sha256(content).digest())
            path.chmod(0o700)
            path.replace(folder / name)
        return _load(folder / name)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", folder, error)
        return None


def _compile(compiler: list[str], output: Path, deadline: float) -> None:
    for extra in EXTRA_FLAGS:
        try:
            _run([*compiler, *FLAGS, *extra, str(SOURCE), "-o", str(output)], deadline)
            return
        except _UnavailableError:
            if extra == EXTRA_FLAGS[-1] or time.monotonic() >= deadline:
                raise


def _load(path: Path) -> ctypes.CDLL | None:
    """The library, or `None` where there is none, or it is damaged, somebody else's or not to be executed."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            return None
        content = path.read_bytes()
        if hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() != content[-CHECKSUM_BYTES:]:
            return None  # half a library may crash the process on loading, so look first
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & stat.S_IWOTH


def _cache_folder() -> Path | None:
    """The folder for libraries, made if need be; `None` (and a warning) if it cannot be had or trusted."""
    named, base = os.environ.get("MEGALOWBIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "megalowbit"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        is_trusted = _is_ours(folder.stat())
        for parent in folder.parents:  # whoever may rename a folder on the way may put another in its place
            mode = parent.stat().st_mode
            is_trusted = is_trusted and (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX))
        if not is_trusted:
            raise PermissionError(f"others may write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.warning("no cache for compiled kernels (%s): set MEGALOWBIT_CACHE to a folder of yours", error)
        return None


def _compiler() -> list[str]:
    found = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
    command = shlex.split(os.environ.get("CC", "")) or list(found)[:1]
    if not command:
        raise _UnavailableError("no C compiler found: install gcc, or set CC")
    return command


def _cpu() -> list[str]:
    """What distinguishes this CPU from others of its architecture that share the folder."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else [platform.processor()]
    changing = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "physical id", "bogomips")
    return sorted({line for line in lines if not line.startswith(changing)})


def _run(command: list[str], deadline: float) -> str:
    """What a compiler prints; an error if it cannot be started, fails, or is not done by the deadline."""
    env = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:  # a pipe would stay open with a hanging child of the compiler
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
            )
        except OSError as error:
            raise _UnavailableError(f"{command[0]} cannot be run ({error.strerror}): set CC") from error
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise _UnavailableError(f"{command[0]} took over {COMPILE_TIMEOUT_S:g} s: set CC") from error
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
        first = next((line for line in lines if "error" in line.lower()), lines[0])
        raise _UnavailableError(f"{command[0]} failed ({first}): install gcc 9 or newer, or set CC")
    return text


# CRC-32 of what `_check_known_bits` makes of its matrix.
_KNOWN_BITS: tuple[tuple[Encoding, int | None, int], ...] = (
    (Encoding(format=NVFP4), None, 0x6918A2CC),
    (Encoding(format=NVFP4, is_stochastic=True, scale_rounding="up"), 0x5AC3, 0xE920FEF3),
    (Encoding(format=NVFP4, four_over_six=True), None, 0x4533972A),
    (Encoding(format=NVFP4_TILED, q_scalar=0.8), None, 0x55CD40E1),
    (Encoding(format=MXFP4, scale_rounding="down"), None, 0x9080EA9F),
    (Encoding(format=MXFP4, is_stochastic=True, scale_rounding="up"), 0x1234, 0x54ECB4B3),
)


@_disable_current_modes()
def _check_known_bits(library: ctypes.CDLL) -> None:
    """Refuse a library that a compiler has got wrong."""
    run = functools.partial(encode, operand_dtype=torch.bfloat16, with_counts=True, library=library)
    for encoding, signs, expected in _KNOWN_BITS:
        got = run(_check_matrix(), encoding, random_key=RandomKey(2**63 + 5, 2**33 + 7), signs=signs)
        if _checksum(got) != expected:
            raise _UnavailableError(f"the compiled library fails its self-check ({encoding}): set CC")


def _check_matrix() -> Tensor:
    """fp32 (20, 96), of many magnitudes, with zeros of both signs; columns contiguous."""
    mantissas = [(i * 2654435761 >> 7) % 8191 - 4095 for i in range(20 * 96)]
    numbers = [number * 2.0 ** (i * i // 7 % 29 - 20) * (i % 11 > 0) for i, number in enumerate(mantissas)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").view(96, 20).t()


def _checksum(encoded: Encoded) -> int:
    parts = (encoded.codes, encoded.scales, encoded.tensor_scale, encoded.operand, encoded.counts)
    raw = [part.reshape(-1).view(torch.uint8).tolist() for part in parts if part is not None]
    return zlib.crc32(b"".join(map(bytes, raw)))
