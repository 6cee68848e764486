"""BitLinear: `nn.Linear` whose three GEMMs run on low-precision operands.

Parameters, their names, shapes and dtypes are those of `nn.Linear`, so checkpoints pass both ways. It
computes in its input's dtype, or in autocast's where that is on; the weight is quantised from the dtype it
is kept in. Slots, filled by `megalowbit.convert` and its callers: the layer's name, a random stream shared
by the model, an observer. Without a stream the layer makes its own at its first forward, seeded from torch's
default CPU generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.layers.lowbit_matmul import WEIGHT_ROLES, Call, lowbit_linear
from megalowbit.layers.observer import Observer
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.use_counter import UseCounter, is_recomputing
from megalowbit.quantize.random_stream import RandomStream


class BitLinear(nn.Linear):
    """A linear layer in low precision: y = Q(x) · Q(W)ᵀ + b.

    Args:
        in_features: size of the input's last axis; need not be a multiple of the block size.
        out_features: size of the output's last axis.
        bias: whether to add one (kept in high precision).
        recipe: a recipe, its name, or a configuration block.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        recipe: the quantisers.
        layer_name: its name in the model; part of the key of its random numbers.
        observer: takes counts in training mode, or `None`.
        random_stream: shared by the model's layers; whoever attaches it advances it. `None`: the layer's own.
        is_transposed: whether it stands for a transformers `Conv1D`, which keeps its weight as (in, out).
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
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.fill_slots(recipe_of(recipe))

    def fill_slots(self, recipe: Recipe, *, layer_name: str = "", is_transposed: bool = False) -> None:
        """Set everything that `nn.Linear` does not have; parameters stay as they are."""
        self.recipe = recipe
        self.layer_name = layer_name
        self.is_transposed = is_transposed
        self.observer: Observer | None = None
        self.random_stream: RandomStream | None = None
        self._own_stream: RandomStream | None = None
        self._seeded_at: tuple[int, int] | None = None  # micro-batch and use that drew the stream's seed
        self._uses = UseCounter()

    def forward(self, input: Tensor) -> Tensor:
        """Multiply: y = Q(x) · Q(W)ᵀ + b.

        Args:
            input: (…, in_features), one axis at least.

        Returns:
            (…, out_features), in the input's dtype or autocast's.

        Raises:
            UserError: the last axis has another size.
        """
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise UserError(
                f"BitLinear {self.layer_name!r} expects a last axis of {self.in_features}, "
                f"got an input of shape {tuple(input.shape)}"
            )
        return lowbit_linear(input, self.weight, self.bias, self._call(input))

    def _call(self, input: Tensor) -> Call:
        device = input.device.type
        is_replay = is_recomputing()
        stream = self.random_stream or self._advanced_own_stream(is_replay=is_replay)
        step = stream.step
        use = self._uses.next(step, is_replay=is_replay)
        if self.random_stream is None:
            self._keep_torchs_generator_in_step(step, use, is_replay=is_replay)
        name = self.layer_name

        def generator(role: str, device: torch.device) -> torch.Generator:
            key = role if use == 0 else f"{role}#{use}"
            return stream.generator(name, key, device, step=step, is_shared=role in WEIGHT_ROLES)

        observer = self.observer

        def observe(role: str, counts: Tensor, error: Tensor) -> None:
            if observer is not None:
                observer.observe(name, role, counts, error)

        return Call(
            recipe=self.recipe,
            compute_dtype=(
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
            ),
            generator=generator,
            observe=observe if observer is not None and self.training else None,
            is_replay=is_replay,
            needs_grad=torch.is_grad_enabled(),
        )

    def _advanced_own_stream(self, *, is_replay: bool) -> RandomStream:
        if self._own_stream is None:
            self._own_stream = RandomStream(_draw_seed())
        if self.training and not is_replay:
            self._own_stream.advance()
        return self._own_stream

    def _keep_torchs_generator_in_step(self, step: int, use: int, *, is_replay: bool) -> None:
        if self._seeded_at is None:
            self._seeded_at = (step, use)
        elif is_replay and self._seeded_at == (step, use):
            # Checkpointing has set torch's generator back to before the seed was drawn. Draw it again, or
            # dropouts behind this layer would not recompute the masks they had.
            _draw_seed()

    def extra_repr(self) -> str:
        """Sizes as `nn.Linear` prints them, and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"


def _draw_seed() -> int:
    """A seed that no other layer has, without asking a device."""
    return int(torch.randint(2**62, (), device="cpu"))
