"""The one check of a configuration that all ways to a run go through.

`load_config` reads what can be read in a second. Here is what takes torch, transformers and DeepSpeed to
know: recipe, DeepSpeed's own blocks, the model's configuration. The run, `--dry-run`, `--prepare-data`,
`submit.py` and sweeps call the same function, so none accepts what another refuses. Not covered: what depends
on the machine (`kernels`) or on the data.
"""

from __future__ import annotations

from pathlib import Path

from megalowbit.engine.run_checks.deepspeed_blocks import check_parts
from megalowbit.errors import Problems
from megalowbit.hf.checkpoint import read_config
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.components.late_switch import check_switchable
from megalowbit.pretrain.components.speculation import check_speculation
from megalowbit.pretrain.config import PretrainConfig, load_config


def load_checked_config(path: Path, overrides: list[str], *, world_size: int | None) -> PretrainConfig:
    """Read a configuration as `load_config` does, and check it.

    Raises:
        UserError: a line for each mistake.
    """
    config = load_config(path, overrides, world_size=world_size)
    check_config(config)
    return config


def check_config(config: PretrainConfig, *, has_model: bool = True) -> None:
    """Check what `load_config` cannot.

    Args:
        config: resolved.
        has_model: the files of the model can be read here, as they can where the run will be.

    Raises:
        UserError: a line for each mistake.
    """
    problems = Problems()
    settings = config.settings
    with problems.collect():
        check_parts(config.parts)
    if not problems:  # what follows takes a recipe that is one
        recipe = recipe_of(config.recipe)
        with problems.collect():
            check_switchable(settings.late_switch, recipe)
        with problems.collect():
            check_speculation(settings.speculation, recipe)
    if has_model:
        with problems.collect():
            read_config(settings.model)
    problems.raise_any()
