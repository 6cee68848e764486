"""Reads and checks all micro-batches of a pipeline step before the step starts.

DeepSpeed reads each micro-batch when it needs it, in the first and the last stage. If an iterator is too
short or a batch is wrong, one of these stages ends and the other ranks wait forever. Here both stages read
and check all batches first, and an error on one rank is raised on all. This costs one more small collective
per step. The hosts exchange it over gloo, so that none waits for its device before the schedule. An error
within the schedule still ends only one rank. Not checked: that both stages read the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from megalowbit.distributed.agreement import failing_together
from megalowbit.distributed.process_group import group_of_hosts
from megalowbit.engine.pipeline.micro_batches import Inputs, as_inputs_and_labels, check_values
from megalowbit.engine.pipeline.parts import batch_limits, causal_loss
from megalowbit.errors import UserError
from megalowbit.families.vocabulary import num_tokens
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.hf.losses.token_losses import sum_of_token_losses, sums_of_rows

Batch = tuple[Inputs, Tensor]


class BatchReader:
    """Replaces `train_batch` and `eval_batch` of a `PipelinedModel`'s engine.

    Calls that do not exist for pipelines raise an error. A function passed to `engine.set_batch_fn` is
    applied to each batch first, as in DeepSpeed. Every rank must create one, because it may create a group.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._hosts = group_of_hosts()
        self._limits = batch_limits(engine.module.config)
        self._shapes: list[tuple[int, ...]] | None = None
        engine.train_batch = self.train_batch
        engine.eval_batch = self.eval_batch
        for name in ("forward", "backward", "step"):
            setattr(engine, name, _refuse)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take one optimizer step; every rank must call it.

        Args:
            data_iter: iterator over micro-batches, kept for later calls. By default the previous one, or the
                iterator of the training data.

        Returns:
            The mean loss, 0-dim.

        Raises:
            UserError: the data end within the step, or a batch does not fit; raised on all ranks.
            RuntimeError: reading failed in another way on another rank; that rank raises the original.
        """
        engine = self._engine
        if data_iter is not None:
            engine.set_dataiterator(data_iter)
        with failing_together(self._hosts):
            batches = self._read("train_batch", engine.data_iterator, engine.micro_batches)
        with self._given(batches):
            loss: Tensor = type(engine).train_batch(engine)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Losses without a step; see DeepSpeed's `eval_batch`, and `train_batch` for the errors."""
        engine = self._engine
        count = engine.micro_batches if num_micro_batches is None else num_micro_batches
        with failing_together(self._hosts):
            batches = self._read("eval_batch", data_iter, count)
        with self._given(batches):
            return type(engine).eval_batch(
                engine,
                iter(batches),
                return_logits=return_logits,
                compute_loss=compute_loss,
                reduce_output=reduce_output,
                bcast_loss=bcast_loss,
                num_micro_batches=num_micro_batches,
            )

    def _read(self, caller: str, source: Any, count: int) -> list[Batch]:
        """The next micro-batches; empty in stages between the first and the last."""
        engine = self._engine
        if not (engine.is_first_stage() or engine.is_last_stage()):
            return []
        if not hasattr(source, "__next__"):
            what = "no data" if source is None else f"data of type {type(source).__name__}"
            raise UserError(f"engine.{caller} has {what}: pass an iterator over micro-batches, iter(…)")
        function = engine.batch_fn or (lambda batch: batch)
        batches: list[Batch] = []
        for _ in range(count):
            try:
                given = next(source)
            except StopIteration:
                raise UserError(
                    f"the data iterator of engine.{caller} ended after {len(batches)} of the {count} "
                    f"micro-batches of a step: provide {count} on the first and on the last stage"
                ) from None
            inputs, labels = as_inputs_and_labels(function(given))
            check_values(inputs, labels, self._limits)
            batches.append((inputs, labels))
        self._check_shapes([inputs for inputs, _ in batches])
        return batches

    def _check_shapes(self, everything: list[Inputs]) -> None:
        """Reject shapes other than those of the fixed buffers of stages without dynamic shapes."""
        engine = self._engine
        if engine.dynamic_shape or engine.num_stages == 1:
            return
        expected = self._shapes
        if engine.pipe_recv_buf is None and engine.first_output_send:  # there are no buffers now
            expected = None
        for inputs in everything:
            shapes = [tuple(each.shape) for each in (inputs if isinstance(inputs, tuple) else (inputs,))]
            expected = expected or shapes
            if shapes != expected:
                raise UserError(
                    f"a batch for a pipeline has inputs of shapes {shapes} after {expected}: use equal "
                    "shapes, or call pipeline_module with dynamic_shape=True"
                )
        self._shapes = expected

    @contextmanager
    def _given(self, batches: list[Batch]) -> Iterator[None]:
        """Context in which the engine's schedule reads `batches`, to which `batch_fn` is already applied."""
        engine = self._engine
        source, function = engine.data_iterator, engine.batch_fn
        engine.data_iterator, engine.batch_fn = iter(batches), None
        try:
            yield
        finally:
            engine.data_iterator, engine.batch_fn = source, function


def loss_of_step(engine: Any) -> Tensor | None:
    """The mean loss of a step's micro-batches, on the device; None in all stages but the last.

    It is known when the optimizer steps. DeepSpeed sends the same number to the other stages afterwards
    (`dp_group_loss`), which is too late for the optimizer's host read.
    """
    if not engine.is_last_stage():
        return None
    loss: Tensor = engine.total_loss / engine.micro_batches
    return loss


def sums_of_losses(engine: Any, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The sum of each batch's losses, see `hf.losses.token_losses`; every rank must call it.

    Args:
        engine: of a `PipelinedModel`, in evaluation mode.
        batches: of the training shape, rows of one sequence, the target of each position as its label.

    Returns:
        (n,) float64; zeros in all stages but the last.
    """
    found: list[Tensor] = []

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        found.append(sum_of_token_losses(logits[..., :size], targets))
        return found[-1]

    module = engine.module
    size = num_tokens(module.config)
    trained, module.loss_fn = module.loss_fn, loss_of
    try:
        with attention_within_documents(batches[0], None):
            engine.eval_batch(
                iter(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
            )
    finally:
        module.loss_fn = trained
    if not found:
        return torch.zeros(len(batches), dtype=torch.float64, device=engine.device)
    return torch.stack(found)


@contextmanager
def losses_of_rows(engine: Any) -> Iterator[list[Tensor]]:
    """Context of `train_batch` that finds the sum of the losses of each row; the training does not notice.

    Yields:
        (batch,) float64 for each micro-batch; empty in all stages but the last.
    """
    found: list[Tensor] = []
    module = engine.module
    trained = module.loss_fn

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        found.append(sums_of_rows(logits.detach(), labels))
        loss: Tensor = trained(logits, labels)
        return loss

    module.loss_fn = loss_of
    try:
        yield found
    finally:
        module.loss_fn = trained


@contextmanager
def loss_per_label(engine: Any, num_labels: Tensor) -> Iterator[None]:
    """Context of `train_batch` in which the loss of a micro-batch is its sum over `num_labels`, 0-dim.

    Raises:
        ValueError: the loss of the model is another one, whose sum is not known.
    """
    module = engine.module
    if module.loss_fn is not causal_loss:
        raise ValueError(f"the loss of the model must be `causal_loss`, not {module.loss_fn!r}")
    trained, module.loss_fn = module.loss_fn, partial(causal_loss, num_labels=num_labels)
    try:
        yield
    finally:
        module.loss_fn = trained


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "engine(batch), engine.backward and engine.step do not work with pipelines: call "
        "engine.train_batch(iterator), which does all three, or engine.eval_batch(iterator)"
    )
