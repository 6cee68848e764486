"""Look-up tables that are built once for each device and then only read.

A table may first be needed while PyTorch traces a model with fake tensors (an estimate of memory), or under
`with torch.device("meta")`. It is built outside of such modes all the same: a fake table in the cache would
poison every later, real call. Default dtype and device may be anything: builders name both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def cached_table(build: Callable[..., Tensor]) -> functools._lru_cache_wrapper[Tensor]:
    """Decorate a function that makes a table from hashable arguments: it is called once for each."""

    @functools.lru_cache(maxsize=64)
    @functools.wraps(build)
    def build_once(*arguments: Hashable) -> Tensor:
        with _disable_current_modes():
            return build(*arguments)

    return build_once
