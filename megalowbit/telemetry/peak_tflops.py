"""Peak TFLOP/s of accelerators, by the name that torch gives a device. Imported without torch.

Figures are dense, of one device, and those that its vendor divides by for MFU. Figures with 2:4 sparsity are
twice as high; training does not use it. `fp32` is that of the vector units on NVIDIA's devices, because torch
computes fp32 products there unless TF32 is allowed. Sources:

- NVIDIA, github.com/NVIDIA/dgxc-benchmarking, README, "Peak Theoretical Throughput": bf16, FP8 and NVFP4 of
  H100, B200, B300, GB200 and GB300. An H200 has the chip of an H100.
- NVIDIA, github.com/NVIDIA-NeMo/RL, nemo_rl/utils/flops_tracker.py: bf16 of A100 and H200; fp32 and TF32 of
  all. An A100 with SXM has the same bf16 figure as one with PCIe (arXiv:2104.04473, section 5).
- AMD, rocm.docs.amd.com, "AMD Instinct MI300 series microarchitecture", table of peak performance: MI300X.
- AMD, github.com/AMD-AGI/Primus: MI325X in primus/core/projection/simulation_backends/sdpa_simulator.py,
  MI350X and MI355X in primus/backends/torchtitan/patches/peak_flops_patches.py. FP8 of MI300X and MI325X in
  the former file. Each of the 256 compute units of MI350X and MI355X has 8192 FP8 operations a clock (AMD,
  ISSCC 2026), twice those in bf16: 4.6 PFLOP/s at 2.2 GHz and 5.0 at 2.4 GHz (AMD, Hot Chips 2025).

Not covered: devices without such a source, among them H100 and H200 with NVL or PCIe, which are slower; power
limits below the vendor's; parts of a device (MIG); CPUs. `telemetry.peak_tflops` sets the peak there.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense TFLOP/s by dtype; None: no source."""

    half: float  # bf16 and fp16
    tf32: float | None = None
    fp32: float | None = None
    fp8: float | None = None
    fp4: float | None = None  # NVFP4 and MXFP4


_H100_SXM = Peak(half=989.0, tf32=494.5, fp32=67.0, fp8=1979.0)

# Words of the device's name, and its figures; the first row whose words are all in the name is used.
PEAKS: tuple[tuple[str, Peak], ...] = (
    ("GB300", Peak(half=2450.0, tf32=1250.0, fp32=80.0, fp8=4900.0, fp4=14700.0)),
    ("GB200", Peak(half=2450.0, tf32=1250.0, fp32=80.0, fp8=4900.0, fp4=9800.0)),
    ("B300", Peak(half=2250.0, tf32=1100.0, fp32=80.0, fp8=4500.0, fp4=13500.0)),
    ("B200", Peak(half=2250.0, tf32=1100.0, fp32=80.0, fp8=4500.0, fp4=9000.0)),
    ("H200", _H100_SXM),
    ("H100 HBM3", _H100_SXM),  # "NVIDIA H100 80GB HBM3"
    ("A100", Peak(half=312.0, tf32=156.0, fp32=19.5)),  # "A100-SXM4-80GB", "A100 80GB PCIe"
    ("MI355X", Peak(half=2500.0, fp8=5000.0)),
    ("MI350X", Peak(half=2300.0, fp8=4600.0)),
    ("MI325X", Peak(half=1307.0, fp8=2614.0)),
    ("MI300X", Peak(half=1307.4, tf32=653.7, fp32=163.4, fp8=2614.9)),
)
COLUMN_OF = {"bf16": "half", "fp16": "half", "fp32": "fp32", "tf32": "tf32", "fp8": "fp8", "fp4": "fp4"}
# in the names of parts of a device, and of slower devices that share a row's words
OTHER_DEVICES = {"MIG", "NVL"}


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of a device in TFLOP/s; None: unknown.

    Args:
        device_name: as in `torch.cuda.get_device_name`.
        dtype: `"bf16"`, `"fp16"`, `"tf32"`, `"fp32"`, `"fp8"` or `"fp4"`.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & OTHER_DEVICES:
        return None
    for name, peak in PEAKS:
        if words >= set(name.split()):
            figure: float | None = getattr(peak, COLUMN_OF[dtype])
            return figure
    return None
