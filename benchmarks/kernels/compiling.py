"""Compiles launches of Triton kernels for GPUs that are not there, and checks what comes out.

`ptxas`, which comes with Triton, and LLVM report registers, stack, spills and shared memory. Equal bits on
every GPU need more: nothing in the code may be approximated, flushed to zero or contracted to a fused
multiply-add that the source does not have. Instructions are counted if Triton has the disassembler.

Not covered: what an instruction does on real hardware, and how fast it is.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from benchmarks.kernels.launches import Launch, name_of
from megalowbit.errors import UserError

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
OPTIONS = {"enable_fp_fusion": False}  # as `launch_arguments.launch` sets them
SHARED_KIB = {"gfx942": 64}  # a program's shared memory; elsewhere that of sm_120, the smallest
SMALLEST_SHARED_KIB = 99
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
# bytes of stack, and of spills, that are accepted at most, by target, label and kernel; docs/gpu.md says why
ACCEPTED = {("sm_100", "int8, row, Hadamard", "fp32_scales.encode_kernel"): 20}
# PTX: flushes subnormals, approximates, or lets the assembler contract
INEXACT_PTX = re.compile(r"\S*(?:\.ftz|\.approx|div\.full)\S*")
# LLVM: relaxed arithmetic, or subnormals that are not IEEE's
INEXACT_LLVM = re.compile(
    r"\b(?:fadd|fsub|fmul|fdiv|call) (?:\w+ )*?(?:fast|contract|afn|arcp|reassoc)\b"
    r'|"denormal-fp-math(?:-f32)?"="(?!ieee)[^"]*"|!fpmath'
)
# a multiply-add in the source is a call in LLVM's code; the digits say how many numbers it takes at once
EXPLICIT_FMA = re.compile(r"call [^@\n]*@llvm\.fma\.(?:v(\d+))?f32")
PTX_FMA = re.compile(r"\bfma\.rn\.f32(?:x(\d+))?\b")


@dataclass(frozen=True)
class Compiled:
    """What a launch compiles to for a target.

    Attributes:
        instructions: machine instructions per element; `None` without a disassembler.
        inexact: instructions that do not round as the source does.
    """

    label: str
    kernel: str
    target: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    instructions: float | None
    inexact: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this must not be launched; empty if nothing is wrong, or no more than is accepted."""
        shared = SHARED_KIB.get(self.target, SMALLEST_SHARED_KIB)
        accepted = ACCEPTED.get((self.target, self.label, self.kernel), 0)
        found = [f"{self.spill_bytes} B of spills"] * (self.spill_bytes > accepted)
        found += [f"{self.stack_bytes} B of stack"] * (self.stack_bytes > accepted)
        found += [f"{self.shared_bytes} B of shared memory, over {shared} KiB"] * (
            self.shared_bytes > shared * 1024
        )
        return (*found, *(f"inexact: {each}" for each in self.inexact))


def target_of(name: str) -> GPUTarget:
    """The target of a name.

    Raises:
        UserError: there is none.
    """
    if name not in TARGETS:
        raise UserError(f"no target {name!r}: choose from {', '.join(TARGETS)}")
    return TARGETS[name]


def why_missing(name: str) -> str | None:
    """Why this Triton does not compile for a target at all, in a line; `None` if it does."""
    try:
        triton.compile(ASTSource(empty_kernel, {}), target_of(name), OPTIONS)
    except UserError:
        raise
    except Exception as error:
        return f"Triton {triton.__version__} does not compile for {name}: {str(error).splitlines()[0]}"
    return None


@triton.jit
def empty_kernel():
    pass


def compile_launch(launch: Launch, name: str, *, count: bool = False) -> Compiled:
    """Compile a launch for a target.

    Args:
        launch: a captured launch.
        name: name of the target.
        count: whether to count instructions.

    Raises:
        UserError: no such target, or the kernels run in Triton's interpreter.
    """
    target = target_of(name)
    if not hasattr(launch.kernel, "params"):
        raise UserError("the kernels run in Triton's interpreter: unset TRITON_INTERPRET")
    source, log = source_of(launch, target), io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        compiled = triton.compile(source, target, OPTIONS)
    is_nvidia = target.backend == "cuda"
    resources = nvidia_resources(log.getvalue()) if is_nvidia else amd_resources(compiled.asm["amdgcn"])
    instructions = None
    if count:
        total = sass_instructions(compiled.asm["cubin"]) if is_nvidia else isa_lines(compiled.asm["amdgcn"])
        threads = compiled.metadata.num_warps * target.warp_size
        instructions = total and total * threads / elements_of(launch)
    return Compiled(
        label=launch.label,
        kernel=name_of(launch.kernel),
        target=name,
        shared_bytes=compiled.metadata.shared,
        instructions=instructions,
        inexact=inexact_of(compiled.asm),
        **resources,
    )


def distinct(launches: Iterable[Launch], name: str) -> list[Launch]:
    """The launches that compile to different code; of the same code the first."""
    target, found = target_of(name), {}
    for launch in launches:
        found.setdefault(source_of(launch, target).hash(), launch)
    return list(found.values())


def source_of(launch: Launch, target: GPUTarget) -> ASTSource:
    """A kernel specialised for its arguments, as Triton does it at a launch."""
    kernel, arguments, backend = launch.kernel, launch.arguments, type(make_backend(target))
    assert set(kernel.arg_names) == set(arguments), name_of(kernel)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[name] = "constexpr", value
            continue
        description = ""
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            description = backend.get_tensor_specialization(value, align=True)
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            description = backend.get_int_specialization(value, align=True)
        else:
            signature[name] = "fp32"
        if description and not parameter.do_not_specialize:
            attributes[(parameter.num,)] = backend.parse_attr(description)
    return ASTSource(kernel, signature, constants, attributes)


def elements_of(launch: Launch) -> int:
    """Elements that one program encodes or decodes, or of a tile of a product."""
    arguments = launch.arguments
    if "TILE_GROUPS" in arguments:
        return arguments["TILE_ROWS"] * arguments["TILE_GROUPS"] * 16
    if "TILE_M" in arguments:  # a product
        return arguments["TILE_M"] * arguments["TILE_N"]
    if "TILE_COLS" in arguments:  # a residual
        return arguments["TILE_ROWS"] * arguments["TILE_COLS"]
    if "TILE_ROWS" not in arguments:  # of factors
        return arguments.get("TILE", arguments.get("RANK", 1)) * arguments.get("RANK", 1)
    return arguments["TILE_ROWS"] * arguments["TILE_WORDS"] * (32 // arguments.get("BITS", 4))


def nvidia_resources(log: str) -> dict[str, int]:
    """Registers, stack and spills from what `ptxas -v` prints."""
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if frame is None or used is None:
        raise RuntimeError(f"ptxas reports in another way than expected: {log!r}")
    return {
        "registers": int(used[1]),
        "stack_bytes": int(frame[1]),
        "spill_bytes": int(frame[2]) + int(frame[3]),
    }


def amd_resources(assembly: str) -> dict[str, int]:
    """Vector registers, stack and spills from the metadata at the end of LLVM's assembly.

    Scalar registers that are kept in vector registers count as spilled there, but go to no memory unless
    there is stack too. So they are no spills here.
    """

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"LLVM's assembly has no {key}")
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
    }


def inexact_of(asm: Any) -> tuple[str, ...]:
    """Instructions that round differently than the source, of any level of the code."""
    found = set(INEXACT_LLVM.findall(asm["llir"]))
    if "ptx" in asm:
        found |= set(INEXACT_PTX.findall(asm["ptx"]))
        contracted = _total(PTX_FMA, asm["ptx"]) - _total(EXPLICIT_FMA, asm["llir"])
        found |= {f"{contracted} contracted fma"} if contracted > 0 else set()
    return tuple(sorted(found))


def _total(pattern: re.Pattern[str], code: str) -> int:
    return sum(int(width or 1) for width in pattern.findall(code))


def disassembler() -> str | None:
    """NVIDIA's disassembler: the one in Triton's package, or one in PATH."""
    try:
        return knobs.nvidia.nvdisasm.path
    except (RuntimeError, AttributeError):
        return shutil.which("nvdisasm")


def sass_instructions(cubin: bytes) -> int | None:
    """Number of instructions of NVIDIA code without padding; `None` without a disassembler."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z]\w*)", text, flags=re.MULTILINE)
    return sum(name != "NOP" for name in names)


def isa_lines(assembly: str) -> int:
    """Number of instructions of AMD code."""
    return len(re.findall(r"^\s+(?:v_|s_|ds_|global_|buffer_|flat_)", assembly, flags=re.MULTILINE))
