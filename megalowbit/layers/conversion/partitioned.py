"""Models whose parameters DeepSpeed has already cut into pieces: refused before their shapes are read."""

from __future__ import annotations

from torch import nn

from megalowbit.errors import UserError


def refuse_partitioned(model: nn.Module) -> None:
    """Refuse a model that was built under `deepspeed.zero.Init`, whose parameters look empty.

    Raises:
        UserError: names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):  # DeepSpeed's mark
            raise UserError(
                f"parameter {name} is cut into pieces already, by deepspeed.zero.Init or an earlier engine "
                "at stage 3, so its exact values are gone: build the model outside of zero.Init, for "
                "mlb.initialize cuts it (transformers enters zero.Init by itself while a "
                "TrainingArguments(deepspeed=…) or HfDeepSpeedConfig with stage 3 exists: build the model "
                "before)"
            )
