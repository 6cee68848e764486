"""A GPU that is not there, for Triton: kernels are compiled for it and launched, and nothing runs.

Triton's launcher is the real one, with its C code, built against a `libcuda.so.1` that only records
(`stand_in_cuda.c`). Tensors are a CPU's. What is recorded of a launch is what a GPU's driver would get: the
compiled function, the grid, the stream, and the bytes of each parameter.

Not for a process that also uses a GPU: the library has the name of the real one.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from megalowbit.errors import UserError
from megalowbit.quantize import backends

SOURCE = Path(__file__).with_name("stand_in_cuda.c")
LIBRARY = "libcuda.so.1"
STREAM = 0x51
MOST_PARAMETERS = 64
SIZES = {
    "i1": 1,
    "i8": 1,
    "u1": 1,
    "u8": 1,
    "i16": 2,
    "u16": 2,
    "fp16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "fp32": 4,
}


class RecordedLaunch(ctypes.Structure):
    """As in `stand_in_cuda.c`."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("function", "stream", "shared_bytes", "count")),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64 * 3),
        ("parameters", ctypes.c_uint64 * MOST_PARAMETERS),
    ]


class DriverLaunch(NamedTuple):
    """A launch as the driver got it.

    Attributes:
        kernel: name of the kernel.
        function: number of the compiled function.
        grid: programs along three axes.
        block: threads along three axes.
        stream: handle.
        shared_bytes: of a program.
        parameters: bytes of each as a number, pointers too; without constants, and with the scratch pointers.
        is_pointer: of each parameter.
    """

    kernel: str
    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    stream: int
    shared_bytes: int
    parameters: tuple[int, ...]
    is_pointer: tuple[bool, ...]


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The built library, loaded under its name, so that Triton's code finds it."""
    if torch.cuda.is_available():
        raise UserError("a GPU is present: the stand-in is for machines without one")
    folder = tempfile.TemporaryDirectory(prefix="megalowbit-stand-in-")
    path = Path(folder.name, LIBRARY)
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", f"-I{nvidia.include_dirs[0]}"]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True)
    knobs.nvidia.libcuda_path = folder.name
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.stand_in_launches.restype = ctypes.POINTER(RecordedLaunch)
    library.stand_in_launched.restype = ctypes.c_uint64
    library.folder = folder  # kept as long as the library
    return library


class StandInDriver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's CUDA driver on the library that records."""

    def __init__(self) -> None:
        self.library = _library()
        self.utils = nvidia.CudaUtils()
        self.signatures: dict[int, tuple[str, ...]] = {}
        self.names: dict[int, str] = {}
        self._last: tuple[str, ...] = ()
        self._load = self.utils.load_binary
        self.launcher_cls = self._launcher
        self.get_current_stream = lambda _device: STREAM
        self.get_current_device = lambda: 0

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)

    def _launcher(self, source: Any, metadata: Any) -> Any:
        self._last = tuple(each for each in source.signature.values() if each != "constexpr")
        return nvidia.CudaLauncher(source, metadata)

    def load_binary(self, name: str, *others: Any) -> Any:
        """Triton's, and register the parameters of the function; a launcher is made before it is loaded."""
        found = self._load(name, *others)
        function, types = found[1], (*self._last, "*i8", "*i8")
        sizes = bytes(SIZES.get(each, 8) for each in types)
        self.library.stand_in_register(ctypes.c_uint64(function), len(sizes), sizes)
        self.signatures[function], self.names[function] = types, name
        return found

    def recorded(self) -> list[DriverLaunch]:
        """The launches since recording began."""
        count, made = self.library.stand_in_launched(), self.library.stand_in_launches()
        return [self._read(made[index]) for index in range(count)]

    def _read(self, launch: RecordedLaunch) -> DriverLaunch:
        types = self.signatures[launch.function]
        return DriverLaunch(
            self.names[launch.function],
            launch.function,
            tuple(launch.grid),
            tuple(launch.block),
            launch.stream,
            launch.shared_bytes,
            tuple(launch.parameters[: launch.count]),
            tuple(each.startswith("*") for each in types),
        )

    @contextmanager
    def recording(self) -> Iterator[list[DriverLaunch]]:
        """Fill the list with the launches inside when the block ends."""
        launches: list[DriverLaunch] = []
        self.library.stand_in_record(1)
        try:
            yield launches
        finally:
            launches += self.recorded()
            self.library.stand_in_record(0)


@contextmanager
def standing_in() -> Iterator[StandInDriver]:
    """Launch on the GPU that is not there: CPU tensors are quantised "by" Triton kernels, with no results."""
    if knobs.runtime.interpret:
        raise UserError("the kernels run in Triton's interpreter: unset TRITON_INTERPRET")
    former, stand_in = driver._active, StandInDriver()
    with ExitStack() as stack:
        stack.callback(driver.set_active, former)
        driver.set_active(stand_in)
        stack.enter_context(patch.object(stand_in.utils, "load_binary", stand_in.load_binary))
        stack.enter_context(patch.object(backends, "_backend_for", lambda *_: "triton"))
        yield stand_in
