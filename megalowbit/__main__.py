"""Commands of the package: `python -m megalowbit evaluate RUN`.

    python -m megalowbit evaluate runs/gpt2
    python -m megalowbit evaluate runs/gpt2/checkpoints/step-00000400 --set megalowbit.validation.bf16=true
    python -m megalowbit evaluate runs/gpt2/hf --set 'megalowbit.data.validation={"corpus": "other.txt"}'
    python -m megalowbit evaluate some-hf-folder --ds-config gpt2.json --output loss.json
    torchrun --nproc-per-node 2 -m megalowbit evaluate runs/gpt2

Other commands are scripts in launch/ and tools/.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.command_line import (
    SHUTDOWN_SECONDS,
    OneLineParser,
    prepare_environment,
    program,
    run_command,
)
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals

UNFINISHED = "the text was evaluated"  # what has not happened when a signal ends the process


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `python -m megalowbit`."""
    parser = OneLineParser.for_script(__doc__)
    parser.prog = "python -m megalowbit"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    evaluate = commands.add_parser(
        "evaluate", help="the loss of a checkpoint or a Hugging Face folder on a text", allow_abbrev=False
    )
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
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(
        lambda identity: _run(build_parser().parse_args(arguments), identity),
        lambda: f"interrupted before {UNFINISHED}",
    )


def _run(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    if not options.path.exists():  # before imports that take seconds
        raise UserError(f"{options.path} does not exist: name a run, a checkpoint or a Hugging Face folder")
    prepare_environment()
    with StartSignals(is_main=identity.is_main, before=UNFINISHED, ending=STOP_SIGNALS):
        from megalowbit.engine.process_start import import_deepspeed, stop_process_group

        import_deepspeed(is_checked=False)
        from megalowbit.pretrain.estimate.evaluate import evaluate

        chosen = {"config_file": options.ds_config, "overrides": options.overrides, "inputs": options.inputs}
        evaluate(options.path, identity, output=options.output, **chosen)
        stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))


if __name__ == "__main__":
    sys.exit(program(main))
