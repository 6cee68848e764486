"""Whether work for a GPU is being captured in a CUDA graph, and in which one.

A graph repeats launches with the arguments that they were captured with, and the host's Python does not run
again. Code that decides something on the host for each step must therefore know about a capture: some of it
has another way, the rest refuses (`refuse`).

torch says that a stream is capturing, but not whether two calls belong to the same capture. CUDA's driver
numbers captures, each number once in a process. Only NVIDIA's driver is asked.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from megalowbit.errors import UserError

LIBRARY = "libcuda.so.1"
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    if device.index is None or torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def capture_of(device: torch.device) -> int | None:
    """The number of the capture that the device's current stream is part of; `None`: of none.

    Raises:
        UserError: the GPU is not NVIDIA's.
    """
    if not is_capturing(device):
        return None
    if torch.version.hip is not None:
        raise UserError(
            f"a HIP graph is captured on {device}: low-bit layers can be captured on NVIDIA GPUs only, "
            "run them outside of the graph"
        )
    return _number(_stream(device))


def refuse(device: torch.device, what: str, remedy: str) -> None:
    """Reject a capture that would repeat something that the host decides for each step.

    Raises:
        UserError: the device's current stream is being captured.
    """
    if is_capturing(device):
        raise UserError(f"a CUDA graph is captured on {device}, and would repeat {what}: {remedy}")


def _stream(device: torch.device) -> int:
    """The handle of the current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _number(stream: int) -> int:
    """The driver's number of the capture of a stream, by its handle."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error or status.value != _ACTIVE:
        raise RuntimeError(f"the capture of stream {stream:#x} failed (error {error}, state {status.value})")
    return number.value


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    """`cuStreamGetCaptureInfo_v2`, which the driver has had since CUDA 11.3 and keeps for older programs."""
    function = ctypes.CDLL(LIBRARY).cuStreamGetCaptureInfo_v2
    pointer = ctypes.c_void_p
    numbers = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)
    function.argtypes = [pointer, *numbers, pointer, pointer, pointer]
    function.restype = ctypes.c_int
    return function
