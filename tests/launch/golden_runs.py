"""Record small runs of one version bitwise, and compare another version with them.

    python tests/launch/golden_runs.py record FOLDER [--tree DIR] [--only NAME …]
    python tests/launch/golden_runs.py compare FOLDER [--tree DIR] [--only NAME …]
    python tests/launch/golden_runs.py names FILE [--tree DIR]

`record` trains every entry of `RUNS` with the version in DIR (default: this repository) and keeps the run
folders and the facts read from them. `compare` trains all of it with the version in DIR, continues and
exports what is recorded, and prints a line for each fact that differs; its exit code is then 1. Only the
public programs are used, so any version can be compared. The bits of a run depend on the CPU and the
installed libraries: compare on the machine that recorded. `names` writes what does not depend on them, of a
few runs: names of metrics, files, settings and checkpoint entries, with types and shapes of tensors.

Programs are forks of this process, which has imported the package: an import takes longer than a run.
"""

import argparse
import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import re
import runpy
import secrets
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from golden_matrix import RUNS, write_inputs

from launchers import SPEEDS, free_port, make_cache

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # that one program may take
FACTS = "facts.json"
NAMED = ("tables", "zero2-ranks2", "parameter-split", "speculation")
NOT_OURS = ("ds_config", "hf_config", "generation_config", "config", "hf", "tokenizer")  # or twice there
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IMPORTED = (
    "torch",
    "torch.utils.tensorboard",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

UNCOMPARED = "not-compared"
# What two runs of one version do not have in common: only the names are kept.
NOT_COMPARED = {
    **dict.fromkeys(SPEEDS, "a speed, or memory"),
    **dict.fromkeys(("time", "pid", "code", "command"), "of an attempt: time, process, version, paths"),
    "seconds": "a duration",
    "milliseconds": "durations of the optimizer's phases",
    "digest": "a hash over a checkpoint's file, which holds durations",
}
LINES_NOT_COMPARED = {
    r"^ *\d+/\d+ ": "rows of the table of steps, with speed and time left; metrics.jsonl has their figures",
    r"\btime (in steps)? *\d": "the summary's duration",
    r"tokens/s|TFLOP/s": "the summary's speeds",
    r"^done: ": "has the duration of the run",
    r"^\[\d{4}-|^\[rank\d|\.(py|cpp):\d+": "the libraries' own log lines, with times or numbers of lines",
    r"<work>.* → |^[^ ]+ → <work>|<tree>.* → <tree>": "a path that changed because the folder is another",
}


class Masks:
    """Texts with folders in them replaced by names.

    Args:
        folders: pairs of path and name.
    """

    def __init__(self, folders):
        self.folders = sorted(folders, key=lambda each: -len(each[0]))  # one path may begin with another

    def __call__(self, text):
        for path, name in self.folders:
            text = text.replace(path, name)
        return text

    def lines(self, name, text):
        """The lines that two runs have in common, as facts by number."""
        lines = [line.rstrip() for line in self(text).splitlines()]
        kept = [line for line in lines if not any(re.search(each, line) for each in LINES_NOT_COMPARED)]
        return {f"{name}/line {number}": line for number, line in enumerate(kept, start=1)}


def run_facts(folder, masks):
    """What a run folder holds, by name."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = sorted({re.sub(r"events\.out\..*", "events", str(path)) for path in paths})
    facts = {f"file {name}": "there" for name in names}
    for path in sorted(folder.glob("*.json")):
        facts |= flat(json.loads(path.read_text()), path.name, masks)
    for path in sorted(folder.glob("*.jsonl")):
        if not path.name.startswith("attempts"):  # these are times and processes
            facts |= columns(path, masks)
    for path in sorted(folder.glob("checkpoints/step-*")):
        facts |= checkpoint_facts(path, path.name, masks)
    for name in ("hf", "tokenizer"):
        facts |= hf_facts(folder / name, name, masks)
    return facts


def columns(path, masks):
    """Each column of a file of JSON lines as one fact, all its values in order."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        for name, value in flat(json.loads(line), path.name, masks).items():
            found[name].append(value)
    return {name: " ".join(values) for name, values in found.items()}


def checkpoint_facts(folder, name, masks):
    """Every tensor and value of a checkpoint, the list of its files included."""
    import torch

    facts = {}
    for path in sorted(folder.iterdir()):
        facts[f"{name}/file {path.name}"] = "there"
        if path.suffix == ".pt":
            facts |= flat(torch.load(path, weights_only=False), f"{name}/{path.name}", masks)
    return facts


def hf_facts(folder, name, masks):
    from safetensors.torch import load_file

    facts = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            facts |= flat(load_file(path), f"{name}/{path.name}", masks)
        elif path.suffix == ".json":
            facts |= flat(json.loads(path.read_text()), f"{name}/{path.name}", masks)
    return facts


def flat(value, name, masks, depth=0):
    """Nested data as facts: a tensor's type, shape and hash, other values as Python writes them."""
    import numpy as np
    import torch

    if name.rpartition("/")[2] in NOT_COMPARED or "/milliseconds/" in name:
        return {name: UNCOMPARED}
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"}
    if isinstance(value, np.ndarray):
        return flat(torch.from_numpy(value.copy()), name, masks)
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, (list, tuple)) and any(
        isinstance(each, (dict, list, tuple)) or hasattr(each, "shape") for each in value
    ):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and depth < 20:
        found = flat(vars(value), name, masks, depth + 1)
        return {name: f"{type(value).__module__}.{type(value).__qualname__}", **found}
    else:
        text = masks(repr(value))
        return {
            name: text if len(text) < 200 else f"{text[:60]}… {hashlib.sha256(text.encode()).hexdigest()}"
        }
    facts = {}
    for key, each in items:
        facts |= flat(each, f"{name}/{key}", masks, depth + 1)
    return facts


def import_package(tree):
    """Import what programs of this version import; refuses another version than this."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TORCH_CPP_LOG_LEVEL="ERROR")
    sys.path.insert(0, str(tree))
    for name in IMPORTED:
        importlib.import_module(name)
    package = importlib.import_module("megalowbit")
    if not Path(package.__file__).is_relative_to(tree):
        raise SystemExit(f"error: megalowbit comes from {package.__file__}, not from {tree}")
    for module in pkgutil.walk_packages(package.__path__, "megalowbit."):
        with contextlib.suppress(ImportError):  # kernels of libraries that are not installed
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # or the collector of each fork would copy what is imported
    atexit.register(gc.unfreeze)  # or libraries would take it for leaks at the end
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise SystemExit("error: an import has started a thread, which forks do not have")


def be_program(script, arguments, variables, folder, output):
    """What a fork does: run a Python file as an interpreter does, with other random numbers each time."""
    import numpy as np
    import torch

    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ.update(variables)
    seed = secrets.randbits(32)  # or a program that forgets to seed itself would look reproducible
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


class Version:
    """One version's programs, and what they write of each run.

    Args:
        tree: the version's repository.
        work: folder for all that its programs write.
        sets: settings to change in all runs.
    """

    def __init__(self, tree, work, sets=()):
        self.tree, self.work, self.sets = tree, work, tuple(sets)
        self.folders = ((str(work), "<work>"), (str(tree), "<tree>"))
        self.masks = Masks(self.folders)
        make_cache(work / "cache")

    def train(self, name):
        """Facts of a run that starts; the run folder is `work/name/run`."""
        run, folder = RUNS[name], self.work / name
        folder.mkdir()
        write_inputs(run, folder, self.tree)
        if run.is_dry:
            code, output = self.start("launch/pretrain.py", run, folder, "--dry-run")
            return {"exit code": str(code), **self.masks.lines("output", output)}
        return self.pretrain(run, folder, folder / "run")

    def go_on(self, name, recorded):
        """Facts of what follows from a recorded run folder: continued, exported, imported."""
        run, folder = RUNS[name], self.work / name
        facts = self.convert(folder, recorded) if run.is_exported else {}
        if not run.is_dry and run.is_continued:
            for number, (sets, processes) in enumerate([((), run.processes), *run.continued_on]):
                again = copy_until_first_checkpoint(recorded, folder / f"again-{number}")
                found = self.pretrain(run, folder, again, sets=sets, processes=processes, is_resume=True)
                facts |= {f"again-{number}/{each}": value for each, value in found.items()}
        return facts

    def pretrain(self, run, folder, run_dir, *, sets=(), processes=None, is_resume=False):
        more = ["--resume", "auto"] if is_resume else []
        for each in sets:
            more += ["--set", each]
        arguments = ("--run-dir", run_dir, *more)
        code, output = self.start("launch/pretrain.py", run, folder, *arguments, processes=processes)
        facts = {"exit code": str(code), **self.masks.lines("output", output)}
        return facts | (run_facts(run_dir, self.masks) if run_dir.is_dir() else {})

    def convert(self, folder, recorded):
        hf, start = folder / "exported", folder / "start"
        facts = {}
        for name, source, target in (("to-hf", recorded, hf), ("to-megalowbit", hf, start)):
            code, output = self.fork("tools/convert_hf.py", folder, [name, source, target], 1)
            facts |= {f"{name}/exit code": str(code), **self.masks.lines(f"{name}/output", output)}
        facts |= hf_facts(hf, "to-hf", self.masks)
        for path in sorted(each.parent for each in start.rglob("*.pt")):
            facts |= checkpoint_facts(path, f"to-megalowbit/{path.relative_to(start)}", self.masks)
        return facts

    def start(self, script, run, folder, *arguments, processes=None):
        config = self.tree / "configs" / f"{run.shipped}.json" if run.shipped else folder / "config.json"
        sets = [
            word
            for each in (*run.sets, *self.sets)
            for word in ("--set", each.replace("<folder>", str(folder)))
        ]
        return self.fork(
            script, folder, ["--ds-config", config, *sets, *arguments], processes or run.processes
        )

    def fork(self, script, folder, arguments, processes):
        """Exit code of a program on some ranks, and what rank 0 has printed."""
        fork, port = multiprocessing.get_context("fork"), free_port()
        common = {"MEGALOWBIT_CACHE": str(self.work / "cache"), "PYTHONPATH": str(self.tree)}
        logs = [folder / f"output-{secrets.token_hex(4)}.txt" for _ in range(processes)]
        ranks = []
        for rank, log in enumerate(logs):
            values = (rank, rank, processes, processes, "127.0.0.1", port)
            place = dict(zip(RANK_VARIABLES, map(str, values), strict=True)) if processes > 1 else {}
            given = (self.tree / script, [str(each) for each in arguments], common | place, folder, log)
            ranks.append(fork.Process(target=be_program, args=given))
            ranks[-1].start()
        end = time.monotonic() + SECONDS
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        for rank in ranks:
            rank.kill()
            rank.join()
        code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        return code, logs[0].read_text(errors="replace")


def copy_until_first_checkpoint(recorded, target):
    """A recorded run as it would be, had it been killed once its first checkpoint was written."""
    shutil.copytree(recorded, target)
    shutil.rmtree(target / "hf", ignore_errors=True)
    for name in ("DONE", "summary.json"):
        (target / name).unlink(missing_ok=True)
    _, *later = sorted(target.glob("checkpoints/step-*"))
    for path in later:
        shutil.rmtree(path)
    return target


def record(version, folder, names):
    for name in names:
        begin, target = time.monotonic(), folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        facts = {"folders": version.folders, "run": version.train(name)}
        if not RUNS[name].is_dry:
            if not (version.work / name / "run").is_dir():
                raise SystemExit(f"error: {name} does not start: {list(facts['run'].values())}")
            shutil.copytree(version.work / name / "run", target / "run")
        facts["afterwards"] = version.go_on(name, target / "run")
        (target / FACTS).write_text(json.dumps(facts, indent=0, ensure_ascii=False))
        code, count = facts["run"]["exit code"], sum(map(len, facts.values()))
        print(f"{name}: exit code {code}, {count:,} facts, {time.monotonic() - begin:.1f} s", flush=True)
        shutil.rmtree(version.work / name)
    return 0


def compare(version, folder, names):
    total = 0
    for name in names:
        recorded = json.loads((folder / name / FACTS).read_text())
        version.masks = Masks((*version.folders, *recorded["folders"]))
        found = {"run": version.train(name), "afterwards": version.go_on(name, folder / name / "run")}
        lines = [line for part in found for line in differences(recorded[part], found[part], part)]
        total += len(lines)
        print(f"{name}: {len(lines) or 'no'} differences", *lines, sep="\n  ", flush=True)
        shutil.rmtree(version.work / name)
    print(f"{total or 'no'} differences in {len(names)} runs")
    return int(total > 0)


def differences(recorded, found, part):
    """A line for each name whose value is not what is recorded."""
    for name in sorted(recorded.keys() | found.keys()):
        old, new = (each.get(name, "(nothing)") for each in (recorded, found))
        if old != new and not old.startswith(UNCOMPARED) and not new.startswith(UNCOMPARED):
            yield f"{part}: {name}: {first_difference(old, new)}"


def first_difference(old, new):
    """`old → new`, of values in a row only the first that differ."""
    rows = [old.split(" "), new.split(" ")]
    if len(rows[0]) == len(rows[1]) > 6:
        place = next(place for place, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1])
        return f"value {place + 1}: {rows[0][place]} → {rows[1][place]}"
    return f"{old[:120]} → {new[:120]}"


def names_of(facts):
    """Names alone, numbers in them as `*`; of tensors also types and shapes."""
    found = set()
    for name, value in facts.items():
        if "/line " in name or any(f"/{part}/" in f"/{name}" for part in NOT_OURS):
            continue
        shape = re.match(r"torch\.\w+ \([\d, ]*\)", value)
        plain = re.sub(r"(?<=[/.\-_])\d+(?=[/.\-_]|$)", "*", name)
        found.add(f"{plain} {shape.group()}" if shape else plain)
    return found


def write_names(version, file, names):
    found = {name: names_of(version.train(name)) for name in names}
    shared = set.intersection(*found.values())
    lists = {"every run": sorted(shared), **{name: sorted(found[name] - shared) for name in names}}
    file.write_text(json.dumps(lists, indent=1) + "\n")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "names"))
    parser.add_argument("path", type=Path, help="folder of what is recorded, or file of names")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="repository of the version (default: this one)"
    )
    parser.add_argument("--only", action="append", choices=RUNS, help="a run; may be given several times")
    parser.add_argument("--set", action="append", default=[], help="a setting to change in all runs")
    options = parser.parse_args()
    tree, path = options.tree.resolve(), options.path.resolve()
    import_package(tree)
    recorded = [name for name in RUNS if (path / name / FACTS).is_file()]
    action, names = {
        "record": (record, RUNS), "compare": (compare, recorded), "names": (write_names, NAMED)
    }[options.command]  # fmt: skip
    # not a TemporaryDirectory, which each fork would remove at its end
    work = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        return action(Version(tree, work, options.set), path, options.only or names)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
