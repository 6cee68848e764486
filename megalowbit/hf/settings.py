"""The `"model"` section of the configuration: an architecture to initialise, or weights to start from.

It is read before torch is imported, so only the combination of keys is checked here; `checkpoint.build_model`
checks the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megalowbit.errors import UserError
from megalowbit.values import SettingsModel


class ModelSettings(SettingsModel):
    """`"model"`: exactly one of `config` and `checkpoint`.

    Attributes:
        config: a Hugging Face `config.json`; weights are initialised at random.
        checkpoint: a Hugging Face folder (`config.json` and weights) or one of our training checkpoints.
        overrides: fields of the Hugging Face configuration to change (`{"resid_pdrop": 0.0}`).
    """

    config: Path | None = Field(default=None, description="path of a Hugging Face config.json")
    checkpoint: Path | None = Field(default=None, description="folder of weights to start from")
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if (self.config is None) == (self.checkpoint is None):
            raise UserError(
                "model needs either config (a config.json: random weights) or checkpoint (a folder): "
                f"{'neither is' if self.config is None else 'both are'} given"
            )
        return self
