import os
import re
import sys
from pathlib import Path

import pytest
import torch

from megalowbit.doctor import machine as machine_module
from megalowbit.doctor.machine import (
    apex_kind,
    compiler_version,
    inspect_machine,
    versions,
)
from megalowbit.engine.versions import installed


@pytest.fixture(autouse=True)
def _versions_are_checked_again():
    installed.check_installed.cache_clear()
    yield
    installed.check_installed.cache_clear()


def codes(machine):
    return {(each.level, each.code) for each in machine.notices}


def test_this_machine_is_described():
    found = inspect_machine()
    assert found.facts["torch"] == versions()["torch"] == torch.__version__
    assert found.target.is_cpu
    assert found.target.memory == pytest.approx(found.memory)
    total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 0 < found.memory * 2**30 <= total * 1.01
    assert not [each for each in codes(found) if each[0] == "problem"]


def test_another_version_is_a_problem_with_its_remedy(monkeypatch):
    monkeypatch.setattr(installed, "TORCH", "1.0.0")
    (found,) = [each for each in inspect_machine().notices if each.code == "versions"]
    assert found.level == "problem"
    assert "verified only with 1.0.0" in found.text
    assert found.fix.startswith("pip install 'torch==1.0.0'")


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["apex/__init__.py"], "another package"),
        (["apex/__init__.py", "apex/multi_tensor_apply/__init__.py"], "NVIDIA's, without its kernels"),
        (
            ["apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "amp_C.py"],
            "NVIDIA's, with its kernels",
        ),
        ([], "not installed"),
    ],
)
def test_nvidias_apex_is_told_from_the_package_on_pypi(tmp_path, monkeypatch, files, kind):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('it must not be imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert apex_kind() == kind
    expected = {"another package": "note", "not installed": None}.get(kind, "note")
    found = {each.code: each.level for each in inspect_machine().notices}
    assert found.get("apex") == expected
    monkeypatch.setenv("MEGALOWBIT_APEX", "1")
    found = {each.code: each.level for each in inspect_machine().notices}
    assert found.get("apex") == (None if kind.endswith("with its kernels") else "problem")


def test_a_driver_without_torch_for_cuda_is_a_problem(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\nGCC version: 12\n")
    monkeypatch.setattr(machine_module, "NVIDIA_DRIVER", driver)
    found = inspect_machine()
    assert found.facts["driver"] == "570.86.15"
    assert ("problem", "gpu-unused") in codes(found)
    assert ("problem", "gpu-unused") not in codes(inspect_machine(is_cpu_chosen=True))


def test_without_a_compiler_the_c_kernels_are_missed(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert compiler_version() == f"{tmp_path / 'none'}, which cannot be run"
    from megalowbit.quantize.cpu.fp4 import LIBRARY

    monkeypatch.setattr(LIBRARY, "why_unavailable", lambda: "no C compiler found: install gcc")
    (found,) = [each for each in inspect_machine().notices if each.code == "c-kernels"]
    assert found.level == "warning"
    assert "no C compiler found" in found.text


class Gpus:
    """What torch.cuda says on a machine with GPUs of these names."""

    def __init__(self, monkeypatch, *names, capability):
        monkeypatch.setattr(machine_module, "this_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        properties = [type("P", (), {"name": name, "total_memory": 85 * 10**9}) for name in names]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(machine_module, "_check_triton", lambda device: iter(()))


def test_gpus_have_units_and_need_nccl(monkeypatch):
    Gpus(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", capability=(9, 0))
    found = inspect_machine(processes=2)
    assert found.facts["GPUs"] == "2 × NVIDIA H100 80GB HBM3"
    assert (found.target.name, found.target.devices_of_host) == ("h100", 2)
    (units,) = [each for each in found.notices if each.code == "gpu-units"]
    assert units.text == "compute capability 9.0: units for bf16, FP8; none for FP4"
    assert (("problem", "nccl") in codes(found)) == (not torch.distributed.is_nccl_available())
    assert ("problem", "nccl") not in codes(inspect_machine(processes=1))


def test_different_gpus_in_one_host_are_a_problem(monkeypatch):
    Gpus(monkeypatch, "NVIDIA A100-SXM4-80GB", "NVIDIA A10", capability=(8, 0))
    assert ("problem", "gpu-mixed") in codes(inspect_machine())


def test_a_triton_that_cannot_compile_is_a_problem(monkeypatch):
    from megalowbit.quantize.triton import probe

    monkeypatch.setattr(probe, "why_unusable", lambda device: "Triton 9 cannot compile a kernel: no gcc")
    monkeypatch.setattr(machine_module, "file_system_of", lambda path: "nfs4")
    found = list(machine_module._check_triton(torch.device("cpu")))
    assert [(each.level, each.code) for each in found] == [("problem", "triton"), ("warning", "triton-cache")]


def test_the_lock_of_a_killed_build_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert ("warning", "stale-lock") not in codes(inspect_machine())
    os.utime(lock, (0, 0))
    (found,) = [each for each in inspect_machine().notices if each.code == "stale-lock"]
    assert str(lock) in found.text
    assert found.fix == "remove the file if nothing is compiling"
