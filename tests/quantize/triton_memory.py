"""Check every address that the Triton kernels touch: `python triton_memory.py cpu small`.

Triton's interpreter runs one program after the other and reads and writes anything, so a missing mask or two
programs that write one address go unnoticed there. Here the interpreter's loads and stores are recorded.
Every tensor of a launch is a slice of a larger buffer of canaries: whatever is read from outside is NaN, and
whatever is written there is found, also if it did not go through the recorded functions.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import sys
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder
from triton_comparison import bits

from benchmarks.kernels import launches
from benchmarks.kernels.launches import FactorRequest, Fp8Request, ProductRequest, ResidualRequest
from megalowbit.formats.block_format import SCALE_DTYPES
from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest
from megalowbit.quantize.triton import launch_fp4

CANARY = 0xFF  # of it every floating-point number is NaN
MARGIN = 4096  # bytes before and after a tensor


class Access(NamedTuple):
    kind: str  # "load", "store" or "atomic"
    program: int
    addresses: np.ndarray  # uint64, of the lanes that are not masked
    size: int  # bytes of each


@contextmanager
def recording():
    """Every access of the programs that run inside."""
    accesses = []

    def recorded(kind, function, pointers, mask):
        def run(*arguments):
            where, is_on = arguments[pointers], arguments[mask]
            addresses = np.broadcast_to(where.data, is_on.data.shape)[is_on.data].ravel()
            size = max(1, where.get_element_ty().primitive_bitwidth // 8)
            accesses.append(Access(kind, interpreter_builder.grid_idx[0], addresses, size))
            return function(*arguments)

        return run

    builder = interpreter_builder  # plain loads and stores call the masked ones
    with (
        mock.patch.object(builder, "create_masked_load", recorded("load", builder.create_masked_load, 0, 1)),
        mock.patch.object(
            builder, "create_masked_store", recorded("store", builder.create_masked_store, 0, 2)
        ),
        mock.patch.object(builder, "create_atomic_rmw", recorded("atomic", builder.create_atomic_rmw, 1, 3)),
    ):
        yield accesses


def elements(tensor):
    """Addresses of a tensor's elements."""
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride
    return (tensor.data_ptr() + offsets.ravel() * tensor.itemsize).astype(np.uint64)


def check_bounds(accesses, tensors):
    """Each access is one element of a tensor of the launch."""
    for access in accesses:
        fitting = [elements(each) for each in tensors.values() if each.itemsize == access.size]
        outside = np.setdiff1d(access.addresses, np.concatenate(fitting)) if fitting else access.addresses
        assert not outside.size, (
            f"program {access.program}: {access.kind} of {outside.size} addresses outside"
        )


def check_races(accesses):
    """An address that is stored to is touched once; one that is changed atomically by nothing else."""

    def touched(kind):
        found = [each.addresses for each in accesses if each.kind == kind]
        return np.concatenate(found) if found else np.zeros(0, np.uint64)

    stored, loaded, atomic = touched("store"), touched("load"), touched("atomic")
    values, counts = np.unique(stored, return_counts=True)
    assert (counts == 1).all(), f"{(counts > 1).sum()} addresses are stored to twice"
    for name, others in (("loaded", loaded), ("changed atomically", atomic)):
        both = np.intersect1d(values, others)
        assert not both.size, f"{both.size} addresses are stored to and {name}"
    both = np.intersect1d(atomic, loaded)
    assert not both.size, f"{both.size} addresses are changed atomically and loaded"


def guarded(tensor):
    """A copy with the same strides inside a buffer of canaries, and the buffer."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    buffer = torch.full((2 * MARGIN + span * tensor.itemsize,), CANARY, dtype=torch.uint8)
    inside = buffer[MARGIN : MARGIN + span * tensor.itemsize].view(tensor.dtype)
    copy = inside.as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return copy, buffer


def check_canaries(name, tensor, buffer):
    """Nothing but the tensor's own bytes has been written."""
    is_own = np.zeros(len(buffer), dtype=bool)
    starts = elements(tensor) - np.uint64(buffer.data_ptr())
    for byte in range(tensor.itemsize):
        is_own[starts + np.uint64(byte)] = True
    assert (buffer.numpy()[~is_own] == CANARY).all(), f"{name}: bytes outside of the tensor are written"


def launch_checked(kernel, programs, device, **arguments):
    """Launch on guarded copies, check all accesses, and copy back."""
    originals = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    copies = {name: guarded(value) for name, value in originals.items()}
    tensors = {name: copy for name, (copy, _) in copies.items()}
    with recording() as accesses:
        kernel[(programs,)](**{**arguments, **tensors})
    assert {each.program for each in accesses} == set(range(programs))
    check_bounds(accesses, tensors)
    check_races(accesses)
    for name, (copy, buffer) in copies.items():
        check_canaries(name, copy, buffer)
        originals[name].copy_(copy)
    launched.append(launches.name_of(kernel))


def spoil_new_tensors():
    """Fill what `torch.empty` returns with canaries: a result that a kernel does not write differs."""
    empty = torch.empty

    def spoiled(*shape, **options):
        found = empty(*shape, **options)
        found.view(-1).view(torch.uint8).fill_(CANARY)
        return found

    return mock.patch.object(torch, "empty", spoiled)


def check_requests(rows, cols, only):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    requests = {
        **launches.encode_requests(x),
        **launches.decode_requests(x),
        **launches.product_requests(x),
        **launches.factor_requests(x),
    }
    for label, request in requests.items():
        if only not in label:
            continue
        expected = None
        if isinstance(request, EncodeRequest) and request.fp8_dtype is not None:
            expected = backends.encode(request)  # by C or plain torch
        elif isinstance(request, EncodeRequest):
            expected = reference.encode(request)
        elif isinstance(request, FactorRequest | ResidualRequest):
            expected = launches.run(request)  # by the same kernels, unguarded
        elif not isinstance(request, Fp8Request | ProductRequest):
            expected = reference.decode(request)
        try:
            with launches.launching(launch_checked), spoil_new_tensors():
                result = launches.run(request)
            if expected is not None:
                check_equal(result, expected)
        except AssertionError as error:
            raise AssertionError(f"{label}, {rows} × {cols}: {error}") from error


def check_equal(result, expected):
    """Bits of all results; the error is a sum in another order."""
    if isinstance(result, torch.Tensor):
        assert torch.equal(bits(result), bits(expected)), "another matrix than the reference's"
        return
    if not isinstance(result, Encoded):
        for one, other in zip(result, expected, strict=True):
            check_equal(one, other)
        return
    for field in ("codes", "scales", "tensor_scale", "operand", "counts", "exponents"):
        ours, theirs = getattr(result, field), getattr(expected, field)
        assert (ours is None) == (theirs is None), field
        assert ours is None or torch.equal(bits(ours), bits(theirs)), f"other {field} than the reference's"
    if expected.fp8 is not None:
        assert torch.equal(bits(result.fp8.numbers), bits(expected.fp8.numbers)), "another FP8 operand"
        assert torch.equal(result.fp8.scale, expected.fp8.scale), "another scale of the FP8 operand"
    if expected.error is not None:
        torch.testing.assert_close(result.error, expected.error, rtol=1e-6, atol=0)


@triton.jit
def unmasked_kernel(x, out, cols, TILE: tl.constexpr):
    col = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + col, tl.load(x + col), mask=col < cols)


@triton.jit
def overwriting_kernel(x, out, cols, TILE: tl.constexpr):
    col = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + col, tl.load(x + col, mask=col < cols, other=0))


@triton.jit
def racing_kernel(x, out, cols, TILE: tl.constexpr):
    col = tl.program_id(0) * (TILE - 1) + tl.arange(0, TILE)
    tl.store(out + col, tl.load(x + col, mask=col < cols, other=0), mask=col < cols)


@triton.jit
def reading_back_kernel(x, out, cols, TILE: tl.constexpr):
    col = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + col, tl.load(x + col, mask=col < cols, other=0), mask=col < cols)
    tl.store(x, tl.load(out + cols - 1))


PLANTED = {
    unmasked_kernel: "program 1: load of 6 addresses outside",
    overwriting_kernel: "program 1: store of 6 addresses outside",
    racing_kernel: "1 addresses are stored to twice",
    reading_back_kernel: "addresses are stored to",
}


def check_planted():
    """The checks find what they are for."""
    for kernel, complaint in PLANTED.items():
        x, out = torch.ones(10), torch.zeros(10)
        with pytest.raises(AssertionError, match=complaint):
            launch_checked(kernel, 2, x.device, x=x, out=out, cols=10, TILE=8)
    copy, buffer = guarded(torch.zeros(3, 4).t())
    check_canaries("x", copy, buffer)
    buffer[MARGIN + 48] = 0
    with pytest.raises(AssertionError, match="bytes outside of the tensor"):
        check_canaries("x", copy, buffer)


def span(tensor):
    """Bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def launch_ends(kernel, programs, device, **arguments):
    """Launch the first and the last program only, and check that they reach the first and last elements.

    For tensors so large that only the pages are in memory that these programs touch.
    """
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]

    def place(x, y, z):
        interpreter_builder.grid_idx = ((0, programs - 1)[x], y, z)

    with recording() as accesses, mock.patch.object(interpreter_builder, "set_grid_idx", place):
        kernel[(2,)](**arguments)
    reached = set()
    for access in (each for each in accesses if each.addresses.size):
        low, high = int(access.addresses.min()), int(access.addresses.max())
        inside = [
            each
            for each in tensors
            if each.data_ptr() <= low and high + access.size <= each.data_ptr() + span(each)
        ]
        assert inside, f"program {access.program}: {access.kind} outside"
        reached |= {low, high}
    for tensor in tensors:
        if tensor.numel() > 2**31:
            assert tensor.data_ptr() in reached
            assert tensor.data_ptr() + span(tensor) - tensor.itemsize in reached
    launched.append(launches.name_of(kernel))


def check_far_addresses():
    """Offsets beyond 2³¹ elements do not wrap around."""
    rows, cols = 2**16 + 16, 2**15 + 128
    x, wide = torch.empty(rows, cols, dtype=torch.bfloat16), torch.empty(cols, rows, dtype=torch.bfloat16).t()
    requests = []
    for name in ("nvfp4e2m1b", "mxfp4e2m1bnosr", "int8", "int8e5m2b"):
        encoding = launches.mlb.quantizer(name).encoding
        requests += [
            EncodeRequest(matrix, encoding, launches.KEY, operand_dtype=torch.bfloat16)
            for matrix in (x, wide)
        ]
        codes = torch.empty(encoding.format.codes_shape(rows, cols), dtype=torch.uint8)
        scales = torch.empty(
            encoding.format.scales_shape(rows, cols), dtype=SCALE_DTYPES[encoding.format.scale]
        )
        for transpose in (False, True):
            requests.append(
                DecodeRequest(codes, scales, encoding.format, rows, cols, torch.bfloat16, transpose)
            )
            if name.startswith("mxfp4"):
                near = torch.tensor([127, -127], dtype=torch.int32)
                requests.append(Fp8Request(codes, scales, near, rows, cols, torch.float8_e5m2, transpose))
    sides = torch.empty(rows, 16, dtype=torch.bfloat16), torch.empty(16, cols, dtype=torch.bfloat16)
    requests += [ResidualRequest(matrix, *sides) for matrix in (x, wide)]
    for request in requests:
        with launches.launching(launch_ends):
            launches.run(request)


def main():
    group = sys.argv[2]
    assert launch_fp4.is_available(torch.device("cpu"))
    if group == "planted":
        check_planted()
    elif group == "far":
        check_far_addresses()
    elif group == "small":
        check_requests(19, 21, only="nvfp4e2m1b, column, operand and counts")
        check_requests(19, 21, only="decode nvfp4e2m1bnosr to bfloat16, transposed")
    else:
        check_requests(37, 75, only="")
        check_requests(1, 1, only="")
        for rows, cols, orientation in ((17, 272, "row"), (270, 17, "column")):  # longer than a tile
            check_requests(rows, cols, only=f", {orientation}")
        for label in ("straight", "factors, rank"):
            check_requests(17, 272, only=label)
        for label in ("transposed", "factors, rank", " of mxfp4"):
            check_requests(270, 17, only=label)
        assert set(launched) == launches.kernel_names(), launched
    print("equal")


if __name__ == "__main__":
    launched = []
    main()
