"""One layer that left the others: its weights jumped, or one of its operands began to saturate or vanish.

The counts between two tables are compared in two directions. Against the layer's own past: an optimizer
changes weights by at most about the learning rate in a step, so their mean square does not jump. Against all
other layers in the same interval: what a learning rate or a batch does, it does to many layers; what a bad
write or a broken device does, it does to one.
"""

from __future__ import annotations

import numpy as np

from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.layer_tables import LayerTables
from megalowbit.findings.robust import Array, deviation
from megalowbit.findings.run_files import RunFiles
from megalowbit.records.files import LAYERS

DEVIATIONS = 8.0  # of the changes of all layers; 1 in 10^15 if they were normal
LEAST_DECIBELS = 6.0  # doubled in root mean square, which no update of a trained layer does within a table
MOST_LAYERS = 0.25  # at most this share of all layers, or it is no matter of one layer
# part, whole, what it is, and the least rise of the share. Saturation of healthy layers moves by a percent.
# Small elements vanish in healthy runs, too, as gradients shrink; a layer is lost only if most of it does.
RATES = (
    ("saturated", "elements", "elements are saturated", 0.05),
    ("saturated_scales", "blocks", "block scales are saturated", 0.05),
    ("underflow", "elements", "non-zero elements become zero", 0.5),
    ("zero_blocks", "blocks", "blocks are zero", 0.5),
)


def findings(run: RunFiles) -> list[Finding]:
    """The first layer that left the others; empty if none did, or there are fewer than two tables."""
    tables = run.layers
    if tables is None or len(tables.steps) < 2:
        return []
    found = [*_jumps(tables), *_rates(tables)]
    return [min(found, key=lambda finding: finding.step or 0)] if found else []


def mean_square(tables: LayerTables, rows: list[int]) -> Array:
    """(t, rows) in dB: mean square of the elements that were quantised between two tables."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = tables.counts["squared_norm"][:, rows] / tables.counts["elements"][:, rows]
        return np.where(ratio > 0, 10 * np.log10(ratio), np.nan)


def _jumps(tables: LayerTables) -> list[Finding]:
    """Layers whose weights jumped."""
    rows = tables.rows_of("weight")
    if len(rows) < 3:
        return []
    changes = np.diff(mean_square(tables, rows), axis=0)  # (t - 1, rows)
    for table in range(len(changes)):
        now = changes[table]
        known = changes[: table + 1][np.isfinite(changes[: table + 1])]
        if not np.isfinite(now).any():
            continue
        middle = float(np.nanmedian(now))
        limit = max(LEAST_DECIBELS, DEVIATIONS * max(deviation(known), deviation(now[np.isfinite(now)])))
        beyond = np.flatnonzero(np.abs(now - middle) > limit)
        if len(beyond) and len(beyond) <= max(1, MOST_LAYERS * len(rows)):
            worst = int(beyond[np.argmax(np.abs(now[beyond] - middle))])
            return [_of_jump(tables, table + 1, rows[worst], float(now[worst]), middle, limit)]
    return []


def _of_jump(
    tables: LayerTables, table: int, row: int, change: float, middle: float, limit: float
) -> Finding:
    layer, first, last = tables.keys[row][0], tables.first_step_of(table), int(tables.steps[table])
    factor = 10 ** (change / 20)
    evidence = (
        Evidence(
            file=LAYERS, step=last,
            text=f"root mean square of {layer} weight: × {factor:.3g} ({change:+.1f} dB) since step "
            f"{first - 1}",
        ),
        Evidence(
            file=LAYERS, step=last,
            text=f"median of all layers in the same steps: {middle:+.2f} dB; limit ± {limit:.1f} dB",
        ),
    )  # fmt: skip
    return Finding(
        name=base.LAYER, step=first, evidence=evidence,
        title=f"the weights of {layer} jumped between steps {first} and {last}, and those of no other layer: "
        "a bad write, a device that computes wrongly, or code that changed them; no optimizer step does it",
        remedy=(
            f"continue from a checkpoint before step {first}: move later ones out of checkpoints/, then "
            "--resume auto",
            "if it happens again on the same device, test it (dcgmi diag -r 3) or leave its host out",
        ),
    )  # fmt: skip


def _rates(tables: LayerTables) -> list[Finding]:
    """Operands of single layers that began to saturate or to vanish."""
    found = []
    for role in ("weight", "input", "grad_output"):
        rows = tables.rows_of(role)
        if len(rows) < 3:
            continue
        for part, whole, what, least in RATES:
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = tables.counts[part][:, rows] / tables.counts[whole][:, rows]
            place = _first_beyond(rate, least)
            if place is not None:
                table, number = place
                found.append(_of_rate(tables, table, rows[number], role, what, rate[:, number], rate[table]))
    return found


def _first_beyond(rate: Array, least: float) -> tuple[int, int] | None:
    """The first table and row whose rate rose beyond its own past and beyond the rise of the other rows."""
    for table in range(1, len(rate)):
        past, now = rate[:table], rate[table]
        rise = now - np.where(np.isfinite(past), past, -np.inf).max(axis=0)  # above anything it has shown
        known = rise[np.isfinite(rise)]
        if len(known) < 3:
            continue
        spread = max(deviation(known), deviation(np.diff(rate[: table + 1], axis=0).ravel()))
        limit = max(least, DEVIATIONS * spread)
        beyond = np.flatnonzero(np.nan_to_num(rise - max(0.0, float(np.median(known)))) > limit)
        if len(beyond) and len(beyond) <= max(1, MOST_LAYERS * len(now)):
            return table, int(beyond[np.argmax(rise[beyond])])
    return None


def _of_rate(
    tables: LayerTables, table: int, row: int, role: str, what: str, own: Array, others: Array
) -> Finding:
    layer, first, last = tables.keys[row][0], tables.first_step_of(table), int(tables.steps[table])
    evidence = (
        Evidence(
            file=LAYERS, step=last,
            text=f"{layer} {role}: {own[table]:.1%} of its {what}; before at most "
            f"{np.nanmax(own[:table]):.1%}",
        ),
        Evidence(file=LAYERS, step=last, text=f"median of all layers: {np.nanmedian(others):.1%}"),
    )  # fmt: skip
    return Finding(
        name=base.LAYER, step=first, evidence=evidence,
        title=f"from steps {first} to {last} on, {own[table]:.0%} of the {role} of {layer} no longer fits "
        f"its format ({what}), unlike in other layers",
        remedy=(
            f"keep the layer in high precision, in a new run: \"keep\": [\"{layer}\"] in megalowbit.recipe",
            "or a recipe with spectral splits or Hadamard transforms for outliers: megalowbit recipes",
        ),
    )  # fmt: skip
