"""Facts as TensorBoard scalars, tags exactly as the facts are named.

TensorBoard keeps scalars in float32: counts above 2^24 are rounded there, and exact in `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalowbit.errors import UserError
from megalowbit.telemetry.counters import LayerOverflow
from megalowbit.telemetry.facts import Facts

FLUSH_SECONDS = 10  # what a kill may cost


class TensorBoardSink:
    """Writes every numeric fact; text and `None` have no curve.

    Args:
        folder: where the event files go.
        resume_step: last step already trained; TensorBoard hides what an interrupted run wrote after it.

    Raises:
        UserError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "telemetry.tensorboard is on but tensorboard is not installed: pip install tensorboard, "
                "or set megalowbit.telemetry.tensorboard=false"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECONDS)

    def write(self, step: int, facts: Facts) -> None:
        """Add one scalar per numeric fact."""
        for name, value in facts.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Add the curves of every layer and role."""
        for row in layers:
            self.write(step, row.facts())

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Flush and close the event file."""
        self._writer.close()
