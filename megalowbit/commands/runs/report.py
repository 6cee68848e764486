"""Write a page about a run, or one that compares several.

    megalowbit report runs/gpt2_tiny_fp4
    megalowbit report runs/bf16 runs/nvfp4 runs/nvfp4-seed-2 --out compared.html
    megalowbit report runs/gpt2_tiny_fp4 --spectra

The page is one HTML file that needs no network: losses, gaps to the first run with their noise, loss scale
and skipped steps, speed, memory, saturation and SNR by layer, precisions, what differs, environment,
configuration. A run may still be training. docs/report.md explains the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.command_line import prepare_environment


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit report")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder; the first one is the reference"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder of the only run)",
    )
    parser.add_argument(
        "--spectra",
        action="store_true",
        help="also show the singular values of the final weights of the only run, plain and rounded; minutes "
        "to hours for a large model",
    )
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    print(_report(options))
    return 0


def _report(options: argparse.Namespace) -> Path:
    from megalowbit.records.run import read_runs
    from megalowbit.report.page import write_report

    if not options.spectra:
        return write_report(options.runs, options.out)
    if len(options.runs) > 1:
        raise UserError("--spectra shows the weights of one run: name one, or leave --spectra out")
    (run,) = read_runs(options.runs)  # before minutes of work
    return write_report(options.runs, options.out, spectra=_spectra(run.folder, run.config["megalowbit"]))


def _spectra(run: Path, block: Mapping[str, Any]) -> str:
    """The section about the weights in a run's `hf/`.

    Raises:
        UserError: there are none, or they or the recipe cannot be read.
    """
    folder = run / "hf"
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist, so there are no final weights: wait for the end of the run, or write "
            f"them with megalowbit convert to-hf {run} {folder}"
        )
    prepare_environment()
    import torch

    from megalowbit.hf.folders.config_file import CONFIG_FILE, config_from_dict
    from megalowbit.hf.model import load_weights
    from megalowbit.layers.conversion.convert import convert
    from megalowbit.layers.conversion.weight_spectra import weight_spectra
    from megalowbit.layers.settings import DEFAULT_RECIPE
    from megalowbit.report.sections.spectra import spectra

    config = config_from_dict(read_json_object(folder / CONFIG_FILE), {}, str(folder))
    model = load_weights(config, folder, dtype=torch.float32)
    convert(model, block.get("recipe", DEFAULT_RECIPE))

    def progress(name: str, number: int, count: int) -> None:
        print(f"spectra {number}/{count}: {name}", file=sys.stderr)

    return spectra(weight_spectra(model, progress))
