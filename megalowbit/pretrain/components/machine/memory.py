"""Memory of the main process in each step: of the host, and on GPUs the peak of the device.

Every run has this component; it has no section. Host memory is what the process has resident after the step.
The device's peak is that of torch's allocator since the process started, like that of `--benchmark`; other
libraries' memory is not in it. Reading both waits for nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megalowbit.pretrain.components.base import Component, RunParts
from megalowbit.telemetry.facts import Fact, Facts

if TYPE_CHECKING:
    import torch

RESIDENT = Path("/proc/self/status")
GIB = 2**30


class Memory(Component):
    """Columns `host_memory_gib` and, on GPUs, `device_memory_gib`.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> Memory:
        return cls(parts.engine.device)

    def facts(self, known: Facts) -> Facts:
        """Memory after this step, in GiB; None for the host on systems that do not tell."""
        import torch

        facts: dict[str, Fact] = {"host_memory_gib": resident_gib()}
        if self._device.type == "cuda":
            facts["device_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return facts


def resident_gib(status: Path = RESIDENT) -> float | None:
    """Resident memory of this process in GiB, as Linux counts it; None elsewhere."""
    try:
        text = status.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lines = [line.split() for line in text.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0][1]) / 2**20 if lines else None
