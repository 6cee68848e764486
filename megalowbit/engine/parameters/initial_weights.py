"""Gives a model on the meta device its weights, one tensor at a time, and to each rank what it keeps.

Rank 0 computes or reads each weight and broadcasts it. Every rank keeps what it needs: the full tensor, the
shard of its tensor-parallel rank, the piece that ZeRO gives it, or nothing, if the weight belongs to another
stage. One rank reads for all nodes, not one for each node: processors of another kind may draw other random
numbers, and files may differ. On the host of rank 0 is one tensor at a time; the others receive it on their
device.

An error of rank 0 (a damaged file, NaN) reaches all ranks before the broadcast that it prevents.

| ZeRO stage | parameters before the engine is built | weights arrive |
|---|---|---|
| 0 | fp32, on the device | before: our optimizer copies masters from them |
| 1, 2 | in the model's precision, on the device, without values | after, with masters |
| 3 | the same on the host, where unwritten memory is only reserved | after, with masters |

At stage 3 DeepSpeed moves and partitions one parameter at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import agree
from megalowbit.errors import UserError
from megalowbit.hf.start.weights import StartWeights
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.layers.state_dict_layout import HFStateDict

SOURCE = 0  # the rank that reads
REMEDY = "pass those that start_model has returned with the model, or leave weights out"
Put = Callable[[nn.Parameter, Tensor], None]


@dataclass(frozen=True)
class _Target:
    """A parameter of this rank, and the layer that holds it under this name."""

    parameter: nn.Parameter
    layer: nn.Module
    name: str

    def part_of(self, full: Tensor) -> Tensor:
        """What this rank holds of a full weight in the layout of the plain model."""
        layer = self.layer
        is_transposed = self.name == "weight" and isinstance(layer, HFStateDict) and layer.is_transposed
        value = full.t() if is_transposed else full
        sharding = getattr(self.parameter, "sharding", None)
        if sharding is None:
            return value
        group = layer.__dict__["tensor_group"]
        shard: Tensor = sharding.shard(value, group.rank, group.size)
        return shard


def check_weights(model: nn.Module, weights: object) -> None:
    """Check that weights and model come from the same `start_model`, before the model is sharded.

    Raises:
        UserError: `weights` is of another type, the model has values already, or names differ.
    """
    if not isinstance(weights, StartWeights):
        raise UserError(f"weights is a {type(weights).__name__}: {REMEDY}")
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise UserError(f"weights given, but parameter {name} has values already: {REMEDY}")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UserError(
                f"weights given, but buffer {name}, which they do not have, has no values: {REMEDY}"
            )
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] not in SPLIT_NAMES}
    if missing := names - weights.shapes.keys():
        raise UserError(f"weights have no {min(missing)}: {REMEDY}")
    if unknown := weights.shapes.keys() - names:
        raise UserError(f"weights have {min(unknown)}, which the model does not have: {REMEDY}")


class InitialWeights:
    """The weights of a sharded and converted model whose parameters are on the meta device.

    Args:
        model: the model, or this rank's stage of it.
        weights: of the full model; they have passed `check_weights`.
        stage: of ZeRO.
        dtype: of the parameters when the engine gets them.
        device: the engine's.
        names: a parameter's name in `model` → its name in the full model, where they differ.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: StartWeights,
        *,
        stage: int,
        dtype: torch.dtype,
        device: torch.device,
        names: Mapping[str, str],
    ) -> None:
        self._model, self._weights, self._names = model, weights, names
        self._stage, self._dtype, self._device = stage, dtype, device
        self._targets: dict[str, list[_Target]] = defaultdict(list)

    def allocate(self) -> None:
        """Replace parameters on the meta device by others without values; call it once.

        Raises:
            UserError: a weight has another shape than its parameter.
        """
        made: dict[int, nn.Parameter] = {}
        with _unwritten_memory():
            for path, layer in self._model.named_modules():
                for name, parameter in list(layer._parameters.items()):
                    if parameter is None or not parameter.is_meta:
                        continue
                    if id(parameter) not in made:
                        made[id(parameter)] = self._allocated(parameter)
                        self._add(f"{path}.{name}" if path else name, layer, made[id(parameter)])
                    layer._parameters[name] = made[id(parameter)]

    def _allocated(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without values in place of one on the meta device, with its attributes and hooks."""
        device = torch.device("cpu") if self._stage == 3 else self._device
        empty = torch.empty(parameter.shape, dtype=self._dtype, device=device)
        new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        for hook in (parameter._backward_hooks or {}).values():
            new.register_hook(hook)
        return new

    def _add(self, own: str, layer: nn.Module, parameter: nn.Parameter) -> None:
        target = _Target(parameter, layer, own.rpartition(".")[2])
        full = self._names.get(own, own)
        if target.name not in SPLIT_NAMES:
            part = target.part_of(torch.empty(self._weights.shapes[full], device="meta"))
            if part.shape != parameter.shape:
                raise UserError(
                    f"weights have {full} in shape {tuple(part.shape)}, the model in "
                    f"{tuple(parameter.shape)}: {REMEDY}"
                )
        self._targets[full].append(target)

    @contextmanager
    def placed_by_engine(self) -> Iterator[None]:
        """Around `deepspeed.initialize`: at stage 3, the engine's `model.to(device)` moves buffers only.

        It would move all parameters, which `zero.Init` then moves and partitions one at a time.
        """
        if self._stage < 3:
            yield
            return
        model = self._model

        def move_buffers(device: torch.device) -> nn.Module:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
            return model

        model.__dict__["to"] = move_buffers
        try:
            yield
        finally:
            del model.__dict__["to"]

    @torch.no_grad()
    def fill(self, put: Put) -> None:
        """Pass each parameter of this rank and its value to `put`, once; collective.

        The value is fp32, on the engine's device, and may be a view that is not contiguous.

        Raises:
            UserError: the weights cannot be read; all ranks raise it.
        """
        if self._weights.open is not None:
            for name, full in self._stream():
                for target in self._targets.pop(name, ()):
                    put(target.parameter, target.part_of(full))
        for target in (each for targets in self._targets.values() for each in targets):
            # factors of a weight that is not split yet; everything, if a checkpoint is loaded later
            shape = getattr(target.parameter, "ds_shape", target.parameter.shape)  # stage 3 leaves it empty
            put(target.parameter, torch.zeros(shape, device=self._device))
        self._targets.clear()

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the full model, in the order in which rank 0 reads them."""
        opened: list[Mapping[str, Tensor]] = []
        read: list[Tensor] = []

        def begin() -> list[str]:
            assert self._weights.open is not None
            opened.append(self._weights.open())
            if wrong := opened[0].keys() ^ self._weights.shapes.keys():
                raise UserError(f"shapes and values of weights differ in {min(wrong)}: {REMEDY}")
            return list(opened[0])

        def read_next(name: str) -> None:
            read.append(opened[0][name].contiguous())

        for name in agree(begin):
            agree(read_next, name)
            if read:  # on rank 0
                full = read.pop().to(self._device)
            else:
                full = torch.empty(self._weights.shapes[name], device=self._device)
            if process_group.world_size() > 1:
                collectives.broadcast(full, SOURCE)
            yield name, full
            del full  # before the next one


@contextmanager
def _unwritten_memory() -> Iterator[None]:
    """Leave new memory unwritten, also if torch computes deterministically and would fill it with NaN."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def copy_value(parameter: nn.Parameter, value: Tensor) -> None:
    """The `put` of a parameter that is full on this rank."""
    parameter.data.copy_(value)
