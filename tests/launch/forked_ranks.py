"""Ranks of launch/pretrain.py without a launcher: started, watched, hurt and ended one by one.

A rank takes seconds to import what it needs, and some tests start hundreds. So ranks are forked by a process
that has imported the same and done nothing else (rank_server.py), or else started as users' are, from the
first import on. Either kind runs the real command line in a process of its own.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launchers import ROOT, SCRIPT, built_libraries, copy_libraries, environment, free_port

HERE = Path(__file__).parent
PATIENCE = 240  # seconds, on a machine with much else to do


class RankServer:
    """The process that forks."""

    def __init__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{HERE}"}
        # of warnings at import, and for a bad day
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py")],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self._answer() == "ready"

    def ask(self, name, **values):
        self.process.stdin.write(json.dumps([name, values]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise AssertionError(f"the rank server has ended\n{self.log.read()}")
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()


@functools.cache
def rank_server():
    server = RankServer()
    atexit.register(server.close)
    return server


class ForkedRank:
    """A rank that the server has forked; as much of `Popen` as is needed."""

    def __init__(self, **values):
        self.returncode = None
        self.pid = rank_server().ask("start", **values)

    def poll(self):
        if self.returncode is None:
            self.returncode = rank_server().ask("poll", pid=self.pid)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


class Ranks:
    """One start of a run; as a context it leaves no process behind.

    Args:
        folder: where logs and caches go.
        arguments: of launch/pretrain.py.
        world_size: number of ranks.
        is_forked: whether they are forked, or started as users' are.
        file_sizes: bytes that ranks may write to a file, by rank; forked ones only.
        hook: `module.function` that each calls first; forked ones only.
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
        self.ranks = []
        self.logs = [(log_folder or folder) / f"rank{rank}.log" for rank in range(world_size)]
        for rank, log in enumerate(self.logs):
            env = {**base, **variables(rank, world_size, port), "PYTHONPATH": str(ROOT), **more}
            log.write_text("")
            if is_forked:
                size = sizes.get(rank)
                self.ranks.append(
                    ForkedRank(arguments=arguments, env=env, log=str(log), file_size=size, hook=hook)
                )
            else:
                with log.open("w") as file:
                    command = [sys.executable, SCRIPT, *arguments]
                    self.ranks.append(
                        subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
                    )

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

    def wait(self, seconds=PATIENCE):
        """Whether all have ended within this time."""
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(0.01)
        return self.is_over

    def wait_until(self, is_so):
        """Until something is so, or all have ended."""
        end = time.monotonic() + PATIENCE
        while not (is_so() or self.is_over):
            assert time.monotonic() < end, f"hangs\n{self.output()}"
            time.sleep(0.005)

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
    def errors(self):
        """Lines that say what a user should mend."""
        lines = [line for log in self.logs for line in log.read_text(errors="replace").splitlines()]
        return [line for line in lines if line.startswith("error")]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end()


def variables(rank, world_size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
