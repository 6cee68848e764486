"""Forks Python programs on request, with the imports done that take them seconds: see forks.py.

Each line on standard input is a request, each line on standard output its answer, both JSON. This process
does nothing but fork and wait, and has one thread: what another one held would stay held in a child for ever.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import random
import resource
import runpy
import signal
import sys
import threading
from pathlib import Path

IMPORTED_LATE = (
    "megalowbit.pretrain.command_line",
    "megalowbit.pretrain.run",
    "deepspeed.runtime.zero.muon.original_muon",  # and by it torch's compiler
    "transformers.models.gpt2.modeling_gpt2",
    "torch.utils.tensorboard",
    "tensorboard.compat.proto.event_pb2",
)


def import_what_programs_import():
    """Before the first fork; what leads to seconds of imports when a model and its engine are made, too."""
    from megalowbit.engine.process_start import import_deepspeed

    import_deepspeed()
    for name in IMPORTED_LATE:
        importlib.import_module(name)


def start(answers, script, arguments, env, cwd, output, errors=None, file_size=None, hook=None):
    """The process id of a program.

    Args:
        answers: where this process answers, which is nothing of the program's.
        script: its file.
        arguments: of the program.
        env: its whole environment.
        cwd: its working folder.
        output: the file that its output goes to.
        errors: the file for its standard error; None: the same.
        file_size: bytes that it may write to a file; None: any number.
        hook: `module.function` to call in it first.
    """
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    pid = os.fork()
    if pid == 0:
        answers.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        send_output_to(output, errors or output)
        os.environ.clear()
        os.environ.update(env)
        reseed()
        if hook is not None:
            module, _, name = hook.rpartition(".")
            getattr(importlib.import_module(module), name)()
        if file_size is not None:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, hard))
        sys.argv = [script, *arguments]
        search_modules_as_if_started(script, env)
        run_as_a_program(script)
    return pid


def run_as_a_program(script):
    """Run it and end this process with its exit code.

    An interpreter frees all that was imported at its end, which takes seconds of each rank; that is left out.
    Programs that are started as users start them do it.
    """
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        gc.unfreeze()  # or libraries would take what is left over at the end for leaks
        raise
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads, as an interpreter does before functions of `atexit`
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def send_output_to(output, errors):
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in (output, errors)]
    for ours, theirs in zip((nothing, *files), (0, 1, 2), strict=True):
        os.dup2(ours, theirs)


def search_modules_as_if_started(script, env):
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(script).parent), *given, *(path for path in sys.path if path not in own)]


def reseed():
    """Otherwise a program that forgets to seed itself would look reproducible."""
    import numpy as np
    import torch

    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def poll(pid):
    """The exit code of a program, negative for a signal; None while it runs. It can be read once."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import_what_programs_import()
    gc.collect()
    gc.freeze()  # or each child's collector would look at, and so copy, all that was imported
    actions = {"start": functools.partial(start, answers), "poll": poll}
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, values = json.loads(line)
        print(json.dumps(actions[name](**values)), file=answers, flush=True)


if __name__ == "__main__":
    main()
