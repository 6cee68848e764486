"""Kill runs of two ranks at random moments, resume them, and compare them with uninterrupted runs.

    python tests/launch/kill_soak.py --kills 200 --seed 1

Every run is killed over and over, from the first import to the last export, and started again with
`--resume auto` until it has left its DONE. Then all its records, its last checkpoint with every generator in
it and the exported weights must be bitwise those of the undisturbed run. A kill is SIGKILL of one rank or of
both; some are signals that ask, which the ranks must follow by themselves. What is random follows from the
seed but for the moments, which are those of real processes. Exit code 0: all runs were alike.
"""

import argparse
import itertools
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from forked_ranks import Ranks
from soak_runs import RUNS, compare, write_run

from launchers import metrics

PHASES = ("import", "start", "step", "save", "end")
# stopped as asked, by Ctrl-C, because the other rank was, before any step had ended
CODES_WHEN_ASKED = {0, 130, 75, 143}


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--most-steps", type=int, default=8, help="that a start may take before its kill")
    parser.add_argument("--unforked", type=float, default=0.2, help="share of starts with all imports")
    parser.add_argument("--folder", type=Path, default=None)
    return parser.parse_args(arguments)


class Watched:
    """A run as it looks from outside.

    Args:
        config: its configuration.
        path: its folder.
        steps: of the whole run.
    """

    def __init__(self, config, path, steps):
        self.config, self.path, self.steps = config, path, steps

    @property
    def arguments(self):
        arguments = ("--ds-config", self.config, "--run-dir", self.path, "--resume", "auto")
        return [str(argument) for argument in arguments]

    @property
    def step(self):
        rows = metrics(self.path)
        return rows[-1]["step"] if rows else 0

    @property
    def saved(self):
        """Step of the newest complete checkpoint."""
        return max(
            (int(p.parent.name[5:]) for p in self.path.glob("checkpoints/step-*/manifest.json")), default=0
        )

    @property
    def is_saving(self):
        folder = self.path / "checkpoints" / f"step-{self.step:08d}"  # others are what a kill has left
        return folder.is_dir() and not (folder / "manifest.json").exists()

    @property
    def is_done(self):
        return (self.path / "DONE").exists()

    @property
    def is_held(self):
        """Whether a main process has the run's folder; reading it disturbs no process."""
        try:
            number = (self.path / ".lock").stat().st_ino
        except FileNotFoundError:
            return False
        return f":{number} " in Path("/proc/locks").read_text()


class Soak:
    """Kills each run in turn, until it has done so `kills` times and the last one is done."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.random = random.Random(options.seed)
        self.kills, self.hit, self.how, self.wrong = 0, Counter(), Counter(), []
        self.never_aimed_at = ["import", "start", "save", "step"]  # each once, before chance decides

    def run(self):
        undisturbed = {name: self.undisturbed(name) for name in self.options.runs}
        for number in itertools.count():
            name = self.options.runs[number % len(self.options.runs)]
            self.kill_until_done(undisturbed[name], f"{name}-{number}")
            if self.kills >= self.options.kills:
                return

    def undisturbed(self, name):
        config = write_run(self.folder / name, name, self.options.steps)
        watched = Watched(config, self.folder / name / "undisturbed", self.options.steps)
        self.finish(watched)
        return watched

    def kill_until_done(self, undisturbed, name):
        """Kill one run until it is done, or had its share of all kills; compare it."""
        watched = Watched(undisturbed.config, undisturbed.path.with_name(name), undisturbed.steps)
        before = self.kills
        most = min(self.options.kills, before + math.ceil(self.options.kills / len(self.options.runs)))
        while not watched.is_done:
            if self.kills >= most:
                self.finish(watched)
            else:
                self.start_and_kill(watched)
        found = compare(watched.path, undisturbed.path)
        self.wrong += [f"{name}: {line}" for line in found]
        verdict = "bitwise the undisturbed run" if not found else f"{len(found)} DIFFERENCES"
        print(f"{name}: {self.kills - before} kills, {verdict}", *found, sep="\n   ", flush=True)

    def start(self, watched, *, is_forked=True):
        return Ranks(self.folder, *watched.arguments, is_forked=is_forked)

    def finish(self, watched):
        with self.start(watched) as ranks:
            assert ranks.wait(), f"hangs\n{ranks.output()}"
            assert ranks.codes == [0, 0], ranks.output()
            assert watched.is_done, ranks.output()

    def start_and_kill(self, watched):
        phase, is_forked = self.draw_phase(watched)
        saved, started = watched.saved, time.monotonic()
        with self.start(watched, is_forked=is_forked) as ranks:
            self.wait_for_a_moment(watched, ranks, phase)
            phase = self.phase_of(watched, ranks)
            if ranks.is_over:  # done before its time had come
                assert ranks.codes == [0, 0], ranks.output()
                return
            how = self.end(ranks)
            self.kills += 1
            self.hit[phase] += 1
            self.how[how] += 1
            print(
                f"{self.kills:4}  {how:<22} in {phase:<7}{'' if is_forked else '*'}"
                f" step {watched.step}, saved {saved} → {watched.saved}, codes {ranks.codes}"
                f" {time.monotonic() - started:.1f} s",
                flush=True,
            )
            self.check(watched, ranks, saved)
            if phase != "import" and not how.startswith("SIGKILL"):
                self.check_answer(watched, ranks, saved, is_early=phase == "start")

    def draw_phase(self, watched):
        """The phase to kill in, and whether the ranks are forked: only others import."""
        if self.never_aimed_at:
            phase = self.never_aimed_at.pop(0)
            return phase, phase != "import"
        is_forked = self.random.random() >= self.options.unforked
        is_near_end = watched.steps - watched.saved <= self.options.most_steps
        weights = {"import": 0 if is_forked else 2, "start": 1, "step": 4, "save": 4, "end": 3 * is_near_end}
        (phase,) = self.random.choices(PHASES, [weights[each] for each in PHASES])
        return phase, is_forked

    def wait_for_a_moment(self, watched, ranks, phase):
        """Let the ranks come to a phase, and some way into it."""
        first = watched.saved
        goal = min(first + self.random.randint(1, self.options.most_steps), watched.steps)
        reached = {
            "import": lambda: True,
            "start": lambda: self.phase_of(watched, ranks) == "start",
            "step": lambda: watched.step >= goal,
            "save": lambda: watched.saved >= goal - 2 and watched.is_saving,
            "end": lambda: self.phase_of(watched, ranks) == "end" and watched.saved >= watched.steps,
        }[phase]
        longest = {"import": 3.0, "start": 1.5, "step": 0.3, "save": 0.2, "end": 0.4}[phase]
        if phase == "step":  # records of steps that the checkpoint lacks are dropped first
            ranks.wait_until(lambda: watched.step <= first)
        ranks.wait_until(reached)
        time.sleep(self.random.uniform(0, longest))

    def phase_of(self, watched, ranks):
        if not watched.is_held:
            return "import"
        if not re.search(r"^batch ", ranks.logs[0].read_text(errors="replace"), re.MULTILINE):
            return "start"  # the opening is not logged yet
        if watched.is_saving:
            return "save"
        return "end" if watched.step >= watched.steps else "step"

    def end(self, ranks):
        """Kill or ask to stop; returns how."""
        victims = self.random.choice([(0,), (1,), (0, 1)])
        names = " and ".join(map(str, victims))
        number = self.random.choices(
            [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], [16, 1, 2, 1]
        )[0]
        if number == signal.SIGINT:
            victims, names = (0, 1), "0 and 1"  # as the keyboard does
        ranks.send(number, victims)
        if number == signal.SIGKILL:
            ranks.wait(self.random.choice([0.0, 0.5, 2.0]))
            ranks.end()
        else:
            assert ranks.wait(), f"hangs after {number.name}\n{ranks.output()}"
        return f"{number.name} of {names}"

    def check(self, watched, ranks, saved):
        """What must hold after every kill."""
        assert watched.saved >= saved, f"a checkpoint is lost\n{ranks.output()}"
        assert not list(watched.path.glob("checkpoints/*.damaged*")), ranks.output()

    def check_answer(self, watched, ranks, saved, *, is_early):
        """How ranks that were asked must end; while they import, Python answers as it likes.

        Before the loop nobody explains to one rank that Ctrl-C or SIGTERM has ended the other.
        """
        if is_early and {130, 143} & set(ranks.codes):
            return
        assert set(ranks.codes) <= CODES_WHEN_ASKED, ranks.output()
        if ranks.codes == [0, 0]:
            assert watched.is_done or watched.step == watched.saved > saved, ranks.output()


def main(arguments=None):
    options = parse(arguments)
    options.seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    started = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-soak-"))
    folder.mkdir(exist_ok=True)
    soak = Soak(options, folder)
    soak.run()
    if options.folder is None and not soak.wrong:
        shutil.rmtree(folder)
    hit = ", ".join(f"{soak.hit[phase]} in {phase}" for phase in PHASES)
    print(f"{soak.kills} kills in {time.monotonic() - started:.0f} s: {hit}")
    print(", ".join(f"{count} {how}" for how, count in soak.how.most_common()))
    print(*soak.wrong, sep="\n")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
