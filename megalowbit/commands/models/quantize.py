"""Pack the weights of a Hugging Face folder for inference servers, without training.

    megalowbit quantize llama-folder/ llama-nvfp4/ --text held.txt
    megalowbit quantize llama-folder/ llama-w4a4/ --text held.txt --inputs static --layout modelopt

With a text, the loss on it is measured before and after. docs/export.md has the layouts and what they hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megalowbit.commands.models.evaluate import interrupted_before
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.json_text import parse_json
from megalowbit.one_line_parser import OneLineParser
from megalowbit.pretrain.command_line import prepare_environment, run_command
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals

UNFINISHED = "the folder was complete"  # has not happened when a signal ends the process


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    quantize = OneLineParser.for_script(__doc__, "megalowbit quantize")
    quantize.add_argument(
        "source", type=Path, metavar="HF_FOLDER", help="folder with config.json and weights"
    )
    quantize.add_argument("folder", type=Path, metavar="OUT", help="new folder for the packed model")
    quantize.add_argument(
        "--recipe",
        default="nvfp4",
        help="how weights and inputs are rounded: a name, or a block in JSON (default: %(default)s)",
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
    return quantize


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = argparse.Namespace()

    def work(identity: ProcessIdentity) -> None:
        build_parser().parse_args(arguments, options)
        _quantize(options, identity)

    return run_command(work, lambda: interrupted_before(options, UNFINISHED))


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
    with StartSignals(is_main=True, before=UNFINISHED, ending=STOP_SIGNALS):
        from megalowbit.pretrain.estimate.quantize import TextOptions, quantize

        text = TextOptions(options.text, **{name: each for name, each in given.items() if each is not None})
        recipe = options.recipe
        if recipe.lstrip().startswith("{"):
            recipe = parse_json(recipe, "--recipe", is_strict=True)
        quantize(
            options.source,
            options.folder,
            recipe=recipe,
            layout=options.layout,
            inputs=options.inputs,
            text=text,
            is_dry_run=options.dry_run,
        )
