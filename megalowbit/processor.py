"""What the system says about its CPUs: model, instructions for matrix products, lines that identify them."""

import platform
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "sve")  # flags, the best first
CHANGING = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "physical id", "bogomips")


def cpu_name() -> str:
    """The model of the CPUs. CPUs with different instructions may have one name, as in a virtual machine."""
    return _value("model name", "CPU part") or platform.processor() or platform.machine()


def cpu_units() -> list[str]:
    """Instructions of the CPUs that matter for matrix products, the best first; empty if none is known."""
    flags = set((_value("flags", "Features") or "").split())
    return [name for name in UNITS if name in flags]


def cpu_lines() -> list[str]:
    """Lines that distinguish these CPUs from others of their architecture."""
    return sorted({line for line in _lines() or [platform.processor()] if not line.startswith(CHANGING)})


def _value(*names: str) -> str | None:
    for line in _lines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return None


def _lines() -> list[str]:
    with suppress(OSError):
        return CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
