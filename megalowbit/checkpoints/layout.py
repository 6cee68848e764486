"""Where every number of a checkpoint lies: plain data, written by the store at save time.

DeepSpeed's ZeRO files hold flat tensors without names. Instead of guessing how they were cut, the saving
engine writes down what it knows: of each parameter its name, shape and place. One *slice* is what one
model-parallel rank (a tensor rank or a pipeline stage) has of the model; within it, data-parallel ranks hold
the *fragments* computed here, at every stage by the same few lines, for reading as for loading into an engine
of another size. Not covered: experts, sequence parallelism, states swapped to NVMe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from megalowbit.errors import UserError, shown

FORMAT = 1
ENGINE_KEY = "megalowbit_engine"  # of the engine's own part of a checkpoint's client state
LAYOUT_KEY = "layout"
RANK_FILES_KEY = "rank_files"  # names of the files that hold what is a rank's own
NOWHERE = -1
MOST = 2**62  # of anything that is counted


class Fragment(NamedTuple):
    """A run of a parameter's elements.

    Attributes:
        data_rank: who holds it.
        flat_start: its first element in that rank's flat tensor.
        start: its first element in the flattened parameter.
        numel: how many elements.
    """

    data_rank: int
    flat_start: int
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter of a slice.

    Attributes:
        name: in the Hugging Face model, or else in the module.
        shape: of the slice's part of it.
        dtype: of the weights that compute, `"bfloat16"`.
        group: master group (stage 0), flat group (1, 2) or sub-group (3); -1: there is no master.
        offset: index in the master group (stage 0), first element in the whole flat group (1, 2) or in each
            rank's flat sub-group (3).
        size: elements that each data-parallel rank holds, at stage 3.
        state: index of its state in the inner optimizer's saved state; -1: it is not trained.
        optimizer_group: index of its group there.
        weight: file and key of the computing weights; None where they are not stored (stage 3).
        is_transposed: whether what is stored is the transpose of the plain module's parameter, as of a Conv1D
            that was made a linear layer to be sharded.
        cut: of what is stored, `{"dim": 0, "parts": [8, 8]}` of a tensor-parallel shard, else None.
        is_marked: whether the user's program says that it is a shard (`tensor_model_parallel`). It is no
            place, so layouts that differ in it are equal.
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
        """Raise a `TypeError` where a value is of another kind than is written."""
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
            raise TypeError(f"parameter {shown(self.name)} has a value that is none")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one model-parallel rank holds.

    Attributes:
        parameters: all of them, in the module's order, each once.
        partition_sizes: elements of a data-parallel rank's part of each flat group (stages 1, 2).
        buffers: file and key of each buffer, by name.
    """

    parameters: tuple[StoredParameter, ...]
    partition_sizes: tuple[int, ...] = ()
    buffers: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of a whole checkpoint.

    Attributes:
        stage: ZeRO's, 0 … 3.
        data_size: data-parallel ranks.
        tensor_size: tensor-parallel ranks.
        pipeline_size: stages of a pipeline.
        slices: by model-parallel rank.
        tied: further names of parameters that have several, `{"lm_head.weight": "wte.weight"}`.
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
        """Read what `to_dict` wrote, and check that no two parameters share a place.

        Raises:
            UserError: another format, or the data contradicts itself.
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
        """Raise a `TypeError` where a value is of another kind than `to_dict` writes."""
        sizes = (self.stage, self.data_size, self.tensor_size, self.pipeline_size)
        if not _are_counts(*sizes) or self.stage > 3:
            raise TypeError(f"stage {shown(self.stage)} on {shown(self.data_size)} ranks")
        if len(self.slices) != self.tensor_size * self.pipeline_size or not self.data_size:
            raise TypeError(f"{len(self.slices)} slices of {self.tensor_size} × {self.pipeline_size} ranks")
        if not all(map(_is_text, [*self.tied.keys(), *self.tied.values()])):
            raise TypeError("a name of a tied parameter is none")
        for part in self.slices:
            if not _are_counts(*part.partition_sizes):
                raise TypeError(f"partitions of {shown(part.partition_sizes)} elements")
            for stored in part.parameters:
                stored.check_kinds()

    def describe(self) -> str:
        """`ZeRO 2 on 4 data-parallel ranks`, with tensor ranks and stages where there are several."""
        parts = [f"ZeRO {self.stage} on {self.data_size} data-parallel rank{'s' * (self.data_size != 1)}"]
        if self.tensor_size > 1:
            parts.append(f"{self.tensor_size} tensor ranks")
        if self.pipeline_size > 1:
            parts.append(f"{self.pipeline_size} pipeline stages")
        return ", ".join(parts)

    def check_sharding(self, stored: StoredParameter, where: str) -> None:
        """Raise a `UserError` where it is not known how shards make a whole: none is read as a copy."""
        if self.tensor_size > 1 and stored.is_marked and stored.cut is None:
            raise UserError(
                f"{where}: parameter {stored.name} is marked tensor_model_parallel but has no "
                f".sharding, so its {self.tensor_size} shards cannot be joined: continue at the ZeRO stage "
                "and on the ranks it was saved with, or set .sharding "
                "(megalowbit.layers.tensor_parallel.Sharding) before saving"
            )

    def check(self, where: str) -> None:
        """Raise a `UserError` where parameters overlap, or do not fit where they should lie."""
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
        """Which rank holds which elements of a master, in the parameter's order; none if there is none."""
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
                    return  # `check` finds the rest missing
                numel = min(size - flat_start, stored.numel - start)
                yield Fragment(rank, flat_start, start, numel)
                start += numel

    def _intervals(self, part: Slice) -> Iterator[tuple[int, int, int, str]]:
        """Group, first and last element of every master."""
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
