"""Validation: the loss on held-out text at intervals and at the end, and the checkpoint with the lowest.

`data.validation` names the text. Every run has this component, which does nothing without such text.

The loss is exact: each token counts once, on any number of ranks. Ranks share batches; every batch is
computed once, its sum is a float64, and the sums are added in the order of the batches. `data/validation.py`
says which tokens a batch predicts, `layers/conversion/evaluation.py` what layers do meanwhile. Training does
not notice: a run has the same weights with and without validation, bit for bit.

The checkpoint of a step whose loss is the lowest so far is saved and kept until a later one has a lower loss;
the file `best` names it. After a rollback, or with other text, the search starts again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, Summary
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Fact, Facts
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    import torch

    from megalowbit.data.validation import Batch, TextLoss, ValidationText
    from megalowbit.distributed.process_grid import ProcessGrid

KEY = "megalowbit.validation"
BEST = "best"  # beside the checkpoints; names the one with the lowest loss
LONG = 60.0  # seconds of a validation, which schedulers may not wait for when they stop a job
BATCHES_PER_CALL = 16  # of a pipeline, which is idle at the beginning and end of a call


class ValidationSettings(SettingsModel):
    """How often the model is evaluated on the text of `data.validation`, and how."""

    every: int = Field(
        default=0,
        ge=0,
        description="interval between validations. 0: only after the last step",
        json_schema_extra=unit("steps"),
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="predict only so many tokens, in sequences that are spread evenly over the text. "
        "`null`: all",
        json_schema_extra=unit("tokens"),
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="sequences in a forward pass. `null`: `train_micro_batch_size_per_gpu`. The loss of "
        "recipes whose scales depend on a whole tensor changes a little with it",
        json_schema_extra=unit("sequences"),
    )
    bf16: bool = Field(
        default=False,
        description="also evaluate with nothing quantised, as with the recipe `bf16`; doubles the time",
    )
    keep_best: bool = Field(
        default=True,
        description="save a checkpoint when the loss is the lowest so far, and keep it until a later one has "
        "a lower loss",
    )


class Validation(Component):
    """Evaluates the model of a run.

    Args:
        settings: when and how.
        engine: DeepSpeed's engine around the converted model.
        text: the text, limited to `settings.tokens`.
        num_tokens: of its tokens whose predictions count.
        num_bytes: of its predicted tokens.
        size: sequences in a batch.
        total_steps: optimizer steps of the run.

    Attributes:
        last: columns of the newest validation; None: there was none.
    """

    key = "validation"
    settings_class = ValidationSettings
    description = "how often to evaluate on the text of `data.validation`"
    may_change = (f"{KEY}.*", "megalowbit.data.validation", "megalowbit.data.validation.*")

    def __init__(
        self,
        settings: ValidationSettings,
        engine: Any,
        text: ValidationText,
        *,
        num_tokens: int,
        num_bytes: int,
        size: int,
        total_steps: int,
    ) -> None:
        self._settings, self._engine, self._text = settings, engine, text
        self._num_tokens = num_tokens
        self._num_bytes, self._size, self._total_steps = num_bytes, size, total_steps
        self.last: dict[str, Fact] | None = None
        self._last_step = 0
        self._seconds = 0.0  # of the newest validation
        self._longest = 0.0  # of those that were said to be long
        self._best: dict[str, float] | None = None  # step and loss

    @classmethod
    def build(cls, settings: ValidationSettings, parts: RunParts) -> Validation | None:
        from megalowbit.distributed.agreement import agree

        if parts.loader.validation is None:
            return None
        text = parts.loader.validation.limited(settings.tokens)
        return cls(
            settings,
            parts.engine,
            text,
            num_tokens=agree(text.count_tokens),
            num_bytes=agree(text.count_bytes, parts.loader.tokenizer),
            size=settings.micro_batch_size or parts.loader.micro_batch_size,
            total_steps=parts.run.steps,
        )

    def startup_line(self) -> str:
        every = self._settings.every
        often = f"every {every} steps and " if every else ""
        return f"validate  {self.describe_text()}, {often}after the last step"

    def describe_text(self) -> str:
        """`12,345 tokens of held.txt`; with a limit, also how they are chosen."""
        text, line = self._text, f"{self._num_tokens:,} tokens of {self._text.name}"
        if text.num_left_out:
            share = text.num_predicted / (text.num_predicted + text.num_left_out)
            line += f", {share:.2%} of it in {text.num_sequences:,} evenly spread sequences"
        return line

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after `step`."""
        every = self._settings.every
        return step == self._total_steps or (every > 0 and step % every == 0)

    def evaluate(self, step: int, progress: Callable[[], None]) -> Facts:
        if not self.is_due(step):
            return {}
        started = time.monotonic()
        self.last, self._last_step = self.measure(progress), step
        self._seconds = time.monotonic() - started
        loss = columns.number(self.last["validation/loss"])
        is_lower = loss is not None and (self._best is None or loss < self._best["loss"])
        if self._settings.keep_best and loss is not None and math.isfinite(loss) and is_lower:
            self._best = {"step": step, "loss": loss}
        return self.last

    def measure(self, progress: Callable[[], None]) -> dict[str, Fact]:
        """Evaluate the weights as they are; every rank must call it.

        Args:
            progress: called between batches.

        Returns:
            Columns of the metrics.
        """
        found = self._loss(progress, is_quantized=True)
        facts: dict[str, Fact] = {
            "validation/loss": found.loss,
            "validation/perplexity": found.perplexity,
            "validation/bits_per_byte": found.bits_per_byte,
        }
        if self._settings.bf16:
            facts["validation/bf16_loss"] = self._loss(progress, is_quantized=False).loss
        return facts

    @property
    def num_pauses(self) -> int:
        """How often `measure` calls `progress` on this rank."""
        grid = self._engine.process_grid
        rounds = math.ceil(self._text.num_batches(self._size) / grid.data_size)
        return math.ceil(rounds / _batches_per_call(grid)) * (2 if self._settings.bf16 else 1)

    def _loss(self, progress: Callable[[], None], *, is_quantized: bool) -> TextLoss:
        from megalowbit.data.validation import TextLoss

        sums = sums_of_batches(
            self._engine, self._text, size=self._size, progress=progress, is_quantized=is_quantized
        )
        return TextLoss(nats=math.fsum(sums), num_tokens=self._num_tokens, num_bytes=self._num_bytes)

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        if self.last is None or step != self._last_step:
            return ()
        is_best = self._best is not None and self._best["step"] == step
        lines = [f"validation after step {step}: {describe(self.last, is_lowest=is_best)}"]
        if self._settings.every and self._seconds > max(LONG, 2 * self._longest):
            self._longest = self._seconds
            lines.append(
                f"a validation takes {columns.clock_text(self._seconds)}, and a stop signal waits for it: "
                "give jobs more time between the signal and their end, or set validation.tokens"
            )
        return lines

    def named_checkpoints(self) -> Mapping[str, int | None]:
        return {BEST: None if self._best is None else int(self._best["step"])}

    def after_load(self, saved_steps: Collection[int]) -> None:
        """Forget the best checkpoint if it is gone: a rollback removes those of later steps."""
        if self._best is not None and self._best["step"] not in saved_steps:
            self._best = None

    def summary(self) -> Summary:
        if self.last is None:
            return Summary()
        newest = {name.removeprefix("validation/"): value for name, value in self.last.items()}
        entries = {
            "step": self._last_step, "tokens": self._num_tokens, **newest, "best": self._best
        }  # fmt: skip
        best = columns.UNKNOWN
        if self._best is not None:
            best = f"{columns.loss_text(self._best['loss'])} (step {self._best['step']})"
        row = ("validation", f"{columns.loss_text(self.last['validation/loss'])} loss", "lowest", best)
        return Summary(entries={"validation": entries}, row=row)

    def state_dict(self) -> dict[str, Any]:
        return {
            "text": self._text.fingerprint,
            "last": self.last,
            "last_step": self._last_step,
            "best": self._best,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue with the losses of the same text; those of another one cannot be compared."""
        is_same = state is not None and state["text"] == self._text.fingerprint
        self.last, self._last_step, self._best = None, 0, None
        if state is not None and is_same:
            self.last, self._last_step, self._best = state["last"], state["last_step"], state["best"]


def describe(facts: Facts, *, is_lowest: bool = False) -> str:
    """The columns on one line: `loss 3.2141 (the lowest so far), perplexity 24.88, 1.2103 bits per byte`."""
    text = f"loss {columns.loss_text(facts['validation/loss'])}{' (the lowest so far)' * is_lowest}"
    text += f", perplexity {facts['validation/perplexity']:.4g}"
    if facts["validation/bits_per_byte"] is not None:
        text += f", {columns.loss_text(facts['validation/bits_per_byte'])} bits per byte"
    if "validation/bf16_loss" in facts:
        text += f"; loss {columns.loss_text(facts['validation/bf16_loss'])} unquantised"
    return text


def sums_of_batches(
    engine: Any,
    text: ValidationText,
    *,
    size: int,
    progress: Callable[[], None],
    is_quantized: bool,
) -> list[float]:
    """The sum of the losses of each batch of the text, on every rank; every rank must call it.

    Args:
        engine: DeepSpeed's engine around the model.
        text: the text.
        size: sequences in a batch.
        progress: called between batches.
        is_quantized: whether low-bit layers quantise.
    """
    import torch

    from megalowbit.distributed import collectives, process_group
    from megalowbit.layers.conversion.evaluation import evaluation

    grid, count = engine.process_grid, text.num_batches(size)
    # at ZeRO stage 3 and in pipelines, all ranks run equally often: some compute a batch that is not used
    numbers = [number if number < count else 0 for number in _numbers(grid.data_rank, grid.data_size, count)]
    found: list[torch.Tensor] = []
    per_call = _batches_per_call(grid)
    # codes of full weights on every rank would need the memory that stage 3 saves
    keeps_weights = engine.zero_optimization_stage() < 3
    with evaluation(engine.module, numbers, is_quantized=is_quantized, keeps_weights=keeps_weights):
        for start in range(0, len(numbers), per_call):
            progress()
            found.append(
                _sums(engine, [text.batch(number, size) for number in numbers[start : start + per_call]])
            )
    sums = torch.zeros(count, dtype=torch.float64, device=engine.device)
    if grid.tensor_rank == 0 and grid.stage == grid.pipeline_size - 1:  # one rank has each batch's result
        of_rank = sums[grid.data_rank :: grid.data_size]
        of_rank.copy_(torch.cat(found)[: len(of_rank)])
    if process_group.world_size() > 1:
        sums = sums.to(process_group.exchange_device(None, sums.device))
        collectives.all_reduce(sums)  # adds zeros, so it rounds nothing
    numbers_read: list[float] = sums.tolist()
    return numbers_read


def _batches_per_call(grid: ProcessGrid) -> int:
    return BATCHES_PER_CALL if grid.pipeline_size > 1 else 1


def _numbers(rank: int, num_ranks: int, count: int) -> Iterator[int]:
    """Numbers of a rank's batches, equally many on each rank; those from `count` on do not exist."""
    rounds = math.ceil(count / num_ranks)
    return (turn * num_ranks + rank for turn in range(rounds))


def _sums(engine: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """The sum of each batch's losses, (n,) float64; zeros in stages of a pipeline without the loss."""
    import torch

    from megalowbit.engine.pipeline.batch_reader import sums_of_losses
    from megalowbit.hf.batches.upload import upload
    from megalowbit.hf.losses.token_losses import sum_of_model_losses

    is_pipeline = engine.process_grid.pipeline_size > 1
    config = None if is_pipeline else engine.module.config
    placed = [upload(batch, engine.device, config) for batch in batches]
    if is_pipeline:
        return sums_of_losses(engine, placed)
    return torch.stack([sum_of_model_losses(engine, engine.module, batch) for batch in placed])


def check_validation(
    settings: ValidationSettings, *, has_text: bool, sequence_length: int, micro_batch_size: int, stages: int
) -> None:
    """Reject settings that have no effect, or do not fit the run.

    Args:
        settings: the section.
        has_text: whether `data.validation` is set.
        sequence_length: of the data.
        micro_batch_size: of training.
        stages: of the pipeline.
    """
    changed = sorted(settings.model_dump(exclude_defaults=True))
    if changed and not has_text:
        raise UserError(
            f"{KEY}.{changed[0]} is set, but there is no text to evaluate on: name it in "
            "megalowbit.data.validation"
        )
    if settings.tokens is not None and settings.tokens < sequence_length:
        raise UserError(
            f"{KEY}.tokens = {settings.tokens} is less than one sequence "
            f"(megalowbit.data.sequence_length = {sequence_length}): raise it"
        )
    if stages > 1 and settings.micro_batch_size not in (None, micro_batch_size):
        raise UserError(
            f"{KEY}.micro_batch_size = {settings.micro_batch_size} must be train_micro_batch_size_per_gpu = "
            f"{micro_batch_size} in a pipeline, whose buffers have one shape: leave it out"
        )
