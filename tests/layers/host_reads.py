"""A mode that counts where the host reads tensors."""

import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "__array__", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
OPERATORS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
}  # fmt: skip
PACKAGES = ("megalowbit", "deepspeed", "transformers")


class HostReads(TorchDispatchMode):
    """Counts reads by the function of one of `PACKAGES` that issued them."""

    def __init__(self, patch):
        super().__init__()
        self.places = Counter()
        self._depth = 0
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def read(*arguments, **named):
            self._note()
            self._depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1

        return read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in OPERATORS:
            self._note()
        return function(*args, **(kwargs or {}))

    def _note(self):
        if self._depth:
            return
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals["__name__"]
            if module.split(".")[0] == "triton":
                return  # the interpreter, which reads what a GPU would
            if module.split(".")[0] in PACKAGES:
                self.places[f"{module}.{frame.f_code.co_name}"] += 1
                return
            frame = frame.f_back
        self.places["elsewhere"] += 1
