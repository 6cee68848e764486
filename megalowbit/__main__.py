"""Commands of the package: `python -m megalowbit evaluate RUN` and `python -m megalowbit quantize HF OUT`.

    python -m megalowbit evaluate runs/gpt2
    python -m megalowbit evaluate runs/gpt2/checkpoints/step-00000400 --set megalowbit.validation.bf16=true
    python -m megalowbit evaluate runs/gpt2/hf --set 'megalowbit.data.validation={"corpus": "other.txt"}'
    python -m megalowbit evaluate some-hf-folder --ds-config gpt2.json --output loss.json
    torchrun --nproc-per-node 2 -m megalowbit evaluate runs/gpt2
    python -m megalowbit quantize llama-folder/ llama-nvfp4/ --text held.txt
    python -m megalowbit quantize llama-folder/ llama-w4a4/ --text held.txt --inputs static --layout modelopt

Other commands are scripts in launch/ and tools/.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

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

# what has not happened when a signal ends the process
UNFINISHED = {"evaluate": "the text was evaluated", "quantize": "the folder was complete"}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `python -m megalowbit`."""
    parser = OneLineParser.for_script(__doc__)
    parser.prog = "python -m megalowbit"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_evaluate(commands)
    _add_quantize(commands)
    return parser


def _add_evaluate(commands: Any) -> None:
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
    evaluate.add_argument(
        "--forward",
        choices=("checkpoint", "recipe"),
        default="checkpoint",
        help="after a late switch: with the precision of the checkpoint, or as the recipe rounds, like a "
        "packed model (default: %(default)s)",
    )
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")


def _add_quantize(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="pack the weights of a Hugging Face folder for inference servers, without training",
        allow_abbrev=False,
    )
    quantize.add_argument(
        "source", type=Path, metavar="HF_FOLDER", help="folder with config.json and weights"
    )
    quantize.add_argument("folder", type=Path, metavar="OUT", help="new folder for the packed model")
    quantize.add_argument(
        "--recipe", default="nvfp4", help="how weights and inputs are rounded (default: %(default)s)"
    )
    quantize.add_argument(
        "--layout",
        choices=("compressed-tensors", "modelopt"),
        default="compressed-tensors",
        help="of the packed weights (default: %(default)s)",
    )
    quantize.add_argument(
        "--inputs",
        choices=("none", "static"),
        default="none",
        help="static: servers round inputs, too, by scales that are calibrated on the text (default: none)",
    )
    quantize.add_argument(
        "--text",
        metavar="PATH",
        help="file, folder or glob; measures the loss before and after, and calibrates static inputs",
    )
    quantize.add_argument(
        "--tokenizer",
        metavar="TOKENIZER",
        help='of the text: "byte" or a folder (default: the tokenizer in HF_FOLDER)',
    )
    for name, default, what in (
        ("--tokens", "262144", "use only so many tokens of the text, evenly spread"),
        ("--sequence-length", "that of the model, at most 2048", "tokens of a sequence"),
    ):
        quantize.add_argument(name, type=int, metavar="N", help=f"{what} (default: {default})")
    quantize.add_argument(
        "--dry-run", action="store_true", help="print what would be written, and write nothing"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen: list[str] = []  # once the arguments have been read

    def work(identity: ProcessIdentity) -> None:
        options = build_parser().parse_args(arguments)
        chosen.append(UNFINISHED[options.command])
        RUN[options.command](options, identity)

    return run_command(work, lambda: f"interrupted before {(chosen or ['the command line was read'])[0]}")


def _quantize(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    if identity.world_size > 1:
        raise UserError(f"quantize runs in one process, and {identity.world_size} were started: start one")
    given = {name: getattr(options, name) for name in ("tokenizer", "tokens", "sequence_length")}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None and options.text is None:
            raise UserError(f"{option} is for a text: add --text, or leave it out")
        if isinstance(value, int) and value < 2:
            raise UserError(f"{option} {value} is less than 2: raise it")
    prepare_environment()
    with StartSignals(is_main=True, before=UNFINISHED["quantize"], ending=STOP_SIGNALS):
        from megalowbit.pretrain.estimate.quantize import TextOptions, quantize

        text = TextOptions(options.text, **{name: each for name, each in given.items() if each is not None})
        chosen = {name: getattr(options, name) for name in ("recipe", "layout", "inputs")}
        quantize(options.source, options.folder, text=text, is_dry_run=options.dry_run, **chosen)


def _evaluate(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    if not options.path.exists():  # before imports that take seconds
        raise UserError(f"{options.path} does not exist: name a run, a checkpoint or a Hugging Face folder")
    prepare_environment()
    with StartSignals(is_main=identity.is_main, before=UNFINISHED["evaluate"], ending=STOP_SIGNALS):
        from megalowbit.engine.process_start import import_deepspeed, stop_process_group

        import_deepspeed(is_checked=False)
        from megalowbit.pretrain.estimate.evaluate import evaluate

        chosen = {
            "config_file": options.ds_config,
            "overrides": options.overrides,
            "inputs": options.inputs,
            "forward": options.forward,
        }
        evaluate(options.path, identity, output=options.output, **chosen)
        stop_process_group(timedelta(seconds=SHUTDOWN_SECONDS))


RUN = {"evaluate": _evaluate, "quantize": _quantize}

if __name__ == "__main__":
    sys.exit(program(main))
