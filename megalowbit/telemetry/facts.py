"""Facts: names with plain Python values, `None` if unknown in this step.

Tensors are not allowed, because reading one waits for the device; the step's only host read is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

Fact = float | int | bool | str | None
Facts = Mapping[str, Fact]


def check_facts(facts: Facts) -> None:
    """Raise if a value is not plain.

    Raises:
        TypeError: names the fact that is a tensor, an array or a container.
    """
    for name, value in facts.items():
        if value is not None and not isinstance(value, (float, int, str)):
            raise TypeError(f"fact {name!r} must be a plain number, text or None, not {type(value).__name__}")
