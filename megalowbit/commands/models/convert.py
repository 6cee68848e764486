"""Convert between Hugging Face folders and megalowbit training checkpoints, and import others' checkpoints.

    megalowbit convert to-megalowbit gpt2/ start/
    megalowbit convert to-megalowbit deepspeed_run/ start/ --config gpt2/
    megalowbit convert to-hf runs/tiny/ tiny-hf/
    megalowbit convert to-hf runs/tiny/ tiny-nvfp4/ --packed compressed-tensors

The first command writes a checkpoint to start training from (`"model": {"checkpoint": "start/"}`). The second
writes a folder that `AutoModelForCausalLM.from_pretrained` loads. The third packs the low-bit layers, for
inference servers. Existing files are never overwritten. Memory holds one tensor at a time. After an
interruption, the same command continues with the files it had finished.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.hf.folders.new_folder import refuse_existing
from megalowbit.hf.folders.unfinished import unfinished
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.command_line import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from megalowbit.data.tokenize import Tokenizer
    from megalowbit.hf.folders.conversion import Conversion
    from megalowbit.hf.model import SavableTokenizer
    from megalowbit.hf.packed.export import PackedExport

DEFAULT_SHARD = 5.0  # GB
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("compressed-tensors", "modelopt")
PRECISIONS = ("w4a16", "w4a4")
LOADER = "transformers.AutoModelForCausalLM.from_pretrained"


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit convert")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_ours = commands.add_parser(
        "to-megalowbit",
        help="convert a Hugging Face folder, or a checkpoint of DeepSpeed or Megatron-LM, into a checkpoint "
        "to start from",
        allow_abbrev=False,
    )
    to_ours.add_argument("source", type=Path, metavar="SRC", help="folder of the model or checkpoint")
    to_ours.add_argument("folder", type=Path, metavar="OUT", help="new folder for the checkpoint")
    to_ours.add_argument(
        "--recipe",
        default=DEFAULT_RECIPE,
        help="recipe that the model will be trained with (default: %(default)s)",
    )
    to_ours.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="config.json of a checkpoint of DeepSpeed or Megatron-LM, or a folder that has it",
    )
    to_hf = commands.add_parser(
        "to-hf", help="convert a training checkpoint into a Hugging Face folder", allow_abbrev=False
    )
    to_hf.add_argument(
        "source", type=Path, metavar="SRC", help="a run folder, its checkpoints/, or one step-… folder"
    )
    to_hf.add_argument("folder", type=Path, metavar="OUT", help="new folder for the model")
    to_hf.add_argument(
        "--dtype", metavar="DTYPE", help=f"type of the weights: {', '.join(DTYPES)} (default: as stored)"
    )
    to_hf.add_argument(
        "--tokenizer",
        metavar="TOKENIZER",
        help='tokenizer to save with the weights: "byte" or a folder (default: the tokenizer of the run)',
    )
    to_hf.add_argument("--packed", metavar="LAYOUT", help=f"pack the low-bit layers: {' or '.join(LAYOUTS)}")
    to_hf.add_argument(
        "--precision",
        metavar="PRECISION",
        help="with --packed: w4a16, or w4a4 if servers shall round inputs, too (default: w4a16)",
    )
    to_hf.add_argument(
        "--exact",
        action="store_true",
        help="with --packed: fail if a value would differ from that of the training's forward",
    )
    for each in (to_ours, to_hf):
        each.add_argument(
            "--shard-size",
            type=float,
            default=DEFAULT_SHARD,
            metavar="GB",
            help="largest size of a file of weights, in 10⁹ bytes (default: %(default)g)",
        )
        each.add_argument(
            "--dry-run", action="store_true", help="print what would be written, and write nothing"
        )
        each.add_argument(
            "--verify",
            action="store_true",
            help="read both sides again and compare every tensor bit by bit before OUT appears",
        )
    return parser


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = build_parser().parse_args(arguments)
        _check_places(options.source, options.folder)
        refuse_existing(options.folder)
        if not 0 < options.shard_size < 1e9:
            raise UserError(f"--shard-size {options.shard_size:g} is no size in GB: name one above 0")
        if options.command == "to-megalowbit":
            _to_megalowbit(options)
        else:
            _to_hf(options)
    except KeyboardInterrupt:
        print(f"error: {_interrupted(options.folder)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _interrupted(folder: Path) -> str:
    """What Ctrl-C has ended."""
    drafts = ", ".join(str(draft) for draft in unfinished(folder))
    kept = f"the same command continues with the finished files in {drafts}" if drafts else "nothing was kept"
    return f"interrupted before {folder} was complete: {kept}"


def _check_places(source: Path, folder: Path) -> None:
    try:
        source, folder = source.resolve(), folder.resolve()
        source.exists()
    except (OSError, RuntimeError) as error:  # a name of more than 255 bytes, a loop of links
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot convert {source} to {folder} ({reason}): name other folders") from error
    if source in folder.parents:
        raise UserError(f"{folder} is inside {source}, which must not change: name a folder outside of it")


# Heavy imports are inside the functions, so --help and argument errors are immediate.


def _to_megalowbit(options: argparse.Namespace) -> None:
    from megalowbit.durable_files import step_name
    from megalowbit.hf.checkpoint import plan_import
    from megalowbit.hf.folders.tokenizer_files import FOLDER

    _silence_progress()
    conversion = plan_import(
        options.source, options.recipe, config=options.config, shard_size=_shard_size(options)
    )
    if not _convert(conversion, options):
        return
    step = options.folder / step_name(0)
    print(f'{step}: start from it with "model": {{"checkpoint": "{options.folder}"}}')
    if (options.folder / FOLDER).is_dir():
        print(f'its tokenizer: "data": {{"tokenizer": "{options.folder / FOLDER}"}}')


def _to_hf(options: argparse.Namespace) -> None:
    if options.dtype not in (None, *DTYPES):
        raise unknown_name("dtype", options.dtype, DTYPES)
    _check_packed(options)
    import torch

    from megalowbit.hf.checkpoint import plan_export
    from megalowbit.hf.folders.tokenizer_files import has_tokenizer
    from megalowbit.hf.packed.export import plan_packed_export

    _silence_progress()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    tokenizer, why_none = _exported_tokenizer(options.source, options.tokenizer)
    if options.packed is None:
        conversion = plan_export(options.source, dtype, tokenizer, shard_size=_shard_size(options))
        export = None
    else:
        export = plan_packed_export(
            options.source,
            options.packed,
            precision=options.precision or "w4a16",
            is_exact=options.exact,
            tokenizer=tokenizer,
            shard_size=_shard_size(options),
        )
        conversion = export.conversion
    if not _convert(conversion, options, export or conversion):
        return
    about = f"load it with {LOADER}" if export is None else export.report
    print(f"{options.folder} is {conversion.source}: {about}")
    if not has_tokenizer(options.folder):
        print(why_none)


def _check_packed(options: argparse.Namespace) -> None:
    if options.packed is None and (options.precision is not None or options.exact):
        option = "--exact" if options.exact else "--precision"
        raise UserError(f"{option} is for packed weights: add --packed compressed-tensors, or leave it out")
    if options.packed not in (None, *LAYOUTS):
        raise unknown_name("layout", options.packed, LAYOUTS)
    if options.precision not in (None, *PRECISIONS):
        raise unknown_name("precision", options.precision, PRECISIONS)
    if options.packed is not None and options.dtype not in (None, "bfloat16"):
        raise UserError(
            f"--dtype {options.dtype} does not fit --packed, which writes other weights in bfloat16: "
            "leave it out"
        )


def _shard_size(options: argparse.Namespace) -> int:
    return max(1, round(options.shard_size * 1e9))


def _convert(
    conversion: Conversion, options: argparse.Namespace, described: Conversion | PackedExport | None = None
) -> bool:
    """Write the folder; with --dry-run, say what would be written and return False."""
    if options.dry_run:
        print((described or conversion).describe(options.folder))
        return False
    conversion.run(options.folder, is_verified=options.verify)
    if options.verify:
        print(f"verified: all {len(conversion.tensors):,} tensors are those of {conversion.source}")
    return True


@dataclass
class _EndOfText:
    """Stands for a tokenizer that is not saved, because transformers would give other ids."""

    eos_token_id: int | None

    def save_pretrained(self, folder: Path) -> None:
        """Do nothing."""


def _exported_tokenizer(source: Path, name: str | None) -> tuple[SavableTokenizer | None, str]:
    """The tokenizer to save, and what to say if none is saved.

    Raises:
        UserError: the named one cannot be used with the model.
    """
    from megalowbit.hf.training_checkpoint import find_checkpoint, stored_config

    why_none = "the run has no tokenizer, so none was saved: name one with --tokenizer"
    tokenizer = _tokenizer_of_run(source) if name is None else _tokenizer(name)
    if tokenizer is None:
        return None, why_none
    try:
        tokenizer.check_export(stored_config(find_checkpoint(source))["model_type"])
    except UserError as error:
        if name is not None:
            raise
        return _EndOfText(tokenizer.eos_token_id), f"no tokenizer was saved: {error}"
    return tokenizer, why_none


def _tokenizer_of_run(source: Path) -> Tokenizer | None:
    """The tokenizer in a run folder, next to `checkpoints/`."""
    from megalowbit.data.tokenize import FolderTokenizer
    from megalowbit.hf.folders.tokenizer_files import FOLDER
    from megalowbit.hf.training_checkpoint import CHECKPOINTS_FOLDER, find_checkpoint

    checkpoints = find_checkpoint(source).absolute().parent
    folder = checkpoints.parent / FOLDER
    is_of_run = checkpoints.name == CHECKPOINTS_FOLDER and folder.is_dir()
    return FolderTokenizer(folder) if is_of_run else None


def _tokenizer(name: str) -> Tokenizer:
    from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer

    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        raise UserError('--tokenizer "bpe" needs a trained tokenizer: name the folder it was saved to')
    folder = Path(name).expanduser()
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name of more than 255 bytes
        is_folder = False
    if not is_folder:
        raise UserError(f'--tokenizer {shown(name)} is neither "byte" nor an existing folder: name one')
    return FolderTokenizer(folder)


def _silence_progress() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
