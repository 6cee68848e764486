"""Training curves of recipes as a picture: the loss, and its gap to a peer within each seed.

Seeds are thin lines, their mean is bold. Losses of single steps are mostly the noise of their batches, so
curves are means over the last steps; the gap needs that less, since both runs of a seed see the same batches.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart too, without yellow: faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", ":")
PEER_COLOUR = "#000000"
BEGINNING = 0.1  # part of a run whose steep fall the axes leave out
Curves = dict[str, dict[int, list[float | None]]]


def draw(path: Path, losses: Curves, peer: str) -> None:
    """Write the picture.

    Args:
        path: a PNG.
        losses: by recipe and seed, a loss for every step, `None` where it was not finite.
        peer: the recipe others are compared with.
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
    looks = {
        label: (COLOURS[n % len(COLOURS)], STYLES[n // len(COLOURS) % len(STYLES)])
        for n, label in enumerate(others)
    }
    looks[peer] = (PEER_COLOUR, "-")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for label in [*others, peer]:
        plot(
            left,
            {seed: smoothed(each[:steps], window) for seed, each in arrays[label].items()},
            looks[label],
            label,
        )
    for label in others:
        gaps = {
            seed: smoothed(arrays[label][seed][:steps] - arrays[peer][seed][:steps], window)
            for seed in arrays[label]
        }
        plot(right, gaps, looks[label], label)
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
    """What both panels have: labels, grid, limits."""
    values = "each step" if window == 1 else f"each value: mean over the last {window}"
    axes.set_xlabel(f"optimizer step ({values})")
    axes.set_xlim(0, steps)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if leave_out_the_beginning(axes, steps):
        axes.set_title(f"{axes.get_title()}\ny axis cut: fits from step {int(BEGINNING * steps) + 1} on")


def plot(axes: Axes, curves: dict[int, np.ndarray], look: tuple[str, str], label: str) -> None:
    """Thin lines for the seeds and a bold one for their mean; the first steps of a window have no value."""
    colour, style = look
    steps = np.arange(1, len(next(iter(curves.values()))) + 1)
    if len(curves) > 1:
        for each in curves.values():
            axes.plot(steps, each, color=colour, linestyle=style, linewidth=0.6, alpha=0.45)
    mean = np.mean(list(curves.values()), axis=0)
    axes.plot(steps, mean, color=colour, linestyle=style, linewidth=2, label=label)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, NaN where there are fewer."""
    sums = np.convolve(values, np.ones(window) / window, mode="valid")
    return np.concatenate([np.full(window - 1, np.nan), sums])


def leave_out_the_beginning(axes: Axes, steps: int) -> bool:
    """Fit the y axis to what comes after the first steps, which would press all else flat.

    Returns:
        Whether something of those first steps lies outside.
    """
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    curves = [each for each in lines if len(each) == steps]  # the zero line has other lengths
    shown = finite([each[int(BEGINNING * steps) :] for each in curves])
    if not len(shown):
        return False
    low, high = float(shown.min()), float(shown.max())
    margin = 0.05 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)
    values = finite(curves)
    return bool((values < low - margin).any() or (values > high + margin).any())


def finite(curves: list[np.ndarray]) -> np.ndarray:
    """All values of curves that are finite, in one row."""
    values = np.concatenate([*curves, np.empty(0)])
    return values[np.isfinite(values)]
