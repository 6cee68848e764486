"""Sibling layers: layers of one module that read the same input and share its quantised forms.

The q, k and v projections of an attention read one tensor, the gate and up projections of an MLP another. The
first of them to run quantises it. The others multiply the same codes and keep the same memory for backward:
of a LLaMA block's seven inputs, four are quantised and saved.

`convert` tells each layer the names of its siblings, and gives all layers of a model one `SharedInput`. The
names decide only how long the forms of a tensor are held: until the last sibling has run, or until a layer
of the model reads another input, whichever is first. Whether a layer may use a form is decided by what the
codes depend on, so a wrong guess costs time but cannot change a number:

- the tensor: its memory, shape, strides and dtype, and its version, which every in-place operation changes.
  `x.data` has the memory of x but counts versions itself. An alias shares only while x has its version too;
- the micro-batch, and on a GPU the stream, because another one would not wait until the codes are written;
- the CUDA graph that is being captured, because codes of a capture are written by replays of its
  graph only, and a graph that repeats the products alone would multiply old codes;
- the request (`MatmulContext.input`): quantizer, layout, split, random key, dtype of the decoded operand,
  whether FP8 products read the range of its exponents.

Layers with different recipes or precisions therefore share what is equal and quantise the rest themselves. A
layer that runs again makes new forms. The forms do not keep the tensor: they are dropped when its memory is
freed, and when a layer fails. An exception in a model's forward therefore leaves nothing behind. (Siblings of
a tensor-parallel layer do keep it, until another layer runs: they need the view whose gradient is summed.)

Siblings draw the random numbers of their input under the name of the first sibling. Stochastic rounding
therefore gives the same codes whether they are shared or made several times.

Not shared: inputs of compiled layers, because the results of an operator must not be another one's memory;
inputs in inference mode, which have no version; splits that start from a layer's own directions (all but the
mean); inputs sharded over tensor-parallel ranks. Hooks that copy saved tensors, such as `save_on_cpu`, copy
the codes once for each layer. As for the tensors that autograd saves, a write between two siblings that does
not change the version of the input goes unnoticed: through `.data`, NumPy or the untyped storage, or by a
collective such as `dist.scatter`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalowbit import cuda_graphs
from megalowbit.layers.recipe import Recipe

# Names of layers in one module that get the same input, in the order in which transformers' models run them.
# In a cross attention they get two inputs, and share what is equal.
ROWS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
)
INPUT_ROLES = ("input", "backward_input")


def find_siblings(in_features: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The siblings of each layer that has any, itself included, in the order of `ROWS`.

    `in_features` holds the low-bit layers by name; those without a common size have no common input.
    """
    found = {}
    for name, size in in_features.items():
        module, dot, last = name.rpartition(".")
        for row in ROWS:
            names = tuple(f"{module}{dot}{each}" for each in row)
            siblings = tuple(each for each in names if in_features.get(each) == size)
            if last in row and len(siblings) > 1:
                found[name] = siblings
    return found


def shares_input(recipe: Recipe) -> bool:
    """Whether the quantised forms of an input depend on nothing that differs between siblings."""
    return recipe.split_input is None or recipe.split_input.method == "mean"


class InputForms:
    """The quantised forms of one tensor, by what was requested.

    Attributes:
        forms: request → what was made for it.
        summed: (the tensor, a view of it whose gradient is summed over tensor-parallel ranks), or `None`.
    """

    def __init__(self, input: Tensor, siblings: tuple[str, ...], step: int) -> None:
        self._waiting = set(siblings)
        # Not held: after an exception no sibling may come to drop it. Once its memory is freed, another
        # tensor may get the same address, so the forms go with it.
        self._storage: object = weakref.ref(input.untyped_storage(), lambda _: self.close())
        self._identity = _identity(input, siblings, step)
        self._versions = _versions_of(input)
        self.forms: dict[tuple[object, ...], Any] = {}
        self.summed: tuple[Tensor, Tensor] | None = None

    def is_for(self, layer: str, input: Tensor, siblings: tuple[str, ...], step: int) -> bool:
        """Whether `layer` still has to run and `input` is this tensor, unchanged, in the same micro-batch."""
        is_unchanged = self._versions._version == input._version  # the tensors may count separately
        return is_unchanged and layer in self._waiting and self._identity == _identity(input, siblings, step)

    def end(self, layer: str) -> bool:
        """Record that a sibling has run; true if all have."""
        self._waiting.discard(layer)
        return not self._waiting

    def close(self) -> None:
        """Drop all tensors; contexts that are kept for backward still hold this object."""
        self._storage = self.summed = None
        self.forms.clear()
        self._waiting.clear()


def _identity(input: Tensor, siblings: tuple[str, ...], step: int) -> tuple[object, ...]:
    storage = input.untyped_storage()._cdata
    view = input.storage_offset(), input.shape, input.stride(), input.dtype, input.is_neg()
    place = _stream_of(input), cuda_graphs.capture_of(input.device)
    return storage, *view, input._version, *place, siblings, step


def _versions_of(input: Tensor) -> Tensor:
    """An empty tensor with the version counter of `input`, whose memory it does not keep.

    ZeRO 3 gives each layer an alias that lives no longer than the layer runs; its versions are read later.
    """
    counting = input.detach()  # shares the counter
    counting.data = input.new_empty(0)  # replaces the memory, but not the counter
    return counting


def _stream_of(input: Tensor) -> object:
    """The stream that works on a tensor now; `None` on a CPU, and for fake tensors without a GPU."""
    has_streams = input.is_cuda and torch.cuda.is_initialized()
    return torch.cuda.current_stream(input.device) if has_streams else None


class SharedInput:
    """The input that a model's layers read last, if siblings share it; one for all layers of a model."""

    def __init__(self) -> None:
        self._current: InputForms | None = None

    def begin(self, layer: str, input: Tensor, siblings: tuple[str, ...], step: int) -> InputForms | None:
        """The forms of a layer's input, to use and to add to; `None`: they are not shared.

        Args:
            layer: its name.
            input: what the layer multiplies.
            siblings: names of the layer and its siblings; empty if it has none.
            step: the micro-batch.
        """
        current = self._current
        can_share = siblings and not torch.is_inference_mode_enabled() and not input.is_inference()
        if current is not None and can_share and current.is_for(layer, input, siblings, step):
            return current
        if current is not None:
            current.close()
        self._current = InputForms(input, siblings, step) if can_share else None
        return self._current

    def end(self, forms: InputForms, layer: str) -> None:
        """A layer has run; drop the forms after the last sibling."""
        if forms.end(layer):
            forms.close()
            if self._current is forms:
                self._current = None

    def drop(self) -> None:
        """Drop the forms, because a layer has failed."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: they hold no tensors."""
        return {"_current": None}
