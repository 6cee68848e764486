"""The loss on each source of a blend, in each step.

Every run whose data is a blend has this component; it has no section. In each step it has the losses of the
tokens of each source summed over micro-batches and ranks, in float64 and together with the loss of the step.
The column `loss/NAME` is their mean, exact for any number of ranks; null in a step without a sample of the
source. The summary has the newest mean of each source, which checkpoints keep. Losses of single tokens are
those that the step's loss is the mean of; training does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.labels import count_labels
from megalowbit.pretrain.components.base import Component, RunParts, Summary
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Fact, Facts

if TYPE_CHECKING:
    import torch

    from megalowbit.data.loader import BlendedLoader

SOURCES = "sources"  # in a batch: the place of each row's source


class SourceLosses(Component):
    """Sums of losses and numbers of predicted tokens, by source.

    Args:
        loader: of the run.
        device: on which the losses are computed.

    Attributes:
        sums: (2 · sources,) float64: losses, then tokens; of this rank in this attempt at a step.
    """

    key = "source_losses"

    def __init__(self, loader: BlendedLoader, device: torch.device) -> None:
        import torch

        self._loader = loader
        self._of_step: dict[str, Fact] = {}
        self._newest: dict[str, float] = {}  # of each source that has given a sample
        self.sums = torch.zeros(2 * len(loader.names), dtype=torch.float64, device=device)

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> SourceLosses | None:
        from megalowbit.data.loader import BlendedLoader

        if not isinstance(parts.loader, BlendedLoader):
            return None
        return cls(parts.loader, parts.engine.device)

    def startup_line(self) -> str:
        """A line for each source: its shares, and how often the run reads it."""
        lines = []
        for name, shares in self._loader.planned_shares.items():
            source = self._loader.dataset.sources[name]
            epochs = self._loader.planned_epochs[name]
            lines.append(
                f"source    {name}: {shares}, from {source.name} of "
                f"{source.num_samples:,} sequences, read {epochs:.4g} times in the whole run"
            )
        return "\n".join(lines)

    def begin_attempt(self) -> None:
        self.sums.zero_()

    def add(self, sources: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> None:
        """Add a micro-batch.

        Args:
            sources: (batch,), the place of each row's source.
            labels: (batch, tokens).
            losses: (batch,), the sum of each row.
        """
        import torch

        counts = count_labels(labels).double()
        places = torch.arange(len(self._loader.names), device=sources.device)
        is_of = places[:, None] == sources  # (sources, batch)
        # not a product with zeros: a loss that is not finite must stay in its source
        parts = [torch.where(is_of, each, 0.0).sum(1) for each in (losses, counts)]
        self.sums += torch.cat(parts).to(self.sums.device)

    def note(self, sums: Sequence[float]) -> None:
        """Note the sums over all ranks, which the host has read."""
        losses, counts = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        found = {
            name: loss / count if count else None
            for name, loss, count in zip(self._loader.names, losses, counts, strict=True)
        }
        self._of_step = {f"loss/{name}": loss for name, loss in found.items()}
        self._newest |= {name: loss for name, loss in found.items() if loss is not None}

    def facts(self, known: Facts) -> Facts:
        return self._of_step

    def summary(self) -> Summary:
        loader = self._loader
        entries = {
            name: {
                "samples": count,
                "tokens": count * loader.dataset.sequence_length,
                "epochs": loader.epochs[name],
                "loss": columns.number(self._newest.get(name)),
            }
            for name, count in loader.counts.items()
        }
        return Summary(entries={"sources": entries})

    def state_dict(self) -> dict[str, Any]:
        return {"newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        self._newest = {} if state is None else dict(state["newest"])
