"""Time of a start, a save and a load of one process, part by part, against plain copies of the same bytes.

    python benchmarks/restart.py
    python benchmarks/restart.py --set megalowbit.model.overrides='{"n_layer":12,"n_embd":768,"n_head":12}'

Runs launch/pretrain.py with timers around its parts: once from the beginning with a save at its end, and once
resumed. The table has the shortest time of each part over the rounds. The files are in the page cache,
because they have just been written: reading is as fast as memory allows, which it is not on a parallel file
system.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# module or class, name of the function, name in the table
PARTS = (
    ("megalowbit.pretrain.run", "start_process_group", "process group"),
    ("megalowbit.pretrain.run", "check_ranks_agree", "ranks agree"),
    ("megalowbit.pretrain.run", "check_kernels", "kernels"),
    ("megalowbit.pretrain.job", "build_loader", "data"),
    ("megalowbit.pretrain.job", "start_model", "model"),
    ("megalowbit.pretrain.job", "convert", "conversion"),
    ("megalowbit.pretrain.job", "initialize", "engine"),
    ("megalowbit.engine.checkpoints.store.CheckpointStore", "latest", "verification"),
    ("megalowbit.engine.checkpoints.store.CheckpointStore", "load", "load"),
    ("megalowbit.engine.checkpoints.store.CheckpointStore", "save", "save"),
    ("megalowbit.pretrain.loop", "train_step", "steps"),
    ("megalowbit.pretrain.run", "export", "export"),
)


def timed_run(out: Path, arguments: list[str]) -> None:
    """Run the command line, in a separate process, and write the seconds of each part."""
    seconds: dict[str, list[float]] = defaultdict(list)
    spent_inside = [0.0]

    def timing(original: Any, name: str) -> Any:
        @functools.wraps(original)
        def timed(*values: Any, **named: Any) -> Any:
            outer, spent_inside[0] = spent_inside[0], 0.0
            began = time.perf_counter()
            try:
                return original(*values, **named)
            finally:
                lasted = time.perf_counter() - began
                seconds[name].append(
                    lasted - spent_inside[0]
                )  # without nested parts, which are counted separately
                spent_inside[0] = outer + lasted

        return timed

    started = time.clock_gettime(time.CLOCK_BOOTTIME) - _started_after_boot()
    from megalowbit.engine.process_start import import_deepspeed
    from megalowbit.pretrain.command_line import main

    began = time.perf_counter()
    import_deepspeed()
    importlib.import_module(
        "transformers.models.gpt2.modeling_gpt2"
    )  # otherwise its import counts as "model"
    for place, name, title in PARTS:
        module, _, _ = place.partition(".CheckpointStore")
        holder = importlib.import_module(module)
        holder = holder.CheckpointStore if place.endswith("CheckpointStore") else holder
        setattr(holder, name, timing(getattr(holder, name), title))
    imports = time.perf_counter() - began
    if (code := main(arguments)) != 0:
        raise SystemExit(code)
    seconds["interpreter"].append(started)
    seconds["imports"].append(imports)
    out.write_text(json.dumps(seconds))


def _started_after_boot() -> float:
    """The start of this process, in seconds after the machine's boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def copy_seconds(files: list[Path], folder: Path) -> dict[str, float]:
    """Seconds to read, hash, and write with fsync the same bytes, without anything else."""
    found = dict.fromkeys(("write and fsync", "read", "SHA-256"), 0.0)
    for path in files:
        began = time.perf_counter()
        content = path.read_bytes()
        read = time.perf_counter()
        hashlib.sha256(content).digest()
        hashed = time.perf_counter()
        with (folder / "copy").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        for name, lasted in zip(found, (written - hashed, read - began, hashed - read), strict=True):
            found[name] += lasted
    return found


def run(folder: Path, arguments: list[str]) -> dict[str, float]:
    """Run one process; returns the seconds of each part."""
    out = folder / "seconds.json"
    command = [sys.executable, __file__, "--timed-run", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {name: sum(each) for name, each in json.loads(out.read_text()).items()}


def configuration(folder: Path) -> Path:
    """Write the configuration of a GPT-2 on bytes; it is small unless `--set` changes its sizes."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 4000)
    model = {
        "model_type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 4,
        "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(model))
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"corpus": "text.txt", "sequence_length": 128, "tokenizer": "byte"},
            "run": {"steps": 2},
            "checkpoint": {"export_hf": False},
        },
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder / "config.json"


def shortest(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The shortest time of each part: that of the round in which the machine was least busy."""
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in launch/pretrain.py"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        choices=range(1, 100),
        metavar="N",
        help="number of rounds (default: 3)",
    )
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="restart-", dir=".") as name:
        folder = Path(name)
        config = configuration(folder)
        for number in range(options.rounds):
            first = ["--ds-config", str(config), "--run-dir", str(folder / f"run{number}")]
            first += [part for each in options.set for part in ("--set", each)]
            fresh = run(folder, first)
            files = list((folder / f"run{number}" / "checkpoints").glob("step-*/*.pt"))
            size = sum(path.stat().st_size for path in files)
            plain = copy_seconds(files, folder)
            again = run(folder, [*first, "--resume", "auto", "--set", "megalowbit.run.steps=3"])
            rounds.append((fresh, again, plain))
            shutil.rmtree(folder / f"run{number}")
    fresh, again, plain = (shortest(each) for each in zip(*rounds, strict=True))
    print(f"checkpoint {size / 1e6:,.1f} MB in {len(files)} files")
    print(f"{'':18}{'start':>9}{'resume':>9}   seconds")
    for name in dict.fromkeys(("interpreter", "imports", *(title for *_, title in PARTS))):
        row = [seconds.get(name, 0.0) for seconds in (fresh, again)]
        print(f"{name:18}{row[0]:9.2f}{row[1]:9.2f}")
    print("plain copies of the same bytes, and the parts that move them, GB/s")
    for name, lasted in plain.items():
        print(f"{name:18}{size / 1e9 / lasted:9.2f}")
    for name, seconds in (("save", fresh), ("verification", again), ("load", again)):
        print(f"{name:18}{size / 1e9 / seconds[name]:9.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--timed-run"]:
        timed_run(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
