import platform
import sys

import pytest

from megalowbit import processor

ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU part\t: 0xd4f\nBogoMIPS\t: 50.00\n"
X86 = """processor\t: {number}
model name\t: Some CPU
cpu MHz\t\t: {mhz}
flags\t\t: fpu avx2 avx512f{flags}
bugs\t\t: none
"""


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def test_model_and_instructions_are_read(cpuinfo):
    cpuinfo.write_text(X86.format(number=0, mhz=2000, flags=" avx512_bf16_not avx512_bf16"))
    assert processor.cpu_name() == "Some CPU"
    assert processor.cpu_units() == ["avx512_bf16", "avx512f", "avx2"]
    cpuinfo.write_text(ARM)
    assert processor.cpu_name() == "0xd4f"
    assert processor.cpu_units() == ["bf16", "sve"]


def test_lines_tell_other_instructions_from_another_core_and_clock(cpuinfo):
    found = []
    for number, mhz, flags in ((0, 2000, ""), (1, 3000, ""), (0, 2000, " amx_bf16")):
        cpuinfo.write_text(X86.format(number=number, mhz=mhz, flags=flags))
        found.append(processor.cpu_lines())
    assert found[0] == found[1] != found[2]


def test_without_the_file_python_names_the_processor(cpuinfo, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert processor.cpu_name() == "arm"
    assert processor.cpu_units() == []
    assert processor.cpu_lines() == ["arm"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the file")
def test_the_file_of_this_machine_can_be_read():
    assert processor.CPUINFO.exists()
    assert len(processor.cpu_lines()) > 2
