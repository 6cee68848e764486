"""When nodes fail: one sequence of moments, the same whatever a run does, so that settings can be compared.

Nodes fail independently. The time from repair to failure is exponential, or Weibull with the same mean:
a shape below 1 says that a node just repaired is the likeliest to fail again. A cluster is not new when a run
begins, so first failures are drawn from the stationary process and the rate is nodes/MTBF throughout, at any
shape. Not covered: failures of many nodes at once, and ones that a node's load brings about.
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
        nodes: that a run uses.
        node_mtbf: mean seconds between failures of one node, as good as new after each.
        shape: of the Weibull distribution; 1 is the exponential one.
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
                f"shape = {self.shape:g} is not valid: nodes have 0.5 to 2, 0.1 to 10 is computed"
            )

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures of any node."""
        return self.node_mtbf / self.nodes


class FailureTrace:
    """The moments at which nodes fail, found as far as they are asked for, the same for a seed."""

    def __init__(self, failures: NodeFailures, *seed: int) -> None:
        self._failures = failures
        self._random = np.random.default_rng(seed)
        self._moments: list[float] = []
        self._next_of_nodes: list[float] = []  # a heap; stays empty where the distribution has no memory
        self._scale = failures.node_mtbf / math.gamma(1 + 1 / failures.shape)
        if failures.shape != 1:
            self._next_of_nodes = sorted(self._residual_lives().tolist())

    def moment(self, index: int) -> float:
        """Seconds from the start to failure number `index`."""
        while index >= len(self._moments):
            self._extend()
        return self._moments[index]

    def _residual_lives(self) -> np.ndarray:
        """What is left of nodes that were met at any time: part of a life that is drawn by its length."""
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
