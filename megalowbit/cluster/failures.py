"""Times of node failures.

The sequence depends on the seed, not on what the run does. Two settings of a run can therefore be compared.

Nodes fail independently. The time from repair to failure has an exponential distribution, or a Weibull
distribution with the same mean. With a shape below 1, nodes that have just been repaired are the most likely
to fail. A cluster is not new when a run starts, so first failures are drawn from the stationary process: for
every shape the rate is nodes/MTBF from the beginning. Not covered: simultaneous failures of several nodes,
and failures caused by a node's load.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from megalowbit.errors import UserError

DRAWS = 256  # numbers taken from the generator at a time


@dataclass(frozen=True, kw_only=True)
class NodeFailures:
    """How often nodes fail.

    Attributes:
        nodes: number of nodes that a run uses.
        node_mtbf: mean seconds between failures of one node, which is as good as new after a repair.
        shape: shape of the Weibull distribution; 1 is the exponential distribution.
    """

    nodes: int
    node_mtbf: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"nodes = {self.nodes} is not valid: a run needs at least 1")
        for name in ("node_mtbf", "shape"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"{name} = {value:g} is not valid: it must be positive and finite")
        if not 0.1 <= self.shape <= 10:
            raise UserError(
                f"shape = {self.shape:g} is not valid: use 0.1 to 10; typical nodes have 0.5 to 2"
            )

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures of any node."""
        return self.node_mtbf / self.nodes


class FailureTrace:
    """The times of node failures; computed on demand and determined by the seed."""

    def __init__(self, failures: NodeFailures, *seed: int) -> None:
        self._failures = failures
        self._random = np.random.default_rng(seed)
        self._moments: list[float] = []
        self._next_of_nodes: list[float] = []  # next failure of each node, a heap; empty if exponential
        self._scale = failures.node_mtbf / math.gamma(1 + 1 / failures.shape)
        if failures.shape != 1:
            self._next_of_nodes = sorted(self._residual_lives().tolist())

    def moment(self, index: int) -> float:
        """Seconds from the start to failure number `index`."""
        while index >= len(self._moments):
            self._extend()
        return self._moments[index]

    def _residual_lives(self) -> np.ndarray:
        """Remaining times to failure in the stationary process, (nodes,): a random part of each node's life.

        Long lives are more likely to be observed, so lives are drawn weighted by their length.
        """
        nodes, shape = self._failures.nodes, self._failures.shape
        lives = self._scale * self._random.gamma(1 + 1 / shape, size=nodes) ** (1 / shape)
        return lives * self._random.random(nodes)

    def _extend(self) -> None:
        if not self._next_of_nodes:
            gaps = self._random.exponential(self._failures.mtbf, DRAWS)
            last = self._moments[-1] if self._moments else 0.0
            self._moments.extend((last + np.cumsum(gaps)).tolist())
            return
        for life in (self._scale * self._random.weibull(self._failures.shape, DRAWS)).tolist():
            moment = self._next_of_nodes[0]
            heapq.heapreplace(self._next_of_nodes, moment + life)
            self._moments.append(moment)
