"""Throughput: TFLOP/s of the model on one device, and the share of the device's peak that this is (MFU).

Every run has this component; it has no section. `families/model_flops.py` counts the FLOPs of a token. The
peak is the vendor's (`telemetry/peak_tflops.py`), or the setting `telemetry.peak_tflops`.

For any layout: tokens per second of all ranks × FLOPs of the full model for a token ÷ number of devices.
Tensor and pipeline ranks share their tokens, and `tokens_per_second` counts these once. The peak is that of
the run's `precision`, also if products run in FP8 or FP4: bf16 and FP4 runs can then be compared by MFU.

Separate documents need less attention than whole samples. This rank counts it in its own micro-batches, which
are a random part of the step's.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from megalowbit.pretrain.components.base import Component, RunParts, Summary
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Fact, Facts
from megalowbit.telemetry.moving_rate import MovingRate
from megalowbit.telemetry.peak_tflops import peak_tflops

if TYPE_CHECKING:
    import torch

    from megalowbit.families.model_flops import ModelFlops

KEY = "megalowbit.telemetry.peak_tflops"


class Throughput(Component):
    """TFLOP/s and MFU of a run.

    Args:
        flops: of one token.
        are_separate: whether documents are separate.
        tokens_per_step: of one optimizer step, over all ranks.
        num_devices: processes of the run, each with one device.
        device: what they are called.
        dtype: precision whose peak is used.
        peak: of one device, in TFLOP/s; None: unknown.
    """

    def __init__(
        self,
        flops: ModelFlops,
        *,
        are_separate: bool = False,
        tokens_per_step: int,
        num_devices: int,
        device: str,
        dtype: str,
        peak: float | None,
    ) -> None:
        self.flops, self.peak = flops, peak
        self._are_separate = are_separate
        self._of_batches = list[float]()  # FLOPs of a token in the micro-batches of this step
        self._of_step = float(flops.counted)  # in the last step
        self._sum, self._num_steps = 0.0, 0  # over the steps
        self._num_devices, self._device, self._dtype = num_devices, device, dtype
        self._tokens_per_step, self._speed = tokens_per_step, MovingRate()

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> Throughput:
        device = name_of(parts.engine.device)
        dtype = matrix_dtype(parts.precision)
        peak = parts.telemetry.peak_tflops
        return cls(
            parts.flops,
            are_separate=parts.loader.rules.are_separate,
            tokens_per_step=parts.tokens_per_step,
            num_devices=parts.engine.process_grid.world_size,
            device=device,
            dtype=dtype,
            peak=peak_tflops(device, dtype) if peak is None else peak,
        )

    def startup_line(self) -> str:
        """The FLOPs of a token and the peak, or how to set it."""
        most = "at most " if self._are_separate else ""
        flops = f"flops     {most}{columns.amount_text(self.flops.counted)} FLOP per token"
        if self.peak is None:
            return (
                f"{flops}; no MFU, because the peak of {self._device} in {self._dtype} is unknown: set {KEY}"
            )
        return f"{flops}, peak of {self._device} {self.peak:g} TFLOP/s in {self._dtype}"

    def read_batch(self, batch: Mapping[str, torch.Tensor]) -> None:
        if self._are_separate:
            self._of_batches.append(self.flops.of_documents(batch["position_ids"].numpy()))

    def end_step(self) -> None:
        if self._of_batches:
            self._of_step = fmean(self._of_batches)
            self._of_batches.clear()
        self._sum, self._num_steps = self._sum + self._of_step, self._num_steps + 1

    @property
    def flops_per_token(self) -> float:
        """The mean over the steps of this process."""
        return self._sum / self._num_steps if self._num_steps else float(self.flops.counted)

    def of_speed(
        self, tokens_per_second: float | None, flops_per_token: float | None = None
    ) -> dict[str, Fact]:
        """Columns for a speed over all ranks; None if it is unknown, and no MFU if the peak is.

        `flops_per_token` are counted FLOPs; None: their mean.
        """
        counted = self.flops_per_token if flops_per_token is None else flops_per_token
        names = ("tflops_per_device", *(("mfu", "mfu_palm") if self.peak is not None else ()))
        if tokens_per_second is None:
            return dict.fromkeys(names)
        counted, palm = (
            flops * tokens_per_second / self._num_devices / 1e12 for flops in (counted, self.flops.palm)
        )
        facts: dict[str, Fact] = {"tflops_per_device": counted}
        if self.peak is not None:
            facts |= {"mfu": counted / self.peak, "mfu_palm": palm / self.peak}
        return facts

    def facts(self, known: Facts) -> Facts:
        """TFLOP/s of one device in this step, with a known peak MFU, and the memory so far."""
        speed = self.of_speed(columns.number(known["tokens_per_second"]), self._of_step)
        return {**speed, "memory_gib": peak_memory()}

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        self._speed.add(self._tokens_per_step)
        return ()

    def summary(self) -> Summary:
        """Averages over the steps of this process without its first, as for `tokens_per_second`."""
        averages = self.of_speed(self._speed.average)
        mfu, tflops = averages.get("mfu"), columns.number(averages["tflops_per_device"])
        figure = columns.UNKNOWN if tflops is None else f"{tflops:.4g} per device"
        return Summary(
            entries={
                **averages,
                "peak_tflops": self.peak,
                "flops_per_token": self.flops_per_token,
                "flops_per_token_palm": self.flops.palm,
            },
            row=("TFLOP/s", figure, "MFU", columns.percent_text(mfu)),
        )


def peak_memory() -> float:
    """GiB that this process has used at most: tensors on its GPU, or without one its resident memory."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def name_of(device: torch.device) -> str:
    """The name of an accelerator, as the driver gives it; `"cpu"`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def matrix_dtype(precision: str) -> str:
    """The dtype in which a run of this `precision` multiplies matrices on a GPU: fp32 may be TF32."""
    import torch

    is_tf32 = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else precision
