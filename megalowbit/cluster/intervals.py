"""How often to save, by formula: Young 1974, Daly 2006, and what a run then takes on average.

All of them take failures for exponentially distributed, with one mean time between them for all nodes
together, and a save that stops training. Young: J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 17 (1974). Daly: J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22 (2006). Time limits, spare nodes and other distributions are `goodput`'s.
"""

from __future__ import annotations

import math


def young_interval(save: float, mtbf: float) -> float:
    """Seconds of training between two saves: √(2·save·mtbf), as in `expected_seconds`."""
    return math.sqrt(2 * save * mtbf)


def daly_first_order_interval(save: float, mtbf: float, restart: float) -> float:
    """Daly's simple model, in which a restart costs as well: √(2·save·(mtbf + restart))."""
    return math.sqrt(2 * save * (mtbf + restart))


def daly_interval(save: float, mtbf: float) -> float:
    """Daly's higher order; costs at most 0.02 % more than the best while a save is shorter than mtbf."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_seconds(
    work: float, interval: float, *, save: float, mtbf: float, start: float, pause: float = 0.0
) -> float:
    """Mean seconds that `work` seconds of training take, saving after each `interval` seconds of it.

    With pause = 0 it is Daly's (mtbf)·e^(start/mtbf)·(e^((interval + save)/mtbf) − 1)·work/interval, which is
    exact where the interval divides the work and nothing has to start at the beginning.

    Args:
        work: seconds of training, without any failure or save.
        interval: seconds of training between saves.
        save: seconds of a save.
        mtbf: mean seconds between failures of any node.
        start: seconds of a start after a failure, in which another failure may strike.
        pause: seconds before such a start in which none can, for nothing is running.
    """
    growth = math.expm1(min((interval + save) / mtbf, 700.0))  # beyond it a run never ends anyhow
    return (mtbf + pause) * math.exp(min(start / mtbf, 700.0)) * growth * work / interval
