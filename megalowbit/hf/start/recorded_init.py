"""Builds a model without weights, and repeats its random initialisation one parameter at a time.

`record_initialization` builds a model whose parameters are on the meta device. What the constructors would
have done to each parameter (draw numbers, fill, scale a part) is recorded instead. `RandomWeights` then does
it to one parameter at a time, with the same generator, so the values are bitwise those of an ordinary build.

The generator is sequential: numbers of earlier draws must be drawn to reach a later one. Its state before
each draw is kept once it is reached. In the order in which `RandomWeights` iterates, every draw is made once.

Not covered: initialisations that compute one parameter from another, random buffers, and functions of
`torch.nn.init` that need values, such as `trunc_normal_`. They are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

Model = TypeVar("Model", bound=nn.Module)

aten = torch.ops.aten
UNWRITTEN = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default)
# functions of `torch.nn.init` that return at once on the meta device
SKIPPED = ("trunc_normal_", "dirac_", "orthogonal_", "sparse_")
# after these, nothing is left of what a tensor held before
OVERWRITING = (aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar)


class Step(NamedTuple):
    """One operation in place on a parameter, or on a view of one.

    Attributes:
        operation: of torch's aten.
        size, stride, offset: of the view in the parameter's memory, in elements.
        arguments, keywords: those behind the tensor.
        is_random: whether it draws numbers.
    """

    operation: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    is_random: bool

    def apply(self, memory: Tensor, generator: torch.Generator) -> None:
        """Run it on the flat `memory` of a parameter."""
        target = memory.as_strided(self.size, self.stride, self.offset)
        keywords = {**self.keywords, "generator": generator} if self.is_random else self.keywords
        self.operation(target, *self.arguments, **keywords)

    @property
    def extent(self) -> int:
        """Elements of the parameter's memory up to the last one of the view."""
        ends = ((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset + sum(ends) + 1 if torch.Size(self.size).numel() else self.offset

    def overwrites(self, numel: int) -> bool:
        """Whether it sets all elements of a parameter."""
        return self.operation in OVERWRITING and self.offset == 0 and torch.Size(self.size).numel() == numel


class RandomWeights(Mapping[str, Tensor]):
    """The initial weights of a recorded model by name, each computed on access; of tied names only the first.

    Args:
        model: as `record_initialization` has built it.
        steps: what was done to the memory of each parameter, in order.
        seed: of torch's generator for the CPU.
    """

    def __init__(self, model: nn.Module, steps: list[tuple[int, Step]], seed: int) -> None:
        self._steps = [step for _, step in steps]
        of_memory: dict[int, list[int]] = defaultdict(list)
        for index, (memory, _) in enumerate(steps):
            of_memory[memory].append(index)
        parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._needed = {
            name: self._since_overwritten(of_memory[_memory(parameter)], parameter.numel())
            for name, parameter in parameters.items()
        }
        self._draws = [index for index, step in enumerate(self._steps) if step.is_random]
        self._generator = torch.Generator().manual_seed(seed)
        state = self._generator.get_state()
        # (draws + 1, bytes): before each draw that was reached, and after the last of them. In one tensor:
        # small ones, made between large ones, would keep the memory of these from the system.
        self._states = state.new_empty(len(self._draws) + 1, len(state))
        self._states[0] = state
        self._reached = 0

    def _since_overwritten(self, indices: list[int], numel: int) -> list[int]:
        last = [place for place, index in enumerate(indices) if self._steps[index].overwrites(numel)]
        return indices[last[-1] :] if last else indices

    def __getitem__(self, name: str) -> Tensor:
        shape, needed = self.shapes[name], self._needed[name]
        places = {index: self._draws.index(index) for index in needed if self._steps[index].is_random}
        self._reach(next(iter(places.values()), 0))  # before there is memory for the parameter
        memory = torch.empty(torch.Size(shape).numel())
        for index in needed:
            if index in places:
                self._reach(places[index])
                self._draw(places[index], memory)
            else:
                self._steps[index].apply(memory, self._generator)
        return memory.view(shape)

    def _reach(self, place: int) -> None:
        while self._reached < place:
            step = self._steps[self._draws[self._reached]]
            self._draw(self._reached, torch.empty(step.extent))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._needed, key=lambda name: max(self._needed[name], default=-1)))

    def __len__(self) -> int:
        return len(self._needed)

    def _draw(self, place: int, memory: Tensor) -> None:
        """Make a draw whose state is known."""
        step = self._steps[self._draws[place]]
        self._generator.set_state(self._states[place].clone())  # torch does not accept a view
        step.apply(memory, self._generator)
        if place == self._reached:
            self._reached += 1
            self._states[self._reached] = self._generator.get_state()


def record_initialization(build: Callable[[], Model], *, seed: int) -> tuple[Model, RandomWeights]:
    """A model with parameters on the meta device and ordinary buffers, and its initial weights.

    Args:
        build: constructs and initialises a model on the CPU, in fp32.
        seed: of the weights; they are those of `build` after `torch.manual_seed(seed)`.

    Raises:
        RuntimeError: the initialisation cannot be repeated one parameter at a time.
    """
    recorder = _Recorder()
    hook: Any = recorder.replace  # torch's annotation knows no hook that replaces
    handle = register_module_parameter_registration_hook(hook)
    try:
        with recorder, _refusing(SKIPPED):
            model = build()
    finally:
        handle.remove()
    return model, RandomWeights(model, recorder.steps, seed)


@contextmanager
def _refusing(names: Sequence[str]) -> Iterator[None]:
    """Replace functions of `torch.nn.init`, and what transformers calls in their place, by errors."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*_arguments: Any, **_named: Any) -> Any:
            raise RuntimeError(f"{name} does nothing on the meta device: it is not repeated")

        return refuse

    before = {name: (getattr(nn.init, name), TORCH_INIT_FUNCTIONS[name]) for name in names}
    try:
        for name in names:
            TORCH_INIT_FUNCTIONS[name] = refusal(name)
            setattr(nn.init, name, TORCH_INIT_FUNCTIONS[name])
        yield
    finally:
        for name, (of_torch, of_transformers) in before.items():
            setattr(nn.init, name, of_torch)
            TORCH_INIT_FUNCTIONS[name] = of_transformers


class _Recorder(TorchDispatchMode):
    """Records what is done to tensors on the meta device, and makes new parameters such tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, Step]] = []
        self._alive: list[Tensor] = []  # or another tensor could get the same memory
        self._unwritten: set[int] = set()

    def replace(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Torch's hook for every parameter that a module gets."""
        if parameter is None or parameter.is_meta:
            return None
        empty = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
        new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        if parameter.data_ptr() not in self._unwritten:  # made with values, such as ones
            with torch.no_grad():
                new.copy_(parameter.detach().clone())
        return new

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) else None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if target is not None and target.is_meta and func._schema.is_mutable:
            self._record(func, target, args[1:], kwargs, is_random=is_random)
            return target
        if is_random and not (target is not None and target.is_meta):
            raise RuntimeError(f"{func} draws numbers for a tensor that is no parameter: it is not repeated")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.is_meta and not func.is_view:
            known = self._unwritten
            (known.add if func in UNWRITTEN else known.discard)(result.data_ptr())
        return result

    def _record(
        self, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_random: bool
    ) -> None:
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(each.is_meta for each in others):
            raise RuntimeError(f"{func} computes a parameter from another one: it is not repeated")
        self._alive.append(target)
        place = (tuple(target.shape), target.stride(), int(target.storage_offset()))
        self.steps.append((_memory(target), Step(func, *place, args, dict(kwargs), is_random)))


def _memory(tensor: Tensor) -> int:
    """What identifies the memory of a tensor that has no address."""
    return tensor.untyped_storage()._cdata
