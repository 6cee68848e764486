"""Recipes: which quantiser each operand of the three GEMMs gets, and which layers stay out.

    output      = input · weightᵀ          q_forward_input,       q_forward_weight
    grad_input  = grad_output · weight     q_backward_outputgrad, q_backward_weight
    grad_weight = grad_outputᵀ · input     q_backward_outputgrad, q_backward_input

Each tensor is quantised once, in blocks along its last axis, and its codes serve both GEMMs (transposed where
need be); a backward quantiser of another name than the forward one quantises the tensor a second time.
Field names are those of the Metis configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megalowbit.errors import UserError, unknown_name
from megalowbit.quantize.names import quantizer

OPERAND_FIELDS = (
    "q_forward_input",
    "q_forward_weight",
    "q_backward_input",
    "q_backward_weight",
    "q_backward_outputgrad",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named choice of quantisers; frozen and comparable.

    Attributes:
        name: for reports.
        q_forward_input: quantiser name, as are the next four.
        q_forward_weight: see above.
        q_backward_input: see above.
        q_backward_weight: see above.
        q_backward_outputgrad: see above.
        keep: patterns (`*`, `?`, `[…]`) of module names left in high precision, with all below them.

    Raises:
        UserError: a quantiser is unknown, or `keep` is not a list of strings.
    """

    name: str
    q_forward_input: str
    q_forward_weight: str
    q_backward_input: str
    q_backward_weight: str
    q_backward_outputgrad: str
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"recipe name must be a non-empty string, not {self.name!r}")
        for field in OPERAND_FIELDS:
            value = getattr(self, field)
            if not isinstance(value, str):
                raise UserError(f"recipe {self.name!r}: {field} must be a quantizer name, not {value!r}")
            quantizer(value)
        object.__setattr__(self, "keep", _patterns(self.name, self.keep))

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantised at all."""
        return not all(quantizer(getattr(self, field)).is_identity for field in OPERAND_FIELDS)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from a configuration block: `{"base": "nvfp4", "keep": ["*.h.0.*"]}`.

        Args:
            values: fields of `Recipe`, and `base`, the named recipe that fills those left out. Without a
                name of its own the result is called after its base, with what was changed.

        Raises:
            UserError: a key is unknown, a value is wrong, or fields are missing and there is no base.
        """
        known = [field.name for field in fields(Recipe)]
        for key in values:
            if key not in known and key != "base":
                raise unknown_name("recipe key", key, ["base", *known])
        changes = {key: value for key, value in values.items() if key != "base"}
        if "base" in values:
            base = recipe(values["base"])
            changed = [key for key in changes if key != "name" and _plain(changes[key]) != getattr(base, key)]
            name = f"{base.name} with own {', '.join(changed)}" if changed else base.name
            return replace(base, **{"name": name, **changes})
        missing = [field for field in OPERAND_FIELDS if field not in changes]
        if missing:
            raise UserError(
                f"recipe block lacks {', '.join(missing)}: give them, or a base ({', '.join(recipes())})"
            )
        return Recipe(**{"name": "custom", **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` gives back an equal recipe."""
        return {**asdict(self), "keep": list(self.keep)}

    def __str__(self) -> str:
        forward = f"input {self.q_forward_input}, weight {self.q_forward_weight}"
        backward = (
            f"input {self.q_backward_input}, weight {self.q_backward_weight}, "
            f"grad_output {self.q_backward_outputgrad}"
        )
        kept = f"; kept: {', '.join(self.keep)}" if self.keep else ""
        return f"{self.name} (forward: {forward}; backward: {backward}{kept})"


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _patterns(name: str, keep: object) -> tuple[str, ...]:
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise UserError(f"recipe {name!r}: keep must be a list of module name patterns, not {keep!r}")
    patterns = tuple(keep)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: keep holds {pattern!r}: expected a module name pattern")
    return patterns


def _uniform(name: str, operand: str, *, outputgrad: str | None = None) -> Recipe:
    return Recipe(
        name=name,
        q_forward_input=operand,
        q_forward_weight=operand,
        q_backward_input=operand,
        q_backward_weight=operand,
        q_backward_outputgrad=outputgrad or operand,
    )


def recipes() -> dict[str, Recipe]:
    """The named recipes.

    `nvfp4` rounds to nearest even and output gradients stochastically; `bf16` quantises nothing.
    """
    named = [
        _uniform("nvfp4", "nvfp4e2m1bnosr", outputgrad="nvfp4e2m1b"),
        _uniform("bf16", "fp32"),
    ]
    return {each.name: each for each in named}


def recipe(value: str | Recipe | Mapping[str, Any]) -> Recipe:
    """A recipe from its name, from a configuration block (`Recipe.from_dict`), or as it is.

    Raises:
        UserError: the name is unknown (the message lists the names and the nearest one), or the block is not
            valid.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    known = recipes()
    if not isinstance(value, str) or value not in known:
        raise unknown_name("recipe", value, known)
    return known[value]
