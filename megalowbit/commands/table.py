"""The command `megalowbit`: finds the command that is named, imports its file only, and runs it.

Each command is a file with `build_parser()` and `main(arguments)`, which returns the exit code. The scripts
in launch/ and tools/ call the same functions. Why this is argparse: docs/decisions/0024.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from types import ModuleType
from typing import Any, NamedTuple

from megalowbit.errors import UserError, unknown_name
from megalowbit.one_line_parser import printing_user_errors
from megalowbit.standard_streams import run_until_unread

EXIT_INTERRUPTED = 130
RANK_OPTIONS = ("--local_rank", "--local-rank")  # DeepSpeed's launcher puts one before all others


class Command(NamedTuple):
    """A command.

    Attributes:
        group: heading in the list of commands.
        about: one line.
        module: that has its `build_parser` and `main`, below megalowbit.
        is_job: computes as a process of a job may: signals and errors are handled for all ranks.
    """

    group: str
    about: str
    module: str
    is_job: bool = False

    def load(self) -> ModuleType:
        """Import the command's file."""
        return import_module(f"megalowbit.{self.module}")


RUNS, MODELS, STUDIES, OTHERS = "a run", "models", "choosing settings", "others"
COMMANDS = {
    "init": Command(RUNS, "write a configuration for a model size and a machine", "commands.runs.init"),
    "pretrain": Command(
        RUNS, "train; --dry-run describes the run without it", "pretrain.command_line", is_job=True
    ),
    "doctor": Command(RUNS, "examine machine and configuration before a run", "commands.runs.doctor", True),
    "report": Command(RUNS, "write a page about a run, or one that compares several", "commands.runs.report"),
    "submit": Command(
        RUNS, "queue a run on SLURM, where it continues until it is done", "commands.runs.submit"
    ),
    "diagnose": Command(RUNS, "say what went wrong first in a run", "commands.runs.diagnose"),
    "preprocess": Command(
        RUNS, "tokenise text into Megatron's .bin and .idx files", "commands.runs.preprocess"
    ),
    "goodput": Command(
        RUNS, "estimate what failures of nodes cost, and how often to save", "commands.runs.goodput"
    ),
    "evaluate": Command(
        MODELS,
        "the loss of a checkpoint or a Hugging Face folder on a text",
        "commands.models.evaluate",
        True,
    ),
    "generate": Command(
        MODELS, "text from a run, a checkpoint or a Hugging Face folder", "commands.models.generate", True
    ),
    "convert": Command(
        MODELS, "between Hugging Face folders and training checkpoints", "commands.models.convert"
    ),
    "quantize": Command(
        MODELS, "pack a Hugging Face folder for inference servers", "commands.models.quantize", True
    ),
    "recipes": Command(STUDIES, "list the recipes, or print the fields of one", "commands.models.recipes"),
    "study": Command(STUDIES, "compare recipes over sizes, texts and seeds", "commands.studies.study"),
    "calibrate": Command(
        STUDIES, "find an SNR threshold for precision speculation", "commands.studies.calibrate"
    ),
    "plan-layers": Command(STUDIES, "choose a recipe for each layer", "commands.studies.plan_layers"),
    "completion": Command(OTHERS, "print the completion script of a shell", "commands.completion"),
}


def start() -> None:
    """Run the command line of this process and exit; the entry point of `megalowbit`."""
    command = COMMANDS.get(next(iter(_without_rank(sys.argv[1:])), ""))
    if command is None or not command.is_job:
        sys.exit(run_until_unread(main))
    from megalowbit.pretrain.command_line import program

    sys.exit(program(main))


@printing_user_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = _without_rank(sys.argv[1:] if arguments is None else arguments)
    name = _name_of(words)
    if name is None:
        return 0
    try:
        code: int = COMMANDS[name].load().main(words[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands with their options, for which all their files are imported."""
    parser = argparse.ArgumentParser(prog="megalowbit", description="Pretrain language models in FP4.")
    parser.add_argument("--version", action="store_true", help="print the version")
    # argparse makes the parser of a command by calling `parser_class`
    commands: Any = parser.add_subparsers(metavar="COMMAND", parser_class=_Built)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about, built=command.load().build_parser())
    return parser


class _Built(argparse.ArgumentParser):
    """Stands for a parser that exists already."""

    def __new__(cls, *, built: argparse.ArgumentParser, **_: object) -> Any:
        return built


def listed() -> str:
    """The list of commands, as `megalowbit --help` prints it."""
    lines = ["usage: megalowbit COMMAND …", "", "Pretrain language models in FP4 with DeepSpeed."]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<13}{each.about}" for name, each in COMMANDS.items() if each.group == group]
    examples = [
        "megalowbit pretrain --ds-config gpt2_tiny_fp4 --run-dir runs/first",
        "megalowbit generate runs/first --prompt 'def '",
        "deepspeed --module megalowbit pretrain --ds-config gpt2_tiny_fp4",
    ]
    lines += ["", "examples:", *(f"    {each}" for each in examples)]
    return "\n".join([*lines, "", "megalowbit COMMAND --help has the options and examples of a command."])


def _without_rank(words: Sequence[str]) -> list[str]:
    """The words without a launcher's option before the command; ranks are read from the environment."""
    before = list(takewhile(lambda word: word.startswith(RANK_OPTIONS), words))
    return list(words[len(before) :])


def _name_of(words: Sequence[str]) -> str | None:
    """The command that is named; None if `--help` or `--version` has been printed instead.

    Raises:
        UserError: there is none, or no command has this name.
    """
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        print(listed())
        return None
    if first == "--version":
        print(f"megalowbit {import_module('megalowbit').__version__}")
        return None
    if not first:
        raise UserError(f"no command is named: name one of {', '.join(COMMANDS)}; see megalowbit --help")
    if first not in COMMANDS:
        raise unknown_name("command", first, COMMANDS)
    return first
