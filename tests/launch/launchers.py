"""Start launch/pretrain.py the ways users do, with real launchers and real processes."""

import fcntl
import functools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = str(ROOT / "launch" / "pretrain.py")
BIN = Path(sys.executable).parent
SECONDS = 240
PORTS = range(20_000, 32_000)
RESERVED = set()  # ports that this process has locked
# columns measured with a clock or by the system, which differ between equal runs
TIMES_OF_RANKS = {"ranks/slowest", "ranks/slowest_milliseconds", "ranks/other_milliseconds"}
MEMORY = {"host_memory_gib", "device_memory_gib"}
SPEEDS = {"tokens_per_second", "step_ms", "tflops_per_device", "mfu", "mfu_palm", *MEMORY, *TIMES_OF_RANKS}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Done:
    code: int
    output: str

    @property
    def errors(self):
        return [line for line in self.output.splitlines() if line.startswith("error")]


@functools.lru_cache(maxsize=1)
def port_locks():
    """A file whose byte number N is locked while a test process of this user has port N, until it ends."""
    return (Path(tempfile.gettempdir()) / f"megalowbit-test-ports-{os.getuid()}").open("a")


def free_port():
    """A port that nothing takes before it is used: no other test, no outgoing connection (theirs are higher).

    The program that gets the port binds it later, so a lock reserves the port until this process ends.
    """
    while True:
        port = secrets.choice(PORTS)
        if port in RESERVED:
            continue
        with suppress(OSError), socket.socket() as probe:
            fcntl.lockf(port_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            RESERVED.add(port)
            probe.bind(("", port))
            return port


@functools.lru_cache(maxsize=1)
def built_libraries():
    """Folder of compiled kernels that this user's cache or earlier launches have; removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="megalowbit-libraries-")
    copy_libraries(Path.home() / ".cache" / "megalowbit", Path(folder.name))
    return folder


def copy_libraries(source, target):
    for library in source.glob("*.so"):
        if not (target / library.name).exists():
            shutil.copy2(library, target / library.name)


def make_cache(folder):
    """Make a cache that has compiled kernels only: copying them saves ten seconds of compiling."""
    folder.mkdir(mode=0o700, exist_ok=True)
    copy_libraries(Path(built_libraries().name), folder)
    return folder


def environment(cache):
    """The environment of a launched process; its cache has compiled kernels only."""
    make_cache(cache)
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {
        **inherited,
        "PATH": f"{BIN}:{inherited['PATH']}",
        "MEGALOWBIT_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }


def command(launcher, processes=1):
    if launcher == "deepspeed":
        port = f"--master_port={free_port()}"
        return [str(BIN / "deepspeed"), "--num_accelerators", str(processes), port, SCRIPT]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), f"--nproc-per-node={processes}", "--standalone", SCRIPT]
    return [sys.executable, SCRIPT]


def start(launcher, *arguments, cwd, processes=1, **more):
    return subprocess.Popen(
        [*command(launcher, processes), *map(str, arguments)],
        cwd=cwd,
        env={**environment(Path(cwd) / "cache"), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(launcher, *arguments, cwd, processes=1, seconds=SECONDS, **more):
    process = start(launcher, *arguments, cwd=cwd, processes=processes, **more)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        kill(process)
        copy_libraries(Path(cwd) / "cache", Path(built_libraries().name))
    return Done(process.returncode, output)


def kill(process):
    """End the launcher and every process it started, as a power cut would."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def check_refusal(done, message):
    """A command line says a mistake in one line with exit code 2, and does nothing else.

    Args:
        done: what `subprocess.run` returned.
        message: what the line must contain.
    """
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""


def metrics(run_dir):
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + SECONDS
    while not (seen := metrics(run_dir)) or seen[-1]["step"] < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.02)


@functools.lru_cache(maxsize=1)
def training_text():
    """About 60 kB of simple sentences, always the same: what tests train on does not change with the code."""
    draw = random.Random(0)
    who = ("the baker", "a sailor", "my sister", "the old fox", "one of us", "the night train")
    does = ("counts", "carries", "remembers", "paints", "waits for", "sells")
    what = ("blue stones", "letters", "a quiet garden", "warm bread", "seven clocks", "the tide")
    where = ("by the river", "in the attic", "before dawn", "on Mondays", "far from home", "with care")
    parts = (who, does, what, where)
    return "".join(f"{' '.join(map(draw.choice, parts))}, page {page}.\n" for page in range(1100))


def write_config(folder, *, model=None, block=None, **deepspeed):
    """A GPT-2 of a few thousand parameters on `training_text()`; returns the path of its JSON."""
    (folder / "text.txt").write_text(training_text())
    hf_config = {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **(model or {}),
    }
    (folder / "model.json").write_text(json.dumps(hf_config))
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": 3},
        },
        **deepspeed,
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"corpus": "text.txt", "sequence_length": 32},
            "run": {"steps": 6},
            "telemetry": {"log_every": 1, "count_every": 1},
            **(block or {}),
        },
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps(raw, indent=2))
    return path
