"""Damaged configurations: each is accepted or refused in lines that a user can act on, never anything else.

    python tests/launch/config_fuzz.py --seed 1 --seconds 600 --commands 20

Shipped configurations of runs, clusters and models are damaged by seeded mutations of their values and of
their text. What is accepted must mean what it says: values that can be compared with the resolved
configuration are the same there, of the same kind, and the resolved configuration resolves to itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from megalowbit.cluster.settings import load_cluster
from megalowbit.errors import UserError, lines_of, shown
from megalowbit.hf.checkpoint import read_config
from megalowbit.hf.settings import ModelSettings
from megalowbit.pretrain.checks import load_checked_config

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "configs"
KINDS = {"run": "*.json", "cluster": "clusters/*.json", "model": "models/*.json"}
SECONDS_FOR_ONE = 20
LONGEST_LINE = 4000  # characters of a refusal
WORLD_SIZES = (None, 1, 2, 3, 8, 64)
VALUES = (
    *(True, False, None, 0, 1, -1, 2, 3, 7, 0.0, 1.0, -0.5, 0.5, 1.5, 2.0, 1e-300, 1e300, 1e3, 2**31),
    *(2**63, -(2**63), 10**40, 10**400, "", "auto", "true", "1", "1e3", "nan", "none", "cpu"),
    *("nvfp4", "bf16", "\0", "ÿ", "𝔘", "\ud800", "a" * 5000, "../../x", "~nobody/x", "/", "[]", " "),
    *("\n", [], {}, [[]], [{}], [True], {"a": {}}, {"": 1}, [1, 2], ["x"], {"base": "nvfp4"}),
    *({"type": "auto"}, {"enabled": True}, {"enabled": 1}),
)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "0x10", "01", "1.", "True", "None")
# what a resolved configuration has in another form, by design: translated, made absolute, or another spelling
TRANSLATED = (
    *("fp16", "bf16", "bfloat16", "tensorboard", "wandb", "zero_optimization", "optimizer.type"),
    *("pipeline.use_reentrant", "megalowbit.model", "megalowbit.data.cache_dir", "megalowbit.data.corpus"),
    *("megalowbit.data.tokenizer", "megalowbit.autocast", "megalowbit.grad_scaler"),
)
NULL_IS_THE_DEFAULT = (None, "auto")


class Hang(BaseException):
    """A configuration took longer than any may."""


def nodes(value, path=()):
    """Paths of everything inside a value, itself first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def damaged(raw, random_numbers):
    """A copy of a configuration with one to three values damaged."""
    raw = copy.deepcopy(raw)
    for _ in range(random_numbers.choice((1, 1, 1, 2, 3))):
        paths = [path for path in nodes(raw) if path]
        if not paths:
            break
        path = random_numbers.choice(paths)
        holder, key = at(raw, path[:-1]), path[-1]
        value = copy.deepcopy(random_numbers.choice(VALUES))
        match random_numbers.randrange(10):
            case 0 | 1 | 2 | 3:
                holder[key] = value
            case 4:
                del holder[key]
            case 5:
                holder[key] = [holder[key]] if random_numbers.random() < 0.5 else {str(key): holder[key]}
            case 6 if isinstance(holder, dict):
                name = str(key)
                cut = random_numbers.randrange(len(name) + 1)
                holder[name[:cut] + random_numbers.choice("xé_ ") + name[cut:]] = holder.pop(key)
            case 7 if isinstance(holder, dict):
                holder[random_numbers.choice(("extra", "enabled", "stage", "recipe", "", "ключ"))] = value
            case 8:
                # not by deepcopy, which takes several calls a level: the value may be deep
                holder[key] = json.loads(json.dumps(at(raw, random_numbers.choice(paths))))
            case _:
                for _ in range(random_numbers.choice((2, 50, 99, 200))):
                    value = {"a": value} if random_numbers.random() < 0.5 else [value]
                holder[key] = value
    return raw


def damaged_text(text, random_numbers):
    """The bytes of a configuration's file, damaged."""
    place = random_numbers.randrange(len(text) + 1)
    match random_numbers.randrange(10):
        case 0:
            return text[:place].encode()
        case 1:
            return (text[:place] + random_numbers.choice('{}[]",:\0\\0x') + text[place:]).encode()
        case 2:
            return b"\xef\xbb\xbf" + text.encode()
        case 3:
            return text.encode()[:place] + bytes([random_numbers.randrange(256)]) + text.encode()[place:]
        case 4:
            return random_numbers.choice((b"", b"null", b"3", b"[]", b"{}", b"\xff\xfe", b'"x"', b"{" * 9999))
        case 5:
            numbers = [part for part in text.replace(",", " ").split() if part.replace(".", "").isdigit()]
            old = random_numbers.choice(numbers)
            return text.replace(f" {old}", f" {random_numbers.choice(LITERALS)}", 1).encode()
        case 6:
            lines = text.splitlines()
            line = random_numbers.randrange(len(lines))
            return "\n".join([*lines[: line + 1], lines[line], *lines[line + 1 :]]).encode()  # a key twice
        case 7:
            return text.encode("utf-16")
        case 8:
            return text.replace('"', "'").encode()
        case _:
            lines = text.splitlines()
            random_numbers.shuffle(lines)
            return "\n".join(lines).encode()


def read(kind, path, world_size=1):
    """The resolved form of a file, or what is wrong with it."""
    if kind == "cluster":
        return load_cluster(path, []).model_dump(mode="json")
    if kind == "model":
        return read_config(ModelSettings(config=path)).to_dict()
    return load_checked_config(path, [], world_size=world_size).to_dict()


def check_meaning(raw, resolved):
    """Hold that each value of an accepted configuration is what was made of it.

    Raises:
        AssertionError: names the key.
    """
    for path in nodes(raw):
        value = at(raw, path)
        if isinstance(value, dict | list) or value in NULL_IS_THE_DEFAULT:
            continue
        dotted = ".".join(map(str, path))
        if any(dotted == each or dotted.startswith(f"{each}.") for each in TRANSLATED):
            continue
        try:
            found = at(resolved, path)
        except (KeyError, IndexError, TypeError):
            raise AssertionError(f"{dotted} = {value!r} was accepted and is gone") from None
        is_rounded = isinstance(found, float) and isinstance(value, int) and str(found) == str(float(value))
        is_same = (found == value or is_rounded) and isinstance(found, bool) == isinstance(value, bool)
        assert is_same, f"{dotted} = {value!r} was accepted as {found!r}"


def check_refusal(error):
    """Hold that a refusal is lines that can be read, and that all of them are given."""
    for line in lines_of(error):
        assert line.strip(), "an empty line"
        assert len(line) < LONGEST_LINE, shown(line)
        assert "Traceback" not in line, line


def try_one(kind, path, world_size):
    """Read one file; returns whether it was accepted.

    Raises:
        Exception: anything but an acceptance that means what it says, or a `UserError`.
    """
    handler = signal.signal(signal.SIGALRM, _hang)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_ONE)  # returns that of pytest-timeout
    try:
        resolved = read(kind, path, world_size)
        if kind == "run":
            check_meaning(json.loads(path.read_text(encoding="utf-8-sig")), resolved)
            again = path.with_name("again.json")
            again.write_text(json.dumps(resolved), encoding="utf-8")
            named = json.loads(json.dumps(resolved))
            assert read(kind, again, world_size) == named, "the resolved configuration resolves to another"
    except UserError as error:
        check_refusal(error)
        return False
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    return True


def _hang(*_):
    raise Hang


def run_command(path, kind):
    """The same file given to the real command; returns its exit code.

    Raises:
        AssertionError: it ended otherwise than by acceptance or refusal.
    """
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--ds-config", str(path), "--dry-run"]
    if kind == "cluster":
        ds_config = CONFIGS / "gpt2_tiny_fp4.json"
        command = [sys.executable, str(ROOT / "launch" / "slurm" / "submit.py"), "--cluster", str(path)]
        command += ["--ds-config", str(ds_config), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def fuzz(seed, folder, *, seconds=float("inf"), count=10**9, commands=0):
    """Damage and read until time or count are over.

    Args:
        seed: of everything.
        folder: empty; a copy of the shipped configurations is made there.
        seconds: at most.
        count: files at most.
        commands: how many of them are given to the real command, too.

    Returns:
        Counts by kind and outcome.

    Raises:
        AssertionError: with seed, number and text of the first file that is read wrongly.
    """
    shutil.copytree(CONFIGS, folder / "configs")
    shipped = {kind: sorted((folder / "configs").glob(pattern)) for kind, pattern in KINDS.items()}
    outcomes = Counter()
    end = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > end:
            break
        random_numbers = random.Random(f"{seed}-{number}")
        kind = random_numbers.choices(list(KINDS), weights=(8, 1, 1))[0]
        source = random_numbers.choice(shipped[kind])
        path = source.with_name("damaged.json")
        text = source.read_text(encoding="utf-8")
        if random_numbers.random() < 0.2:
            content = damaged_text(text, random_numbers)
        else:
            content = json.dumps(damaged(json.loads(text), random_numbers), indent=1).encode()
        path.write_bytes(content)
        try:
            is_accepted = try_one(kind, path, random_numbers.choice(WORLD_SIZES))
            outcomes[kind, "accepted" if is_accepted else "refused"] += 1
            if kind != "model" and number < commands:
                outcomes[kind, f"command ended with {run_command(path, kind)}"] += 1
        except (Exception, Hang) as error:
            where = folder / f"wrong-{seed}-{number}.json"
            where.write_bytes(content)
            raise AssertionError(
                f"seed {seed}, file {number} of {source.name}, kept as {where}: {shown(str(error))}"
            ) from error
    return outcomes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--commands", type=int, default=0, help="so many files also by the real command")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="config-fuzz-"))
    outcomes = fuzz(options.seed, folder, seconds=options.seconds, commands=options.commands)
    shutil.rmtree(folder)
    for (kind, outcome), times in sorted(outcomes.items()):
        print(f"{kind:8} {outcome:24} {times:8,}")


if __name__ == "__main__":
    main()
