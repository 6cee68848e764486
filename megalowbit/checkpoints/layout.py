"""Where every number of a checkpoint is stored: plain data, written at save time.

DeepSpeed's ZeRO files hold flat tensors without names. To avoid guessing how they were partitioned, the
saving engine records the name, shape and place of every parameter.

- A *slice* is the part of the model that one model-parallel rank (a tensor rank or a pipeline stage) holds.
- A *fragment* is the part of a parameter in one data-parallel rank's flat tensor. `Layout.fragments` computes
  the fragments of every ZeRO stage, both for reading and for loading into an engine of another size.

Not covered: experts, sequence parallelism, states swapped to NVMe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from megalowbit.errors import UserError, shown

FORMAT = 1
ENGINE_KEY = "megalowbit_engine"  # of the engine's part of a checkpoint's client state
LAYOUT_KEY = "layout"
RANK_FILES_KEY = "rank_files"  # names of the files that hold rank-specific state
NOWHERE = -1
MOST = 2**62  # the largest count that is accepted


class Fragment(NamedTuple):
    """A contiguous run of a parameter's elements.

    Attributes:
        data_rank: the data-parallel rank that holds it.
        flat_start: offset in that rank's flat tensor.
        start: offset in the flattened parameter.
        numel: number of elements.
    """

    data_rank: int
    flat_start: int
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter of a slice.

    Attributes:
        name: name in the Hugging Face model, or in the module if there is none.
        shape: shape of the slice's part.
        dtype: dtype of the model's weights, such as `"bfloat16"`.
        group: index of the master group (stage 0), flat group (1, 2) or sub-group (3); -1: no master.
        offset: index in the master group (stage 0), first element in the full flat group (1, 2) or in each
            rank's flat sub-group (3).
        size: elements that each data-parallel rank holds (stage 3).
        state: index in the inner optimizer's saved state; -1: the parameter is not trained.
        optimizer_group: index of its parameter group in that state.
        weight: file and key of the model's weight; None if it is not stored (stage 3).
        is_transposed: whether the stored tensor is the transpose of the unsharded module's parameter, as for
            a `Conv1D` that became a linear layer in order to be sharded.
        cut: how a tensor-parallel shard was made, `{"dim": 0, "parts": [8, 8]}`; None if it is not sharded.
        is_marked: whether the user's program marks it as a shard (`tensor_model_parallel`). Ignored when
            layouts are compared, because it does not change where data is stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = NOWHERE
    offset: int = 0
    size: int = 0
    state: int = NOWHERE
    optimizer_group: int = NOWHERE
    weight: tuple[str, str] | None = None
    cut: Mapping[str, Any] | None = None
    is_transposed: bool = False
    is_marked: bool = field(default=False, compare=False)

    def check_kinds(self) -> None:
        """Raise a `TypeError` if a value has another type than is written."""
        indices = (self.group, self.state, self.optimizer_group)
        is_right = (
            isinstance(self.name, str)
            and isinstance(self.dtype, str)
            and _are_counts(*self.shape, self.offset, self.size, *(index + 1 for index in indices))
            and (self.weight is None or (len(self.weight) == 2 and all(map(_is_text, self.weight))))
            and type(self.is_transposed) is type(self.is_marked) is bool
            and (self.cut is None or (_are_counts(self.cut["dim"], *self.cut["parts"])))
        )
        if not is_right:
            raise TypeError(f"parameter {shown(self.name)} has an invalid value")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of the model that one model-parallel rank holds.

    Attributes:
        parameters: all parameters, in the module's order, each once.
        partition_sizes: number of elements of each flat group on one data-parallel rank (stages 1, 2).
        buffers: buffer name → file and key.
    """

    parameters: tuple[StoredParameter, ...]
    partition_sizes: tuple[int, ...] = ()
    buffers: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a checkpoint.

    Attributes:
        stage: ZeRO stage, 0 … 3.
        data_size: data-parallel ranks.
        tensor_size: tensor-parallel ranks.
        pipeline_size: stages of a pipeline.
        slices: by model-parallel rank.
        tied: further name → first name of tied parameters, `{"lm_head.weight": "wte.weight"}`.
    """

    stage: int
    data_size: int
    tensor_size: int = 1
    pipeline_size: int = 1
    slices: tuple[Slice, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], *, where: str) -> Layout:
        """Read the result of `to_dict`, and check that no two parameters overlap.

        Raises:
            UserError: the format is another one, or the data is inconsistent.
        """
        if saved.get("format") != FORMAT:
            raise UserError(
                f"checkpoint {where} has a layout of format {shown(saved.get('format'))}, not {FORMAT}: "
                "use its version"
            )
        values = {key: value for key, value in saved.items() if key != "format"}
        try:
            values["slices"] = tuple(_slice_from(each) for each in values["slices"])
            layout = cls(**values)
            layout.check_kinds()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"checkpoint {where} has a layout that cannot be read: {error}") from error
        layout.check(where)
        return layout

    def check_kinds(self) -> None:
        """Raise a `TypeError` if a value has another type than `to_dict` writes."""
        sizes = (self.stage, self.data_size, self.tensor_size, self.pipeline_size)
        if not _are_counts(*sizes) or self.stage > 3:
            raise TypeError(f"stage {shown(self.stage)} on {shown(self.data_size)} ranks")
        if len(self.slices) != self.tensor_size * self.pipeline_size or not self.data_size:
            raise TypeError(f"{len(self.slices)} slices of {self.tensor_size} × {self.pipeline_size} ranks")
        if not all(map(_is_text, [*self.tied.keys(), *self.tied.values()])):
            raise TypeError("a name of a tied parameter is not a string")
        for part in self.slices:
            if not _are_counts(*part.partition_sizes):
                raise TypeError(f"partitions of {shown(part.partition_sizes)} elements")
            for stored in part.parameters:
                stored.check_kinds()

    def describe(self) -> str:
        """`"ZeRO 2 on 4 data-parallel ranks"`, plus tensor ranks and pipeline stages if there are several."""
        parts = [f"ZeRO {self.stage} on {self.data_size} data-parallel rank{'s' * (self.data_size != 1)}"]
        if self.tensor_size > 1:
            parts.append(f"{self.tensor_size} tensor ranks")
        if self.pipeline_size > 1:
            parts.append(f"{self.pipeline_size} pipeline stages")
        return ", ".join(parts)

    def check_sharding(self, stored: StoredParameter, where: str) -> None:
        """Raise a `UserError` for shards that cannot be joined, so that none is read as a copy."""
        if self.tensor_size > 1 and stored.is_marked and stored.cut is None:
            raise UserError(
                f"{where}: parameter {stored.name} is marked tensor_model_parallel but has no "
                f".sharding, so its {self.tensor_size} shards cannot be joined: continue at the ZeRO stage "
                "and on the ranks it was saved with, or set .sharding "
                "(megalowbit.layers.tensor_parallel.Sharding) before saving"
            )

    def check(self, where: str) -> None:
        """Raise a `UserError` if parameters overlap, or are larger than the space recorded for them."""
        for number, part in enumerate(self.slices):
            names = [stored.name for stored in part.parameters]
            if len(set(names)) != len(names):
                raise UserError(f"checkpoint {where}: a parameter is in slice {number} twice: use another")
            for stored in part.parameters:
                held = sum(fragment.numel for fragment in self.fragments(part, stored))
                if stored.group != NOWHERE and held != stored.numel:
                    raise UserError(
                        f"checkpoint {where} holds {held} of the {stored.numel} elements of {stored.name}: "
                        "use another"
                    )
            for first, second in pairwise(sorted(self._intervals(part))):
                if first[0] == second[0] and first[2] > second[1]:
                    raise UserError(f"checkpoint {where}: {first[3]} and {second[3]} overlap: use another")

    def fragments(self, part: Slice, stored: StoredParameter) -> Iterator[Fragment]:
        """The fragments of a parameter's master, in element order; nothing if it has no master."""
        if stored.group == NOWHERE or not stored.numel:
            return
        if self.stage == 0:
            yield Fragment(0, 0, 0, stored.numel)
        elif self.stage == 3:
            for rank in range(self.data_size):
                start = rank * stored.size
                if (numel := min(stored.size, stored.numel - start)) > 0:
                    yield Fragment(rank, stored.offset, start, numel)
        else:
            size, start = part.partition_sizes[stored.group], 0
            while start < stored.numel:
                rank, flat_start = divmod(stored.offset + start, size)
                if rank >= self.data_size:
                    return  # `check` reports the missing rest
                numel = min(size - flat_start, stored.numel - start)
                yield Fragment(rank, flat_start, start, numel)
                start += numel

    def _intervals(self, part: Slice) -> Iterator[tuple[int, int, int, str]]:
        """(group, start, end, name) of every master."""
        for stored in part.parameters:
            if stored.group != NOWHERE and stored.numel:
                length = {0: 1, 3: stored.size}.get(self.stage, stored.numel)
                yield stored.group, stored.offset, stored.offset + length, stored.name


def _are_counts(*values: object) -> bool:
    return all(type(value) is int and 0 <= value < MOST for value in values)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _slice_from(saved: Mapping[str, Any]) -> Slice:
    parameters = []
    for each in saved["parameters"]:
        weight = each["weight"]
        values = {**each, "shape": tuple(each["shape"]), "weight": None if weight is None else tuple(weight)}
        parameters.append(StoredParameter(**values))
    return Slice(
        parameters=tuple(parameters),
        partition_sizes=tuple(saved["partition_sizes"]),
        buffers={name: (file, key) for name, (file, key) in saved["buffers"].items()},
    )
