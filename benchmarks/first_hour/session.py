"""What a step gets: the folder, the device, sizes for it, and figures of earlier steps."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.timing import GpuState, Times, interleaved

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "no GPU: torch.cuda.is_available() is False"
ROUNDS = 5
T = TypeVar("T")


def device_name() -> str:
    """Number and name of the GPUs, such as "2 × NVIDIA H200", or "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} × {names[0]}" if len(set(names)) == 1 else ", ".join(names)


@dataclass(frozen=True)
class Session:
    """One run of a step.

    Attributes:
        folder: of the results; steps put traces and logs there.
        device: "cuda" or "cpu".
        device_name: see `device_name`.
    """

    folder: Path
    device: str
    device_name: str

    @property
    def is_gpu(self) -> bool:
        """Whether there is a GPU; without one, sizes are small and speeds have no limits."""
        return self.device == "cuda"

    def size(self, gpu: T, cpu: T) -> T:
        """One of two sizes."""
        return gpu if self.is_gpu else cpu

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def time(self, candidates: dict[str, Callable[[], object]]) -> Times:
        """Interleaved rounds of candidates."""
        return interleaved(candidates, ROUNDS if self.is_gpu else 3, self.device)

    def median(self, run: Callable[[], object]) -> tuple[float, GpuState | None]:
        """Median seconds of one run, and the GPU's state."""
        times = self.time({"run": run})
        return statistics.median(times["run"]), times.state("run")

    def host_seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Seconds that the host needs to queue a run; the least of five means."""
        for _ in range(3):
            run()
        means = []
        for _ in range(5):
            self.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            means.append((time.perf_counter() - started) / repeats)
        self.synchronize()
        return min(means)

    def keep(self, name: str, value: Any) -> None:
        """Keep a figure of this device for later steps."""
        kept = {**self._kept(), name: {"value": value, "device": self.device_name}}
        (self.folder / "figures.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of earlier steps on this device, by name."""
        kept = self._kept().items()
        return {name: each["value"] for name, each in kept if each["device"] == self.device_name}

    def _kept(self) -> dict[str, Any]:
        """Name → value and device; without figures of earlier versions, which have no device."""
        path = self.folder / "figures.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: each for name, each in found.items() if isinstance(each, dict)}
