"""The Triton kernels compile for GPUs that are not there, within what each GPU has, and round as written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.kernels import compiling, launches
from megalowbit.errors import UserError

ROOT = Path(__file__).parents[2]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_compiler = pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET=1: kernels cannot be compiled")
PTXAS_LOG = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    40 bytes stack frame, 36 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 2048 bytes smem
"""
AMD_METADATA = """    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 16
    .sgpr_count:     30
    .sgpr_spill_count: 1
    .vgpr_count:     128
    .vgpr_spill_count: 2
"""


def compiled(**changes):
    facts = {"registers": 40, "stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0, "inexact": ()}
    facts |= {"label": "x", "kernel": "fp4.encode_kernel", "target": "sm_90", "instructions": None}
    return compiling.Compiled(**facts | changes)


def test_each_kernel_is_launched_by_a_request():
    assert {
        launches.name_of(each.kernel) for each in launches.all_launches(16, 32)
    } == launches.kernel_names()


def test_resources_are_read_from_what_the_assemblers_report():
    assert compiling.nvidia_resources(PTXAS_LOG) == {"registers": 255, "stack_bytes": 40, "spill_bytes": 84}
    assert compiling.amd_resources(AMD_METADATA) == {"registers": 128, "stack_bytes": 16, "spill_bytes": 8}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"spill_bytes": 8}, "8 B of spills"),
        ({"stack_bytes": 40}, "40 B of stack"),
        ({"shared_bytes": 99 * 1024 + 1}, "101377 B of shared memory, over 99 KiB"),
        ({"target": "gfx942", "shared_bytes": 65 * 1024}, "66560 B of shared memory, over 64 KiB"),
        ({"inexact": ("div.full.f32",)}, "inexact: div.full.f32"),
    ],
)
def test_each_excess_is_a_problem(changes, problem):
    assert compiled().problems == ()
    assert compiled(**changes).problems == (problem,)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, ()),
        ({"spill_bytes": 21}, ("21 B of spills",)),
        ({"stack_bytes": 21}, ("21 B of stack",)),
        ({"shared_bytes": 99 * 1024 + 1}, ("101377 B of shared memory, over 99 KiB",)),
        ({"inexact": ("div.full.f32",)}, ("inexact: div.full.f32",)),
        ({"target": "sm_120"}, ("20 B of spills", "20 B of stack")),
        ({"kernel": "fp4.amax_kernel"}, ("20 B of spills", "20 B of stack")),
        ({"label": "int8, column, Hadamard"}, ("20 B of spills", "20 B of stack")),
    ],
)
def test_an_excess_is_accepted_up_to_its_bytes_for_one_kernel_of_one_target(changes, problems, monkeypatch):
    which = {"target": "sm_100", "label": "int8, row, Hadamard", "kernel": "fp32_scales.encode_kernel"}
    monkeypatch.setattr(compiling, "ACCEPTED", {tuple(which.values()): 20})
    assert compiled(**{**which, "stack_bytes": 20, "spill_bytes": 20, **changes}).problems == problems


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ({"ptx": "div.full.ftz.f32 %f1, %f2, %f3;"}, ("div.full.ftz.f32",)),
        ({"ptx": "ex2.approx.f32 %f1, %f2;"}, ("ex2.approx.f32",)),
        ({"ptx": "fma.rn.f32 %f1, %f2, %f3, %f4;"}, ("1 contracted fma",)),
        ({"ptx": "fma.rn.f32 %f1;", "llir": "%1 = tail call float @llvm.fma.f32(float %0)"}, ()),
        ({"ptx": "fma.rn.f32x2 %f1;", "llir": "%1 = tail call <2 x float> @llvm.fma.v2f32()"}, ()),
        ({"ptx": "fma.rn.f32x2 %f1;", "llir": "%1 = tail call float @llvm.fma.f32()"}, ("1 contracted fma",)),
        ({"ptx": "div.rn.f32 %f1, %f2, %f3; mul.rn.f32 %f1, %f2, %f3;"}, ()),
        ({"llir": "%1 = fmul contract float %2, %3"}, ("fmul contract",)),
        ({"llir": '"denormal-fp-math-f32"="preserve-sign"'}, ('"denormal-fp-math-f32"="preserve-sign"',)),
        ({"llir": '"denormal-fp-math-f32"="ieee"'}, ()),
    ],
)
def test_code_that_rounds_otherwise_is_found(code, found):
    assert compiling.inexact_of({"llir": "", **code}) == found


@needs_compiler
def test_a_kernel_compiles_for_hopper_without_spills_and_exactly():
    label = "nvfp4e2m1bnosr, row, operand"
    *_, encode = (each for each in launches.all_launches() if each.label == label)
    found = compiling.compile_launch(encode, "sm_90", count=True)
    assert found.problems == ()
    assert found.kernel == "fp4.encode_kernel"
    assert 16 <= found.registers <= 255
    assert found.instructions is None or 5 < found.instructions < 100


@needs_compiler
def test_an_unknown_target_is_one_line():
    with pytest.raises(UserError, match="no target 'sm_70': choose from sm_80, sm_90"):
        compiling.compile_launch(launches.all_launches(16, 32)[0], "sm_70")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "start", "every"),
    [("sm_90", 0, 2), ("sm_100", 1, 2), ("sm_120", 0, 8), ("gfx942", 2, 8), ("gfx950", 4, 8)],
    ids=lambda value: str(value),
)
def test_every_kernel_compiles_without_spills_and_exactly(target, start, every):
    """Every kernel for every target, and a share of its launches: each for Hopper or for Blackwell."""
    if missing := compiling.why_missing(target):
        pytest.skip(missing)
    distinct = compiling.distinct(launches.all_launches(), target)
    names = [launches.name_of(each.kernel) for each in distinct]
    asked = [
        each
        for index, (each, name) in enumerate(zip(distinct, names, strict=True))
        if index % every == start
        or names.index(name) == index
        or (target, each.label, name) in compiling.ACCEPTED
    ]
    found = [compiling.compile_launch(each, target) for each in asked]
    assert {each.kernel for each in found} == launches.kernel_names()
    assert not [(each.label, each.kernel, each.problems) for each in found if each.problems]
    excessive = {(target, each.label, each.kernel) for each in found if each.stack_bytes or each.spill_bytes}
    assert excessive == {each for each in compiling.ACCEPTED if each[0] == target}  # none is out of date


@needs_compiler
@pytest.mark.slow
def test_the_tool_prints_a_table_and_fails_on_mistakes(tmp_path):
    tool = [sys.executable, str(ROOT / "tools" / "compile_kernels.py")]
    chosen = ["--target", "sm_90", "--only", "row, codes", "--json", str(tmp_path / "kernels.json")]
    done = subprocess.run([*tool, *chosen], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2 compiled, 0 with problems\n")
    assert '"target": "sm_90"' in (tmp_path / "kernels.json").read_text()
    done = subprocess.run([*tool, "--only", "nothing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    labels = {each.label for each in launches.all_launches()}
    assert all(part in done.stderr for label in labels for part in label.split(", "))
