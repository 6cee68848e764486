"""Write text with a run, a checkpoint or a Hugging Face folder.

    megalowbit generate runs/first --prompt 'def '
    megalowbit generate runs/first/checkpoints/step-00000400 --prompt 'import ' --greedy --max-tokens 64
    megalowbit generate runs/first --prompt 'class ' --temperature 0.7 --seed 3 --forward recipe
    megalowbit generate hf-folder/ --prompt 'Once upon a time' --recipe nvfp4

The text goes to stdout, after the prompt; lines about the model go to stderr. The tokenizer, the precision
and the recipe are those that were recorded with the weights.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from megalowbit.commands.models.evaluate import interrupted_before
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.one_line_parser import OneLineParser
from megalowbit.pretrain.command_line import prepare_environment, run_command
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, StartSignals

UNFINISHED = "the text was complete"  # has not happened when a signal ends the process


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit generate")
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run folder (its newest checkpoint), one step-… folder, or a Hugging Face folder",
    )
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: the start of a document)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to write (default: %(default)s)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of sampling, above 0 (default: 1)",
    )
    kind.add_argument("--greedy", action="store_true", help="always take the most probable token")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling (default: %(default)s)")
    parser.add_argument("--recipe", metavar="NAME", help="another recipe than the recorded one, such as bf16")
    parser.add_argument(
        "--forward",
        choices=("checkpoint", "recipe"),
        default="checkpoint",
        help="after a late switch: with the precision of the checkpoint, or as the recipe rounds, like a "
        "packed model (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer", metavar="TOKENIZER", help='"byte" or a folder (default: as saved with the weights)'
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        default=None,
        help="a prompt that spells a special token has that token (default: as data.parse_special_tokens of "
        "the run; text if there is none)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = argparse.Namespace()

    def work(identity: ProcessIdentity) -> None:
        build_parser().parse_args(arguments, options)
        _check(options, identity)
        _generate(options)

    return run_command(work, lambda: interrupted_before(options, UNFINISHED))


def _check(options: argparse.Namespace, identity: ProcessIdentity) -> None:
    if identity.world_size > 1:
        raise UserError(f"generate runs in one process, and {identity.world_size} were started: start one")
    if not options.path.is_dir():
        raise UserError(f"{options.path} is not a folder: name a run, a checkpoint or a Hugging Face folder")
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens {options.max_tokens} is less than 1: raise it")
    temperature = options.temperature
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature {temperature:g} is not above 0: raise it, or give --greedy")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed} is not between 0 and 2⁶³ - 1: choose another")


def _generate(options: argparse.Namespace) -> None:
    prepare_environment()
    with StartSignals(is_main=True, before=UNFINISHED, ending=STOP_SIGNALS):
        from megalowbit.pretrain.estimate.generate import generator_of

        generator = generator_of(
            options.path,
            recipe=options.recipe,
            tokenizer=options.tokenizer,
            forward=options.forward,
            parse_special_tokens=options.parse_special_tokens,
        )
        print("\n".join(generator.lines), file=sys.stderr, flush=True)
        temperature = 1.0 if options.temperature is None else options.temperature
        text, count = generator.write(
            options.prompt,
            max_tokens=options.max_tokens,
            temperature=0.0 if options.greedy else temperature,
            seed=options.seed,
        )
        print(options.prompt + text, flush=True)
        print(f"{count} tokens", file=sys.stderr, flush=True)
