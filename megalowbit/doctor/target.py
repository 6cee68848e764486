"""The hardware that a run is judged for: that of this machine, or a kind named with `--target`.

Peaks of products are those of `telemetry/peak_tflops.py`. The other figures are those of one device:

- `memory` is what torch can allocate, in GiB, rounded down: 79.1 GiB of an H100 with 80 GB. Of GB200, GB300,
  B300 and AMD's devices it is one percent below the vendor's figure.
- `bandwidth` of its memory, `link` to other devices of its domain and `network` to other hosts are in GB/s;
  the last two in each direction.

Sources: NVIDIA, github.com/NVIDIA/dgxc-benchmarking, README, reference architectures of H100, B200, B300,
GB200 and GB300 (memory, NVLink, compute links); NVIDIA's data sheets of the A100 with 40 and 80 GB, H100 SXM
(3.35 TB/s, where the README has 3.2) and H200; AMD's data sheets of the Instinct MI300 and MI350 series.
`network` is one adapter of 400 Gbit/s for each device, 800 for B300 and GB300, 200 for A100 (DGX A100).

Not covered: devices with PCIe or NVL, which are slower, A100s and H100s with other memories, and consumer
GPUs. Of those that are in this machine, capability and memory are known, and no times are estimated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.telemetry.peak_tflops import OTHER_DEVICES, peak_tflops

# in the names of slower devices that share a row's words
OTHER_WORDS = {*OTHER_DEVICES, "PCIE"}
BF16, FP8, FP4 = (8, 0), (8, 9), (10, 0)  # least compute capability with units for them
DEVICES_OF_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of device, and how several are connected.

    Attributes:
        name: as for `--target`, or as the driver names it.
        device: what `peak_tflops` calls it.
        driver: words of the name that its driver gives it; empty: it is recognised by no name.
        capability: compute capability; None: no NVIDIA GPU.
        memory: GiB of a device; of a CPU that of its host.
        bandwidth, link, network: GB/s, see above; None: unknown.
        measured: names of those of them that were reached by messages, rather than a vendor's figure.
        devices_of_host: devices in one host.
        hosts_of_domain: hosts whose devices `link` connects: one, or the 18 of an NVL72.
        is_cpu: whether processes compute on CPUs.
    """

    name: str
    device: str
    driver: str = ""
    capability: tuple[int, int] | None = None
    memory: float
    bandwidth: float | None = None
    link: float | None = None
    network: float | None = None
    devices_of_host: int = DEVICES_OF_HOST
    hosts_of_domain: int = 1
    is_cpu: bool = False
    measured: tuple[str, ...] = ()

    @property
    def domain(self) -> int:
        """Devices that `link` connects."""
        return self.hosts_of_domain * min(self.devices_of_host, DEVICES_OF_HOST)

    @property
    def is_amd(self) -> bool:
        """Whether it is a GPU of AMD."""
        return self.capability is None and not self.is_cpu

    @property
    def units(self) -> tuple[str, ...]:
        """Formats that its matrix units multiply, of those that this project uses."""
        if self.is_cpu:
            return ()
        if self.capability is None:
            return ("bf16", "fp8")
        least = {"bf16": BF16, "fp8": FP8, "fp4": FP4}
        return tuple(name for name, capability in least.items() if self.capability >= capability)

    def peak(self, dtype: str) -> float | None:
        """Dense peak in TFLOP/s of products in a dtype of `peak_tflops`; None: unknown."""
        return peak_tflops(self.device, dtype)

    def hosts(self, processes: int) -> int:
        """Hosts of a run of so many processes."""
        return -(-processes // self.devices_of_host)

    def describe(self) -> str:
        """One line: memory, bandwidths, units."""
        if self.is_cpu:
            return f"CPUs, {self.memory:.0f} GiB of host memory"
        figures = {"memory at": self.bandwidth, "link": self.link, "network": self.network}
        known = [
            f"{name} {value:,.0f} GB/s{' (measured)' * (name in self.measured)}"
            for name, value in figures.items()
            if value is not None
        ]
        units = ", ".join(self.units) or "none"
        return "; ".join([f"{self.name}: {self.memory:.0f} GiB", *known, f"matrix units: {units}"])


def _row(
    device: str,
    capability: tuple[int, int] | None,
    memory: float,
    bandwidth: float,
    link: float,
    network: float,
    *,
    name: str | None = None,
    driver: str | None = None,
    devices_of_host: int = DEVICES_OF_HOST,
    hosts_of_domain: int = 1,
) -> Target:
    return Target(
        name=name or device.partition(" ")[0].lower(),
        device=device,
        driver=driver or device,
        capability=capability,
        memory=memory,
        bandwidth=bandwidth,
        link=link,
        network=network,
        devices_of_host=devices_of_host,
        hosts_of_domain=hosts_of_domain,
    )


TARGETS = MappingProxyType(
    {
        each.name: each
        for each in (
            _row("A100", (8, 0), 39.3, 1555, 300, 25, name="a100-40gb", driver="A100 40GB"),
            _row("A100", (8, 0), 79.1, 2039, 300, 25, driver="A100 80GB"),
            _row("H100 HBM3", (9, 0), 79.1, 3350, 450, 50, driver="H100 80GB HBM3"),
            _row("H200", (9, 0), 139.8, 4800, 450, 50),
            _row("B200", (10, 0), 178.3, 7700, 900, 50),
            _row("B300", (10, 3), 267.0, 7700, 900, 100),
            _row("GB200", (10, 0), 184.0, 8000, 900, 50, devices_of_host=4, hosts_of_domain=18),
            _row("GB300", (10, 3), 276.0, 8000, 900, 100, devices_of_host=4, hosts_of_domain=18),
            _row("MI300X", None, 190.0, 5300, 448, 50),
            _row("MI325X", None, 253.0, 6000, 448, 50),
            _row("MI350X", None, 285.0, 8000, 537, 50),
            _row("MI355X", None, 285.0, 8000, 537, 50),
        )
    }
)
ALIASES = {"a100-80gb": "a100", "h100-80gb": "h100"}


def named_target(name: str) -> Target:
    """The target of `--target`.

    Raises:
        UserError: it is unknown.
    """
    known = TARGETS.get(ALIASES.get(name.lower(), name.lower()))
    if known is None:
        device = name.lower().partition("-")[0]
        if device in TARGETS:
            raise UserError(f"unknown target {shown(name)}: did you mean {device!r}?")
        raise unknown_name("target", name, TARGETS)
    return known


def target_of_device(name: str, *, capability: tuple[int, int] | None, memory: float, count: int) -> Target:
    """The target that a GPU of this machine is.

    Args:
        name: as its driver gives it.
        capability: compute capability; None: AMD.
        memory: GiB that torch reports.
        count: GPUs in this machine.
    """
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    known = next((each for each in TARGETS.values() if words >= set(each.driver.split())), None)
    if known is None or words & OTHER_WORDS:
        known = Target(name=name, device=name, memory=memory)
    return replace(known, capability=capability, memory=memory, devices_of_host=count)


def cpu_target(host_memory: float) -> Target:
    """Processes that compute on the CPUs of hosts with so many GiB; each host has one."""
    return Target(name="cpu", device="cpu", memory=host_memory, devices_of_host=1, is_cpu=True)
