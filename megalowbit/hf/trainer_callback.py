"""A callback for Hugging Face's Trainer: low-bit training as configured, or an error before the first step.

Trainer ignores the `"megalowbit"` block in its DeepSpeed configuration, builds its own optimizer, with
DeepSpeed instead of the one it was given, and has no access to a model's random stream. At the start of
training the callback checks block, layers, stream and optimizer, and after each step whether it was applied.
With each checkpoint it saves the positions of the model's streams in `trainer_state.json`, and a resumed run
continues from there. Not saved: directions that splits carry from micro-batch to micro-batch.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerCallback

from megalowbit.errors import UserError
from megalowbit.layers.conversion.carried_state import (
    continue_stream,
    continue_streams,
    has_one_stream,
    stream_states,
)
from megalowbit.layers.conversion.convert import random_stream
from megalowbit.layers.conversion.loop_optimizer import innermost, parts_of
from megalowbit.layers.conversion.other_loops import check_training, find_engine

logger = logging.getLogger(__name__)


class MegalowbitCallback(TrainerCallback, ExportableState):
    """`Trainer(…, callbacks=[MegalowbitCallback()])`, with a model converted before.

    Raises:
        UserError: at the start of training, see `check_training`.
    """

    def __init__(self) -> None:
        self.random_stream: dict[str, int] | None = None  # as in the last checkpoint
        self.random_streams: dict[str, dict[str, int]] | None = None  # of a model with several
        self._model: nn.Module | None = None
        self._given: Any = None  # the optimizer that Trainer was built with

    def on_init_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        *,
        optimizer: object = None,
        **_: Any,
    ) -> None:
        """Note the optimizer that Trainer was given."""
        self._given = innermost(optimizer)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        model: nn.Module,
        optimizer: object = None,
        **_: Any,
    ) -> None:
        """Check the training setup, and set the random stream to its position in a resumed checkpoint."""
        if args.n_gpu > 1:
            raise UserError(
                f"Trainer wraps the model in nn.DataParallel for {args.n_gpu} GPUs, and its copies share one "
                "random stream: start one process for each GPU with torchrun or deepspeed"
            )
        settings = getattr(args, "hf_deepspeed_config", None)
        if settings is not None and find_engine(model) is None:
            raise UserError(
                "Trainer got a DeepSpeed configuration but made no engine: Accelerate ignores it on "
                "CPUs (use_cpu, ACCELERATE_USE_CPU); see docs/other-loops.md, or leave out deepspeed="
            )
        self._check_given(optimizer)
        _take_over_weights(optimizer)
        check_training(model, optimizer=optimizer, config=None if settings is None else settings.config)
        self._model = model
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        if state.global_step:
            self._resume(saved, state.global_step)
        # Trainer expects the key when it saves, but a checkpoint written without this callback lacks it
        state.stateful_callbacks[name] = self.state()

    def on_optimizer_step(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        optimizer: object = None,
        **_: Any,
    ) -> None:
        """Report a step that megalowbit's optimizer has skipped, which Trainer counts as any other."""
        report = getattr(innermost(optimizer), "report", None)
        if report is not None and not report.is_applied and state.is_world_process_zero:
            logger.warning("step %d: %s", state.global_step + 1, report)

    def state(self) -> dict[str, Any]:
        """The state that Trainer writes to `trainer_state.json`."""
        stream = None if self._model is None else random_stream(self._model)
        self.random_stream = None if stream is None else stream.state_dict()
        attributes: dict[str, Any] = {"random_stream": self.random_stream}
        if self._model is not None and not has_one_stream(self._model):
            self.random_streams = stream_states(self._model)
            attributes["random_streams"] = self.random_streams
        return {"args": {}, "attributes": attributes}

    def _check_given(self, optimizer: object) -> None:
        """Reject that DeepSpeed's integration has replaced the optimizer that Trainer was given."""
        if self._given is None or _steps(optimizer, self._given):
            return
        raise UserError(
            f"Trainer was given {type(self._given).__name__} in optimizers=, and steps with "
            f"{type(innermost(optimizer)).__name__}: with DeepSpeed it ignores the argument, so leave out "
            "optimizers= or deepspeed="
        )

    def _resume(self, saved: Any, step: int) -> None:
        last = saved[-1] if isinstance(saved, list) and saved else saved
        attributes = last.get("attributes", {}) if isinstance(last, dict) else {}
        position, of_layers = attributes.get("random_stream"), attributes.get("random_streams")
        stream = None if self._model is None else random_stream(self._model)
        if self._model is None or (stream is None and of_layers is None):
            return
        if of_layers is not None:
            missing = continue_streams(self._model, of_layers)
        elif position is not None:
            missing = continue_stream(self._model, position)
        else:
            assert stream is not None  # otherwise returned above
            logger.warning(
                "the checkpoint of step %d was saved without MegalowbitCallback and lacks the position "
                "of the random stream: stochastic rounding continues from micro-batch %d",
                step,
                stream.step,
            )
            return
        if missing:
            logger.warning(
                "the checkpoint of step %d has no position of the random stream of %s: stochastic rounding "
                "there continues with other numbers than an uninterrupted run",
                step,
                ", ".join(missing),
            )


def _steps(wrapper: Any, optimizer: object) -> bool:
    """Whether `optimizer` is in the wrappers."""
    while wrapper is not None:
        if wrapper is optimizer:
            return True
        wrapper = getattr(wrapper, "optimizer", None)
    return False


def _take_over_weights(optimizer: object) -> None:
    """Copy the model's weights to the fp32 masters if other code has written to them.

    Trainer does after training, with load_best_model_at_end. The next step would undo it.
    """
    for part in parts_of(innermost(optimizer)):
        if hasattr(part, "matches_model") and not part.matches_model():
            part.reload_model_params()
            logger.warning(
                "the model's weights were changed since the last step of %s: its fp32 masters are now these "
                "weights, in the model's precision",
                type(part).__name__,
            )
