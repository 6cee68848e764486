"""Python programs as processes of their own, but without the seconds that their imports take.

The suite starts hundreds, and most of its time would go into `import torch` and what follows it. So programs
are forked by a process that has imported that and done nothing else (fork_server.py); from there on they are
what an interpreter would make of the same file. What depends on the imports themselves, or on variables that
libraries read while they are imported, must be started as users start it.
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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 240


class ForkServer:
    """The process that forks."""

    def __init__(self):
        # as launch/pretrain.py sets it before torch is imported: no stacks of stores that end
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        env = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # of warnings at import, and for a bad day
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
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
            raise AssertionError(f"the fork server has ended\n{self.log.read()}")
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()


@functools.cache
def fork_server():
    server = ForkServer()
    atexit.register(server.close)
    return server


class Forked:
    """A program that runs; as much of `Popen` as is needed.

    Args:
        script: its file.
        arguments: of the program.
        output: the file that its output goes to.
        env: its whole environment; None: this process's.
        cwd: its working folder.
        more: `errors`, `file_size` and `hook` of `fork_server.start`.
    """

    def __init__(self, script, *arguments, output, env=None, cwd=ROOT, **more):
        self.returncode = None
        self.args = [str(script), *map(str, arguments)]
        self.pid = fork_server().ask(
            "start",
            script=str(script),
            arguments=self.args[1:],
            env=dict(os.environ if env is None else env),
            cwd=str(cwd),
            output=str(output),
            **more,
        )

    def poll(self):
        if self.returncode is None:
            self.returncode = fork_server().ask("poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout=SECONDS):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run_script(script, *arguments, env=None, cwd=ROOT, timeout=SECONDS):
    """What `subprocess.run` of a Python file returns, with its output as text."""
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        program = Forked(script, *arguments, output=output, errors=str(errors), env=env, cwd=cwd)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(program.args, code, output.read_text(), errors.read_text())


def run_processes(script, *arguments, folder, world_size=2):
    """Run a Python file as ranks of a job; returns exit codes and outputs, by rank.

    The ranks get RANK, LOCAL_RANK and WORLD_SIZE; how they meet is the program's business.
    """
    outputs, ranks = [Path(folder) / f"output{rank}.txt" for rank in range(world_size)], []
    for rank, output in enumerate(outputs):
        output.write_text("")
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ranks.append(Forked(script, *arguments, output=output, env=env))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return codes, [output.read_text() for output in outputs]
