"""Whole runs in damaged folders, by the real command: each goes on from a good checkpoint, or says one line.

    python tests/launch/checkpoint_fuzz_runs.py --seconds 600 --seed 1

A case damages a run of six steps that was stopped after the fourth, in its checkpoints (`checkpoint_fuzz`) or
in its other files, and starts it again with `--resume auto`. Where it goes on, the losses, and all that the
last checkpoint holds, must be those of the run that nobody damaged; where it does not, there is one line, no
traceback, and neither a record nor a checkpoint has changed. Also read are the tools: the export and the
report of speculation.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed"), str(HERE.parents[1])]

from checkpoint_fuzz import DAMAGES as OF_CHECKPOINTS  # noqa: E402
from checkpoint_fuzz import STRANGE, TEXTS, flip, garble, mutate, overwrite, remove, truncate  # noqa: E402
from checkpoint_fuzz import be_something_else as of_another_kind  # noqa: E402
from forked_ranks import run_ranks  # noqa: E402
from forks import run_script  # noqa: E402

from launchers import ROOT, metrics, write_config  # noqa: E402

BLOCK = {
    "run": {"steps": 6},
    "checkpoint": {"every": 2, "keep": None, "export_hf": False},
    "telemetry": {"log_every": 1, "tensorboard": False, "layers_every": 2},
    "recipe": "speculative-int8",
    "speculation": {"every": 2},
}
FILES = (
    "config.json",
    "metrics.jsonl",
    "overflow_layers.jsonl",
    "speculation.jsonl",
    "saved.json",
    "tokenizer",
)
LAST = "step-00000006"


def write_text(file, generator):
    file.write_text(generator.choice(TEXTS))


def change_values(file, generator):
    lines = file.read_text().splitlines()
    number = generator.randrange(len(lines)) if file.suffix == ".jsonl" else None
    content = json.loads(file.read_text() if number is None else lines[number])
    mutate(content, generator, STRANGE)
    text = json.dumps(content)
    file.write_text(
        text if number is None else "\n".join([*lines[:number], text, *lines[number + 1 :]]) + "\n"
    )


OF_FILES = (flip, truncate, overwrite, remove, of_another_kind, write_text, change_values)


class Runs:
    """A run that was stopped, and what it would have come to."""

    def __init__(self, folder):
        self.folder = folder
        self.config = write_config(folder, block=BLOCK)
        whole = self.start("whole")
        assert whole.code == 0, whole.output
        self.stopped = folder / "stopped"
        shutil.copytree(folder / "whole", self.stopped)
        shutil.rmtree(self.stopped / "checkpoints" / LAST)
        for name in ("DONE", "summary.json"):
            (self.stopped / name).unlink()

    def start(self, name, *more):
        return run_ranks("--ds-config", self.config, "--run-dir", name, *more, cwd=self.folder)

    def case(self, seed):
        """Damage a copy and go on with it; returns what went wrong, and what came out."""
        generator, run = random.Random(seed), self.folder / f"case{seed}"
        shutil.copytree(self.stopped, run, symlinks=True)
        if generator.random() < 0.6:
            # where checkpoint_fuzz looks for another step
            newest, before = (run / "checkpoints" / f"step-{step:08d}" for step in (4, 2))
            before.rename(before.with_name("step-00000001"))
            damage = generator.choice([each for each in OF_CHECKPOINTS if each is not garble])
            file = generator.choice(sorted(newest.glob("*.pt")))
            damage(file, generator)
            before.with_name("step-00000001").rename(before)
        else:
            file = run / generator.choice(FILES)
            damage = remove if file.name == "tokenizer" else generator.choice(OF_FILES)
            if file.is_dir():
                file = generator.choice(sorted(file.iterdir()))
            damage(file, generator)
        what = f"seed {seed}, {damage.__name__} of {file.name}"
        kept = contents(run)
        began = time.monotonic()
        done = self.start(run.name, "--resume", "auto")
        failure = self.judge(run, done, kept) or self.judge_tools(run)
        outcome = "went on" if done.code == 0 else "refused"
        if failure is None:
            shutil.rmtree(run)
        took = f"{time.monotonic() - began:.0f} s"
        return (None if failure is None else f"{what} ({took}): {failure}"), outcome

    def judge(self, run, done, kept):
        if "Traceback" in done.output:
            return f"a traceback\n{done.output[-3000:]}"
        if done.code == 2:
            if len(done.errors) != 1:
                return f"{len(done.errors)} lines of errors\n{done.output[-3000:]}"
            return (
                None if contents(run) == kept else f"it refused, and changed the run\n{done.output[-3000:]}"
            )
        if done.code:
            return f"exit code {done.code}\n{done.output[-3000:]}"
        losses = {row["step"]: row["loss"] for row in metrics(run)}
        expected = {row["step"]: row["loss"] for row in metrics(self.folder / "whole")}
        if losses.get(6) != expected[6] or any(losses[step] != expected[step] for step in losses):
            return f"other losses: {losses}\n{done.output[-3000:]}"
        return None

    def judge_tools(self, run):
        hf = self.folder / f"hf-{run.name}"
        calls = (("convert_hf.py", "to-hf", run, hf), ("speculation_report.py", run))
        for script, *arguments in calls:
            done = run_script(ROOT / "tools" / script, *arguments, cwd=self.folder, timeout=120)
            is_line = (
                done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
            )
            if "Traceback" in done.stderr or not (done.returncode == 0 or (is_line and done.returncode == 2)):
                return f"{script}, exit code {done.returncode}\n{done.stderr[-3000:]}"
        shutil.rmtree(hf, ignore_errors=True)
        return None


def contents(run):
    """Of a run's records and checkpoints, whatever a checkpoint is called."""
    found = {}
    for path in sorted(run.rglob("*")):
        if path.name == ".lock" or not path.is_file() or path.resolve() == Path("/dev/zero"):
            continue
        name = "/".join(part.partition(".damaged")[0] for part in path.relative_to(run).parts)
        found[name] = path.read_bytes() if os.access(path, os.R_OK) else b""
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=float, default=600)
    limit.add_argument("--cases", type=int, help="so many, however long they take")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, failures, seed = {"went on": 0, "refused": 0}, 0, options.seed
    with tempfile.TemporaryDirectory(prefix="checkpoint-fuzz-") as folder:
        runs, end = Runs(Path(folder)), time.monotonic() + options.seconds
        while time.monotonic() < end if options.cases is None else sum(counts.values()) < options.cases:
            try:
                failure, outcome = runs.case(seed)
            except subprocess.TimeoutExpired as error:
                failure, outcome = f"seed {seed}: hangs: {error}", "refused"
            counts[outcome] += 1
            failures += failure is not None
            if failure is not None:
                print(failure, flush=True)
            seed += 1
    print(f"{sum(counts.values())} cases: {counts}, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
