"""Parameters that an optimizer leaves out because they were frozen when it was built.

torch's optimizers keep frozen parameters and train them once they require a gradient. Ours make masters,
gradient buffer and moments when they are built, and ZeRO its flat partitions, so they can never train them.
Without an error, the gradients of a parameter that is unfrozen later would pile up and it would not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megalowbit.errors import UserError


class LeftOutParameters:
    """Parameters that an optimizer does not train, with the name or place of each."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[torch.nn.Parameter, str]] = {}

    def add_frozen(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Add those that are frozen now, under their names."""
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                self._named[id(parameter)] = parameter, name

    def drop_from(self, group: dict[str, Any], number: int) -> None:
        """Remove the frozen parameters of an optimizer's group, with their `param_names`, and add them here.

        Args:
            group: changed in place; torch's `param_names` belong to `params` by their index.
            number: of the group, for errors about a parameter without a name.
        """
        parameters, names = group["params"], group.get("param_names")
        places = [f"parameter {index} of group {number}" for index in range(len(parameters))]
        self.add_frozen(zip(places if names is None else names, parameters, strict=True))
        group["params"] = [each for each in parameters if each.requires_grad]
        if names is not None:
            pairs = zip(names, parameters, strict=True)
            group["param_names"] = [name for name, each in pairs if each.requires_grad]

    def rename(self, names: Mapping[int, str]) -> None:
        """Name those that are in `names`, by id."""
        for key, (parameter, name) in self._named.items():
            self._named[key] = parameter, names.get(key, name)

    def check(self) -> None:
        """Check that all of them are still frozen; reads only `requires_grad`.

        Raises:
            UserError: a parameter was unfrozen, and no step would train it.
        """
        for parameter, name in self._named.values():
            if parameter.requires_grad:
                raise UserError(
                    f"{name} requires a gradient, but was frozen when the optimizer "
                    "was built, which does not train it: build the optimizer again, or leave the parameter "
                    "unfrozen from the start, in a group with lr 0 until it should train"
                )
