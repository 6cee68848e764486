"""Choose a recipe for each layer under a budget, from the weights of a short run.

    megalowbit plan-layers --ds-config X.json --weights runs/short/hf --text heldout.jsonl
    megalowbit plan-layers --ds-config X.json --weights DIR --text FILE --budget 0.05 --out F
    megalowbit plan-layers --ds-config X.json --weights DIR --text FILE --candidate fp8 --cost time
    megalowbit plan-layers --ds-config X.json --weights DIR --text FILE --candidate fp8 --measure gradient

Quantises one layer at a time, with the recipe of the configuration and with each candidate, and prints how
much the loss on the text rises. Chooses the layers that get a candidate, within the budget. The last line is
the recipe as a block for the configuration.
The text must not be in the training data. See docs/studies.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.json_text import parse_json
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.shipped_files import find_config


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = OneLineParser.for_script(__doc__, "megalowbit plan-layers")
    parser.add_argument(
        "--ds-config",
        type=Path,
        required=True,
        metavar="FILE",
        help="configuration of the run: its recipe, tokenizer and sequence length",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the file",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face folder of trained weights",
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="held-out text")
    parser.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="RECIPE",
        help="a recipe that layers may get: its name, or a JSON block of fields that differ from the "
        "configuration's (default: bf16, which keeps a layer in high precision); may be repeated",
    )
    parser.add_argument(
        "--measure",
        choices=("loss", "gradient"),
        default="loss",
        help="what quantising a layer damages: the loss, by the forward's noise, or the gradient, by that of "
        "the backward in one draw, which prefers rounding to nearest although it is biased: compare only "
        "candidates that round the output gradient alike, or much finer ones (default: %(default)s)",
    )
    parser.add_argument(
        "--cost",
        choices=("weights", "bytes", "time"),
        default="weights",
        help="what the budget counts: weights of changed layers, bytes kept for backward, or time of "
        "products on FP4 hardware (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.15,
        metavar="SHARE",
        help="largest additional cost, as a share of that of all layers (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write measurements and recipe as JSON")
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    if options.out is not None and options.out.exists():
        raise UserError(f"--out {options.out} exists: choose another name")
    if options.out is not None and not os.access(options.out.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {options.out}: the folder does not exist or is read-only: name another")
    _plan(options)
    return 0


def _plan(options: argparse.Namespace) -> None:
    import torch

    from megalowbit.durable_files import atomic_file
    from megalowbit.hf.checkpoint import build_model
    from megalowbit.hf.settings import ModelSettings
    from megalowbit.layers.recipe import recipe, recipe_over
    from megalowbit.pretrain.checks import this_device
    from megalowbit.pretrain.config import load_config
    from megalowbit.pretrain.sweep.layer_damage import check_text
    from megalowbit.pretrain.sweep.layer_plan import plan_layers, summary, table, to_json
    from megalowbit.pretrain.sweep.study.evaluation import read_tokens

    values = [_value(each) for each in options.candidate]
    config = load_config(find_config(options.ds_config), options.set, world_size=1)
    chosen, data = recipe(config.recipe), config.settings.data
    if not options.text.exists():
        raise UserError(f"--text {options.text} does not exist")
    model = build_model(ModelSettings(checkpoint=options.weights), seed=0)
    model = model.to(device=this_device(), dtype=torch.bfloat16).eval()
    tokens = read_tokens(data, options.text)
    check_text(model, tokens, data.sequence_length)
    plan = plan_layers(
        model,
        chosen,
        tokens,
        length=data.sequence_length,
        budget=options.budget,
        candidates=[recipe_over(chosen, each) for each in values],
        measure=options.measure,
        cost=options.cost,
        micro_tokens=config.parts.deepspeed["train_micro_batch_size_per_gpu"] * data.sequence_length,
        seed=config.settings.run.seed,
        progress=_print_tenths,
    )
    if options.out is not None:
        with atomic_file(options.out) as file:
            file.write(json.dumps(to_json(plan), indent=1) + "\n")
    print(table(plan))
    print(summary(plan, options.budget))
    print(json.dumps({"recipe": plan.recipe.to_dict()}), flush=True)


def _print_tenths(done: int, count: int) -> None:
    """A line on stderr for each tenth of the measurements."""
    if 10 * done // count > 10 * (done - 1) // count:
        with contextlib.suppress(OSError):  # nobody reads it; the plan goes on
            print(f"{done} of {count} measurements", file=sys.stderr, flush=True)


def _value(text: str) -> Any:
    """A candidate's name, or the block that its JSON holds."""
    from megalowbit.layers.recipe import UNNAMED

    if not text.lstrip().startswith("{"):
        return text
    block = parse_json(text, f"--candidate {text!r}", is_strict=True)
    if not block.keys() - set(UNNAMED):
        raise UserError(f"--candidate {text!r} changes nothing: name fields that differ from the recipe's")
    return block
