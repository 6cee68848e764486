"""Plots the training curves of recipes: the loss, and its gap to a peer within each seed.

Seeds are thin lines, their mean is a bold line. The loss of a single step is mostly the noise of its batch,
so each point is the mean of the last steps. Gaps are less noisy: both runs of a seed train on the same
batches.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's colours, safe for colour-blind readers; without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", ":")
PEER_COLOUR = "#000000"
BEGINNING = 0.1  # fraction of a run at whose steep fall the y axis is not scaled
Curves = dict[str, dict[int, list[float | None]]]


def draw(path: Path, losses: Curves, peer: str) -> None:
    """Write the plot to a file.

    Args:
        path: a PNG.
        losses: by recipe and seed, the loss of every step; `None` if it was not finite.
        peer: the recipe that the others are compared with.
    """
    arrays = {
        label: {
            seed: np.array([math.nan if x is None else x for x in each]) for seed, each in by_seed.items()
        }
        for label, by_seed in losses.items()
    }
    steps = min(len(each) for by_seed in arrays.values() for each in by_seed.values())
    window = max(1, steps // 20)
    others = [label for label in arrays if label != peer]
    line_styles = {
        label: (COLOURS[n % len(COLOURS)], STYLES[n // len(COLOURS) % len(STYLES)])
        for n, label in enumerate(others)
    }
    line_styles[peer] = (PEER_COLOUR, "-")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for label in [*others, peer]:
        plot(
            left,
            {seed: smoothed(each[:steps], window) for seed, each in arrays[label].items()},
            line_styles[label],
            label,
        )
    for label in others:
        gaps = {
            seed: smoothed(arrays[label][seed][:steps] - arrays[peer][seed][:steps], window)
            for seed in arrays[label]
        }
        plot(right, gaps, line_styles[label], label)
    right.axhline(0, color=PEER_COLOUR, linewidth=1)
    left.set(title="Loss", ylabel="cross entropy (nats per token)")
    right.set(
        title=f"Gap to {peer} (black), paired by seed", ylabel=f"loss − loss of {peer} (nats per token)"
    )
    for axes in (left, right):
        finish(axes, steps, window)
    seeds = len(next(iter(arrays.values())))
    note = f"thin: {seeds} seeds, bold: their mean" if seeds > 1 else "one seed"
    handles, names = left.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(4, len(names)), title=note, frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def finish(axes: Axes, steps: int, window: int) -> None:
    """Set the labels, grid and limits of a panel."""
    values = "each step" if window == 1 else f"each value: mean over the last {window}"
    axes.set_xlabel(f"optimizer step ({values})")
    axes.set_xlim(0, steps)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if leave_out_the_beginning(axes, steps):
        axes.set_title(f"{axes.get_title()}\ny axis cut: fits from step {int(BEGINNING * steps) + 1} on")


def plot(axes: Axes, curves: dict[int, np.ndarray], line_style: tuple[str, str], label: str) -> None:
    """Draw thin lines for the seeds, and a bold one for their mean; the first window has no values."""
    colour, style = line_style
    steps = np.arange(1, len(next(iter(curves.values()))) + 1)
    if len(curves) > 1:
        for each in curves.values():
            axes.plot(steps, each, color=colour, linestyle=style, linewidth=0.6, alpha=0.45)
    mean = np.mean(list(curves.values()), axis=0)
    axes.plot(steps, mean, color=colour, linestyle=style, linewidth=2, label=label)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values; NaN at positions with fewer."""
    sums = np.convolve(values, np.ones(window) / window, mode="valid")
    return np.concatenate([np.full(window - 1, np.nan), sums])


def leave_out_the_beginning(axes: Axes, steps: int) -> bool:
    """Fit the y axis to the curves after the first steps, whose fall would flatten everything else.

    Returns:
        Whether a value of those first steps is outside the axis.
    """
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    curves = [each for each in lines if len(each) == steps]  # leaves out the zero line
    shown = finite([each[int(BEGINNING * steps) :] for each in curves])
    if not len(shown):
        return False
    low, high = float(shown.min()), float(shown.max())
    margin = 0.05 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)
    values = finite(curves)
    return bool((values < low - margin).any() or (values > high + margin).any())


def finite(curves: list[np.ndarray]) -> np.ndarray:
    """All finite values of the curves, (values,)."""
    values = np.concatenate([*curves, np.empty(0)])
    return values[np.isfinite(values)]
