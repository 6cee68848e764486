"""Write a configuration to start from, for a model size and a machine.

    megalowbit init 124M --machine 1x24
    megalowbit init 8B --machine 64x80 --out runs/eight
    megalowbit init 0.8M --machine cpu

Writes run.json, model.json and a README that explains the keys. The micro-batch is the largest and the ZeRO
stage the lowest that fit into the memory, by the estimate that pretrain --dry-run prints.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megalowbit.collector import collector_paused
from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.command_line import prepare_environment
from megalowbit.pretrain.estimate.host_memory import host_memory

if TYPE_CHECKING:
    from megalowbit.pretrain.estimate.starting_config import Machine


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit init")
    parser.add_argument("size", metavar="SIZE", help="of the model: 0.8M, 124M, 1B or 8B")
    parser.add_argument(
        "--machine",
        metavar="GPUSxGIB",
        help="GPUs and memory or kind of each, such as 8x80 or 8xH100; or cpu (default: this machine)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder for the files (default: megalowbit-SIZE)"
    )
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    with collector_paused():
        _init(options)
    return 0


def _init(options: argparse.Namespace) -> None:
    folder = options.out or Path(f"megalowbit-{options.size}")
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already and is never overwritten: name another with --out")
    prepare_environment()
    given = None if options.machine is None else _numbers_of(options.machine)
    from megalowbit.pretrain.estimate.starting_config import CONFIG, SIZES, Machine, starting_config

    if options.size not in SIZES:
        raise unknown_name("size", options.size, SIZES)
    machine = this_machine() if given is None else Machine(*given)
    with TemporaryDirectory() as scratch:
        found = starting_config(options.size, machine, Path(scratch))
    found.write(folder)
    stage = found.content["zero_optimization"]["stage"]
    micro_batch = found.content["train_micro_batch_size_per_gpu"]
    print(
        f"{folder / CONFIG}: {options.size} on {machine}, ZeRO stage {stage}, micro-batch {micro_batch}; "
        f"{folder / 'README.md'} explains it and says how to start"
    )


def _numbers_of(text: str) -> tuple[int, float, bool]:
    """Processes, GiB and whether they are CPUs, of `--machine`."""
    if text == "cpu":
        return (1, host_memory() / 2**30, True)
    named = re.fullmatch(r"(\d{1,5})[x×]([A-Za-z]+\d+[A-Za-z]?(?:-\d+[A-Za-z]+)?)", text)
    if named is not None and int(named[1]) >= 1:
        from megalowbit.doctor.target import named_target

        return (int(named[1]), named_target(named[2]).memory, False)
    found = re.fullmatch(r"(\d{1,5})[x×](\d{1,4}(?:\.\d+)?)", text)
    if found is None or int(found[1]) < 1 or float(found[2]) < 1:
        raise UserError(
            f"--machine {shown(text)} is neither GPUSxGIB nor cpu: write for example 8x80 or 8xH100"
        )
    return (int(found[1]), float(found[2]), False)


def this_machine() -> Machine:
    """The GPUs of this machine, or its CPUs."""
    import torch

    from megalowbit.pretrain.checks import this_device
    from megalowbit.pretrain.estimate.starting_config import Machine

    if this_device().type != "cuda":
        return Machine(*_numbers_of("cpu"))
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return Machine(len(sizes), min(sizes) / 2**30)
