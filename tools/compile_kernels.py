#!/usr/bin/env python3
"""Compile every Triton kernel for GPUs that need not be there, and print what it needs of each.

python tools/compile_kernels.py
python tools/compile_kernels.py --target sm_90 --target gfx942 --only nvfp4 --json kernels.json

Exits with 1 if a kernel spills, uses stack, needs more shared memory than a GPU has, or rounds inexactly.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalowbit.errors import EXIT_USER_ERROR, UserError, printed
from megalowbit.one_line_parser import OneLineParser
from megalowbit.standard_streams import run_until_unread

if TYPE_CHECKING:
    from benchmarks.kernels.compiling import Compiled

EXIT_INTERRUPTED = 130
DEFAULT = ("sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 if nothing is wrong, 1 if a kernel must not be launched, 2: user error, 130: Ctrl-C."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument("--target", action="append", help=f"a target (default: {' '.join(DEFAULT)})")
    parser.add_argument(
        "--only",
        default="",
        help='compile the launches whose label contains this text, e.g. "row, codes"',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    try:
        return compile_all(parser.parse_args(arguments))
    except UserError as error:
        print(printed(error), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted: not all kernels were compiled, and no table was written as JSON", file=sys.stderr)
        return EXIT_INTERRUPTED


def compile_all(options: argparse.Namespace) -> int:
    """Compile and print; returns the exit code."""
    try:
        from benchmarks.kernels import compiling
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pip install 'triton>=3.4'") from error
    from benchmarks.kernels.launches import all_launches

    everything = all_launches()
    launches = [each for each in everything if options.only in each.label]
    if not launches:
        parts = sorted({part for each in everything for part in each.label.split(", ")})
        raise UserError(f"no launch has {options.only!r} in its label; labels consist of: {'; '.join(parts)}")
    if compiling.disassembler() is None:
        print("NVIDIA's disassembler (nvdisasm) is missing: instructions per element are not counted there")
    rows: list[Compiled] = []
    for target in options.target or DEFAULT:
        if missing := compiling.why_missing(target):
            print(f"\n{target}: skipped. {missing}")
            continue
        print(f"\n{target}\n  registers  stack  spills  shared  instructions  kernel")
        for launch in compiling.distinct(launches, target):
            rows.append(compiling.compile_launch(launch, target, count=True))
            print(line_of(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1), encoding="utf-8")
    wrong = [each for each in rows if each.problems]
    print(f"\n{len(rows)} compiled, {len(wrong)} with problems")
    for each in wrong:
        print(f"{each.target}  {each.label}  ({each.kernel}): {', '.join(each.problems)}")
    return 1 if wrong else 0


def line_of(compiled: Compiled) -> str:
    """A row of the table."""
    count = "-" if compiled.instructions is None else f"{compiled.instructions:.1f}"
    return (
        f"  {compiled.registers:9}{compiled.stack_bytes:7}{compiled.spill_bytes:8}{compiled.shared_bytes:8}"
        f"{count:>14}  {compiled.kernel}: {compiled.label}" + "  <<<" * bool(compiled.problems)
    )


if __name__ == "__main__":
    sys.exit(run_until_unread(main))
