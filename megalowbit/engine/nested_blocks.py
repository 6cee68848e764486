"""DeepSpeed reads a configuration before anything is allocated; what it finds becomes one line."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megalowbit.engine.batch_size import MICRO, STEPS, TRAIN
from megalowbit.engine.config import DeepSpeedConfigParts
from megalowbit.errors import UserError

# DeepSpeed's throughput timer waits for the device twice a step, for a figure that telemetry has already.
QUIET: dict[str, Any] = {"log_level": "warning", "timers": {"throughput": {"enabled": False}}}


def check_nested_blocks(parts: DeepSpeedConfigParts) -> None:
    """Let DeepSpeed's own models read the configuration; needs a process group.

    Raises:
        UserError: their first finding, as one line.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig({**QUIET, **parts.deepspeed}, _DataParallelSize(parts))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        # DeepSpeed validates block by block and does not say which block it is in.
        blocks = [
            name
            for name, block in parts.deepspeed.items()
            if isinstance(block, dict) and path and path[0] in block
        ]
        key = ".".join([*blocks, *path] if len(blocks) == 1 else path) or error.title
        raise UserError(
            f"DeepSpeed rejects {key} = {first['input']!r} ({first['msg']}): "
            "correct it as DeepSpeed documents it, or remove it"
        ) from None
    except (AssertionError, ValueError, TypeError, DeepSpeedConfigError) as error:
        raise UserError(f"DeepSpeed rejects the configuration: {error}") from None


class _DataParallelSize:
    """The one thing that `DeepSpeedConfig` asks of an mpu."""

    def __init__(self, parts: DeepSpeedConfigParts) -> None:
        train, micro, steps = (parts.deepspeed[key] for key in (TRAIN, MICRO, STEPS))
        self.size = train // (micro * steps)

    def get_data_parallel_world_size(self) -> int:
        return self.size
