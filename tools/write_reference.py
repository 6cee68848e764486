"""Write the tables of docs/configuration.md from the settings classes.

    python tools/write_reference.py            # rewrites the page below its marker
    python tools/write_reference.py --check    # exit code 1 if the page is out of date

Pydantic settings supply types, limits, defaults, units (`values.unit`) and descriptions. Recipes are
dataclasses; their descriptions are the `Attributes:` of the class docstring. The text above the marker is
written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megalowbit.cluster.settings import ClusterSettings, ContainerSettings
from megalowbit.config import keys, optimizer, pipeline, stock_precision, values, zero
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.layers.recipe import NamedRecipe, Recipe, named_recipes
from megalowbit.optim.precision.op_classes import AutocastSettings
from megalowbit.pretrain.config import SETTINGS_MODEL, Monitors
from megalowbit.spectral.settings import FIELDS_READ, OperandSplit, ParameterSplit
from megalowbit.standard_streams import run_until_unread
from megalowbit.values import models_by_type

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARKER = "<!-- Generated below this line by tools/write_reference.py; do not edit by hand. -->"
HEADER = ("key", "values", "default", "unit", "description")
NAMES = {bool: "`true`, `false`", int: "integer", float: "number", str: "string", Path: "path", Any: "any"}
LIMITS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
LARGE = 10**6  # from here on, powers of two and ten are written as powers
# tried on the tables of rejected keys, to find the values that are accepted
SAMPLES = (False, True, 0, 1, "fp32", "torch")


class Row(NamedTuple):
    """A key in a table."""

    key: str
    values: str
    default: str
    unit: str
    description: str


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel] | None, Any]]:
    """Sections below a model, as dotted key, settings class and annotation; None: a union by `type`."""
    for name, field in model.model_fields.items():
        key, found = f"{prefix}{name}", list(_models_in(field.annotation))
        if len(found) == 1:
            yield key, found[0], field.annotation
            yield from sections(found[0], f"{key}.")
        elif found:
            yield key, None, field.annotation


def rows_of(model: type[BaseModel], prefix: str = "", only: Iterable[str] | None = None) -> list[Row]:
    """The rows of a model's table; the `type` of a union's member, which has one value, has no row."""
    names = model.model_fields if only is None else only
    fields = {name: model.model_fields[name] for name in names}
    return [
        Row(
            f"`{name}`",
            _values(field, f"{prefix}{name}"),
            _default(field),
            str((field.json_schema_extra or {}).get("unit", "")),  # type: ignore[union-attr]
            field.description or "",
        )
        for name, field in fields.items()
        if not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1)
    ]


MAPPINGS = ("layers",)  # fields of a recipe that hold pairs, and are objects in JSON


def rows_of_dataclass(kind: type[Any]) -> list[Row]:
    """The rows of a recipe's class, described in the `Attributes:` of its docstring."""
    descriptions, hints = attributes_of(kind), typing.get_type_hints(kind)
    return [
        Row(
            f"`{field.name}`",
            "object" if field.name in MAPPINGS else _type(hints[field.name], ""),
            "required"
            if field.default is dataclasses.MISSING
            else _json({} if field.name in MAPPINGS else field.default),
            "",
            descriptions.get(field.name, "").removesuffix("."),
        )
        for field in dataclasses.fields(kind)
    ]


def attributes_of(kind: type[Any]) -> dict[str, str]:
    """The `Attributes:` of a class docstring, by name."""
    found: dict[str, str] = {}
    for base in kind.__bases__:
        found |= attributes_of(base)
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for line in text.partition("\n\n")[0].splitlines():
        match = re.fullmatch(r" {4}(\w+): (.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        else:
            found[name] += f" {line.strip()}"
    return found


def reference() -> str:
    """The generated part of the page."""
    return "\n\n".join([*_our_block(), *_named_recipes(), *_recipes(), *_deepspeed(), *_cluster()]) + "\n"


def _our_block() -> Iterator[str]:
    yield '## All keys of the `"megalowbit"` block'
    yield "The training loop reads these sections; `mlb.initialize` accepts them but does not act on them:"
    yield _table(HEADER, rows_of(SETTINGS_MODEL))
    yield "`mlb.initialize` and the training loop read these keys:"
    yield _table(HEADER, rows_of(EngineSettings))
    for key, model, annotation in (*sections(SETTINGS_MODEL), *sections(EngineSettings)):
        yield from _section(key, model, annotation)


def _section(key: str, model: type[BaseModel] | None, annotation: Any) -> Iterator[str]:
    yield f"### `{key}`"
    if model is not None:
        yield _doc(model)
        yield _table(HEADER, rows_of(model, f"{key}."))
        return
    kinds = models_by_type(_without_null(annotation))
    yield f"`type` is one of {', '.join(f'`{name}`' for name in kinds)}; it selects the other keys."
    for name, kind in kinds.items():
        yield f'#### `{key}` with `"type": "{name}"`'
        yield _doc(kind)
        if rows := rows_of(kind):
            yield _table(HEADER, rows)


def _named_recipes() -> Iterator[str]:
    named = named_recipes()
    yield "## Named recipes"
    yield "`megalowbit/layers/recipe.json` holds their keys."
    yield _table(
        ("name", "description"),
        [(f"`{name}`", each.about + _cited(each)) for name, each in named.items()],
    )
    yield (
        "What they do otherwise than their papers, and which settings in other sections of the "
        '`"megalowbit"` block belong to them:'
    )
    yield "\n".join(_departures(name, each) for name, each in named.items() if each.source or each.settings)


def _cited(named: NamedRecipe) -> str:
    if named.source is None:
        return ""
    return f" ({named.source['title']}, arXiv:{named.source['arxiv']})"


def _departures(name: str, named: NamedRecipe) -> str:
    who = "the paper sets" if named.source else "meant to be used with"
    settings = [f"{who} `{json.dumps({key: value})[1:-1]}`" for key, value in named.settings.items()]
    return f"- `{name}`: {'; '.join([*named.departures, *settings])}."


def _recipes() -> Iterator[str]:
    header = tuple(each for each in HEADER if each != "unit")
    yield "## All keys of a recipe"
    yield (
        "A block also takes `base`, the name of the recipe that supplies the keys left out, and `name`, its "
        "name in reports. Without `base` the first five quantizers are required."
    )
    yield _table(header, _without_unit(row for row in rows_of_dataclass(Recipe) if row.key != "`name`"))
    yield "### Operand splits"
    yield (
        "The value of `split_input`, `split_weight` and `split_grad_output`. Only keys that the method uses "
        "may be set:"
    )
    yield _table(
        ("method", "keys"), [(f"`{method}`", _codes(names)) for method, names in FIELDS_READ.items()]
    )
    yield _table(header, _without_unit(rows_of_dataclass(OperandSplit)))
    yield "### Parameter split"
    yield "The value of `parameter_split`."
    yield _table(header, _without_unit(rows_of_dataclass(ParameterSplit)))


def _deepspeed() -> Iterator[str]:
    yield "## DeepSpeed's keys"
    yield "DeepSpeed documents its keys. This section lists how megalowbit reads them."
    yield f"**Accepted at the top level:** {_codes(sorted(values.RULES))}."
    yield f"**Removed from DeepSpeed, and rejected:** {_codes(sorted(keys.REMOVED_KEYS))}."
    yield "### `optimizer`"
    for name, model in {"AdamW` and `Adam": optimizer.AdamParams, "SGD": optimizer.SGDParams}.items():
        yield f"`params` of `{name}`:"
        yield _table(HEADER, rows_of(model))
    yield f'`"auto"` becomes: {_assignments(optimizer.OPTIMIZER_AUTO)}.'
    yield "### `scheduler`"
    yield _table(
        ("type", "required parameters", "optional parameters"),
        [
            (f"`{name}`", _codes(needed), _codes(rest))
            for name, (needed, rest) in optimizer.SCHEDULERS.items()
        ],
    )
    yield (
        f'`"auto"` becomes: {_assignments(optimizer.SCHEDULER_AUTO)}; `warmup_max_lr` and `max_lr`: '
        "the optimizer's `lr`; `warmup_num_steps`: one hundredth of all steps; "
        f"{_codes(optimizer.ALL_STEPS)}: all steps."
    )
    for key, model, annotation in sections(Monitors):
        yield from _section(key, model, annotation)
    yield "### `fp16` and `bf16`"
    yield _table(("key", "default", "meaning"), list(_stock_rows()))
    yield "### `pipeline`"
    pipelines = [(f"`{key}`", _json(value), _pipeline_note(key)) for key, value in pipeline.DEFAULTS.items()]
    yield _table(("key", "default", "values"), pipelines)
    yield "### Rejected values"
    yield _table(("key", "value", "reason and remedy"), list(_rejected()))


def _stock_rows() -> Iterator[tuple[str, str, str]]:
    yield "`enabled`", "`false`", "sets `megalowbit.precision`"
    for key, default in stock_precision.SCALER_DEFAULTS.items():
        is_choice = key == "loss_scale"
        meaning = "`0`: a dynamic scale; otherwise this constant one" if is_choice else "of the dynamic scale"
        yield f"`fp16.{key}`", _json(default), f"{meaning} (`grad_scaler`, mode `deepspeed`)"
    for block, names in stock_precision.KEYS.items():
        for key in names:
            if key in stock_precision.FIXED:
                value, reason = stock_precision.FIXED[key]
                yield f"`{block}.{key}`", _json(value), f"no other value: {reason}"
            elif key in stock_precision.IGNORED:
                yield f"`{block}.{key}`", "–", f"ignored: {stock_precision.IGNORED[key]}"


def _pipeline_note(key: str) -> str:
    if key in pipeline.FIXED:
        return f"no other value: {pipeline.FIXED[key]}"
    if key == "partition":
        return _codes(pipeline.PARTITIONS)
    default = pipeline.DEFAULTS[key]
    return NAMES[bool] if isinstance(default, bool) else f"integer ≥ {int(key == 'stages')}"


def _rejected() -> Iterator[tuple[str, str, str]]:
    for dotted, is_refused, remedy in keys.REFUSED:
        accepted = {value: _json(value) for value in reversed(SAMPLES) if not is_refused(value)}
        names = ", ".join(reversed(accepted.values()))  # False == 0 and True == 1: the boolean is listed
        yield f"`{dotted}`", f"any except {names}" if names else "any", remedy
    for key, value, remedy in zero.REFUSED_VALUES:
        yield f"`{zero.BLOCK}.{key}`", _json(value), remedy


def _cluster() -> Iterator[str]:
    yield "## All keys of a cluster file"
    yield _doc(ClusterSettings)
    yield _table(HEADER, rows_of(ClusterSettings))
    yield from _section("container", ContainerSettings, None)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for each in get_args(annotation):
            yield from _models_in(each)


def _without_null(annotation: Any) -> Any:
    """The union of settings in an annotation, without `None` and the discriminator around it."""
    members = [each for each in get_args(annotation) if each is not type(None)]
    while len(members) == 1 or get_origin(annotation) is Annotated:
        annotation = members[0]
        members = [each for each in get_args(annotation) if each is not type(None)]
    return annotation


def _values(field: FieldInfo, key: str) -> str:
    return _type(Annotated[field.annotation, field] if field.metadata else field.annotation, key)


def _type(annotation: Any, key: str, limits: str = "") -> str:
    """What an annotation allows, in words; `limits` are those of numbers in it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], key, _limits(arguments[1:]) or limits)
    if annotation is type(None):
        return "`null`"
    if found := list(_models_in(annotation)):
        is_optional = type(None) in arguments
        link = f"{_many(annotation)}[object](#{anchor(key)})"
        if found == [AutocastSettings]:
            return f"`true`, `false` or {link}"
        return f"{link} or `null`" if is_optional else link
    if origin is Literal:
        return _codes(map(json.dumps, arguments))
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(_type(each, key, limits) for each in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        if Ellipsis in arguments:
            return f"list of {_type(arguments[0], key)}s"
        return f"list of {len(arguments)} {_type(arguments[0], key)}s"
    if origin is dict:
        return "object" if arguments[1] is Any else f"object of {_type(arguments[1], key)}s"
    if dataclasses.is_dataclass(annotation):
        return "object"
    return NAMES[annotation] + (f" {limits}" if limits and annotation in (int, float) else "")


def _many(annotation: Any) -> str:
    """What precedes the link to a section, if a key takes several of them."""
    origins = {get_origin(each) for each in (annotation, *get_args(annotation))}
    if dict in origins:
        return "object with names, each with an "
    return "list, each entry an " if tuple in origins else ""


def _limits(metadata: Iterable[Any]) -> str:
    found: dict[str, float] = {}
    for each in metadata:
        for part in each.metadata if isinstance(each, FieldInfo) else [each]:
            for name, sign in LIMITS:
                value = getattr(part, name, None)
                if value is not None:
                    found[sign] = max(value, found.get(sign, value)) if sign in "≥>" else value
    if found.keys() == {"≥", "≤"}:
        return f"from {_number(found['≥'])} to {_number(found['≤'])}"
    return " and ".join(f"{sign} {_number(value)}" for sign, value in found.items())


def _number(value: float) -> str:
    for base in (2, 10):
        exponent = round(math.log(value, base)) if value >= LARGE else 0
        if exponent and base**exponent == value:
            return f"{base}^{exponent}"
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if shown := (field.json_schema_extra or {}).get("shown_default"):  # type: ignore[union-attr]
        return str(shown)
    if field.is_required():
        return "required"
    return "`{}`" if field.default_factory is not None else _json(field.default)


def _json(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _assignments(found: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` {_json(value)}" for key, value in found.items())


def _doc(model: type[BaseModel]) -> str:
    return inspect.getdoc(model) or ""


def _without_unit(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    return [(row.key, row.values, row.default, row.description) for row in rows]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def page() -> str:
    """The page with its generated part up to date."""
    written, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker, f"{PAGE} has lost its marker"
    return f"{written}{MARKER}\n\n{reference()}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page is out of date"
    )
    options = parser.parse_args(arguments)
    text = page()
    if text == PAGE.read_text(encoding="utf-8"):
        return 0
    if options.check:
        print(f"{PAGE} is out of date: run python tools/write_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_until_unread(main))
