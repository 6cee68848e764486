"""Settings of the section `model`: an architecture to initialise, or weights to start from.

Imported without torch. Only the combination of keys is checked here; `model.build_model` checks the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megalowbit.errors import UserError
from megalowbit.families.outliers import OutlierSettings
from megalowbit.values import SettingsModel, unit


class ModelSettings(SettingsModel):
    """The model to train: exactly one of `config` and `checkpoint`."""

    config: Path | None = Field(
        default=None, description="path of a Hugging Face `config.json`; weights are initialised at random"
    )
    checkpoint: Path | None = Field(
        default=None,
        description="folder of weights to start from: a Hugging Face folder (`config.json` and weights), "
        "or a training checkpoint of megalowbit",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description='fields of the Hugging Face configuration to change, such as `{"resid_pdrop": 0.0}` or '
        '`{"attn_implementation": "flash_attention_2"}`',
    )
    pad_vocab_to_multiple_of: int | None = Field(
        default=None,
        ge=2,
        le=2**16,
        description="add rows to embedding and output projection, up to a multiple of this: 64 or 128 suit "
        "GPUs. They stand for no token, and exported models do not have them. `null`: none",
        json_schema_extra=unit("tokens"),
    )
    outliers: OutlierSettings | None = Field(
        default=None,
        description="multiply a few channels of the weights at the start, to test a recipe; off unless set",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if (self.config is None) == (self.checkpoint is None):
            raise UserError(
                "model needs either config (a config.json: random weights) or checkpoint (a folder): "
                f"{'neither is given' if self.config is None else 'both are given, set one to null'}"
            )
        return self
