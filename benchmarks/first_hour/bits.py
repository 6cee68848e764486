"""Step 2: the same bits on every device, from every backend. Wrong bits make every later figure worthless."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, expect, skip
from benchmarks.first_hour.session import NO_GPU, ROOT, Session
from megalowbit.quantize import backends, reference
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.random_stream import RandomStream

KEY = RandomKey(2**63 + 5, 2**40 + 7)
NAMES = (
    "nvfp4e2m1bnosr",
    "nvfp4e2m1b",
    "nvfp4e2m1b:unbiased",
    "nvfp4e2m1bnosr:4over6",
    "nvfp4e2m1bnosr:tile16",
    "mxfp4e2m1bnosr",
    "mxfp4e2m1b",
    "int8",
    "int8:sr",
    "int8b",
    "int4",
    "fp6e3m2",
    "fp8e4m3",
    "fp8e4m3:sr",
    "fp8e5m2",
    "fp8e5m2:sr",
    "int8e5m2b",
    "int8e5m2b:sr",
)
TESTS_SECONDS, SANITIZER_SECONDS = 600, 300
FIELDS = ("codes", "scales", "tensor_scale", "operand", "counts")


def check(session: Session) -> Iterator[Finding]:
    """Reference on two devices, kernels against it, the project's own tests, memory accesses, registers."""
    yield from references(session)
    yield from kernels(session)
    device = torch.device(session.device)
    RandomStream(0).check(device)  # raises if rounding is biased
    yield Finding("stochastic rounding is unbiased", "pass", "unbiased", "unbiased")
    if session.is_gpu:
        yield tests_on_the_gpu()
        yield memory_checker()
    else:
        yield skip("the tests marked gpu", NO_GPU)
        yield skip("compute-sanitizer", NO_GPU)
    yield compiled(session)


def matrices(sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Tensor]]:
    """bf16 matrices of each size on the CPU, and their column-major twins."""
    generator = torch.Generator().manual_seed(1)
    for rows, cols in sizes:
        x = torch.randn(rows, cols, generator=generator)
        x = (x * torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator))).bfloat16()
        yield f"{rows} × {cols}", x
        yield f"{rows} × {cols}, column-major", x.t().contiguous().t()


def requests(x: Tensor) -> Iterator[tuple[str, EncodeRequest]]:
    """A matrix under every quantizer, with everything a kernel can return, and without counts.

    Kernels have smaller tiles with counts.
    """
    for name in NAMES:
        encoding = mlb.quantizer(name).encoding
        counted = EncodeRequest(x, encoding, KEY, operand_dtype=torch.bfloat16, with_counts=True)
        yield name, counted
        yield f"{name} without counts", counted._replace(with_counts=False)


def different_bytes(ours: Encoded, theirs: Encoded) -> int:
    """Bytes in which two results differ; one NaN is as good as another."""
    return sum(
        _different(getattr(ours, field), getattr(theirs, field))
        for field in FIELDS
        if getattr(theirs, field) is not None
    )


def _different(a: Tensor, b: Tensor) -> int:
    if a.dtype.itemsize > 1 and a.is_floating_point():
        a, b = (torch.where(each.isnan(), torch.nan, each) for each in (a, b))
    pair = [each.contiguous().view(-1).view(torch.uint8) for each in (a, b.to(a.device))]
    return int((pair[0] != pair[1]).sum())


def references(session: Session) -> Iterator[Finding]:
    """The definition in plain torch, on the GPU and on the CPU."""
    if not session.is_gpu:
        yield skip("reference on the GPU = reference on the CPU", NO_GPU)
        return
    bad = []
    for label, x in matrices(((512, 528), (1, 4096), (257, 1041))):
        for name, request in requests(x):
            there = reference.encode(request._replace(x=x.cuda() if x.is_contiguous() else x.t().cuda().t()))
            if wrong := different_bytes(there, reference.encode(request)):
                bad.append((wrong, f"{name}, {label}"))
    yield _verdict("reference on the GPU = reference on the CPU", bad)


def kernels(session: Session) -> Iterator[Finding]:
    """The device's kernels against the reference on the same device, for encoding and decoding."""
    sizes = session.size(
        ((8192, 4096), (8192, 11008), (1, 4096), (4097, 4095)), ((48, 64), (1, 33), (17, 31))
    )
    encoded_bad, decoded_bad = [], []
    for label, x in matrices(sizes):
        x = x.to(session.device) if x.is_contiguous() else x.t().to(session.device).t()
        for name, request in requests(x):
            expected = reference.encode(request)
            if wrong := different_bytes(backends.encode(request), expected):
                encoded_bad.append((wrong, f"{name}, {label}"))
            for packed in packed_matrices(request, expected):
                if wrong := _different(backends.decode(packed), reference.decode(packed)):
                    decoded_bad.append((wrong, f"{name}, {label}"))
    backend = backends.backend_of(x)
    yield _verdict(f"encoding by {backend} = reference", encoded_bad)
    yield _verdict(f"decoding by {backend} = reference", decoded_bad)


def packed_matrices(request: EncodeRequest, encoded: Encoded) -> Iterator[DecodeRequest]:
    """What training decodes: also the transpose, and with the tensor scale if that is a power of two."""
    folded = encoded.tensor_scale if request.encoding.is_power_of_two else None
    for transpose in (False, True):
        yield DecodeRequest(
            encoded.codes,
            encoded.scales,
            request.encoding.format,
            *request.x.shape,
            torch.bfloat16,
            transpose,
            folded,
        )


def _verdict(check: str, bad: list[tuple[int, str]]) -> Finding:
    note = f"first: {bad[0][1]}" if bad else f"{len(NAMES)} quantizers"
    return at_most(check, sum(wrong for wrong, _ in bad), 0, " different bytes", note=note)


def tests_on_the_gpu() -> Finding:
    """The project's tests that need a GPU, among them comparisons of all kernels with the reference."""
    return _program(
        "the tests marked gpu", [sys.executable, "-m", "pytest", "-q", "-m", "gpu"], TESTS_SECONDS
    )


def memory_checker() -> Finding:
    """NVIDIA's memory checker on the comparison of the FP4 kernels."""
    check = "compute-sanitizer"
    program = shutil.which(check)
    if program is None:
        return skip(check, "compute-sanitizer is not in PATH; it comes with the CUDA toolkit")
    comparison = [sys.executable, "tests/quantize/triton_comparison.py", "cuda", "nearest"]
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", *comparison]
    return _program(check, command, SANITIZER_SECONDS)


def _program(check: str, command: list[str], seconds: int) -> Finding:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return Finding(check, "fail", f"not finished after {seconds} s", "exit code 0")
    print(done.stdout, done.stderr)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return expect(
        check, done.returncode == 0, done.returncode, "exit code 0", note=lines[-1] if lines else ""
    )


def compiled(session: Session) -> Finding:
    """Whether the kernels spill registers or round inexactly on this GPU, or else on Hopper."""
    check = "kernels that spill, use stack or round inexactly"
    try:
        from benchmarks.kernels import compiling
    except ModuleNotFoundError as error:
        return skip(check, f"Python's module {error.name} is not installed, so kernels cannot be compiled")
    from benchmarks.kernels.launches import TRAINED, all_launches

    target = "sm_{}{}".format(*torch.cuda.get_device_capability()) if session.is_gpu else "sm_90"
    if target not in compiling.TARGETS:
        return skip(check, f"{target} is not in benchmarks/kernels/compiling.py: TARGETS")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return skip(check, "TRITON_INTERPRET=1: the kernels cannot be compiled")
    launches, of_all, more = all_launches(), "", ""
    if not session.is_gpu:  # a few
        of_all, more = (
            f" of {len(compiling.distinct(launches, target))}",
            "; tools/compile_kernels.py does all",
        )
        launches = [each for each in launches if each.label == f"{TRAINED[0]}, row, operand"]
    found = [compiling.compile_launch(each, target) for each in compiling.distinct(launches, target)]
    wrong = [f"{each.label}: {', '.join(each.problems)}" for each in found if each.problems]
    note = wrong[0] if wrong else f"{len(found)}{of_all} kernels compiled for {target}{more}"
    return at_most(check, len(wrong), 0, " kernels", note=note)
