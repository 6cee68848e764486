"""What a fact is: a name and a plain Python value, `None` where it is not known for this step.

Tensors are no facts: reading one waits for the device, and that happens once a step, elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

Fact = float | int | bool | str | None
Facts = Mapping[str, Fact]


def check_facts(facts: Facts) -> None:
    """Refuse anything but plain values.

    Raises:
        TypeError: names the fact that is a tensor, an array or a container.
    """
    for name, value in facts.items():
        if value is not None and not isinstance(value, (float, int, str)):
            raise TypeError(f"fact {name!r} must be a plain number, text or None, not {type(value).__name__}")
