"""Compute the loss of a checkpoint or a Hugging Face folder on a text.

    megalowbit evaluate runs/gpt2
    megalowbit evaluate runs/gpt2/checkpoints/step-00000400 --set megalowbit.validation.bf16=true
    megalowbit evaluate runs/gpt2/hf --set 'megalowbit.data.validation={"corpus": "other.txt"}'
    megalowbit evaluate some-hf-folder --ds-config gpt2.json --output loss.json
    torchrun --nproc-per-node 2 -m megalowbit evaluate runs/gpt2

The configuration and the precision of the forward are those of the run that PATH is in, unless options name
others. docs/runs.md describes the figures.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.one_line_parser import OneLineParser
from megalowbit.pretrain.command_line import SHUTDOWN_SECONDS, prepare_environment, run_command
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals
from megalowbit.shipped_files import find_config, to_stderr

UNFINISHED = "the text was evaluated"  # has not happened when a signal ends the process


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    evaluate = OneLineParser.for_script(__doc__, "megalowbit evaluate")
    evaluate.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run folder (its newest checkpoint), one step-… folder, or a Hugging Face folder",
    )
    evaluate.add_argument(
        "--ds-config",
        type=Path,
        metavar="X.json",
        help="configuration with recipe, precision and data (default: that of the run in which PATH is)",
    )
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value, e.g. --set megalowbit.recipe=bf16",
    )
    inputs = "quantise inputs by recorded numbers, or by those of each batch (default: static if possible)"
    evaluate.add_argument("--inputs", choices=("static", "dynamic"), help=inputs)
    evaluate.add_argument(
        "--forward",
        choices=("checkpoint", "recipe"),
        default="checkpoint",
        help="after a late switch: with the precision of the checkpoint, or as the recipe rounds, like a "
        "packed model (default: %(default)s)",
    )
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")
    return evaluate


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = argparse.Namespace()

    def work(identity: ProcessIdentity) -> None:
        build_parser().parse_args(arguments, options)
        _evaluate(options, identity)

    return run_command(work, lambda: interrupted_before(options, UNFINISHED))


def interrupted_before(options: argparse.Namespace, unfinished: str) -> str:
    """What Ctrl-C has ended; `options` is empty if they have not been read."""
    return f"interrupted before {unfinished if vars(options) else 'the command line was read'}"


def _evaluate(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    if not options.path.exists():  # before imports that take seconds
        raise UserError(f"{options.path} does not exist: name a run, a checkpoint or a Hugging Face folder")
    config_file = options.ds_config
    if config_file is not None:
        config_file = find_config(config_file, to_stderr if identity.is_main else lambda _: None)
    prepare_environment()
    with StartSignals(is_main=identity.is_main, before=UNFINISHED, ending=STOP_SIGNALS):
        from megalowbit.engine.process_start import import_deepspeed, stop_process_group

        import_deepspeed(is_checked=False)
        from megalowbit.pretrain.estimate.evaluate import evaluate

        chosen = {
            "config_file": config_file,
            "overrides": options.overrides,
            "inputs": options.inputs,
            "forward": options.forward,
        }
        evaluate(options.path, identity, output=options.output, **chosen)
        stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))
