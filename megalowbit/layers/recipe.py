"""Recipes of models: the recipe of most layers, those of single ones, and the layers left in high precision.

`layer_recipe` says what the fields of a layer mean. `recipe.json` holds the named recipes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megalowbit.errors import Problems, UserError, shown, unknown_name
from megalowbit.layers.layer_recipe import (
    OPERAND_FIELDS,
    SPLIT_FIELDS,
    LayerRecipe,
    checked_products,
    split_described,
)
from megalowbit.spectral.settings import OperandSplit, ParameterSplit, block_over, settings_from

UNNAMED = ("name", "if_present")  # fields that do not change what a recipe does
# what only a model has, as a single layer has it
NO_MODEL: Mapping[str, Any] = MappingProxyType(
    {"keep": (), "keep_first": 0, "keep_last": 0, "keep_if_present": (), "layers": ()}
)


@dataclass(frozen=True, kw_only=True)
class Recipe(LayerRecipe):
    """What a model's layers quantise, and which layers stay in high precision; frozen and comparable.

    The fields that a single layer has are those of `LayerRecipe`.

    Attributes:
        keep: patterns (`*`, `?`, `[…]`) of the names of modules, and of weights outside linear layers, that
            stay in high precision, with everything inside them.
        keep_first: blocks at the beginning of the model that stay in high precision: a number (`2`), or a
            fraction of all blocks below 1 (`0.15`).
        keep_last: the same at the end of the model.
        keep_if_present: as `keep`, but a pattern may match nothing: recipes for several model families name
            the layers of each.
        layers: recipes of single layers: pattern (as in `keep`) → the name of a recipe, or a block of fields
            that differ from this one (`{"*.mlp.*": "mxfp4", "*.c_proj": {"q_forward_input": "fp8e4m3"}}`).
            The first pattern that matches a layer decides; an empty block leaves layers to this recipe. A run
            records a list of pairs, which is accepted, too. Patterns of the base come after
            these, unless they are the same. `keep` and the fields like it take precedence,
            those of a recipe named here have no effect, and `parameter_split` is the same for all layers.
        if_present: in `layers` only: the pattern may match nothing, because the recipe is for several model
            families.

    Raises:
        UserError: a quantizer is unknown, `keep` is not a list of strings, or fields cannot be combined.
    """

    keep: tuple[str, ...] = ()
    keep_first: int | float = 0
    keep_last: int | float = 0
    keep_if_present: tuple[str, ...] = ()
    layers: tuple[tuple[str, Recipe], ...] = ()
    if_present: bool = False

    def __new__(cls, *args: Any, **values: Any) -> Recipe:
        """Check the arguments' names; a dataclass only raises TypeErrors."""
        if args:
            value = shown(args[0])
            raise UserError(f"Recipe takes fields by name, not {value}: did you mean mlb.recipe({value})?")
        for key in values.keys() - cls.__dataclass_fields__:
            raise unknown_name("recipe key", key, cls.__dataclass_fields__)
        if missing := [field for field in ("name", *OPERAND_FIELDS) if field not in values]:
            raise UserError(
                f"recipe block lacks {', '.join(missing)}: add them, or a base ({', '.join(recipes())})"
            )
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Recipe, **{each.name: getattr(self, each.name) for each in fields(self)}), ()

    def __post_init__(self) -> None:
        layers, split = self.layers, self.parameter_split
        if layers:  # the checks of a layer's fields follow without them, and in `alone`
            object.__setattr__(self, "layers", ())
            object.__setattr__(self, "parameter_split", None)
        super().__post_init__()
        for field in ("keep", "keep_if_present"):
            object.__setattr__(self, field, _checked_patterns(self.name, field, getattr(self, field)))
        _check_blocks(self)
        if layers:
            of_all = settings_from(SPLIT_FIELDS["parameter_split"], split, "parameter_split")
            object.__setattr__(self, "parameter_split", of_all)
        object.__setattr__(self, "layers", _layer_recipes(self, layers))
        if not isinstance(self.if_present, bool):
            raise UserError(
                f"recipe {self.name!r}: if_present must be true or false, not {self.if_present!r}"
            )
        if not any(each.quantizes for each in self.variants) and self.parameter_split is not None:
            raise UserError(f"recipe {self.name!r}: parameter_split needs quantised layers: name quantizers")

    @functools.cached_property
    def alone(self) -> Recipe:
        """This recipe without `layers`: that of the layers which they do not name."""
        split = self.parameter_split if super().quantizes else None
        return replace(self, layers=(), parameter_split=split) if self.layers else self

    @property
    def variants(self) -> tuple[Recipe, ...]:
        """The recipes that layers may have: this one, and those of `layers`, each once."""
        own = [each for _, each in self._own]
        names_all = any(not pattern.strip("*") for pattern, _ in self.layers)
        return tuple(dict.fromkeys(own if names_all else (self.alone, *own)))

    @property
    def quantizes(self) -> bool:
        """Whether any operand of any layer is quantised."""
        return super().quantizes or any(each.quantizes for _, each in self.layers)

    def of_layer(self, name: str) -> Recipe:
        """The recipe of a layer with this name, which is one of `variants`."""
        return next((each for pattern, each in self._own if matches(name, pattern)), self.alone)

    def is_for_others(self, names: Iterable[str]) -> bool:
        """Whether `layers` is for other model families than one whose layers have these names."""
        if not self.layers or not all(own.if_present for _, own in self.layers):
            return False
        return not any(matches(name, pattern) for name in names for pattern, _ in self.layers)

    @functools.cached_property
    def _own(self) -> tuple[tuple[str, Recipe], ...]:
        """`layers` as layers have them: `if_present` says nothing about a layer."""
        return tuple((pattern, replace(each, if_present=False)) for pattern, each in self.layers)

    def layers_without_split(self) -> tuple[tuple[str, Recipe], ...]:
        """`layers` without the parameter split that all layers share."""
        return tuple((pattern, replace(each, parameter_split=None)) for pattern, each in self.layers)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from a configuration block: `{"base": "nvfp4", "keep": ["*.h.0.*"]}`.

        Args:
            values: fields of `Recipe`, and `base`: the named recipe that supplies the fields left out. If
                both have a split, the base also supplies the fields left out within it, as far as its method
                uses them; if both have `layers`, those of the base come last. Without `name`, the result is
                named after its base and the changed fields.

        Raises:
            UserError: a key is unknown, a value is invalid, or fields are missing and there is no base.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"a recipe block must be a mapping, not {shown(values)}")
        _check_keys(values)
        changes = {key: value for key, value in values.items() if key != "base"}
        if "base" in values:
            return _changed(recipe(values["base"]), changes)
        return Recipe(**{"name": "custom", **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` returns an equal recipe."""
        hadamard = self.hadamard if isinstance(self.hadamard, bool) else list(self.hadamard)
        lists = {"keep": list(self.keep), "keep_if_present": list(self.keep_if_present)}
        without = (*NO_MODEL, "parameter_split")
        layers = {
            pattern: {key: value for key, value in each.to_dict().items() if key not in without}
            for pattern, each in self.layers
        }
        found = {**asdict(self), **lists, "hadamard": hadamard, "layers": layers}
        return found if self.if_present else {key: found[key] for key in found if key != "if_present"}

    def __str__(self) -> str:
        extra = "".join(
            f"; {end} blocks kept: {count}"
            for end, count in (("first", self.keep_first), ("last", self.keep_last))
            if count
        )
        kept = ", ".join((*self.keep, *self.keep_if_present))
        extra += f"; kept: {kept}" if kept else ""
        own = ", ".join(
            f"{pattern}: {each.name}{' (if present)' * each.if_present}" for pattern, each in self.layers
        )
        extra += f"; other recipes: {own}" if own else ""
        return f"{self.name} ({self.description()}{extra})"


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a recipe matches the layer with this name, or a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(len(parts), 0, -1))


def _check_keys(values: Mapping[str, Any]) -> None:
    known = ["base", *(field.name for field in fields(Recipe))]
    problems = Problems()
    for key in (each for each in values if each not in known):
        problems.add(unknown_name("recipe key", key, known))
    problems.raise_any()


def _changed(base: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A recipe with the values of a block, named after its base and the changed fields."""
    changes: dict[str, Any] = {key: _over_base(base, key, value) for key, value in values.items()}
    changed = [key for key in changes if key not in UNNAMED and changes[key] != getattr(base, key)]
    name = f"{base.name} with own {', '.join(changed)}" if changed else base.name
    if base.layers:
        # another parameter_split is given to all layers again
        former = base.layers_without_split() if "parameter_split" in changed else base.layers
        changes["layers"] = _before(former, changes.get("layers", ()))
    return replace(base, **{"name": name, **changes})


def _before(former: tuple[tuple[str, Recipe], ...], given: Any) -> Any:
    """The `layers` of a block before those of its base, without patterns that the block has, too."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)):
        return given  # refused with all other mistakes
    names = [each[0] for each in pairs if isinstance(each, (list, tuple)) and each]
    return (*pairs, *(each for each in former if each[0] not in names))


def _over_base(base: Recipe, key: str, value: object) -> object:
    """Convert a configuration's value into a recipe's; the base supplies what a split leaves out."""
    if key in SPLIT_FIELDS:
        below = getattr(base, key)
        if isinstance(value, Mapping) and below is not None:
            value = block_over(below, value)
        return settings_from(SPLIT_FIELDS[key], value, key)
    if key == "hadamard":
        return checked_products(base.name, value)
    return tuple(value) if isinstance(value, list) or value == {} else value


class NamedRecipe(NamedTuple):
    """An entry of `recipe.json`.

    Attributes:
        recipe: its fields.
        about: describes it in docs/configuration.md, as Markdown.
        source: title and arXiv number of the paper, or `None`.
        departures: what it does otherwise than the paper, and what it leaves out.
        settings: what the paper sets outside of the recipe: keys of the `"megalowbit"` block.
    """

    recipe: Recipe
    about: str
    source: Mapping[str, str] | None
    departures: tuple[str, ...]
    settings: Mapping[str, Any]


@functools.lru_cache(maxsize=1)
def named_recipes() -> Mapping[str, NamedRecipe]:
    """The named recipes with their descriptions; a `base` is an earlier entry of the file."""
    found: dict[str, NamedRecipe] = {}
    for entry in json.loads(Path(__file__).with_name("recipe.json").read_text(encoding="utf-8")):
        block = {**entry["recipe"], "name": entry["name"]}
        layers = {
            key: {**each, "base": found[each["base"]].recipe} for key, each in block.get("layers", {}).items()
        }
        block |= {"layers": layers} if layers else {}
        if "base" in block:
            block["base"] = found[block["base"]].recipe
        found[entry["name"]] = NamedRecipe(
            Recipe.from_dict(block),
            entry["about"],
            entry.get("source"),
            tuple(entry.get("departures", ())),
            MappingProxyType(entry.get("with", {})),
        )
    return MappingProxyType(found)


def recipes() -> dict[str, Recipe]:
    """The named recipes of `recipe.json`; docs/configuration.md describes them."""
    return {name: each.recipe for name, each in named_recipes().items()}


def recipe(value: str | Recipe | Mapping[str, Any]) -> Recipe:
    """A recipe from its name or from a configuration block; a `Recipe` is returned unchanged.

    Raises:
        UserError: the name is unknown (the message lists the names and the nearest one), or the block is
            invalid.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    known = recipes()
    if not isinstance(value, str) or value not in known:
        raise unknown_name("recipe", value, known)
    return known[value]


def _checked_patterns(name: str, field: str, value: object) -> tuple[str, ...]:
    """The patterns of a recipe's `keep` or `keep_if_present`, checked."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UserError(f"recipe {name!r}: {field} must be a list of module name patterns, not {value!r}")
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"recipe {name!r}: {field} holds {pattern!r}: expected a module name pattern")
    return patterns


def _check_blocks(recipe: Recipe) -> None:
    """Reject keep_first and keep_last that are neither a count nor a fraction."""
    for field in ("keep_first", "keep_last"):
        value = getattr(recipe, field)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        is_share = isinstance(value, float) and math.isfinite(value) and 0 <= value < 1
        if not is_count and not is_share:
            raise UserError(
                f"recipe {recipe.name!r}: {field} = {shown(value)}: expected a number of blocks, or a "
                "fraction of them between 0 and 1"
            )


def _layer_recipes(recipe: Recipe, given: Any) -> tuple[tuple[str, Recipe], ...]:
    """The `layers` of a recipe, whose values may still be names and blocks, checked."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    is_valid = isinstance(pairs, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in pairs
    )
    if not is_valid:
        raise UserError(
            f"recipe {recipe.name!r}: layers must give a recipe for each pattern, not be {shown(given)}: "
            'write {"*.mlp.*": "mxfp4"}'
        )
    problems = Problems()
    found: list[tuple[str, Recipe]] = []
    for pattern, value in pairs:
        with problems.collect():
            if pattern in [each for each, _ in found]:
                raise UserError(f"recipe {recipe.name!r}, layers: {pattern!r} occurs twice: remove one")
            found.append((pattern, _layer_recipe(recipe, pattern, value)))
    problems.raise_any()
    return tuple(found)


def _layer_recipe(around: Recipe, pattern: object, value: Any) -> Recipe:
    """The recipe of the layers that a pattern of `layers` matches."""
    where = f"recipe {around.name!r}, layers"
    if not isinstance(pattern, str) or not pattern:
        raise UserError(f"{where}: {shown(pattern)} is no pattern of module names")
    try:
        return recipe_over(around, value)
    except UserError as error:
        raise UserError(f"{where}[{pattern!r}]: {error}") from None


def recipe_over(around: Recipe, value: Any) -> Recipe:
    """The recipe of a single layer in a model with another one, from a value of `layers`.

    Raises:
        UserError: it is invalid, or sets what is the same for all layers.
    """
    found = _resolved(around, value)
    split = found.parameter_split or around.parameter_split
    if split != around.parameter_split:
        raise UserError("parameter_split is the same for all layers: set it outside of layers")
    return replace(found, **NO_MODEL, parameter_split=split if found.quantizes else None)


def _resolved(around: Recipe, value: Any) -> Recipe:
    block = value
    while isinstance(block, Mapping):
        if "layers" in block:
            raise UserError("layers cannot be nested: give their patterns a place in the outer layers")
        if outside := [key for key in (*NO_MODEL, "parameter_split") if key in block]:
            raise UserError(f"{outside[0]} is of the whole model, not of single layers")
        block = block.get("base")
    if isinstance(value, Mapping) and "base" not in value:
        _check_keys(value)
        own = [each for each in value if each not in UNNAMED]
        name = {"name": f"own {', '.join(own)}" if own else around.name}
        made = _changed(replace(around, **NO_MODEL, parameter_split=None), {**name, **value})
        if "name" in value or not own:
            return made
        return replace(made, name=f"own {', '.join(_field_described(made, each) for each in own)}")
    found = recipe(value)
    if found.layers:
        raise UserError(f"recipe {found.name!r} has layers of its own: name one without")
    return found


def _field_described(recipe: Recipe, field: str) -> str:
    """A field of a layer and its value in a few words."""
    value = getattr(recipe, field)
    if isinstance(value, (OperandSplit, ParameterSplit)):
        return split_described(field, value)
    words = {None: "null", True: "true", False: "false"}
    return f"{field} {'+'.join(value) if isinstance(value, tuple) else words.get(value, value)}"
