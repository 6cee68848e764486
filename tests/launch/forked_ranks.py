"""Ranks of launch/pretrain.py without a launcher: started, watched, signalled and ended one by one.

They are forked with their imports done (forks.py), or else started as users' are, from the first import on.
Either kind runs the real command line in a process of its own.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import collective_order
from forks import Forked

from launchers import ROOT, SCRIPT, Done, built_libraries, copy_libraries, environment, free_port, metrics

TIMEOUT = 240  # seconds, on a machine with much else to do


class Ranks:
    """One start of a run; as a context it leaves no process behind.

    Args:
        folder: their working folder, where logs and caches go.
        arguments: of launch/pretrain.py.
        world_size: number of ranks.
        is_forked: whether they are forked, or started as users' are.
        file_sizes: bytes that ranks may write to a file, by rank; forked ones only.
        hook: `module.function` that each calls first; forked ones only. None: several ranks record their
            collectives, which `run_ranks` compares.
        log_folder: where logs go instead.
        more: variables of their environment.
    """

    def __init__(
        self,
        folder,
        *arguments,
        world_size=2,
        is_forked=True,
        file_sizes=None,
        hook=None,
        log_folder=None,
        **more,
    ):
        self.cache = folder / "cache"
        port, base = free_port(), environment(self.cache)
        arguments, sizes = [str(argument) for argument in arguments], file_sizes or {}
        self.ranks, self.is_recorded = [], is_forked and hook is None and world_size > 1 and not sizes
        if self.is_recorded:
            hook = "collective_order.install"
        self.logs = [(log_folder or folder) / f"rank{rank}.log" for rank in range(world_size)]
        for rank, log in enumerate(self.logs):
            env = {**base, **variables(rank, world_size, port), "PYTHONPATH": str(ROOT), **more}
            env[collective_order.FILE] = str(self._record_of(log))
            log.write_text("")
            if is_forked:
                special = {"file_size": sizes.get(rank), "hook": hook}
                started = Forked(SCRIPT, *arguments, env=env, cwd=folder, output=log, **special)
            else:
                with log.open("w") as file:
                    command = [sys.executable, SCRIPT, *arguments]
                    started = subprocess.Popen(
                        command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT
                    )
            self.ranks.append(started)

    @property
    def codes(self):
        """Exit codes, None where a rank runs."""
        return [rank.poll() for rank in self.ranks]

    @property
    def is_over(self):
        return None not in self.codes

    def send(self, number, victims):
        for rank in victims:
            self.ranks[rank].send_signal(number)

    def wait(self, seconds=TIMEOUT):
        """Whether all have ended within this time."""
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(0.02)
        return self.is_over

    def wait_until(self, is_so):
        """Until something is so, or all have ended."""
        end = time.monotonic() + TIMEOUT
        while not (is_so() or self.is_over):
            assert time.monotonic() < end, f"hangs\n{self.output()}"
            time.sleep(0.005)

    def reach(self, run_dir, step):
        """Until this step is recorded."""
        end = time.monotonic() + TIMEOUT
        while not (rows := metrics(run_dir)) or rows[-1]["step"] < step:
            assert not any(self.codes), self.output()
            assert time.monotonic() < end, f"hangs\n{self.output()}"
            time.sleep(0.02)

    def end(self):
        """End what is left, as a power cut would."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        assert self.wait(60)
        copy_libraries(self.cache, Path(built_libraries().name))

    def output(self):
        return "\n".join(
            f"--- rank {rank}, exit code {code}\n{Path(log).read_text(errors='replace')[-4000:]}"
            for rank, (log, code) in enumerate(zip(self.logs, self.codes, strict=True))
        )

    @property
    def done(self):
        """All they have printed, and a code that is not 0 if one was not."""
        output = "".join(log.read_text(errors="replace") for log in self.logs)
        return Done(next((code for code in self.codes if code), 0), output)

    @staticmethod
    def _record_of(log):
        return log.with_suffix(".collectives.json")

    def check_collectives(self):
        """Ranks that have ended well have issued the same collectives, each as NCCL accepts it."""
        if self.is_recorded and not any(self.codes):
            records = collective_order.read(map(self._record_of, self.logs))
            assert records
            assert not collective_order.problems(records)

    @property
    def errors(self):
        """Lines that say what a user should mend."""
        return self.done.errors

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end()


def run_ranks(*arguments, cwd, processes=1, **more):
    """As `launchers.run`, by forked ranks and without a launcher."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as logs:
        kinds = {"world_size": processes, "log_folder": Path(logs)}
        with Ranks(Path(cwd), *arguments, **kinds, **more) as ranks:
            assert ranks.wait(), f"hangs\n{ranks.output()}"
            ranks.check_collectives()
            return ranks.done


def variables(rank, world_size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
