"""DeepSpeed's ways to the weights of an engine's model, in transformers' layout and whole.

`engine.save_16bit_model` and the dictionaries that `accelerator.get_state_dict` and the Trainer ask for are
made of parameters by DeepSpeed, which at stage 3 would give low-bit layers' (out, in) for a Conv1D's (in,
out), under tensor parallelism one rank's shards, and nothing for a pipeline. Here they are whole and written
as one file that is whole or not there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from megalowbit.checkpoints.shards import unwritable
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import agree
from megalowbit.durable_files import atomic_file
from megalowbit.engine.parameters.whole_weights import whole_state_dict
from megalowbit.engine.pipeline.setup import gather_weights, stage_of
from megalowbit.errors import UserError

logger = logging.getLogger(__name__)


def attach_weight_exports(engine: Any) -> None:
    """Put the methods into an engine from `deepspeed.initialize`."""
    exports = WeightExports(engine)
    engine._zero3_consolidated_16bit_state_dict = exports.consolidated
    engine._replace_module_consolidated_state_dict = exports.consolidated
    engine.save_16bit_model = engine.save_fp16_model = exports.save


class WeightExports:
    """The methods of one engine; every rank must call them.

    Args:
        engine: its model need not be whole on any rank.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def consolidated(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """See `DeepSpeedEngine._consolidated_16bit_state_dict`: on rank 0 a state dict, None on others.

        Raises:
            UserError: frozen parameters of a pipeline are to be left out.
        """
        stage = stage_of(self._engine.module)
        if stage is not None and exclude_frozen_parameters:
            raise UserError("exclude_frozen_parameters is not supported for a pipeline: leave it away")
        if stage is not None:
            return gather_weights(stage)
        whole = whole_state_dict(self._engine, exclude_frozen=exclude_frozen_parameters)
        return whole if process_group.rank() == 0 else None

    def save(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole state dict to `save_dir/save_filename`. See `DeepSpeedEngine.save_16bit_model`.

        Returns:
            False, and nothing is written, where the configuration of stage 3 does not allow gathering.

        Raises:
            UserError: the file could not be written, or see `consolidated`; all ranks raise it.
        """
        engine, path = self._engine, Path(save_dir) / save_filename
        if engine.zero_optimization_stage() == 3 and not engine.zero_gather_16bit_weights_on_model_save():
            if process_group.rank() == 0:
                key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
                logger.warning("%s is not written: %s is false", path, key)
            return False
        state = self.consolidated(exclude_frozen_parameters)
        agree(_write, state, path)
        return True


def _write(state: dict[str, torch.Tensor] | None, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        raise unwritable(path, error) from error
