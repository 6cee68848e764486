"""A mode that counts where the host reads tensors. A read waits for all that a GPU has been given.

What is counted:

- operations whose result or shape depends on values, by torch's own tags, so those of a later torch too.
  Two of them depend on values only sometimes: indexing, if an index is a mask, and `repeat_interleave`
  without `output_size`;
- operations that read inside their kernel and have no tag (`UNTAGGED`);
- operations that take a tensor of a device and return or write one of the host;
- methods and functions that run no operation on a CPU (`METHODS`, `to("cpu")`, `torch.tensor([tensor])`),
  because tests run on CPUs.

Where all tensors are on a CPU, two reads look like a copy on one device: `host_tensor.copy_(x)` and
`x.to(host_tensor.device)`. Tests with meta tensors find these, because reading one is an error of torch.

Not seen: kernels that get pointers (C, Triton), which are the device's own work; operations inside a custom
operator such as `torch.ops.megalowbit.linear`, of which only the methods are seen; untyped storages.
"""

import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
UNTAGGED = {
    "_linalg_check_errors", "_linalg_svd", "histc", "histogram",
    "masked_fill.Tensor", "masked_fill_.Tensor", "index_fill.int_Tensor", "index_fill_.int_Tensor",
    "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor",
    "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor",
}  # fmt: skip
METHODS = (
    "item", "tolist", "numpy", "cpu", "__array__", "__dlpack__", "__bool__", "__int__", "__float__",
    "__complex__", "__index__", "__contains__", "__repr__", "__format__",
)  # fmt: skip
CONVERSIONS = ("to", "type")  # read if they name the host
CONSTRUCTORS = ("tensor", "as_tensor", "asarray")  # read tensors in lists, and if they name the host
CPU_TYPES = ("torch.FloatTensor", "torch.DoubleTensor", "torch.IntTensor", "torch.LongTensor")
PACKAGES = ("megalowbit", "deepspeed", "transformers")


class HostReads(TorchDispatchMode):
    """Counts reads within its context.

    Attributes:
        events: names of the operations, methods and functions that have read, in order.
        places: the function of one of `PACKAGES` that issued a read → number of its reads.
    """

    def __init__(self, patch):
        super().__init__()
        self.events, self.places = [], Counter()
        self._depth, self._is_counting = 0, False
        for name in METHODS:
            self._patch(patch, torch.Tensor, name, lambda arguments, named: True)
        for name in CONVERSIONS:
            self._patch(patch, torch.Tensor, name, names_the_host)
        for name in CONSTRUCTORS:
            self._patch(patch, torch, name, reads_its_elements)

    def __enter__(self):
        self.events.clear()
        self.places.clear()
        self._is_counting = True
        return super().__enter__()

    def __exit__(self, *error):
        self._is_counting = False
        return super().__exit__(*error)

    def _patch(self, patch, owner, name, is_read):
        original = getattr(owner, name)

        def read(*arguments, **named):
            if not self._is_counting or not is_read(arguments, named):
                return original(*arguments, **named)
            self._note(name)
            self._depth += 1
            try:
                return original(*arguments, **named)
            finally:
                self._depth -= 1

        patch.setattr(owner, name, read)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        is_read = depends_on_values(function, args, kwargs)
        if is_read:
            self._note(name)
        result = function(*args, **kwargs)
        carries_values = not (name.startswith("new_") or name.endswith("_like"))
        if not is_read and carries_values and comes_to_the_host((args, kwargs), result):
            self._note(name)
        return result

    def _note(self, name):
        if self._depth:
            return
        frame = sys._getframe(2)
        place = "elsewhere"
        while frame is not None:
            module = frame.f_globals["__name__"]
            if module.split(".")[0] == "triton":
                return  # the interpreter, which reads what a GPU would
            if module.split(".")[0] in PACKAGES:
                place = f"{module}.{frame.f_code.co_name}"
                break
            frame = frame.f_back
        self.events.append(name)
        self.places[place] += 1


def depends_on_values(function, args, kwargs):
    """Whether an operation reads values to know its result or its shape."""
    name = function.overloadpacket.__name__
    if name in INDEXING:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    full_name = f"{name}.{function._overloadname}"
    return bool(TAGS & set(function.tags)) or bool({name, full_name} & UNTAGGED)


def comes_to_the_host(arguments, result):
    """Whether an operation takes a tensor of a device and returns or writes one of the host."""
    taken, made = ({each.device.type for each in tensors(tree)} for tree in (arguments, result))
    return bool(taken - {"cpu"}) and "cpu" in made


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def names_the_host(arguments, named):
    """Whether a conversion names the host; a `torch.device` may be that of another tensor."""
    names = [each for each in (*arguments[1:], *named.values()) if isinstance(each, str)]
    return any(name == "cpu" or name in CPU_TYPES for name in names)


def reads_its_elements(arguments, named):
    """Whether the data of a new tensor contains tensors, or comes to the host by name."""
    data = arguments[0] if arguments else named.get("data", named.get("obj"))
    if isinstance(data, torch.Tensor):
        return names_the_host(arguments, named)
    return isinstance(data, (list, tuple)) and bool(tensors(data))


def install():
    """A hook of forks.py for launch/pretrain.py: write the places of reads to files.

    `reads-RANK.json` has those of the second step, `evaluation-RANK.json` those of what follows it, such as a
    validation.
    """
    from megalowbit.pretrain import loop

    def counting(function, name):
        calls = itertools.count(1)

        def counted(*arguments):
            if next(calls) != 2:
                return function(*arguments)
            with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
                result = function(*arguments)
            Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(reads.places))
            return result

        return counted

    loop.train_step = counting(loop.train_step, "reads")
    loop._evaluated = counting(loop._evaluated, "evaluation")
