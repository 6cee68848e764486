"""The optimizer and the machine: learning rate, gradient norm, loss scale, skips; speed, MFU, memory."""

from __future__ import annotations

from collections import Counter

from megalowbit.report.drawing.chart import NUM_COLOURS
from megalowbit.report.drawing.document import folded, table
from megalowbit.report.sections.curves import Drawing, grid, is_constant

# columns with charts elsewhere on the page, and running totals that say nothing as a curve
SHOWN = (
    "loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "tokens", "tokens_per_second",
    "mfu", "mfu_palm", "tflops_per_device", "device_memory_gib", "host_memory_gib",
    "skipped/rank", "precision_switched",
)  # fmt: skip
SHOWN_GROUPS = (
    "loss/",
    "validation/",
    "gradient_overflow/",
    "quantization/",
    "speculation/",
    "milliseconds/",
)
MOST_TENSORS = 8


def optimizer(drawing: Drawing) -> str:
    """Learning rate, gradient norm, loss scale with skipped steps."""
    scales = [run.metrics.column("loss_scale") for run in drawing.runs]
    skips = [
        drawing.marks(
            run,
            run.metrics.skipped,
            f"{drawing.name(run, '')} skipped steps ({len(run.metrics.skipped):,})".strip(),
            mark,
        )
        for style, run in enumerate(drawing.runs)
        if len(run.metrics.skipped)
        for mark in [1 if len(drawing.runs) == 1 else style]
    ]
    has_scale = skips or not all(is_constant(each) for each in scales if each)
    return grid(
        [
            drawing.chart("Learning rate", drawing.plain("lr", "learning rate")),
            drawing.chart(
                "Gradient norm", drawing.smooth("grad_norm", "before clipping"), "before clipping", base=None
            ),
            drawing.chart("Loss scale", [*drawing.plain("loss_scale", "loss scale"), *skips], base=2)
            if has_scale
            else "",
        ]
    ) + _overflowed(drawing)


def _overflowed(drawing: Drawing) -> str:
    """The gradients that overflowed first in skipped steps."""
    rows = []
    for run in drawing.runs:
        counts = Counter(run.metrics.texts.get("skipped/tensor", {}).values())
        for tensor, count in counts.most_common(MOST_TENSORS):
            rows.append([tensor, *([run.label] if len(drawing.runs) > 1 else []), f"{count:,}"])
        if len(counts) > MOST_TENSORS:
            rest = sum(counts.values()) - sum(count for _, count in counts.most_common(MOST_TENSORS))
            rows.append(
                [
                    f"{len(counts) - MOST_TENSORS} others",
                    *([run.label] if len(drawing.runs) > 1 else []),
                    f"{rest:,}",
                ]
            )
    if not rows:
        return ""
    head = ["first gradient that overflowed", *(["run"] if len(drawing.runs) > 1 else []), "skipped steps"]
    return f"<h3>Where gradients overflowed</h3>{table(head, rows)}"


def machine(drawing: Drawing) -> str:
    """Tokens per second, MFU or TFLOP/s, memory, phases of the optimizer step."""
    has_mfu = any(run.metrics.column("mfu") for run in drawing.runs)
    if has_mfu:
        utilisation = drawing.chart("MFU", drawing.smooth("mfu", "MFU", 100.0), "% of the peak of one device")
    else:
        note = (
            "No MFU, because the peak of the device is not known: megalowbit.telemetry.peak_tflops sets it."
        )
        parts = drawing.smooth("tflops_per_device", "TFLOP/s")
        utilisation = drawing.chart("Model TFLOP/s", parts, "of one device", note=note)
    device = drawing.plain("device_memory_gib", "GPU, peak so far")
    other = 1 if len(drawing.runs) == 1 else NUM_COLOURS  # another colour, or the run's with dashes
    memory = device + drawing.plain("host_memory_gib", "host, resident", dash=other if device else 0)
    note = "Full lines: GPU, peak so far. Dashed: host." if device and len(drawing.runs) > 1 else ""
    return grid(
        [
            drawing.chart("Tokens per second", drawing.smooth("tokens_per_second", "tokens/s"), "all ranks"),
            utilisation,
            drawing.chart(
                "Memory of the main process", memory, "GiB" if device else "GiB of the host", note=note
            ),
            _phases(drawing),
        ]
    )


def _phases(drawing: Drawing) -> str:
    parts = []
    for style, run in enumerate(drawing.runs):
        names = [name for name in run.metrics.columns if name.startswith("milliseconds/")]
        for number, name in enumerate(names):
            phase = name.removeprefix("milliseconds/")
            label = phase if len(drawing.runs) == 1 else f"{run.label}, {phase}"
            parts += drawing.line(
                run, run.metrics.column(name), label, number if len(drawing.runs) == 1 else style
            )
    return drawing.chart("Phases of the optimizer step", parts, "ms")


def others(drawing: Drawing) -> str:
    """Charts of all figures that no other section has, folded."""
    names = dict.fromkeys(name for run in drawing.runs for name in run.metrics.columns)
    rest = [name for name in names if name not in SHOWN and not name.startswith(SHOWN_GROUPS)]
    charts = [drawing.chart(name, drawing.plain(name, name)) for name in rest]
    return folded("Other figures of the runs", grid(charts))
