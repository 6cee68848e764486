"""BitLinear: `nn.Linear` whose three GEMMs run on low-precision operands.

Names, shapes and dtypes of the parameters are those of `nn.Linear`. The state dict is that of the layer it
replaces (`state_dict_layout`), so checkpoints can be exchanged in both directions. It computes in its input's
dtype, or in autocast's if that is enabled. The weight is quantised from the dtype in which it is stored.

`megalowbit.convert` and its callers fill the layer's slots: its name, a random stream shared by the model, an
observer, a chooser. Without a shared stream the layer creates one at its first forward, seeded from torch's
default CPU generator. With a chooser, a compiled model runs the layer outside the graph (a graph break),
because its precision may change from step to step.

In selective activation checkpointing the layer is one operation, `torch.ops.megalowbit.linear.default`, which
a policy may save or compute again. With a chooser it is always computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit import cuda_graphs
from megalowbit.derivative_checks import reject_transforms
from megalowbit.distributed.sharded_parameters import is_sharded
from megalowbit.errors import UserError
from megalowbit.layers.compiled import compiled_linear, register
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.matmul.function import lowbit_linear
from megalowbit.layers.matmul.gemms import autocast_dtype
from megalowbit.layers.matmul.quantizations import OPERANDS
from megalowbit.layers.matmul.sharded_operands import ShardedOperands
from megalowbit.layers.matmul.slots import (
    Chooser,
    InputRecord,
    Observer,
    Probe,
    StaticInput,
    warn_of_uncounted,
)
from megalowbit.layers.matmul.use_counter import (
    LayerStream,
    ProductCounts,
    Use,
    UseCounter,
    has_begun_forward,
    is_recomputing,
)
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.parameter_split.split_linear import SplitLinear
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.seed_sizes import check_sizes, needed_blocks
from megalowbit.layers.siblings import INPUT_ROLES, InputForms, SharedInput, shares_input
from megalowbit.quantize.backends import is_selective_checkpoint
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.spectral.settings import OperandSplit
from megalowbit.spectral.state import SplitState
from megalowbit.values import whole_number

# Attributes that `fill_slots` adds to those of `nn.Linear`.
SLOTS = (
    "_recipe",
    "_needed_blocks",
    "handle",
    "layer_name",
    "is_transposed",
    "observer",
    "chooser",
    "_chosen",
    "_pending_probe",
    "random_stream",
    "_layer_stream",
    "_uses",
    "weight_slot",
    "siblings",
    "shared_input",
    "split_states",
    "is_split",
    "input_record",
    "static_input",
    "_product_counts",
)


def _named(input: object) -> str:
    """What a layer got in place of a dense tensor, and how to make one."""
    if not isinstance(input, Tensor):
        return type(input).__name__
    if input.is_nested:
        return "a nested tensor (input.to_padded_tensor(0.0) makes a dense one)"
    return f"a tensor of layout {input.layout}"


class BitLinear(SplitLinear):
    """A linear layer in low precision: y = Q(x) · Q(W)ᵀ + b.

    Args:
        in_features: size of the input's last axis; need not be a multiple of the block size.
        out_features: size of the output's last axis.
        bias: whether to add one (kept in high precision).
        recipe: a recipe, the name of one, or a configuration block. Its `layers` and what it keeps in a model
            do not matter here.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        recipe: the quantizers. May be set, in the same forms as the argument, between a backward and the next
            forward; of a recipe with `layers`, a layer in a model takes what they say of its name.
        layer_name: its name in the model; part of the key of its random numbers.
        observer: receives counts in training mode, or `None`.
        chooser: chooses the recipe for each step and may inspect operands and products; `None`: `recipe` is
            used. Copies and pickles have none.
        random_stream: shared by the model's layers and advanced by the model's forward hook, or by its layers
            where a part of the model is called. `None`: the layer has its own.
        weight_slot: cache for quantised weights between micro-batches, or `None`.
        siblings: names of the layers that read the same input, its own included; empty: none.
        shared_input: the input that siblings share; one object for a model, or `None`.
        split_states: for split operands, by role: directions from which the next factorisation starts.
        is_transposed: whether it replaces a transformers `Conv1D`, which stores its weight as (in, out).
        is_split: whether the weight is W_R + U·diag(S)·V, see `SplitLinear`.
        input_record: records the range of the layer's inputs, or `None`. Copies and pickles have none.
        static_input: recorded numbers by which it quantises its input in evaluation mode; `None`: by those
            of the batch. See `conversion.static_inputs`.
        handle: identifies the layer and its recipe in a compiled graph; see `compiled`.

    Raises:
        UserError: a size is not a whole number ≥ 0, or the recipe is invalid.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: str | Recipe | Mapping[str, Any] = "nvfp4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            whole_number(f"{name} of BitLinear", size, least=0)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.fill_slots(recipe_of(recipe))

    def fill_slots(self, recipe: Recipe, *, layer_name: str = "", is_transposed: bool = False) -> None:
        """Set all attributes that `nn.Linear` does not have; parameters do not change."""
        self.is_split = False
        if recipe.parameter_split is not None:
            self.add_factors(recipe.parameter_split)
        self.weight_slot: WeightSlot | None = None
        self.siblings: tuple[str, ...] = ()
        self.shared_input: SharedInput | None = None
        self.split_states: dict[str, SplitState] = {}
        self.layer_name = layer_name
        self.recipe = recipe
        self.is_transposed = is_transposed
        self.observer: Observer | None = None
        self.chooser: Chooser | None = None
        self._chosen: Recipe | None = None  # the chooser's last recipe, already checked
        self._pending_probe: tuple[int, Probe] | None = None  # (micro-batch, probe), for a repeated forward
        self.random_stream: RandomStream | None = None
        self._layer_stream = LayerStream()
        self._uses = UseCounter()
        self.input_record: InputRecord | None = None
        self.static_input: StaticInput | None = None
        self._product_counts = ProductCounts()

    @property
    def product_counts(self) -> dict[str, dict[str, int]]:
        """Number of products by product and precision: `{"output": {"fp8": 3, "bf16": 1}, …}`.

        With FP8 products on a GPU, reading this waits for the device. In a CUDA graph only those are counted.
        """
        return self._product_counts.table()

    @property
    def recipe(self) -> Recipe:
        """The quantizers."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: str | Recipe | Mapping[str, Any]) -> None:
        chosen = recipe_of(recipe)
        resolved = chosen.of_layer(self.layer_name) if self.layer_name else chosen.alone
        self.check_recipe(resolved)
        # A compiled model guards on the handle, so it recompiles. Cached weights belong to the old recipe.
        self._recipe, self.handle = resolved, register(self)
        self._needed_blocks = needed_blocks(resolved)
        if self.weight_slot is not None:
            self.weight_slot.clear()

    @property
    def shards(self) -> ShardedOperands | None:
        """Which operands are shards of a tensor-parallel layer; `None`: none."""
        return None

    @property
    def changes_no_host_state(self) -> bool:
        """Whether a use of the layer changes nothing on the host but its number of uses."""
        is_observed = self.training and self.observer is not None
        is_observed = is_observed or self.input_record is not None or self._counts_static_inputs
        return not is_observed and self.weight_slot is None and self.shards is None

    @property
    def _counts_static_inputs(self) -> bool:
        return self.static_input is not None and self.static_input.counts is not None

    @property
    def title(self) -> str:
        """The layer's name in messages."""
        if self.layer_name:
            return f"BitLinear {self.layer_name!r}"
        return f"BitLinear({self.in_features}, {self.out_features})"

    def forward(self, input: Tensor) -> Tensor:
        """Multiply: y = Q(x) · Q(W)ᵀ + b.

        Args:
            input: (…, in_features), at least one axis.

        Returns:
            (…, out_features), in the input's dtype or autocast's.

        Raises:
            UserError: the last axis has another size, the input is not a dense tensor or is on another
                device, it lacks the axis `broadcast_dim` of the recipe's splits, or a size that `seed_compat`
                needs; a transform of `torch.func` is active, or a tensor has a forward-mode derivative.
        """
        self._check_input(input)
        dtype = autocast_dtype(input.device.type) or input.dtype
        factors = WeightFactors(self.split_u, self.split_s, self.split_v) if self.is_split else None
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and not is_selective_checkpoint():
            return self._multiply(input, factors, dtype)
        if self.chooser is None:
            return compiled_linear(self, input, self.weight, self.bias, factors, dtype)
        if not is_compiling:
            with _disable_current_modes():  # a layer with a chooser is always computed again
                return self._multiply(input, factors, dtype)
        outside_the_graph = torch.compiler.disable(self._multiply)
        result: Tensor = outside_the_graph(input, factors, dtype)
        return result

    def _multiply(self, input: Tensor, factors: WeightFactors | None, dtype: torch.dtype) -> Tensor:
        use, needs_grad, recipe, probe = self.begin_use(), torch.is_grad_enabled(), None, None
        if self.chooser is not None:
            recipe, probe = self._choose(self.chooser, use, needs_grad=needs_grad)
        shared, shards, forms = self.shared_input, self.shards, None
        if shared is not None:
            forms = shared.begin(self.layer_name, input, self.siblings, use.step)
        summed = None if forms is None or shards is None else shards.sum_for_siblings(input, forms)
        if shards is not None and summed is not None:
            input, shards = summed, replace(shards, sums_grad_input=False)
        context = self.context(
            use,
            compute_dtype=dtype,
            needs_grad=needs_grad,
            recipe=recipe,
            probe=probe,
            shards=shards,
            input_forms=forms,
        )
        try:
            output = lowbit_linear(input, self.weight, self.bias, context, factors)
        except BaseException:
            if shared is not None:
                shared.drop()
            raise
        if shared is not None and forms is not None:
            shared.end(forms, self.layer_name)
        return output

    def _choose(self, chooser: Chooser, use: Use, *, needs_grad: bool) -> tuple[Recipe, Probe | None]:
        """The chooser's recipe and probe for this use of the layer."""
        assert not self.is_split  # choosers reject recipes that split parameters
        cuda_graphs.refuse(
            self.weight.device,
            f"the precision that the chooser of {self.title} chooses for each step",
            "turn speculation off, or run this layer outside of the graph",
        )
        recipe = chooser.recipe(self.layer_name, self.recipe)
        if recipe is not self._recipe and recipe is not self._chosen:
            self.check_recipe(recipe)
            self._chosen = recipe
        if not use.is_training:
            return recipe, None
        if use.is_replay:
            is_first = (
                self._pending_probe is not None and self._pending_probe[0] == use.step and use.number == 0
            )
            return recipe, self._pending_probe[1] if self._pending_probe is not None and is_first else None
        probe = chooser.probe(self.layer_name, use)
        if probe is not None and not needs_grad and use.number == 0 and self.random_stream is not None:
            self._pending_probe = use.step, probe
        elif use.number and self._pending_probe is not None and self._pending_probe[0] == use.step:
            self._pending_probe = None  # several uses: unknown which one a forward repeats
        return recipe, probe

    def _check_input(self, input: object) -> None:
        if not isinstance(input, Tensor) or input.layout != torch.strided or input.is_nested:
            raise UserError(f"{self.title} expects a dense torch tensor, got {_named(input)}: convert it")
        if not torch.compiler.is_compiling():
            if is_sharded(self.weight):
                raise UserError(
                    f"{self.title} has a sharded weight: call the module that fully_shard was given, or do "
                    "not use parallelize_module"
                )
            reject_transforms(lambda: (input, *self.parameters()), self.title, "call restore(model)")
            if torch._C._is_tracing():
                raise UserError(
                    f"{self.title} cannot be traced by torch.jit: use torch.export, or call restore(model)"
                )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise UserError(
                f"{self.title} expects a last axis of {self.in_features}, "
                f"got an input of shape {tuple(input.shape)}"
            )
        if input.device != self.weight.device:
            raise UserError(
                f"{self.title} has its weight on {self.weight.device}, got an input on {input.device}: "
                "move one of them"
            )
        for role in ("input", "grad_output") if torch.is_grad_enabled() else ("input",):
            settings: OperandSplit | None = getattr(self.recipe, f"split_{role}")
            axis = None if settings is None else settings.broadcast_dim
            if axis is not None and axis >= input.dim() - 1:  # the output gradient has the same leading axes
                axes = f"0 to {input.dim() - 2}" if input.dim() > 1 else "none"
                raise UserError(
                    f"{self.title}: split_{role}.broadcast_dim = {axis} is not a leading axis of an input of "
                    f"shape {tuple(input.shape)} (leading axes: {axes}): set another, or null"
                )
        if self._needed_blocks:
            sizes = {
                "in_features": self.in_features,
                "out_features": self.out_features,
                "tokens": math.prod(input.shape[:-1]),
            }
            check_sizes(self._needed_blocks, self.title, sizes, is_training=self.training)

    def begin_use(self, step: int | None = None) -> Use:
        """Count a use of the layer.

        Args:
            step: the micro-batch, if the caller knows it better than the stream.
        """
        is_replay = is_recomputing()
        own = self._layer_stream
        stream = self.random_stream or own.advance(is_training=self.training, is_replay=is_replay)
        step = stream.step if step is None else step
        is_next = self.training and not is_replay and stream.is_finished(step)
        # a hook has begun the micro-batch of the model's forward, and a CUDA graph begins one at each replay
        if is_next and not has_begun_forward(stream) and not cuda_graphs.is_capturing(self.weight.device):
            step = stream.begin(step)
        number = self._uses.next(step, is_replay=is_replay)
        if self.random_stream is None:
            own.repeat_seed_draw(step, number, is_replay=is_replay)
        return Use(step, number, is_replay, self.training)

    def set_data_rank(self, rank: int, *, overrides: bool = True) -> None:
        """Set the data-parallel rank whose random numbers the layer draws.

        With `overrides=False`, a stream that was given a rank keeps it.
        """
        stream = self.random_stream
        if stream is None:
            stream, self._layer_stream.rank = self._layer_stream.stream, rank
        if stream is not None and (overrides or stream.given_rank is None):
            stream.rank = rank

    def context(
        self,
        use: Use,
        *,
        compute_dtype: torch.dtype,
        needs_grad: bool,
        recipe: Recipe | None = None,
        probe: Probe | None = None,
        shards: ShardedOperands | None = None,
        input_forms: InputForms | None = None,
    ) -> MatmulContext:
        """The context of one use of the layer; forward and backward may both call it.

        Args:
            use: as returned by `begin_use`.
            compute_dtype: dtype of the GEMMs and the output.
            needs_grad: whether autograd records a graph.
            recipe: for this use; default: the layer's.
            probe: inspects operands and products, or `None`.
            shards: `self.shards`, possibly changed for this use; default: unchanged.
            input_forms: shared with siblings, or `None`.
        """
        recipe = self.recipe if recipe is None else recipe
        stream = self.random_stream or self._layer_stream.stream
        assert stream is not None  # created by begin_use
        observer = self.observer if use.is_training else None
        if observer is not None:
            cuda_graphs.refuse(
                self.weight.device,
                f"the counts of {self.title}, but not the calls of its observer",
                "call set_observer(model, None) before the capture",
            )
        if self.input_record is not None or self._counts_static_inputs:
            cuda_graphs.refuse(
                self.weight.device,
                f"the record of the inputs of {self.title}, but not its beginning and end",
                "capture outside of record_inputs and of counts of static inputs",
            )
        return MatmulContext(
            recipe=recipe,
            compute_dtype=compute_dtype,
            random_key=partial(self.random_key, use),
            hadamard_signs=self._hadamard_signs(stream, recipe, use),
            observe=None if observer is None else partial(self._observe, observer),
            count=self._product_counts.add,
            fp8_counts=self._product_counts.on_device,
            weights=self._weight_slot_outside_graphs(),
            # ZeRO 3 gathers the weight to another address for each use
            keeps_until_cleared=self.shards is not None or hasattr(self.weight, "ds_id"),
            is_replay=use.is_replay,
            needs_grad=needs_grad,
            step=use.step,
            finish=partial(stream.finish, use.step) if use.is_training else self._warn_of_evaluation,
            sizes=self.sizes,
            title=self.title,
            split_state=partial(self._split_state, use),
            shards=self.shards if shards is None else shards,
            probe=probe,
            input_forms=input_forms,
            input_record=self.input_record,
            static_input=None if self.training else self.static_input,
        )

    def _weight_slot_outside_graphs(self) -> WeightSlot | None:
        """The slot; none in a graph, which would repeat a look-up and keep codes that only replays write."""
        slot = self.weight_slot
        return None if slot is None or cuda_graphs.is_capturing(self.weight.device) else slot

    def _hadamard_signs(self, stream: RandomStream, recipe: Recipe, use: Use) -> int:
        if not recipe.hadamard:
            return 0
        if recipe.redraws_signs:
            cuda_graphs.refuse(
                self.weight.device,
                f"the signs of the Hadamard transform, which {self.title} draws for each micro-batch",
                "run this layer outside of the graph, or choose a recipe without ':eden'",
            )
        return stream.hadamard_signs(use.step if recipe.redraws_signs else None)

    def random_key(self, use: Use, role: str, device: torch.device) -> RandomKey:
        """The key of an operand's random numbers in one use."""
        stream = self.random_stream or self._layer_stream.stream
        assert stream is not None  # created by begin_use
        stream.check(device)
        is_shared = OPERANDS[role] == "weight"
        shard = None if self.shards is None else self.shards.shard_of(role)
        name = self.layer_name
        if self.siblings and role in INPUT_ROLES and shares_input(self._recipe):
            name = self.siblings[0]  # the same numbers for all siblings, so the same codes
        is_repeatable = role.endswith("_split") and not use.is_training
        number = 0 if is_repeatable else use.number  # evaluations of one input start splits alike
        return stream.key(name, role, step=use.step, use=number, is_shared=is_shared, shard=shard)

    def _warn_of_evaluation(self) -> None:
        if self.observer is not None:
            warn_of_uncounted()

    def _observe(self, observer: Observer, role: str, counts: Tensor, error: Tensor) -> None:
        if self.shards is None or self.shards.is_reported(role):
            observer.observe(self.layer_name, role, counts, error)

    def _split_state(self, use: Use, role: str) -> SplitState:
        """The state that the split of an operand keeps; an evaluation gets a copy, so it changes nothing."""
        state = self.split_states.setdefault(role, SplitState())
        return state if use.is_training else state.copy()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: without chooser and record, which belong to the original's layers."""
        none = dict.fromkeys(("chooser", "_chosen", "_pending_probe", "input_record"))
        return {**self.__dict__, **none}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled state, with a new handle and without the original's weight cache."""
        new = dict.fromkeys(("shared_input", "input_record", "static_input"))
        state = {"siblings": (), **new, "_product_counts": ProductCounts(), **state}
        super().__setstate__(state)  # older pickles lack some of these
        self.weight_slot, self.handle = None, register(self)
        self._needed_blocks = needed_blocks(self._recipe)

    def extra_repr(self) -> str:
        """Sizes as `nn.Linear` prints them, the recipe's name, and the rank where the weight is split."""
        split = f", split at rank {self.split_s.numel()}" if self.is_split else ""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}{split}"
