"""The late precision switch of a run: when it comes, and what the loss did around it.

Whether layers are switched follows from the step alone, so a resumed run needs no flag: before each step the
loop asks, and a step behind the switch finds it due. What a checkpoint holds are the losses around it, for
the two lines that a person reads: the mean of the steps before, and later the mean of the steps since.
Losses are the means over all ranks that the loop has read anyway.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.precision_switch import switch_precision, switched
from megalowbit.layers.recipe import Recipe
from megalowbit.pretrain.components.late_switch_settings import KEY, LateSwitchSettings

WINDOW = 20  # steps in each mean loss


class LateSwitch:
    """Switches a model's layers when their step has come.

    Args:
        settings: when, and what.
        model: the converted model.
        recipe: its recipe.
        total_steps: optimizer steps of the run.
        num_layers: low-bit layers of the whole model, where this is a part of it.

    Attributes:
        step: optimizer steps before the switch.
        recipe: with which layers go on after it.
        is_switched: whether they do.

    Raises:
        UserError: the recipe quantises nothing that could be switched.
    """

    def __init__(
        self,
        settings: LateSwitchSettings,
        model: nn.Module,
        recipe: Recipe,
        *,
        total_steps: int,
        num_layers: int | None = None,
    ) -> None:
        self.recipe = switched(recipe, settings.scope)
        self.step, self.is_switched = settings.step(total_steps), False
        self._scope, self._model = settings.scope, model
        self._num_layers = num_layers or len(bit_layers(model))
        self._reported_at = min(self.step + WINDOW, total_steps)
        self._former: dict[str, Recipe] = {}  # of the layers, since the switch
        self._before: list[float | None] = []  # losses of the last steps before the switch
        self._since: list[float | None] = []  # of the first ones after it

    def before_step(self, step: int) -> str | None:
        """Switch if it is time, between two optimizer steps.

        Args:
            step: steps trained so far.

        Returns:
            What to tell, at the step of the switch itself.
        """
        if self.is_switched or step < self.step:
            return None
        layers = bit_layers(self._model)
        if layers:  # a pipeline stage may have none
            self._former = {name: layer.recipe for name, layer in layers.items()}
            switch_precision(self._model, self._scope)
        self.is_switched = True
        if step > self.step:
            return None  # a resumed run
        return (
            f"precision switched after step {step}: {self._num_layers} layers go on as {self.recipe.name}; "
            f"{_mean_loss(self._before)} before"
        )

    def after_step(self, step: int, loss: float) -> str | None:
        """Take note of a step's loss.

        Args:
            step: its number; the first is 1.
            loss: of all ranks.

        Returns:
            What to tell, when enough steps have passed since the switch, or the run is at its end.
        """
        # None, for a checkpoint's JSON-like state and a mean that one skipped step must not spoil
        value = loss if math.isfinite(loss) else None
        if step <= self.step:
            self._before = [*self._before, value][-WINDOW:]
            return None
        if step > self.step + WINDOW:
            return None
        self._since.append(value)
        if step != self._reported_at:
            return None
        return (
            f"precision switched after step {self.step}: {_mean_loss(self._since)} since, "
            f"{_mean_loss(self._before)} before"
        )

    def facts(self) -> dict[str, int]:
        """For the records of a step: whether it was trained after the switch."""
        return {"precision_switched": int(self.is_switched)}

    def summary(self) -> dict[str, Any] | None:
        """For the summary of a run: the switch and the mean losses around it; `None` before it.

        Returns:
            `step`, `scope`, `loss_before` and `loss_after`; a loss is `None` where no step's is known.
        """
        if not self.is_switched:
            return None
        return {
            "step": self.step,
            "scope": self._scope,
            "loss_before": _mean(_finite(self._before)),
            "loss_after": _mean(_finite(self._since)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The losses around the switch."""
        return {"before": list(self._before), "since": list(self._since)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._before, self._since = list(state["before"]), list(state["since"])

    def go_back(self, step: int) -> None:
        """Undo the switch where the run has gone back to `step`, from which it is still to come."""
        if not self.is_switched or step > self.step:
            return
        layers = bit_layers(self._model)
        for name, former in self._former.items():
            layers[name].recipe = former
        self.is_switched = False

    def __str__(self) -> str:
        return f"after step {self.step}: {self.recipe.name}"


def check_switchable(settings: LateSwitchSettings | None, recipe: Recipe) -> None:
    """Refuse a switch of a recipe that quantises nothing there.

    Raises:
        UserError: see above.
    """
    if settings is None:
        return
    try:
        switched(recipe, settings.scope)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None


def _mean_loss(losses: list[float | None]) -> str:
    finite = _finite(losses)
    mean = _mean(finite)
    if mean is None:
        return "no loss known of the steps"
    steps = f"the {len(finite)} steps" if len(finite) > 1 else "the step"
    return f"mean loss {mean:.4f} over {steps}"


def _finite(losses: list[float | None]) -> list[float]:
    return [loss for loss in losses if loss is not None]


def _mean(losses: list[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None
