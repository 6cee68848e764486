"""The names of metrics in TensorBoard, W&B and trackio, by their names in `metrics.jsonl`.

Users of these programs look for `train/loss` and `val/loss`, and the programs group curves by the part
before the slash. `metrics.jsonl` keeps its names, because other programs read it. `SINK_NAMES` is the whole
translation, and docs/runs.md shows it. Names that are grouped already (`gradient_overflow/…`,
`quantization/…`, `overflow/…`, `speculation/…`, `oscillation/…`) are the same everywhere.
"""

from __future__ import annotations

from types import MappingProxyType

from megalowbit.telemetry.facts import Fact, Facts

# a name that ends in a slash stands for all names that begin with it
SINK_NAMES = MappingProxyType(
    {
        "loss": "train/loss",
        "loss/": "train/loss/",
        "lr": "train/lr",
        "grad_norm": "train/grad_norm",
        "loss_scale": "train/loss_scale",
        "skipped_steps": "train/skipped_steps",
        "skipped/": "train/skipped/",
        "tokens": "train/tokens",
        "regularization": "train/regularization",
        "num_zeros": "train/num_zeros",
        "overflow_retries": "train/overflow_retries",
        "largest_layer_factor": "train/largest_layer_factor",
        "weights_split": "train/weights_split",
        "precision_switched": "train/precision_switched",
        "rollbacks": "train/rollbacks",
        "validation/": "val/",
        "tokens_per_second": "perf/tokens_per_second",
        "step_ms": "perf/step_ms",
        "host_memory_gib": "perf/host_memory_gib",
        "device_memory_gib": "perf/device_memory_gib",
        "tflops_per_device": "perf/tflops_per_device",
        "mfu": "perf/mfu",
        "mfu_palm": "perf/mfu_palm",
        "milliseconds/": "perf/milliseconds/",
        "ranks/": "perf/ranks/",
    }
)
AGAINST_TOKENS = ("train/loss", "val/loss")  # curves that TensorBoard also shows over tokens


def sink_name(name: str) -> str:
    """The name in TensorBoard, W&B and trackio of a metric in `metrics.jsonl`."""
    section, slash, rest = name.partition("/")
    return SINK_NAMES.get(section + slash, section + slash) + rest


def named(facts: Facts, *, with_former: bool = False) -> dict[str, Fact]:
    """`facts` by their names in the sinks; `with_former`: also by their names in `metrics.jsonl`."""
    renamed = {sink_name(name): value for name, value in facts.items()}
    return {**facts, **renamed} if with_former else renamed
