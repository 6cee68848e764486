import os
import shutil
import sys

import pytest
import torch

from megalowbit.quantize import backends

pytest.importorskip("triton", reason="Triton is not installed")
probe = pytest.importorskip("megalowbit.quantize.triton.probe")

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@needs_compiler
def test_a_machine_with_a_compiler_and_headers_builds_extensions(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    assert probe.why_no_extension() is None


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.why_no_extension() == "no C compiler found: install gcc, or set CC"


def test_a_compiler_that_cannot_be_run_is_named(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    expected = "the C compiler /nowhere/cc cannot be run (No such file or directory): set CC"
    assert probe.why_no_extension() == expected


@needs_compiler
def test_missing_headers_of_python_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(probe.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    reason = probe.why_no_extension()
    if reason is None:
        pytest.skip("the compiler finds Python.h by itself")
    assert "Python.h" in reason
    assert reason.endswith("install Python's headers (python3-dev)")


def test_the_reason_is_one_clause_where_a_launch_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # and there is no driver on a CPU
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    reason = probe.why_unusable(CPU)
    assert reason.endswith("cannot compile a kernel: no C compiler found: install gcc, or set CC")
    assert "\n" not in reason


def test_triton_is_replaced_by_torch_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(backends.launch_triton, "is_available", lambda device: True)
    monkeypatch.setattr(probe, "why_unusable", lambda device: "no C compiler found: install gcc, or set CC")
    monkeypatch.setattr(backends, "_backend_for", backends._backend_for.__wrapped__)
    assert backends._backend_for(torch.device("cuda"), "") == "torch"
    (line,) = caplog.messages
    assert line.endswith("which is slow: no C compiler found: install gcc, or set CC")


def test_a_cache_of_another_user_is_not_used(monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    assert probe.why_cache_is_unsafe() is None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert "others may write" in probe.why_cache_is_unsafe()
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert "others may write" in probe.why_unusable(CPU)


@pytest.mark.gpu
def test_a_gpu_with_triton_runs_kernels():
    assert probe.why_unusable(torch.device("cuda")) is None, sys.version
