"""Sizes that matrix units and blocks want: multiples of 8, 16, 32 and 128.

Rules of NVIDIA's GTC 2019 talk on mixed precision (S9923) and its guides: all three sizes of a product in
half precision should be multiples of 8 (16 bytes), in 8 and 4 bits of 16 or 32. NVFP4 has blocks of 16 and
MXFP4 of 32 elements along the axis that a product sums over, and the kernels here tiles of 128; a size that
is no multiple leaves the last block or tile partly empty. Head sizes of fused
attention must be multiples of 8.

Sizes are those of one rank: tensor parallelism divides them. A multiple of 8 that is missed is a warning, a
larger one a note, because the product then runs a few percent slower, not several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megalowbit.doctor.notices import Notice, note, warning
from megalowbit.doctor.plan import RunPlan, setting
from megalowbit.families.registry import family
from megalowbit.families.vocabulary import num_tokens
from megalowbit.layers.layer_recipe import OPERAND_FIELDS
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer

UNITS, TILE = 8, 128
VOCABULARY = 128
LARGEST_HEAD = 256  # of fused attention
PAD = "megalowbit.model.pad_vocab_to_multiple_of"


class Size(NamedTuple):
    """One size of the run and the rules it meets.

    Attributes:
        name: what it is the size of.
        value: on one rank.
        wanted: the multiple that would suit the hardware and the recipe's blocks best.
        largest: the largest of 8, 16, 32, 64 and 128 that divides it; 1: none.
        fix: how to change it.
        is_of_projection: whether it is one of a linear layer's sizes.
    """

    name: str
    value: int
    wanted: int
    largest: int
    fix: str
    is_of_projection: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict()


def block_size(recipe: Recipe) -> int:
    """The largest number of elements of a recipe's blocks along a row; 1: it has none."""
    sizes = [1]
    for name in {getattr(each, field) for each in recipe.variants for field in OPERAND_FIELDS}:
        chosen = quantizer(name)
        if isinstance(chosen, BlockQuantizer) and chosen.encoding.format.block is not None:
            sizes.append(chosen.encoding.format.block[1])
    return max(sizes)


def sizes_of(plan: RunPlan) -> list[Size]:
    """The sizes that products, attention and blocks have on one rank."""
    names, config = family(plan.model.model_type), plan.model
    grid = plan.config.grid
    hidden, heads = getattr(config, names.hidden_size), getattr(config, names.num_heads)
    head_size = getattr(config, "head_dim", None) or hidden // heads
    block = max(UNITS, block_size(plan.recipe))
    rows = [
        _size("hidden size", hidden, TILE, f"megalowbit.model.overrides.{names.hidden_size}"),
        _size("head size", head_size, 64, f"megalowbit.model.overrides.{names.num_heads}", hidden // 64),
        _vocabulary(plan),
        _size("sequence length", plan.sequence_length, max(block, 64), "megalowbit.data.sequence_length"),
        _tokens(plan, block),
    ]
    for projection in plan.projections:
        if not projection.is_head:
            short = projection.name.rpartition(".*.")[2]
            each = " on a rank" if grid.tensor_size > 1 else ""
            for side, value in (("outputs", projection.out_features), ("inputs", projection.in_features)):
                size = _size(f"{short}, {side}{each}", value, block, "")
                rows.append(size._replace(is_of_projection=True))
    return list(dict.fromkeys(rows))  # layers of a block that the recipe keeps have the same sizes


def _size(name: str, value: int, wanted: int, key: str, suggested: int | None = None) -> Size:
    nearest = -(-value // wanted) * wanted if suggested is None else suggested
    fix = f"{setting(key, nearest)} (another model)" if key and value % wanted else ""
    if key.startswith("megalowbit.data"):
        fix = fix.removesuffix(" (another model)")
    return Size(name, value, wanted, _largest(value), fix)


def _largest(value: int) -> int:
    return next((each for each in (128, 64, 32, 16, 8) if value % each == 0), 1)


def _vocabulary(plan: RunPlan) -> Size:
    rows = int(plan.model.vocab_size)
    fix = "" if rows % VOCABULARY == 0 else setting(PAD, VOCABULARY)
    return Size("vocabulary", rows, VOCABULARY, _largest(rows), fix)


def _tokens(plan: RunPlan, block: int) -> Size:
    """The rows of every product: micro-batch × sequence length."""
    wanted, value = max(TILE, block), plan.micro_tokens
    fix = ""
    if value % wanted:
        least = next((n for n in range(1, wanted + 1) if n * plan.sequence_length % wanted == 0), wanted)
        multiple = -(-plan.micro_batch // least) * least
        fix = setting("train_micro_batch_size_per_gpu", multiple)
    return Size("tokens of a micro-batch", value, wanted, _largest(value), fix)


def check_shapes(plan: RunPlan) -> list[Notice]:
    """Notices about sizes, each with its fix."""
    return [*_check_vocabulary(plan), *_check_head(plan), *_check_others(plan)]


def _check_vocabulary(plan: RunPlan) -> Iterator[Notice]:
    rows, tokens = int(plan.model.vocab_size), num_tokens(plan.model)
    if rows % VOCABULARY == 0:
        return
    padded = -(-tokens // VOCABULARY) * VOCABULARY
    added = padded - tokens
    text = (
        f"vocabulary of {rows:,} rows is no multiple of {VOCABULARY}: the output projection is a product of "
        f"{plan.micro_tokens:,} × {rows:,}, whose last tile is partly empty"
    )
    if rows % UNITS:
        text += f"; it is not even a multiple of {UNITS}, so its rows are not aligned to 16 bytes"
    fix = f"{setting(PAD, VOCABULARY)} ({padded:,} rows, {added} of them without a token)"
    yield (warning if rows % UNITS else note)("shape-vocabulary", text, fix)


def _check_head(plan: RunPlan) -> Iterator[Notice]:
    size = next(each for each in sizes_of(plan) if each.name == "head size")
    if size.value % UNITS or size.value > LARGEST_HEAD:
        names = family(plan.model.model_type)
        yield warning(
            "shape-head",
            f"heads of size {size.value}: fused attention takes multiples of {UNITS} up to {LARGEST_HEAD}, "
            "and others run unfused, with a matrix of all scores",
            f"choose another {names.num_heads} or {names.hidden_size} for the model",
        )


def _check_others(plan: RunPlan) -> Iterator[Notice]:
    block = block_size(plan.recipe)
    missed, partial = [], []
    for size in sizes_of(plan):
        if size.name in ("vocabulary", "head size"):
            continue
        if size.value % UNITS:
            missed.append(size)
        elif size.value % max(block, UNITS):
            partial.append(size)
    for size in missed:
        yield warning(
            "shape-units",
            f"{size.name} {size.value:,} is no multiple of {UNITS}: products with it are not aligned to 16 "
            "bytes and run much slower on matrix units",
            size.fix,
        )
    for size in partial:
        yield note(
            "shape-blocks",
            f"{size.name} {size.value:,} is no multiple of {block}, the block size of recipe "
            f"{plan.recipe.name!r}: the last block of each row is padded with zeros",
            size.fix,
        )
    tokens = next(each for each in sizes_of(plan) if each.name == "tokens of a micro-batch")
    if tokens.fix and tokens not in (*missed, *partial):
        yield note(
            "shape-tokens",
            f"{plan.micro_batch} × {plan.sequence_length:,} tokens of a micro-batch are no multiple of "
            f"{TILE}, the tile of products and kernels",
            tokens.fix,
        )
