"""Recognises checkpoints written by plain DeepSpeed, and says how to load their weights.

They have no manifest and none of our states, so nothing here reads them. Users load the weights into the
model before `megalowbit.initialize`, or convert them (`hf.importers`); optimizer states cannot be used.
"""

from __future__ import annotations

from pathlib import Path

from megalowbit.durable_files import LATEST, MANIFEST, is_file
from megalowbit.json_text import read_text

MODEL_FILE = "mp_rank_00_model_states.pt"
MODEL_FILES = (MODEL_FILE, "zero_pp_rank_0_mp_rank_00_model_states.pt")
SHARDS = "*zero_pp_rank_0_mp_rank_00_optim_states.pt"


def plain_checkpoint(path: Path) -> Path | None:
    """The folder of a DeepSpeed checkpoint without our manifest, or None.

    This is `path`, or the folder in it named by DeepSpeed's file `latest`.

    Raises:
        UserError: the file system is away, or the name is invalid.
    """
    try:
        tag = read_text(path / LATEST).strip()
    except (OSError, ValueError):
        tag = ""
    for folder in (path, path / Path(tag).name) if tag else (path,):
        if any(is_file(folder / name) for name in MODEL_FILES) and not is_file(folder / MANIFEST):
            return folder
    return None


def loading_advice(folder: Path) -> str:
    """The end of a message: how to load the weights of a plain checkpoint."""
    if any(folder.glob(SHARDS)):
        weights = (
            "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint("
            f"{str(folder.parent)!r}, {folder.name!r})"
        )
    else:
        weights = f"torch.load({str(folder / MODEL_FILE)!r}, weights_only=True)['module']"
    return (
        f"if plain DeepSpeed wrote it, take its weights: model.load_state_dict({weights}), "
        "then mlb.initialize; a Hugging Face model is converted by megalowbit convert to-megalowbit --config"
    )
