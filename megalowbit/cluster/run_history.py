"""Simulates one run with node failures, and records how its time was spent.

A run alternates between training and saving. Failures come at times that do not depend on the run
(`failures`). A failure loses the training since the last complete save. It must then be detected, and the job
is queued and started again. Failures can also happen during saves, starts and detection. Before its time
limit a job saves, ends and is queued again. Cycles without a failure are simulated in one step, so the cost
of a simulation depends on the number of failures only.
Not covered: saves in parallel with training, steps (time is continuous), and jobs that wait for each other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from megalowbit.cluster.failures import FailureTrace
from megalowbit.errors import UserError

CAUSES = ("saves", "lost work", "detection", "queue", "starts", "spare nodes")
HOPELESS = 10  # a run is given up after this many times its training time


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Durations of the parts of a run, in seconds.

    Attributes:
        work: total training time, without failures and saves.
        save: duration of a save, during which training stops.
        start: from the start of the processes to the first step: imports, process groups, model, data, load.
        detection: from a failure to the end of the job; at most 1.5 × `watchdog.timeout`.
        requeue: from the end of a job to the start of the next one.
        time_limit: of a job, which then saves and is queued again.
        notice: time between the signal to save and the time limit.
        spares: number of spare nodes; None: another node is always available.
        repair: repair time of a failed node, which then becomes a spare.
    """

    work: float
    save: float
    start: float = 0.0
    detection: float = 0.0
    requeue: float = 0.0
    time_limit: float = math.inf
    notice: float = 0.0
    spares: int | None = None
    repair: float = 0.0

    def __post_init__(self) -> None:
        for name in ("work", "save"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name):g} s is not valid: it must be positive")
        for name in ("start", "detection", "requeue", "notice", "repair"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name):g} s is not valid: it must not be negative")
        if self.spares is not None and self.spares < 0:
            raise UserError(f"spares = {self.spares} is not valid: give their number, 0 or more")
        if self.time_limit <= self.start + self.notice:
            raise UserError(
                f"a time limit of {self.time_limit:g} s leaves no time to train after a start of "
                f"{self.start:g} s and before a notice of {self.notice:g} s: raise it"
            )
        if self.time_limit < math.inf and self.notice < self.save:
            raise UserError(
                f"a notice of {self.notice:g} s is shorter than a save of {self.save:g} s, so no save would "
                "ever be complete: raise it"
            )


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The result of one simulated run.

    Attributes:
        wall: seconds from start to end.
        trained: seconds of training that were saved; less than `work` if the run was given up.
        spent: other seconds by cause, in the order of `CAUSES`; `trained` plus their sum equals `wall`.
        failures: number of failures during a job or its start.
        jobs: number of jobs that were started.
    """

    wall: float
    trained: float
    spent: Mapping[str, float]
    failures: int
    jobs: int

    @property
    def goodput(self) -> float:
        """The fraction of the time that was useful training."""
        return self.trained / self.wall


class _Run:
    """The state of a simulation; `train_all` runs it to its end."""

    def __init__(self, costs: RunCosts, interval: float, trace: FailureTrace) -> None:
        self.costs, self.interval, self.trace = costs, interval, trace
        self.clock = 0.0
        self.done = 0.0  # seconds of training in complete saves
        self.marks = 0  # number of full intervals in `done`
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.failures = self.jobs = 0
        self._index = 0
        self._back: list[float] = []  # a heap of times at which failed nodes become spares
        self._struck_at = trace.moment(0)
        self._hopeless_at = HOPELESS * costs.work

    def train_all(self) -> RunHistory:
        while self.done < self.costs.work and self.clock < self._hopeless_at:
            if self._start():
                self._train()
        return RunHistory(
            wall=self.clock, trained=self.done, spent=self.spent, failures=self.failures, jobs=self.jobs
        )

    def _start(self) -> bool:
        """Wait for nodes and start a job; returns whether it got as far as training."""
        self._wait_for_nodes()
        if self.clock >= self._hopeless_at:
            return False
        self.jobs += 1
        is_struck = self._struck_at < self.clock + self.costs.start
        self._spend("starts", self._struck_at - self.clock if is_struck else self.costs.start)
        if is_struck:
            self._fail()
        return not is_struck

    def _train(self) -> None:
        """Train and save until a failure, the time limit or the end of the work."""
        deadline = self.clock - self.costs.start + self.costs.time_limit - self.costs.notice
        until = min(self._struck_at, deadline)
        while True:
            self._skip_whole_cycles(until)
            segment = min((self.marks + 1) * self.interval, self.costs.work) - self.done
            if self.done >= self.costs.work:
                return
            if self.clock + segment + self.costs.save > until:
                break
            self._commit(segment, segment)
        trained = min(until - self.clock, segment)
        if deadline < self._struck_at and self.clock + trained + self.costs.save <= self._struck_at:
            self._commit(trained, segment)
            if self.done < self.costs.work:
                self._pause("queue", self.costs.requeue)
            return
        if deadline >= self._struck_at:
            trained = min(self._struck_at - self.clock, segment)
        self._spend("lost work", trained)
        self._spend("saves", self._struck_at - self.clock)
        self._fail()

    def _skip_whole_cycles(self, until: float) -> None:
        """Advance over all complete cycles of training and saving before `until`, in one step."""
        if self.done != self.marks * self.interval:
            return
        cycle = self.interval + self.costs.save
        count = min(int((until - self.clock) / cycle), int((self.costs.work - self.done) / self.interval))
        if count > 0:
            self.marks += count
            self.done = self.marks * self.interval
            self.clock += count * self.interval
            self._spend("saves", count * self.costs.save)

    def _commit(self, trained: float, segment: float) -> None:
        """Train for `trained` seconds of the segment, and save."""
        self.clock += trained
        self._spend("saves", self.costs.save)
        if trained < segment:
            self.done += trained
        elif (self.marks + 1) * self.interval <= self.costs.work:
            self.marks += 1
            self.done = self.marks * self.interval
        else:
            self.done = self.costs.work

    def _fail(self) -> None:
        """End the job at the current failure, and queue it again."""
        self.failures += 1
        self._next_failure()
        self._pause("detection", self.costs.detection)
        self._pause("queue", self.costs.requeue)

    def _pause(self, cause: str, seconds: float) -> None:
        """Advance through time without a running job: a failure then only takes a node."""
        self._spend(cause, seconds)
        while self._struck_at <= self.clock:
            self._next_failure()

    def _next_failure(self) -> None:
        if self.costs.spares is not None:
            heapq.heappush(self._back, self._struck_at + self.costs.repair)
        self._index += 1
        self._struck_at = self.trace.moment(self._index)

    def _wait_for_nodes(self) -> None:
        """Wait until enough nodes are repaired, or give up: more nodes fail meanwhile."""
        if self.costs.spares is None:
            return
        while len(self._back) > self.costs.spares or (self._back and self._back[0] <= self.clock):
            back = min(heapq.heappop(self._back), self._hopeless_at)
            self._pause("spare nodes", max(0.0, back - self.clock))
            if self.clock >= self._hopeless_at:
                return

    def _spend(self, cause: str, seconds: float) -> None:
        self.spent[cause] += seconds
        self.clock += seconds


def simulate_run(costs: RunCosts, interval: float, trace: FailureTrace) -> RunHistory:
    """Simulate a run with the failures in `trace` and a save after each `interval` seconds of training.

    The run also saves at its end.

    Raises:
        UserError: the interval is not positive.
    """
    if not 0 < interval < math.inf:
        raise UserError(f"an interval of {interval:g} s is not valid: it must be positive")
    return _Run(costs, interval, trace).train_all()
