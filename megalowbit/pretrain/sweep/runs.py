"""Several runs of one configuration, each in a separate process, and the comparison of their losses.

A `Run` is a process of launch/pretrain.py with one thread, some overridden values and its run folder. An
interrupted sweep continues if it is started again with the same folders. Runs with the same seed have the
same initial weights and batches, so a `Gap` is computed within a seed, and its interval comes from all seeds.
A run that diverges is a result; a run that fails ends the sweep. The files of a run are validated,
because a truncated or edited file would otherwise enter an average unnoticed. `begun.json`, written before a
run starts, has what its configuration only names (`contents.py`), and the versions and the machine.

Not supported: runs with several processes, or on other machines.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from megalowbit.durable_files import atomic_file, open_regular
from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number, parse_json, read_text
from megalowbit.pretrain.checks import load_checked_config
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.resume import with_current_names
from megalowbit.pretrain.sweep.contents import contents_of, differences, plain, texts_of
from megalowbit.pretrain.sweep.study.report.statistics import CONFIDENCE, t_quantile
from megalowbit.pretrain.sweep.study.results import Origin, made_with
from megalowbit.records.files import CONFIG, METRICS, SUMMARY
from megalowbit.records.lines import objects
from megalowbit.shipped_files import checkout

BEGUN = "begun.json"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# overrides that turn off outputs a sweep does not need
LEAN = ("megalowbit.checkpoint.export_hf=false", "megalowbit.telemetry.tensorboard=false")
Losses = list[float | None]  # by step; None if it was not finite


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a sweep, finished or not.

    Attributes:
        label: its name in the sweep, without the seed.
        seed: seed of weights and data.
        folder: the run folder; the log of the process is stored next to it.
        config: DeepSpeed configuration.
        overrides: arguments of `--set`, including the seed.
        program: path of launch/pretrain.py.
    """

    label: str
    seed: int
    folder: Path
    config: Path
    overrides: tuple[str, ...]
    program: Path

    def resolved(self) -> PretrainConfig:
        """The resolved configuration."""
        return load_checked_config(self.config, list(self.overrides), world_size=1)

    def is_complete(self) -> bool:
        """Whether the run has finished all its steps, or was stopped because it diverged.

        Raises:
            UserError: the folder contains a run with other settings, or a damaged one.
        """
        saved, summary = self.folder / CONFIG, self.folder / SUMMARY
        if not saved.exists():
            return False
        wanted = json.loads(json.dumps(self.resolved().to_dict()))
        if with_current_names(self.read_object(saved)) != wanted:
            raise UserError(f"{self.folder} contains a run with other settings: choose another --out")
        self._check_contents()
        steps = wanted["megalowbit"]["run"]["steps"]
        if not summary.exists() or self.read_object(summary).get("steps") != steps:
            return self.was_stopped()
        if [row["step"] for row in self.rows()][-1:] != [steps] and not self.was_stopped():
            self.refuse(self.metrics, f"it does not end with step {steps}, as summary.json says")
        return True

    def begun_with(self) -> Origin | None:
        """The versions and the machine that the run was begun with; None if an earlier version began it.

        Raises:
            UserError: the record is damaged.
        """
        path = self.folder / BEGUN
        if not path.exists():
            return None
        try:
            return Origin.model_validate(self.read_object(path).get("made_with"))
        except ValidationError:
            self.refuse(path, "it does not say what the run was made with")

    def _check_contents(self) -> None:
        """Check that model, recipe, text and versions are those with which the run was begun.

        Raises:
            UserError: they are not; the message names the first one that differs.
        """
        origin = self.begun_with()
        if origin is None:
            return
        before = {key: self.read_object(self.folder / BEGUN).get(key) for key in ("contents", "texts")}
        config = self.resolved()
        now = {"contents": contents_of(config), "texts": texts_of(config)}
        for key, old, new in differences(plain(before), plain(now)):
            name = key.partition(".")[2] or key
            raise UserError(
                f"{self.folder} contains a run with another {name}: it was {shown(old)} and is {shown(new)} "
                "now: restore it, or choose another --out"
            )
        if other := origin.other_version(Origin.model_validate(self._made_with())):
            name, old, new = other
            raise UserError(
                f"{self.folder} was made with {name} {old}, and {new} is installed: install {old}, or choose "
                "another --out"
            )

    def _made_with(self) -> dict[str, Any]:
        return made_with(self.program.parent.parent)

    def _record_begin(self) -> None:
        if (self.folder / BEGUN).exists():
            return
        config = self.resolved()
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"contents": contents_of(config), "texts": texts_of(config), "made_with": self._made_with()}
        with atomic_file(self.folder / BEGUN) as file:
            file.write(json.dumps(content, indent=1) + "\n")

    def execute(self) -> float:
        """Run the process; returns the elapsed seconds, including the start.

        Raises:
            UserError: the process failed. A run that diverged has not failed.
        """
        self._record_begin()
        started = time.perf_counter()
        arguments = ["--ds-config", str(self.config), "--run-dir", str(self.folder), "--resume", "auto"]
        for override in self.overrides:
            arguments += ["--set", override]
        root = str(checkout() or "")  # an installed package is found without help
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = self.folder.parent / f"{self.folder.name}.log"
        with open_regular(log, "w") as file:
            command = [sys.executable, str(self.program), *arguments]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        if done.returncode and not self.was_stopped():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            reason = lines[-1].removeprefix("error: ")
            raise UserError(f"{self.label}, seed {self.seed}, failed: {reason} (full log: {log})")
        return time.perf_counter() - started

    @property
    def metrics(self) -> Path:
        """The file with a line for each step."""
        return self.folder / METRICS

    def rows(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl.

        Raises:
            UserError: a line is damaged.
        """
        if self.metrics.exists() and not self.metrics.is_file():
            self.refuse(self.metrics, "it is not a regular file")
        return [self._row(row, number) for number, row in objects(self.metrics, [])]

    def read_object(self, path: Path) -> dict[str, Any]:
        """The JSON object in one of the run's files.

        Raises:
            UserError: the file is damaged.
        """
        try:
            value = parse_json(read_text(path), str(path))
        except UserError as error:
            self.refuse(path, f"it {str(error).removeprefix(f'{path} ').partition(':')[0]}")
        except OSError as error:
            self.refuse(path, error.strerror or "it cannot be read")
        if not isinstance(value, dict):
            self.refuse(path, "it is not an object")
        return value

    def refuse(self, path: Path, reason: str) -> NoReturn:
        """Raise the error for a damaged file of the run."""
        raise UserError(
            f"{path} is damaged ({reason}): remove that run's folder, {self.folder}, to repeat the run"
        ) from None

    def _row(self, row: dict[str, Any] | None, number: int) -> dict[str, Any]:
        where = f"line {number}"
        if row is None:
            self.refuse(self.metrics, f"{where} is not an object")
        loss = row.get("loss", math.nan)
        if not (loss is None or is_finite_number(loss)):
            self.refuse(self.metrics, f"{where} has no loss")
        if type(row.get("skipped_steps")) is not int:
            self.refuse(self.metrics, f"{where} has no skipped_steps")
        if row.get("step") != number:
            self.refuse(self.metrics, f"{where} is not that of step {number}")
        return row

    def steps_without_update(self) -> int:
        """Number of consecutive steps at the end that were skipped or had a loss that is not finite."""
        rows = self.rows()
        skips = [0, *(row["skipped_steps"] for row in rows)]
        is_lost = [
            row["loss"] is None or after > before
            for row, (before, after) in zip(rows, itertools.pairwise(skips), strict=True)
        ]
        return len(list(itertools.takewhile(bool, reversed(is_lost))))

    def was_stopped(self) -> bool:
        """Whether the loop stopped the run because too many consecutive steps were skipped."""
        return self.steps_without_update() >= self.resolved().settings.run.max_consecutive_skips

    def diverged_at(self) -> int | None:
        """The step from which on nothing was learnt; `None` if the run did not diverge."""
        rows, lost = self.rows(), self.steps_without_update()
        return rows[-lost]["step"] if self.was_stopped() or (lost and rows[-1]["loss"] is None) else None

    def losses(self) -> Losses:
        """The loss of each finished step."""
        return [row["loss"] for row in self.rows()]

    def final_loss(self, last: int) -> float:
        """Mean of the finite losses among the last `last` steps; NaN if the run diverged."""
        finite = [loss for loss in self.losses()[-last:] if loss is not None]
        if self.diverged_at() is not None:
            return math.nan
        if not finite:
            self.refuse(self.metrics, "it has no loss")
        return statistics.mean(finite)


@dataclass(frozen=True)
class Gap:
    """Differences from a reference, paired by seed.

    Attributes:
        mean: of all seeds; NaN if a run has diverged.
        half_width: of the interval of the mean (95 %, Student's t over the seeds); NaN with one seed.
    """

    mean: float
    half_width: float

    @classmethod
    def between(cls, losses: Mapping[int, float], peers: Mapping[int, float]) -> Gap:
        """The gaps `losses[seed] - peers[seed]`; both have the same seeds. NaN if a loss is NaN."""
        gaps = [losses[seed] - peers[seed] for seed in losses]
        if any(map(math.isnan, gaps)):  # Python 3.11's stdev fails on them
            return cls(math.nan, math.nan)
        if len(gaps) == 1:
            return cls(gaps[0], math.nan)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        return cls(statistics.mean(gaps), t_quantile(CONFIDENCE, len(gaps) - 1) * error)


def folder_name(label: str, seed: int) -> str:
    """The name of a run's folder: `"own, hadamard"`, 3 → `own-hadamard-seed-3`."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', label)}-seed-{seed}"


def make_folder(out: Path) -> None:
    """Create the folder of a sweep if it does not exist.

    Raises:
        UserError: the folder cannot be created or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out} is not a writable folder ({error.strerror or error}): choose another --out"
        ) from None


def execute(runs: Sequence[Run], *, jobs: int) -> None:
    """Run them, `jobs` at a time, and print a line after each.

    Raises:
        UserError: a configuration is invalid (raised before the first run), or a run failed, which ends the
            sweep. A run that diverges does not end it.
    """
    for run in runs:
        run.resolved()
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run.execute): run for run in runs}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                run, seconds = futures[future], future.result()
                lost = run.diverged_at()
                end = f"{seconds:.0f} s" + (f", diverged at step {lost}" if lost else "")
                line = f"  [{number}/{len(runs)}] {run.label}, seed {run.seed}: {end}"
                print(line, flush=True)  # there are minutes between lines, and a pipe would buffer them
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
