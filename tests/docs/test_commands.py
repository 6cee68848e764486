"""Every command that a page shows is checked, and run where that takes seconds: see shown_commands.py.

Quick: its program exists, its options are those of the parser, its configuration is valid. Slow: it is run,
with few steps, in a folder that has the runs and models that it begins with.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from forks import run_script
from page_blocks import LANGUAGES, PAGES, PLACEHOLDER, blocks, commands
from shown_commands import ELSEWHERE, FEW_STEPS, NOT_HERE, SMALL, WORLD, is_small, ways

from launchers import ROOT, environment, training_text
from megalowbit.commands.table import COMMANDS
from megalowbit.pretrain.command_line import build_parser
from megalowbit.pretrain.config import load_config
from megalowbit.shipped_files import find_config

ALL = commands()
PRETRAIN = "launch/pretrain.py"
VALIDATED = ("--set", "megalowbit.data.validation.share=0.2", "--set", "megalowbit.validation.every=3")
LAUNCHER_OPTIONS = re.compile(r"^--(nproc.per.node|num_accelerators|num_gpus)(?:=(\d+))?$")


def ids(command):
    return f"{command.page}:{command.line}:{command.text[:60]}"


def test_blocks_have_a_known_language():
    unknown = [f"{each.page}:{each.line}" for each in blocks() if each.language not in LANGUAGES]
    assert not unknown, "label output and layouts as ```text; a block without a label is commands"


def test_no_block_escapes():
    """Blocks that are fenced by tildes or have options after their language would not be found."""
    found = Counter(each.page for each in blocks())
    for path in PAGES:
        fences = re.findall(r"^\s*(?:```|~~~)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * found[path.relative_to(ROOT).as_posix()], path


def test_each_command_is_run_or_has_a_reason():
    wrong = {command.text: found for command in fenced() if len(found := ways(command)) != 1}
    assert not wrong, "name each once in shown_commands.py"


def test_no_line_of_the_lists_is_stale():
    texts = [command.text for command in ALL]
    stale = [
        each for each in (*SMALL, *ELSEWHERE, *NOT_HERE) if not any(re.search(each, text) for text in texts)
    ]
    assert not stale
    assert not [path for path, _ in ELSEWHERE.values() if not (ROOT / path).exists()]


def fenced():
    """All but those in prose that only name a program or an option."""
    return [each for each in ALL if each.is_complete]


def pretraining(words):
    """The arguments of a pretraining run; None: the command does something else."""
    if PRETRAIN in words:
        return words[words.index(PRETRAIN) + 1 :]
    if "megalowbit" in words and "pretrain" in words:
        return words[words.index("pretrain") + 1 :]
    return words if words[0] == "--set" else None


def num_processes(words):
    """Of a launcher, or of `--processes`; 1 without either."""
    for place, word in enumerate(words):
        if match := LAUNCHER_OPTIONS.match(word):
            return int(match[2] or words[place + 1])
        if word == "--processes":
            return int(words[place + 1])
    return 1


@cache
def parser_of(program):
    """The parser of a command's name or of a script; None: the script builds it while it runs."""
    if program in COMMANDS:
        return COMMANDS[program].load().build_parser()
    if "build_parser" not in (ROOT / program).read_text(encoding="utf-8"):
        return None
    spec = importlib.util.spec_from_file_location(f"shown_{Path(program).stem}", ROOT / program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_parser()


def options_in_source(path):
    """The strings of a script that look like options, and those that benchmarks share."""
    texts = [
        path.read_text(encoding="utf-8"),
        (ROOT / "benchmarks" / "timing.py").read_text(encoding="utf-8"),
    ]
    values = (
        node.value for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
    )
    return {value for value in values if isinstance(value, str) and value.startswith("--")}


def check_pretraining(words, rest, is_complete):
    if "…" in rest:
        rest = ["--ds-config", "gpt2_tiny_fp4", *(word for word in rest if word != "…")]
    if rest[:1] == ["--set"]:
        rest = ["--ds-config", "gpt2_tiny_fp4", *rest]
    if not is_complete:
        assert all(word in build_parser()._option_string_actions for word in rest if word.startswith("--"))
        return
    options = build_parser().parse_args(rest)
    config = ROOT / options.ds_config
    if not config.exists():
        config = find_config(Path(options.ds_config), lambda line: None)
    if config.exists():  # otherwise the page's `init` makes it, or it is the reader's own
        load_config(config, options.overrides, world_size=num_processes(words))
    else:
        assert str(options.ds_config).startswith("runs/start-") or options.ds_config.name == "X.json"


def check_program(words, is_complete):
    """Of this package: its parser accepts the arguments, or its source has the options."""
    if words[0] == "megalowbit" or words[:3] == ["python", "-m", "megalowbit"]:
        name, rest = next(((w, words[n + 1 :]) for n, w in enumerate(words) if w in COMMANDS), (None, []))
        assert name is not None or words[1:] in (["--help"], ["-m", "megalowbit"]), words
        parser = name and parser_of(name)
    else:
        script, rest = words[1], words[2:]
        assert (ROOT / script).exists(), script
        is_ours = script.startswith(("tools/", "launch/"))
        parser = parser_of(script) if is_ours else None
        if parser is None:
            options = {word.split("=")[0] for word in rest if word.startswith("--")}
            assert options <= options_in_source(ROOT / script), script
            return
    if parser and is_complete:
        parser.parse_args(rest)
    elif parser:
        assert all(word in parser._option_string_actions for word in rest if word.startswith("--"))


def check_extras(words):
    for extra in re.findall(r"megalowbit\[(\w+)\]", " ".join(words)):
        assert f'"{extra}": [' in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ALL, ids=ids)
def test_a_command_has_the_options_of_its_program(command):
    words = [word for word in command.words if word]
    program = words[0].removeprefix(".venv/bin/")
    if (rest := pretraining(words)) is not None:
        check_pretraining(words, rest, command.is_complete)
    elif program == "make":
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    elif program == "megalowbit" or words[:3] == ["python", "-m", "megalowbit"] or _is_script(words):
        if "quality.py" not in words[1]:  # historical
            check_program(words, command.is_complete)
    elif program == "pip":
        check_extras(words)
    else:
        assert ways(command) or not command.is_complete


def _is_script(words):
    return words[0].endswith("python") and words[1].endswith(".py")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Finished runs of three steps of a GPT-2 and a LLaMA, with checkpoints and exports."""
    folder = tmp_path_factory.mktemp("world")
    write_corpus(folder)
    for name, config in (("gpt2", "gpt2_tiny_fp4"), ("llama", "llama_tiny_fp4")):
        done = pretrain(
            folder, ["--ds-config", str(ROOT / "configs" / f"{config}.json"), "--run-dir", name, *VALIDATED]
        )
        assert done.returncode == 0, done.stderr
    return folder


def write_corpus(folder):
    lines = (json.dumps({"text": line}) for line in training_text().splitlines())
    (folder / "corpus.jsonl").write_text("\n".join(lines))


def pretrain(folder, arguments):
    """Run a pretraining command for three steps on a small text."""
    few = [word for each in FEW_STEPS for word in ("--set", f"megalowbit.{each}")]
    if any("lr_schedule=" in word for word in arguments):  # its phases must fit into three steps
        short = ("lr_schedule.warmup_steps=1", "lr_schedule.decay_steps=1")
        arguments = [*arguments, *(word for each in short for word in ("--set", f"megalowbit.{each}"))]
    return run_script(ROOT / PRETRAIN, *few, *arguments, env=environment(folder / "cache"), cwd=folder)


@pytest.fixture
def place(world, tmp_path):
    """A folder like a checkout whose user has trained and loaded what WORLD names."""
    for name in ("configs", "launch", "tools", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, source in WORLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(world / source, tmp_path / name, copy_function=os.link)
    write_corpus(tmp_path)
    (tmp_path / "code.jsonl").symlink_to("corpus.jsonl")
    for name in ("my-text.txt", "other.txt", "held.txt"):
        (tmp_path / name).write_text(training_text())
    return tmp_path


def made_before(command):
    """What an `init --out` of the same page writes before this command."""
    earlier = [each for each in ALL if each.page == command.page and each.line <= command.line]
    return [each for each in earlier if prepares(each) and each.words[-1] in command.text]


def prepares(command):
    """Whether it only writes what other commands begin with, and is run before them."""
    return command.text.startswith("megalowbit init") and "--out" in command.words


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [each for each in fenced() if is_small(each) and not prepares(each)], ids=ids
)
def test_a_command_works(command, place):
    words = [word.replace("$(cat runs/gpt2/checkpoints/best)", "substituted") for word in command.words]
    for earlier in made_before(command):
        assert run_words(earlier.words, place).returncode == 0
    done = run_words(words, place)
    assert done.returncode == 0, done.stdout + done.stderr


def run_words(words, place):
    best = (place / "runs/gpt2/checkpoints/best").read_text().strip()
    words = [word.replace("substituted", best) for word in words]
    if (rest := pretraining(words)) is None:
        script, arguments = ROOT / "megalowbit" / "__main__.py", words[1:]
        if words[0] == "python":
            script, arguments = ROOT / words[1], words[2:]
        return run_script(script, *arguments, env=environment(place / "cache"), cwd=place)
    options = build_parser().parse_args(rest)
    if options.run_dir and (place / options.run_dir).exists():
        shutil.rmtree(place / options.run_dir)  # of WORLD: the command makes it
    if options.dry_run:
        return run_script(ROOT / PRETRAIN, *rest, env=environment(place / "cache"), cwd=place)
    if "start-" in str(options.ds_config):
        shrink(place / options.ds_config)
    return pretrain(place, rest)


def shrink(config):
    """A configuration that `init` wrote, with the sizes of a tiny model."""
    model = config.parent / json.loads(config.read_text())["megalowbit"]["model"]["config"]
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 2048, "n_positions": 1024}
    model.write_text(json.dumps({**json.loads(model.read_text()), **sizes}))
    raw = json.loads(config.read_text())
    raw.update(train_batch_size=2, train_micro_batch_size_per_gpu=1)
    raw["megalowbit"]["data"].pop("corpus_config", None)
    raw["megalowbit"]["data"]["vocab_size"] = 300
    config.write_text(json.dumps(raw))


def test_a_placeholder_is_not_taken_for_a_command():
    assert PLACEHOLDER.search("megalowbit convert to-hf RUN OUT")
    assert not PLACEHOLDER.search("megalowbit convert to-hf runs/OUTPUT x")
