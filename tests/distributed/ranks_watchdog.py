"""Runs that lose a rank, all at the same time: see test_watchdog.py.

The imports take seconds and are alike, so one process makes them and is forked into all ranks of all runs.
Each run trains until the file `go` is there; then its victim does to itself what its case says.
With `RANK` set, this process is that rank of the only run, and where it runs is up to who has started it.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import ranks_pipeline
import torch
import torch.distributed as dist
from tiny_training import TinyModel, config, make, train_step

from launchers import free_port
from megalowbit.distributed.process_group import ProcessIdentity, is_true_anywhere
from megalowbit.engine.process_start import stop_process_group
from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, TransientError, UserError
from megalowbit.pretrain.command_line import _report
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog

PATIENCE = 3.0  # timeouts or silences, after which the test ends what has not ended by itself


def hang_in_a_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def fail():
    raise ValueError("a defect")


def refuse():
    raise UserError("this corpus has no such file: mend data.corpus")


def terminate():
    time.sleep(1000)


def terminate_when_all_hang(watchdog, folder, rank):
    """Hang, and get SIGTERM once the heartbeats of all ranks say so; the signal is blocked, as in a run."""
    thread = watchdog._heartbeat_thread

    def is_seen():
        heartbeats = thread.execute(lambda store: store.heartbeats())
        places = [heartbeat.place for heartbeat in heartbeats.values()]
        return len(places) == dist.get_world_size() and all(p.endswith(" terminate") for p in places)

    def send():
        if thread is not None:
            wait_until(is_seen, 120)
        time.sleep(1.5 * rank)  # the main process ends first, and the store with it
        strike_time(folder, rank)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    terminate()


def keep_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)  # PyDLL does not let go of the interpreter's lock


def interrupt():
    # whoever starts tests in the background of a shell has them ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "lock": hang_in_a_lock,
    "keep": keep_the_interpreter,
    "fail": fail,
    "refuse": refuse,
    "terminate": terminate_when_all_hang,
    "interrupt": interrupt,
    "end": lambda: sys.exit(0),
}


def save_then_hang(folder, watchdog, rank):
    watchdog.mark("the save of step 8", is_save=True)
    os.kill(os.getpid(), signal.SIGTERM)
    strike_time(folder, rank)
    time.sleep(5)  # longer than a step may go on after the signal
    watchdog.mark("step 9")
    time.sleep(1000)


def finish_before_another_fails(folder, watchdog, rank):
    if rank == 1:
        wait_until((folder / "finished").exists, 10)
        strike_time(folder, rank)
        fail()
    watchdog.finish()
    (folder / "finished").touch()
    assert watchdog._alarmed.wait(10)
    time.sleep(3)  # in which its thread would end it


def finish_after_another_has_failed(folder, watchdog, rank):
    if rank == 1:
        strike_time(folder, rank)
        fail()
    assert watchdog._alarmed.wait(10)
    watchdog.finish()


ENDINGS = {  # what ranks do where others would step on
    "nothing": lambda *_: None,
    "save, then hang": save_then_hang,
    "fail after the finish": finish_before_another_fails,
    "fail before the finish": finish_after_another_has_failed,
}
TOGETHER = {*ENDINGS, "terminate"}  # in the same step on all ranks


def strike_time(folder, rank):
    (folder / f"fault{rank}").write_text(json.dumps(time.monotonic()))


def start_training(kind):
    """`step(number)` of an engine of that kind, and the module where its faults happen."""
    if kind == "pipeline":
        engine = ranks_pipeline.start()
        return lambda number: ranks_pipeline.train(engine, number), engine.module
    settings = {**config("bf16", steps=2), "zero_optimization": {"stage": int(kind)}}
    engine, *_ = make(TinyModel(), settings)
    return lambda number: train_step(engine, number), engine.module


def train(case, folder, training, watchdog, rank):
    step, module = training
    faults = []

    def strike(*_):
        if faults:
            strike_time(folder, rank)
            faults.pop()()

    module.register_forward_pre_hook(strike)
    number = 0
    while True:
        watchdog.mark(f"step {number + 1}")
        step(number)
        number += 1
        if number == 3:
            (folder / f"ready{rank}").write_text(str(time.process_time()))
        is_going = (folder / "go").exists()
        if case["fault"] in TOGETHER:
            is_going = is_true_anywhere(is_going)
        if is_going and case["fault"] in ENDINGS:
            return ENDINGS[case["fault"]](folder, watchdog, rank)
        if is_going and rank in case["victims"]:
            fault = FAULTS[case["fault"]]
            is_signal = fault is terminate_when_all_hang
            faults.append(partial(fault, watchdog, folder, rank) if is_signal else fault)
        time.sleep(0.3)


def run_rank(case, folder, rank):
    """What a command line does: a run that is lost ends at once, whatever the libraries still wait for."""
    torch.set_num_threads(1)
    settings = WatchdogSettings(
        timeout=case["timeout"], silence=case.get("silence", 15.0), termination_seconds=3.0
    )
    if case.get("is_recorded"):
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "flight-rank")
    identity = ProcessIdentity(rank=rank, local_rank=rank, world_size=case["size"], launcher="environment")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        training = start_training(case["kind"])
        with Watchdog(
            settings, identity, folder=folder, report=lambda error: _report(error, identity)
        ) as watchdog:
            train(case, folder, training, watchdog, rank)
    except UserError as error:
        _report(error, identity)
        time.sleep(case.get("seconds_to_leave", 0))
        os._exit(EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR)
    except KeyboardInterrupt:
        os._exit(130)
    if case["fault"] == "fail after the finish":
        os._exit(0)  # the other is not there to leave together with
    stop_process_group()
    return 0


def fork_rank(name, case, folder, rank, port):
    """The process id, or None in the new process."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["size"]),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return None


def wait_until(is_true, seconds):
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.05)


def main(cases, results):
    """Fork, let all train, let them go, collect how each ended."""
    running = {}
    for name, case in cases.items():
        folder = results / name
        folder.mkdir()
        port = free_port()
        for rank in range(case["size"]):
            pid = fork_rank(name, case, folder, rank, port)
            if pid is None:
                return run_rank(case, folder, rank)
            running[pid] = (name, rank)
    try:
        ended = watch(cases, results, running)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    (results / "rank0.json").write_text(json.dumps(ended))
    return 0


def watch(cases, results, running):
    """Let all go once they train; how and when each ended. Leaves in `running` what has not."""
    expected = len(running)
    wait_until(lambda: len(list(results.glob("*/ready*"))) == expected, 120)
    for name in cases:
        (results / name / "go").touch()
    longest = max(case.get("patience", case["timeout"]) or 0 for case in cases.values())
    stopped = {
        (name, rank) for name, case in cases.items() if case["fault"] == "stop" for rank in case["victims"]
    }
    end, ended = time.monotonic() + PATIENCE * longest, {}
    while not stopped.issuperset(running.values()) and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        name, rank = running.pop(pid)
        ended[f"{name}/{rank}"] = {"code": os.waitstatus_to_exitcode(status), "time": time.monotonic()}
    return ended


if __name__ == "__main__":
    given, place = json.loads(sys.argv[1]), Path(os.environ["RESULTS"])
    sys.exit(run_rank(given, place, int(os.environ["RANK"])) if "RANK" in os.environ else main(given, place))
