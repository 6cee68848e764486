"""Look-up tables that are built once for each device.

A table may first be needed while PyTorch traces a model with fake tensors (to estimate memory), or under
`with torch.device("meta")`. It is built outside of such modes, because a fake table in the cache would break
all later calls. Builders name dtype and device explicitly, since torch's defaults may be changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def cached_table(build: Callable[..., Tensor]) -> functools._lru_cache_wrapper[Tensor]:
    """Decorator for a function that builds a table; it runs once for each combination of its arguments."""

    @functools.lru_cache(maxsize=64)
    @functools.wraps(build)
    def build_once(*arguments: Hashable) -> Tensor:
        with _disable_current_modes():
            return build(*arguments)

    return build_once
