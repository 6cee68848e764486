"""Formulas for the interval between checkpoints (Young 1974, Daly 2006) and for the mean time of a run.

All formulas assume exponentially distributed failures with one mean time between failures (MTBF) for all
nodes together, and saves that stop training. Young: J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 17 (1974). Daly: J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22 (2006). `goodput` also simulates time limits, spare nodes and other
distributions.
"""

from __future__ import annotations

import math


def young_interval(save: float, mtbf: float) -> float:
    """Seconds of training between two saves: √(2·save·mtbf), with the arguments of `expected_seconds`."""
    return math.sqrt(2 * save * mtbf)


def daly_first_order_interval(save: float, mtbf: float, restart: float) -> float:
    """Daly's first-order model, which includes the cost of a restart: √(2·save·(mtbf + restart))."""
    return math.sqrt(2 * save * (mtbf + restart))


def daly_interval(save: float, mtbf: float) -> float:
    """Daly's higher-order model; at most 0.02 % worse than the optimum if a save is shorter than the MTBF."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_seconds(
    work: float, interval: float, *, save: float, mtbf: float, start: float, pause: float = 0.0
) -> float:
    """Mean duration of `work` seconds of training with a save after each `interval` seconds of training.

    With pause = 0 this is Daly's (mtbf)·e^(start/mtbf)·(e^((interval + save)/mtbf) − 1)·work/interval. It is
    exact if the interval divides the work and the first start takes no time.

    Args:
        work: seconds of training, without failures and saves.
        interval: seconds of training between saves.
        save: seconds of a save.
        mtbf: mean seconds between failures of any node.
        start: seconds of a start after a failure; another failure may interrupt it.
        pause: seconds before such a start in which nothing runs and no failure can interrupt.
    """
    growth = math.expm1(min((interval + save) / mtbf, 700.0))  # avoids overflow; such a run never ends
    return (mtbf + pause) * math.exp(min(start / mtbf, 700.0)) * growth * work / interval
