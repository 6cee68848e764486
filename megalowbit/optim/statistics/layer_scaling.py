"""Layer scaling: a factor for the gradients of each block, in addition to the loss scale.

One S must suit all layers. If gradients differ by many octaves between blocks, an S that preserves the
smallest overflows the largest. With layer scaling, a block's output multiplies the incoming gradient by a
power of two c, and its inputs divide the outgoing gradient by c. Gradients inside the block are c times
larger; between blocks only S applies. To exclude the skip path, name the residual branches (attention, MLP).
Code that sums parameters' gradients in fp32 divides by `factor_of`, which is exact because factors are powers
of two.

c follows the block's largest stored gradient (including S and c) and rises by at most one octave at a time.
An overflow is attributed to the block in which backward met it first, if its c is above 1. The target of that
block then falls by an octave, which it regains after 1000 applied steps.

Not covered: compiled models; second derivatives, which are an error; `torch.autograd.grad`, whose gradients
of a block's parameters contain its factor; parameters that code outside a block's forward reads; writing in
place to a block's output, which autograd rejects.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.derivative_checks import reject_create_graph
from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number
from megalowbit.optim.loss_scale.state import is_whole, plain_number
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings

logger = logging.getLogger(__name__)

RECOVERY_STEPS = 1000  # applied steps after which a block regains an octave lost to an overflow
MOST_OCTAVES = 4096  # more than between any two numbers
FRONT = 0  # group of parameters that are outside all blocks and registered before the last block


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the model's blocks: the members of its longest `nn.ModuleList`, in order.

    Raises:
        UserError: the model has no `nn.ModuleList` of two or more.
    """
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    name, blocks = max(lists, key=lambda found: len(found[1]), default=("", ()))
    if len(blocks) < 2:
        raise UserError(
            "layer_scaling finds no nn.ModuleList of blocks in the model: name modules by "
            "layer_scaling.modules, or turn it off"
        )
    prefix = f"{name}." if name else ""
    return [f"{prefix}{index}" for index in range(len(blocks))]


def matching_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the modules that match one of the patterns, in the order of registration.

    Raises:
        UserError: a pattern matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"layer_scaling.modules: {shown(pattern)} matches no module of the model: see "
                "model.named_modules(), or leave it out"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class _MultiplyGradient(torch.autograd.Function):
    """Identity whose backward multiplies; the factor is evaluated in backward, like `factor_of`.

    A second backward would pass the identity at a block's input but not the one at its output, and would be
    wrong by the factor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        reject_create_graph("a model with layer_scaling", "leave it out")
        factor = ctx.factor()
        return (gradients[0] if factor == 1.0 else gradients[0] * factor), None


class _Block:
    """One factor, of a module or of several that share parameters.

    Attributes:
        names: names of its modules.
        octaves: log2 of the factor, ≥ 0.
        average: moving average of log2(largest gradient), without S and factor; None before the first.
        penalty: octaves of the target lost to overflows.
        clean_steps: applied steps since the last overflow attributed to it, or since an octave was regained.
    """

    SAVED = ("octaves", "average", "penalty", "clean_steps")
    HIGHEST = {"octaves": 126, "penalty": MOST_OCTAVES, "clean_steps": 2**63}  # noqa: RUF012

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.octaves = 0
        self.average: float | None = None
        self.penalty = 0
        self.clean_steps = 0

    @classmethod
    def is_valid(cls, key: str, value: object) -> bool:
        """Whether a saved value is valid."""
        if key == "average":
            return value is None or (is_finite_number(value) and abs(value) <= MOST_OCTAVES)  # type: ignore[arg-type]
        return is_whole(value) and 0 <= value <= cls.HIGHEST[key]  # type: ignore[operator]

    def back_off(self) -> bool:
        """Lower the factor after an overflow; returns False if it is 1 already."""
        if self.octaves == 0:
            return False
        self.octaves -= 1
        self.penalty += 1
        self.clean_steps = 0
        return True

    def see(self, amax: float, loss_scale: float, smoothing: float) -> float | None:
        """Record a step's largest gradient; returns log2 of it or the average (the larger), unscaled."""
        self.clean_steps += 1
        if self.penalty and self.clean_steps >= RECOVERY_STEPS:
            self.penalty, self.clean_steps = self.penalty - 1, 0
        if amax <= 0:
            return None
        now = math.log2(amax) - math.log2(loss_scale) - self.octaves
        before = now if self.average is None else self.average
        self.average = smoothing * before + (1 - smoothing) * now
        return max(self.average, now)


class LayerScaling:
    """Factors c of a model's blocks, and the hooks that apply them.

    Groups, in the numbering of `GradientWatch`: 0 for parameters outside all blocks; 1 … for the factors, in
    forward order; the last for parameters outside the blocks that are registered after them (final norm,
    head). Backward reaches the last group first, so an overflow there is not attributed to a block.

    Args:
        model: the model that contains the blocks.
        names: names of the blocks, in forward order; none inside another.
        settings: target, bounds and pace.

    Raises:
        UserError: a name is unknown, given twice, inside another block, or the name of a mere container.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str], settings: LayerScalingSettings | None = None
    ) -> None:
        self.settings = settings or LayerScalingSettings(enabled=True)
        modules = _named(model, list(names))
        insides = {name: {id(p) for p in module.parameters()} for name, module in modules.items()}
        inside = set().union(*insides.values())
        groups = _components(insides)
        outside = _parameters_outside(model, modules)
        shared = [names for names in groups if outside & set().union(*(insides[name] for name in names))]
        if shared:
            listed = ", ".join(name for names in shared for name in names)
            logger.warning("layer_scaling: %s share parameters with the model outside: factor 1", listed)
        self._blocks = [_Block(names) for names in groups if names not in shared]
        self._group_of: dict[int, int] = {}
        for index, block in enumerate(self._blocks):
            for name in block.names:
                self._group_of |= dict.fromkeys(insides[name], index + 1)
        behind = False
        for parameter in model.parameters():
            behind = behind or id(parameter) in inside
            if behind and id(parameter) not in inside:
                self._group_of[id(parameter)] = self.num_groups - 1
        self._applied_steps = 0
        self._hooks: list[Any] = []
        for block in self._blocks:
            for name in block.names:
                self._attach(modules[name], block)

    @classmethod
    def from_settings(cls, model: nn.Module, settings: LayerScalingSettings) -> LayerScaling:
        """Factors for the modules that the settings name, by default for the model's blocks.

        Raises:
            UserError: a pattern matches nothing or a module that cannot have a factor, or there are no
                blocks.
        """
        named = matching_modules(model, settings.modules) if settings.modules else find_blocks(model)
        return cls(model, named, settings)

    @property
    def num_groups(self) -> int:
        """Number of factors, plus two for parameters outside the blocks."""
        return len(self._blocks) + 2

    @property
    def factors(self) -> dict[str, float]:
        """Factor c of each block by name; blocks that share parameters with the outside have none."""
        return {name: 2.0**block.octaves for block in self._blocks for name in block.names}

    def group_of(self, parameter: nn.Parameter) -> int:
        """The group of a parameter in the watch."""
        return self._group_of.get(id(parameter), FRONT)

    def factor_of(self, parameter: nn.Parameter) -> float:
        """The factor of a parameter's gradients in addition to the loss scale."""
        return self.factor_of_group(self.group_of(parameter))

    def factor_of_group(self, group: int) -> float:
        """The factor of a group; 1 for parameters outside all blocks."""
        return 2.0 ** self._blocks[group - 1].octaves if 0 < group < self.num_groups - 1 else 1.0

    def update(self, amaxes: Sequence[float], found_inf: bool, loss_scale: float) -> bool:
        """Adapt the factors after a step. Gives the same on all ranks if the arguments are the same.

        Args:
            amaxes: largest stored |gradient| by group, over all ranks, including `loss_scale` and factor; inf
                if one was infinite or NaN.
            found_inf: whether the step was skipped.
            loss_scale: S of that step.

        Returns:
            True if an overflow was attributed to a block and its factor lowered: S need not fall.
        """
        if len(amaxes) != self.num_groups:
            raise ValueError(f"expected the largest gradients of {self.num_groups} groups, got {len(amaxes)}")
        if found_inf:
            if not math.isfinite(amaxes[-1]):
                return False
            # backward runs from the last block to the first, and an infinity propagates from its origin
            faulty = next((b for b, amax in self._last_first(amaxes) if not math.isfinite(amax)), None)
            return faulty is not None and faulty.back_off()
        self._applied_steps += 1
        is_due = self._applied_steps % self.settings.every == 0
        for block, amax in self._last_first(amaxes):
            level = block.see(amax, loss_scale, self.settings.smoothing) if math.isfinite(amax) else None
            if level is not None and is_due:
                self._follow(block, level + math.log2(loss_scale))
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state on which the next `update` depends, as plain numbers."""
        blocks = {b.names[0]: {key: getattr(b, key) for key in _Block.SAVED} for b in self._blocks}
        return {"applied_steps": self._applied_steps, "blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; factors are limited to the present `max_factor`.

        Raises:
            UserError: `state` belongs to other blocks, or is damaged; then nothing has changed.
        """
        self.check_state_dict(state)
        self._applied_steps = int(plain_number(state["applied_steps"]))
        for block in self._blocks:
            for key, value in state["blocks"][block.names[0]].items():
                number = plain_number(value)
                setattr(block, key, number if key == "average" else int(number))
            block.octaves = min(block.octaves, self._max_octaves)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether `load_state_dict` accepts a state; changes nothing.

        Raises:
            UserError: `state` belongs to other blocks, or is damaged.
        """
        saved = state.get("blocks") if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping) or "applied_steps" not in state:
            raise UserError(
                f"layer_scaling state = {shown(state)} must be a mapping with applied_steps and blocks: load "
                "an earlier checkpoint"
            )
        expected = {block.names[0] for block in self._blocks}
        kept = set(_Block.SAVED)
        is_alike = all(isinstance(one, Mapping) and one.keys() == kept for one in saved.values())
        if saved.keys() != expected or not is_alike:
            raise UserError(
                f"layer_scaling state of {shown(sorted(map(str, saved)))} does not fit the blocks "
                f"{shown(sorted(expected))}: resume with the model it was saved with"
            )
        steps = plain_number(state["applied_steps"])
        if not (is_whole(steps) and steps >= 0):
            raise _damaged("applied_steps", steps)
        for name, block in saved.items():
            for key, value in block.items():
                if not _Block.is_valid(key, plain_number(value)):
                    raise _damaged(f"{key} of {name}", value)

    def detach(self) -> None:
        """Remove the hooks; all factors become 1."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for block in self._blocks:
            block.octaves = 0

    @property
    def _max_octaves(self) -> int:
        return int(math.log2(self.settings.max_factor))

    def _last_first(self, amaxes: Sequence[float]) -> list[tuple[_Block, float]]:
        return list(zip(reversed(self._blocks), reversed(amaxes[1:-1]), strict=True))

    def _follow(self, block: _Block, level: float) -> None:
        """Move a factor to the target, down at once, up by one octave; `level` includes S but no factor."""
        wanted = math.floor(math.log2(self.settings.target) - block.penalty - level)
        block.octaves = max(0, min(wanted, block.octaves + 1, self._max_octaves))

    def _attach(self, module: nn.Module, block: _Block) -> None:
        self._hooks.append(module.register_forward_pre_hook(_DivideAtInputs(block), with_kwargs=True))
        self._hooks.append(module.register_forward_hook(_MultiplyAtOutput(block)))


class _FactorHook:
    """A hook of a block; in a copy of the model it does nothing, because nothing divides the factor out."""

    def __init__(self, block: _Block) -> None:
        self._block = block

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _DivideAtInputs(_FactorHook):
    def __call__(self, _: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any] | None:
        if not torch.is_grad_enabled():
            return None
        return _with_multiplied(arguments, self._inverse), _with_multiplied(named, self._inverse)

    def _inverse(self) -> float:
        return 2.0**-self._block.octaves


class _MultiplyAtOutput(_FactorHook):
    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        return _with_multiplied(output, self._factor) if torch.is_grad_enabled() else None

    def _factor(self) -> float:
        return 2.0**self._block.octaves


class _NoHook:
    """What a `_FactorHook` becomes in copies and pickles of the model."""

    def __call__(self, *_: object) -> None:
        return None


def _with_multiplied(value: Any, factor: Callable[[], float]) -> Any:
    """`value`, with each tensor that requires a gradient passed through the identity; others are unchanged.

    All tensors are passed through it: a single one that bypassed it would transport unscaled gradients.
    """
    if isinstance(value, Tensor):
        return _MultiplyGradient.apply(value, factor) if value.requires_grad else value
    if isinstance(value, (tuple, list)):
        parts = [_with_multiplied(part, factor) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps the class: transformers' outputs are subclasses of dict
        for key, part in value.items():
            changed[key] = _with_multiplied(part, factor)
        return changed
    return value


def _damaged(name: str, value: object) -> UserError:
    return UserError(
        f"layer_scaling state is damaged, {name} = {shown(value)}: load an earlier checkpoint, or start "
        "without this state"
    )


def _named(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    modules: dict[str, nn.Module] = {}
    for name in names:
        if name not in known or not name:
            raise UserError(
                f"layer_scaling: the model has no module {shown(name)}: see model.named_modules()"
            )
        modules[name] = known[name]
    if len({id(module) for module in modules.values()}) < len(names):
        raise UserError(f"layer_scaling: a module occurs twice in {shown(names)}: name each module once")
    for name, module in modules.items():
        nested = {id(part) for part in module.modules()} - {id(module)}
        for other, part in modules.items():
            if id(part) in nested:
                raise UserError(f"layer_scaling: {other} is inside {name}: name one of the two")
        if type(module).forward is nn.Module.forward:  # factors are applied when a module is called
            kind = type(module).__name__
            raise UserError(f"layer_scaling: {name} is a {kind}, which is never called: name its children")
    return modules


def _parameters_outside(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[int]:
    """Parameters of modules outside all blocks, whether or not a block has them too."""
    covered = {id(part) for module in modules.values() for part in module.modules()}
    others = [part for part in model.modules() if id(part) not in covered]
    return {id(p) for part in others for p in part._parameters.values() if p is not None}


def _components(insides: Mapping[str, set[int]]) -> list[list[str]]:
    """Group the names that share parameters, ordered by the last name of each group."""
    groups: list[tuple[list[str], set[int]]] = []
    for name, own in insides.items():
        joined = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        names = [each for group in joined for each in group[0]]
        groups.append(([*names, name], own.union(*(group[1] for group in joined))))
    return [names for names, _ in groups]
