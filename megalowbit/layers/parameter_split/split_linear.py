"""A linear layer whose weight may be split into parameters: W = W_R + U·diag(S)·V.

A layer whose recipe has `parameter_split` has the parameters `split_u` (out, k), `split_s` (k,) and `split_v`
(k, in) from its creation. They are zero and unused until the split, so parameter lists, optimizer groups and
checkpoints have the same structure before and after. After the split, `weight` is W_R, and only W_R is
quantised. `matmul.weight_factors` multiplies the factors, and `engine.parameters.split` performs the split. A
layer detects from its parameters whether it is split: the rows of V have length 1 after a split and are zero
before, even if the weight itself is zero.

In a state dict `weight` is the full weight, because `from_pretrained` and other programs read `weight` alone.
In addition there are `split_u`, `split_s`, `split_v` and `split_residual`, which is W_R (out, in). With these
the layer continues with the same bits; loading compares them with the full weight. A weight without the other
parts is a full weight, and the factors become zero. megalowbit's checkpoints contain `weight` and the factors
without `split_residual`; there `weight` is W_R.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.state_dict_layout import HFStateDict
from megalowbit.spectral.settings import ParameterSplit
from megalowbit.spectral.weight_split import WeightParts, full_weight

SPLIT_NAMES = ("split_u", "split_s", "split_v")
RESIDUAL = "split_residual"
# The full weight and its four parts may each have been rounded to another dtype, with an error of at most
# half an epsilon: 2.5 epsilons of the largest of them if all errors add up, plus the rounding of the sum.
MAX_ROUNDINGS = 4


class SplitLinear(HFStateDict):
    """A linear layer with or without factors in addition to its weight.

    Attributes:
        split_u, split_s, split_v: the factors, if the layer was created with them.
        is_split: whether the weight is W_R + U·diag(S)·V; set by the code that changes the parameters.
        weight_decay_rules: which factors decay, for `optim.optimizers.param_groups`. Scaling S alone scales
            U·diag(S)·V by the same factor as the same decay scales W_R.
    """

    split_u: nn.Parameter
    split_s: nn.Parameter
    split_v: nn.Parameter
    is_split: bool = False
    weight_decay_rules = MappingProxyType({"split_u": False, "split_s": True, "split_v": False})

    @property
    def sizes(self) -> tuple[int, int]:
        """in_features and out_features."""
        return self.in_features, self.out_features

    @property
    def has_factors(self) -> bool:
        """Whether the layer can be split."""
        return "split_v" in self._parameters

    def add_factors(self, settings: ParameterSplit) -> None:
        """Add zero factors to the layer's parameters."""
        weight, rank = self.weight, settings.rank_of(*self.sizes)
        shapes = ((self.out_features, rank), (rank,), (rank, self.in_features))
        self._parameters = {**self._parameters}  # a layer made from another one shares its dictionary
        for name, shape in zip(SPLIT_NAMES, shapes, strict=True):
            zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(zeros, requires_grad=weight.requires_grad))

    def check_recipe(self, recipe: Recipe) -> None:
        """Reject a recipe whose split does not fit the layer's parameters; a recipe without a split fits.

        Raises:
            UserError: the layer has no factors, or factors of another rank.
        """
        if recipe.parameter_split is None:
            return
        rank = recipe.parameter_split.rank_of(*self.sizes)
        found = len(self.split_s) if self.has_factors else 0
        if found != rank:
            raise UserError(
                f"recipe {recipe.name!r} has a parameter_split of rank {rank}, but the layer was "
                f"created with {f'one of rank {found}' if found else 'none'}: convert the model "
                "with this recipe"
            )

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_R (stored in `weight`), U, S and V."""
        return self.weight, self.split_u, self.split_s, self.split_v

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The full weight (out, in), split or not, in the dtype of its parameter."""
        if not self.is_split:
            return self.weight.detach()
        return joined(*(part.detach() for part in self.parts()))

    @torch.no_grad()
    def holds_split(self) -> bool:
        """Whether the parameters are those of a split weight; false for tensors without values."""
        if not self.has_factors or self.split_v.is_meta or isinstance(self.split_v, FakeTensor):
            return False
        return bool(self.split_v.any())

    def reset_parameters(self) -> None:
        """A new random full weight; factors become zero."""
        super().reset_parameters()
        if self.has_factors:
            for name in SPLIT_NAMES:
                nn.init.zeros_(getattr(self, name))
            self.is_split = False

    def put_in_hf_layout(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """See `HFStateDict`; the weight becomes the full one, and W_R moves to `split_residual`."""
        weight, factors = f"{prefix}weight", [prefix + name for name in SPLIT_NAMES]
        if self.is_split and all(name in state for name in (weight, *factors)) and state[weight].dim() == 2:
            residual = state[weight]
            state[weight] = joined(residual, *(state[name] for name in factors))
            state[prefix + RESIDUAL] = residual
        super().put_in_hf_layout(state, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        try:
            state_dict = self._completed(state_dict, prefix)
        except UserError as error:
            arguments[-1].append(str(error))  # reported with torch's own messages; the layer does not change
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.is_split = self.holds_split()

    def _completed(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A state dict from which the parameters can be read under their own names.

        `state_dict` is not modified, and may lack entries of the layer.

        Raises:
            UserError: it has only some parts of a split weight, which is an error even if missing keys are
                allowed; the parts do not add up to the weight; or it has W_R for a layer without factors.
        """
        weight, residual = f"{prefix}weight", prefix + RESIDUAL
        names = [prefix + name for name in SPLIT_NAMES]
        if not self.has_factors:
            _refuse_residual(state_dict, weight, residual, names)
            return state_dict
        if residual in state_dict and not self._is_in_parameter_layout:
            _check_complete(state_dict, [residual, *names])
            self._check_sum(state_dict, prefix)
            value = state_dict[residual]
            state_dict = {name: each for name, each in state_dict.items() if name != residual}
            return {**state_dict, weight: value.t() if self.is_transposed else value}
        if weight in state_dict and not any(name in state_dict for name in names):
            like = state_dict[weight]
            zeros = [
                torch.zeros(part.shape, dtype=like.dtype, device=like.device) for part in self.parts()[1:]
            ]
            return {**state_dict, **dict(zip(names, zeros, strict=True))}
        if any(name in state_dict for name in names):
            _check_complete(state_dict, [weight, *names])
        return state_dict

    @torch.no_grad()
    def _check_sum(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Check that the parts and the full weight in a state dict are the same weight."""
        given = state_dict.get(f"{prefix}weight")
        parts = [state_dict[prefix + name].detach() for name in (RESIDUAL, *SPLIT_NAMES)]
        if given is None or any(each.is_meta or isinstance(each, FakeTensor) for each in (given, *parts)):
            return
        given = given.detach().t() if self.is_transposed else given.detach()
        shapes = [part.shape for part in self.parts()]
        if [each.shape for each in (given, *parts)] != [shapes[0], *shapes]:
            return  # torch reports wrong shapes when it copies
        if not all(each.is_floating_point() for each in (given, *parts)):
            return
        whole = joined(*parts)
        eps = max(torch.finfo(each.dtype).eps for each in (given, *parts))
        terms = (given.double(), parts[0].double(), whole.double() - parts[0].double())
        largest = max(float(torch.linalg.vector_norm(each)) for each in terms)
        difference = float(torch.linalg.vector_norm(whole.double() - given.double()))
        if difference > MAX_ROUNDINGS * eps * largest:
            raise UserError(
                f"{prefix}weight and the parts it was split into ({prefix}{RESIDUAL} and the three factors) "
                "are different weights: change all of them, or leave the parts out to load the weight alone"
            )


def _check_complete(state_dict: Mapping[str, Any], names: list[str]) -> None:
    lacking = [name for name in names if name not in state_dict]
    if lacking:
        found = [name for name in names if name in state_dict]
        raise UserError(
            f"{', '.join(found)} without {', '.join(lacking)} is an incomplete split weight: load all four, "
            "or the full weight alone"
        )


def _refuse_residual(state_dict: Mapping[str, Any], weight: str, residual: str, names: list[str]) -> None:
    is_whole = residual in state_dict or not all(name in state_dict for name in (weight, *names))
    if is_whole or state_dict[names[-1]].is_meta or not bool(state_dict[names[-1]].any()):
        return
    raise UserError(
        f"{weight} is the residual of a split weight ({', '.join(names)}), and this layer has no factors: "
        "convert the model with the recipe's parameter_split, or load the full weight"
    )


def joined(residual: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """The full weight of the four parts, in the dtype of the residual."""
    return full_weight(WeightParts(residual, u, s, v)).to(residual.dtype)
