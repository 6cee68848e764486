"""Checkpoints damaged at random: each ends in a whole older one or in one line, and no wrong load is silent.

A case damages the newest of two checkpoints in one of these ways: bytes of a file, which files there are and
what kind they are, the manifest's text and values, and lies: other metadata or other files under a manifest
that agrees with them. Then the store looks for the newest good checkpoint and the engine loads it. What it
has afterwards is compared, bit for bit, with what the undamaged checkpoint of that step gave. Numbers that a
lie changes in the middle of a tensor are not among the cases: nothing else says what they were.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import time
import traceback
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from megalowbit.durable_files import MANIFEST, write_manifest
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.errors import UserError

SECONDS = 60  # that a case may take, on a busy machine
LONGEST_LINE = 2000
STEPS = (1, 2)
STRANGE = [
    None, True, -1, 0, 2**63, 2**4000, 1e999, "", "x", "../x", "/dev/zero", "a\0b", "é" * 10_000, [], [[]],
    {}, {"a": {"a": {"a": []}}}, [1, "2", None],
]  # fmt: skip
TEXTS = [
    "", "null", "[" * 100_000, '{"a":' * 5_000, '{"format": 1, "files": ' + "[" * 900 + "]" * 900 + "}",
    '{"format": 1, "files": [{"name": "x", "size": 1e999, "sha256": ""}]}', "9" * 5000, "\ufeff{}", "NaN",
    '{"format": 1, "files": {}}', '{"format": 1, "files": [[]]}', '{"format": 2, "files": []}',
]  # fmt: skip


# --- damage: of bytes ---


def flip(file, generator):
    data = bytearray(file.read_bytes())
    for _ in range(generator.choice((1, 1, 20))):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    file.write_bytes(data)


def truncate(file, generator):
    data = file.read_bytes()
    file.write_bytes(data[: generator.randrange(len(data))])


def extend(file, generator):
    file.write_bytes(file.read_bytes() + generator.randbytes(generator.randrange(1, 5000)))


def overwrite(file, generator):
    """The same size, other content."""
    file.write_bytes(generator.randbytes(file.stat().st_size))


# --- damage: of files and folders ---


def remove(file, generator):
    file.unlink()


def rename(file, generator):
    file.rename(file.with_name(generator.choice(("x", f"{file.name}.old", "rank_00009.pt"))))


def be_something_else(file, generator):
    """A FIFO, a folder, or a link to one of these, a device, nothing, itself or the file of another step."""
    kind = generator.choice(("fifo", "folder", "device", "nothing", "loop", "other"))
    other = file.parent.with_name(f"step-{STEPS[0]:08d}") / file.name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
        (file / "x").touch()
    else:
        file.symlink_to(
            {"device": "/dev/zero", "nothing": file.parent / "gone", "loop": file, "other": other}[kind]
        )


def swap(file, generator):
    """With another file of the same checkpoint."""
    other = generator.choice([each for each in sorted(file.parent.iterdir()) if each != file])
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def take_from_other_step(file, generator):
    shutil.copy(file.parent.with_name(f"step-{STEPS[0]:08d}") / file.name, file)


def replace_folder(file, generator):
    """The whole checkpoint: gone, a file, a link, under another name, or with the content of another."""
    folder, kind = (
        file.parent,
        generator.choice(("gone", "file", "link", "loop", "renamed", "copied", "fifo")),
    )
    aside = folder.with_name("aside")
    folder.rename(aside)
    if kind == "file":
        folder.write_text("x")
    elif kind == "fifo":
        os.mkfifo(folder)
    elif kind == "link":
        folder.symlink_to("step-00000001")
    elif kind == "loop":
        folder.symlink_to(folder.name)
    elif kind == "renamed":
        aside.rename(folder.with_name(f"step-{generator.choice((3, 10**9)):08d}"))
    elif kind == "copied":
        shutil.copytree(folder.with_name("step-00000001"), folder)


# --- damage: of the manifest, as text and as values ---


def garble(file, generator):
    file.with_name(MANIFEST).write_text(generator.choice(TEXTS))


def change_manifest(file, generator):
    path = file.with_name(MANIFEST)
    content = json.loads(path.read_text())
    mutate(content, generator, STRANGE)
    path.write_text(json.dumps(content))


# --- lies: the manifest agrees with what was changed ---


def rehash(folder):
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder)


def lie_by_other_damage(file, generator):
    generator.choice((truncate, extend, overwrite, remove, rename, swap, take_from_other_step))(
        file, generator
    )
    rehash(file.parent)


def lie_by_other_folder(file, generator):
    """All files of another step under this one's name."""
    for each in sorted(file.parent.glob("*.pt")):
        take_from_other_step(each, generator)
    rehash(file.parent)


def lie_in_file(file, generator):
    """One value of a file, but for what the caller of the store gives and gets back."""
    if file.name.startswith("rank_"):
        file = sorted(file.parent.glob("*_states.pt"))[-1]
    content = torch.load(file, weights_only=True)
    own = {key: content.pop(key) for key in ("step", "notes") if key in content}
    mutate(content, generator, [*STRANGE, torch.zeros(3), torch.zeros(0), torch.zeros((), dtype=torch.int8)])
    torch.save({**content, **own}, file)
    rehash(file.parent)


def lie_in_layout(file, generator):
    """One value of what says where each number lies, numbers to near ones too."""
    file = sorted(file.parent.glob("*model_states.pt"))[0]
    content = torch.load(file, weights_only=True)
    mutate(content["megalowbit_engine"]["layout"], generator, [*STRANGE, 1, 2, 3, 16, 17, 256])
    torch.save(content, file)
    rehash(file.parent)


DAMAGES = (
    flip, truncate, extend, overwrite, remove, rename, be_something_else, swap, take_from_other_step,
    replace_folder, garble, change_manifest, lie_by_other_damage, lie_by_other_folder, lie_in_file,
    lie_in_layout,
)  # fmt: skip


def mutate(content, generator, values):
    """Change one place of nested dicts and lists: to a strange value, to none, or to another key."""
    node = content
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = generator.choice(keys)
        inner = node[key]
        if isinstance(inner, (dict, list)) and inner and generator.random() < 0.9:
            node = inner
            continue
        break
    kind = generator.random()
    if kind < 0.6:
        node[key] = generator.choice(values)
    elif kind < 0.8 or isinstance(node, list):
        del node[key]
    else:
        node["strange"] = node.pop(key)


# --- what an engine has ---


def digest(value):
    """Of nested plain values and tensors, bits and dtypes included."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        data = value.flatten().view(torch.uint8) if value.numel() else value
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(bytes(data.tolist())).hexdigest()}"
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{key!r}:{digest(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(digest, value)) + "]"
    if hasattr(value, "state_dict"):
        return digest(value.state_dict())
    return f"{type(value).__name__}:{value!r}" if type(value) in (int, float, str, bool, type(None)) else ""


def state_of(engine, client_state):
    optimizer = engine.optimizer
    parts = {
        "weights": dict(engine.module.state_dict()),
        "optimizer": optimizer.state_dict(),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "scaler": optimizer.grad_scaler.state_dict() if optimizer.grad_scaler is not None else None,
        "client": client_state,
        "random": [torch.get_rng_state(), random.random(), float(np.random.rand())],
    }
    return {name: digest(part) for name, part in parts.items()}


@torch.no_grad()
def spoil(engine, number):
    """Give everything that a load restores other values."""
    for parameter in engine.module.parameters():
        parameter.fill_(7)
    for state in engine.optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(5)
    for group in engine.optimizer.optimizer.param_groups:
        group["lr"] = 0.5
        for parameter in group["params"]:
            parameter.fill_(7)
    engine.global_steps = engine.global_samples = engine.skipped_steps = 99
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


# --- one case ---


@contextmanager
def limited():
    """End what hangs with an error; the timer of pytest-timeout continues afterwards."""

    def fail(*_):
        raise AssertionError(f"hangs: more than {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, fail)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def ranks():
    is_one = not dist.is_initialized() or dist.get_world_size() == 1
    return (0, 1) if is_one else (dist.get_rank(), dist.get_world_size())


def shared(value):
    """What every rank says."""
    _, size = ranks()
    found = [value] * size
    if size > 1:
        dist.all_gather_object(found, value)
    return found


class Fuzz:
    """Damages copies of one folder of checkpoints, again and again, on all ranks together.

    Args:
        make: builds an engine.
        train: takes `(engine, step)`.
        folder: an empty one that all ranks share.
    """

    def __init__(self, make, train, folder, damages=DAMAGES):
        self._damages = damages
        self._make, self._folder = make, folder
        self._pristine, self.counts = folder / "pristine", {}
        engine = self._engine = make()
        store = CheckpointStore(self._pristine)
        for step in STEPS:
            train(engine, step)
            store.save(engine, step, {"step": step, "notes": [1, {"a": None}]}, {"own": torch.ones(2) * step})
        self._expected = {}
        for step in STEPS:
            spoil(engine, step)
            self._expected[step] = state_of(engine, store.load(engine, store.path_of(step)))
        assert self._expected[1] != self._expected[2]

    def case(self, seed):
        """Damage and load; returns what went wrong, `None` if nothing did. Seeds in a row try all damages."""
        generator, work = random.Random(seed), self._folder / f"case{seed}"
        damage = self._damages[seed % len(self._damages)]
        if ranks()[0] == 0:
            shutil.copytree(self._pristine, work, symlinks=True)
            files = sorted(path for path in (work / "step-00000002").iterdir() if path.name != ".saving")
            file = generator.choice(files)
            if damage.__name__.startswith("lie") and file.suffix != ".pt":
                file = generator.choice([each for each in files if each.suffix == ".pt"])
            damage(file, generator)
        shared(None)
        try:
            outcome = self._outcome(work, seed)
        finally:
            shared(None)
            if ranks()[0] == 0:
                shutil.rmtree(work)
        everyone = shared(outcome)
        for rank, each in enumerate(everyone):
            if not each.startswith(("loaded", "refused")) or each.split(":")[0] != everyone[0].split(":")[0]:
                name = file.name if ranks()[0] == 0 else ""
                return f"seed {seed}, {damage.__name__} of {name}: rank {rank} {each}; rank 0 {everyone[0]}"
        key = (damage.__name__, outcome.split(":")[0])
        self.counts[key] = self.counts.get(key, 0) + 1
        return None

    def _outcome(self, work, seed):
        store, engine = CheckpointStore(work), self._engine
        spoil(engine, seed)
        began = time.monotonic()
        try:
            with limited():
                path = store.latest()
                if path is None:
                    return "found nothing"
                loaded = store.load(engine, path)
                own = store.rank_state(engine, path)
        except UserError as error:
            self._engine = self._make()
            line = str(error)
            is_one_line = "\n" not in line and len(line) < LONGEST_LINE
            return f"refused: {line}" if is_one_line else f"said too much: {line[:3000]}"
        except BaseException:
            self._engine = self._make()
            return f"failed: {traceback.format_exc()[-3000:]}"
        step = int(path.name.removeprefix("step-"))
        found, expected = state_of(engine, loaded), self._expected.get(step)
        if expected is None or digest(own) != digest({"own": torch.ones(2) * step}):
            return f"took {path.name} with {own}"
        wrong = [name for name in found if found[name] != expected[name]]
        if wrong:
            self._engine = self._make()
            return f"loaded wrong {', '.join(wrong)} of {path.name}".replace("loaded", "took")
        assert time.monotonic() - began < SECONDS
        return f"loaded {path.name}"


def fuzz(make, train, folder, *, first_seed=0, cases=None, seconds=None, damages=DAMAGES):
    """Run `cases` cases, or as many as fit into `seconds`; returns failures and how often what came out."""
    work, end, failures = Fuzz(make, train, folder, damages), time.monotonic() + (seconds or 0), []
    number = 0
    while (number < cases) if cases is not None else all(shared(time.monotonic() < end)):
        failure = work.case(first_seed + number)
        number += 1
        if failure is not None:
            failures.append(failure)
    return failures, {
        f"{damage}: {outcome}": count for (damage, outcome), count in sorted(work.counts.items())
    }
