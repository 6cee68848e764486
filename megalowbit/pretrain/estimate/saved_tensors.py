"""Counts the bytes that autograd saves for backward, for a model or one pipeline stage.

The forward pass runs for its hooks only, usually on PyTorch's fake tensors. Each storage counts once. If
layers have a choice of recipes, the one that saves more counts (`LargestRecipes`). Of a sequence of equal
blocks only two are run, and the others count as much as the second; the first also counts the tensors that
all share. Of blocks that are recomputed in backward the inputs count, and once what the largest of them keeps
while it is recomputed. Not covered: temporary allocations of kernels, and what the device's attention kernel
does not save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megalowbit.engine.pipeline.micro_batches import Inputs
from megalowbit.engine.pipeline.parts import (
    Block,
    BlockInputs,
    BlockOptions,
    Embedding,
    Head,
    causal_loss,
    run_parts,
)
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, share_inputs
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.speculation.precisions import operand_quantizer, recipe_with
from megalowbit.speculation.settings import HIGHEST, SpeculationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LargestRecipes:
    """The recipes with which layers save the most for backward; of a model, so they may have `layers`.

    Attributes:
        input_unsaved: for a layer whose input no other operation saves.
        input_saved: for a layer whose input is already saved, by another layer or by the operation that
            produced it; quantised codes of the input then need additional memory.
    """

    input_unsaved: Recipe
    input_saved: Recipe


class _Kept:
    """Storages that autograd would keep. Holding them prevents a new storage from reusing an address."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._not_counted = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._uncounted = 0  # bytes of blocks that were not run

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._not_counted:
            self._storages[storage._cdata] = storage
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def add_bytes(self, count: int) -> None:
        self._uncounted += count

    @property
    def nbytes(self) -> int:
        return self._uncounted + sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def _with_largest_recipes(
    model: nn.Module, largest: LargestRecipes | None, is_kept: Callable[[torch.Tensor], bool]
) -> Iterator[None]:
    """Set each layer's recipe in a forward pre-hook; the layers' previous recipes are not restored."""

    def choose(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, BitLinear)
        assert largest is not None
        layer.recipe = largest.input_saved if is_kept(inputs[0]) else largest.input_unsaved

    layers = [] if largest is None else list(bit_layers(model).values())
    if layers:
        share_inputs(model, is_on=False)  # siblings may run at different precisions and then share nothing
    handles = [layer.register_forward_pre_hook(choose) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recomputation:
    """Runs blocks with activation checkpointing, and counts what one of them keeps while it is recomputed.

    Attributes:
        alive: what autograd keeps, and what the block that runs now would keep.
        nbytes: of the block that keeps the most.
    """

    def __init__(self, kept: _Kept, parameters: Iterable[torch.Tensor]) -> None:
        self.alive = [kept]
        self.nbytes = 0
        self._kept = kept
        self._parameters = list(parameters)

    def run(
        self, block: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **options: Any
    ) -> torch.Tensor:
        """The block's output."""
        if not (block.training and getattr(block, "gradient_checkpointing", False)):
            return forward(*args, **options)
        for value in tree_leaves((args, options)):
            if isinstance(value, torch.Tensor):
                self._kept.add(value)
        segment = _Kept(self._parameters)
        self.alive[1:] = [segment]
        block.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            with torch.autograd.graph.saved_tensors_hooks(segment.add, lambda tensor: tensor):
                output = forward(*args, **options)
        finally:
            block.gradient_checkpointing = True  # type: ignore[assignment]
            del self.alive[1:]
        self.nbytes = max(self.nbytes, segment.nbytes)
        return output

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(each.holds(tensor) for each in self.alive)


@contextmanager
def _skip_repeated_blocks(
    blocks: Sequence[nn.Module], kept: _Kept, recomputation: _Recomputation | None = None
) -> Iterator[None]:
    """Run only the first two of equal consecutive blocks, and count each of the others as the second."""
    seen: list[str] = []
    sizes: dict[str, int] = {}

    def instead_of(block: nn.Module) -> Callable[..., torch.Tensor]:
        run, own_kind = block.forward, _kind(block)

        def forward(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            # blocks with sliding-window attention get other masks
            kind = f"{own_kind} {[id(each) for each in (*args, *options.values())]}"
            is_repeated = kind in seen[-1:]
            seen.append(kind)
            if is_repeated and kind in sizes:
                kept.add_bytes(sizes[kind])
                return torch.empty_like(hidden, requires_grad=True)
            before = kept.nbytes
            if recomputation is None:
                output: torch.Tensor = run(hidden, *args, **options)
            else:
                output = recomputation.run(block, run, hidden, *args, **options)
            if is_repeated:
                sizes[kind] = kept.nbytes - before
            return output

        return forward

    for block in blocks:
        block.forward = instead_of(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _kind(block: nn.Module) -> str:
    """A key for blocks that save equally many bytes: modules, recipes, parameters' shapes and dtypes."""
    layers = [(layer.recipe, layer.is_split) for layer in bit_layers(block).values()]
    parameters = [(name, value.shape, value.dtype) for name, value in block.named_parameters()]
    is_recomputed = getattr(block, "gradient_checkpointing", False)
    return f"{block} {layers} {parameters} {is_recomputed}"


def saved_for_backward(
    model: nn.Module,
    micro_batch_size: int,
    sequence_length: int,
    largest: LargestRecipes | None = None,
    *,
    blocks: Sequence[nn.Module] = (),
    has_documents: bool = False,
) -> int:
    """Bytes that autograd keeps between one forward and its backward, without parameters.

    Of blocks with activation checkpointing, the inputs and one recomputation.

    Args:
        model: a causal language model that takes `input_ids` and `labels`; may consist of fake tensors.
        micro_batch_size: sequences in the batch.
        sequence_length: tokens per sequence.
        largest: the recipes that save the most; None: each layer's current recipe.
        blocks: modules that the model runs in sequence on its hidden states; of equal ones only two are
            run. Empty: all modules are run.
        has_documents: whether sequences consist of separate documents, which takes a mask.
    """
    kept = _Kept(model.parameters())
    recomputation = _Recomputation(kept, model.parameters())
    tokens = torch.zeros(micro_batch_size, sequence_length, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor)
    with_largest = _with_largest_recipes(model, largest, recomputation.holds)
    batch = {"input_ids": tokens, "labels": tokens}
    if has_documents:
        batch["position_ids"] = torch.zeros_like(tokens)
    within_documents = attention_within_documents(batch, None)
    with hooks, with_largest, _skip_repeated_blocks(blocks, kept, recomputation), within_documents:
        loss = model(**batch).loss
    del loss
    return kept.nbytes + recomputation.nbytes


def saved_by_stage(
    model: PreTrainedModel,
    parts: Sequence[nn.Module],
    *,
    micro_batch_size: int,
    sequence_length: int,
    interval: int,
    num_in_flight: int,
    largest: LargestRecipes | None = None,
    has_documents: bool = False,
) -> int:
    """Peak bytes that a pipeline stage with these `parts` of the model keeps for backward.

    The backward of `num_in_flight` micro-batches is still to come. `interval` is the number of blocks per
    recomputed segment (0: no recomputation). The other arguments are those of `saved_for_backward`.
    """
    kept, recomputed = _Kept(model.parameters()), [0]
    of_model = (
        [] if interval else [model.get_submodule(part.names[0]) for part in parts if isinstance(part, Block)]
    )
    alive = [kept]

    def run_blocks(blocks: Sequence[Block], hidden: torch.Tensor, options: BlockOptions) -> torch.Tensor:
        for start in range(0, len(blocks), interval or len(blocks)):
            segment = _Kept(model.parameters()) if interval else kept
            kept.add(hidden)
            alive[1:] = [segment]
            with torch.autograd.graph.saved_tensors_hooks(segment.add, lambda tensor: tensor):
                for block in blocks[start : start + (interval or len(blocks))]:
                    hidden = block(hidden, options)
            recomputed[0] = max(recomputed[0], segment.nbytes if interval else 0)
        return hidden

    tokens = torch.zeros(micro_batch_size, sequence_length, dtype=torch.long)
    first = tokens if isinstance(parts[0], Embedding) else _hidden_states(model, tokens)
    inputs: Inputs = first
    batch = {"input_ids": tokens}
    if has_documents:
        batch["position_ids"] = torch.zeros_like(tokens)
        inputs = (first, torch.ones_like(tokens[:, :1]), batch["position_ids"])
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor)
    with_largest = _with_largest_recipes(
        model, largest, lambda tensor: any(each.holds(tensor) for each in alive)
    )
    within_documents = attention_within_documents(batch, None)
    with hooks, with_largest, _skip_repeated_blocks(of_model, kept), within_documents:
        found = run_parts(parts, inputs, BlockInputs(model), run_blocks)
        output = found if isinstance(found, torch.Tensor) else found[0]
        if isinstance(parts[-1], Head):
            causal_loss(output, tokens)
        else:
            kept.add(output)  # kept until its gradient arrives from the next stage
    return kept.nbytes * num_in_flight + recomputed[0]


def _hidden_states(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The previous stage's output for `tokens`: (sequences, tokens) → (sequences, tokens, hidden_size)."""
    shape = (*tokens.shape, model.config.hidden_size)
    return torch.zeros(shape, dtype=next(model.parameters()).dtype, requires_grad=True)


def largest_recipes(settings: SpeculationSettings, recipe: Recipe) -> LargestRecipes:
    """The choices of candidate precisions with which layers save the most for backward.

    An input needs the most memory if `grad_weight` uses it unquantised. If another operation saves the input
    anyway, quantised codes for `grad_weight` need additional memory instead. Codes of the weight for
    `grad_input` are additional in both cases.
    """
    widest = max((name for name in settings.candidates if name != HIGHEST), key=_code_bytes, default=HIGHEST)
    return LargestRecipes(
        input_unsaved=_all_with(recipe, (HIGHEST, widest, HIGHEST)),
        input_saved=_all_with(recipe, (HIGHEST, widest, widest)),
    )


def _all_with(recipe: Recipe, choice: Sequence[str]) -> Recipe:
    """A model's recipe with the products of all layers at the chosen precisions."""
    layers = tuple((pattern, recipe_with(each, choice)) for pattern, each in recipe.layers)
    return replace(recipe_with(recipe.alone, choice), layers=layers)


def _code_bytes(name: str) -> int:
    """Bytes of a weight's codes and scales, to compare candidate precisions."""
    return quantizer(operand_quantizer(name, "weight")).quantize(torch.zeros(128, 128)).nbytes
