"""`PrecisionController` runs each product of a model at the cheapest precision predicted to be safe.

    controller = mlb.PrecisionController(model, {"candidates": ["int8", "fp8", "bf16"], "threshold_db": 15})
    for batch in batches:
        controller.begin_step()
        ...                              # forward and backward of all micro-batches, then the optimizer
        report = controller.end_step()   # None in steps without a precision check

There is a precision check every `every` steps:

1. The probes (`probe`) compute statistics of the operands on the device, for the first training use of each
   layer in the step. In a *verified* check they also compare products with high precision, at the precision
   of the step and at all candidates. Verified are the first `verify_every` checks, then every
   `verify_every`-th one.
2. `end_step` combines the results of all ranks (`exchange`) and reads them once.
3. It predicts the SNR of each product at each candidate (`noise`) and decides (`policy`).

A decision is in force until the next check. Between checks a layer pays for one dictionary look-up. A layer
that does not run in a step with a check keeps its precision.

Recipes with splits, Hadamard transforms or separate copies for each product are rejected. For a layer used
several times in a step, only the first use counts. Every rank has the decisions of all layers, including
those of other pipeline stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.layers.conversion.convert import bit_layers, set_chooser
from megalowbit.layers.layer_recipe import operand_quantizers
from megalowbit.layers.matmul.slots import Probe
from megalowbit.layers.matmul.use_counter import Use
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.speculation.agreement import agreed
from megalowbit.speculation.counters import PrecisionCounters
from megalowbit.speculation.exchange import Findings
from megalowbit.speculation.noise import predict_candidates
from megalowbit.speculation.policy import RESTART, Policy, finite_or_none
from megalowbit.speculation.precisions import OPERANDS, PRODUCTS, recipe_with
from megalowbit.speculation.probe import PrecisionCheck, ProductProbe, RankFindings
from megalowbit.speculation.report import Change, GemmRow, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import SpeculationSettings

Gemm = tuple[str, str]  # layer, product


class PrecisionController:
    """Chooses the precision of a model's products between optimizer steps; implements `Chooser` for layers.

    Args:
        model: converted with a recipe that `precisions.check_base` accepts. A pipeline stage may have no
            layers.
        settings: `SpeculationSettings`, or a mapping with the same keys.
        group: the ranks that decide together; `None`: all. Creating a controller is collective over the
            group.

    Attributes:
        settings: the validated settings.
        step: number of finished optimizer steps.

    Raises:
        UserError: a setting, recipe or layer is not supported; raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: SpeculationSettings | Mapping[str, Any],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._layers = {layer.layer_name: layer for layer in bit_layers(model).values()}
        self.settings, self._exchange = agreed(model, settings, group)
        self._policy = Policy(self.settings)
        self.step = 0
        self._checks = 0
        self._check_at: int | None = None  # a step to check in addition to every `every`-th
        self._states = {(name, product): self._policy.start() for name in self.layers for product in PRODUCTS}
        self._has_run: set[Gemm] = set()
        self._counters = PrecisionCounters()
        self._recipes: dict[str, tuple[Recipe, Recipe]] = {}  # layer → (its own recipe, the one it runs with)
        self._is_in_step = False
        self._check: PrecisionCheck | None = None
        self._checked: set[str] = set()
        self._is_attached = True
        if self._layers:
            set_chooser(model, self)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers on all ranks."""
        return self._exchange.layers

    def precision(self, layer: str, product: str) -> str:
        """The precision that a product of a layer runs at now.

        Raises:
            UserError: there is no such layer or product.
        """
        state = self._states.get((layer, product))
        if state is None:
            if product not in PRODUCTS:
                raise unknown_name("product", product, PRODUCTS)
            raise unknown_name("layer", layer, self.layers)
        return state.precision

    def recipe(self, layer: str, base: Recipe) -> Recipe:
        """See `layers.matmul.slots.Chooser.recipe`."""
        known = self._recipes.get(layer)
        if known is None or known[0] is not base:
            choice = [self.precision(layer, product) for product in PRODUCTS]
            known = self._recipes[layer] = (base, recipe_with(base, choice))
        return known[1]

    def probe(self, layer: str, use: Use) -> Probe | None:
        """See `matmul.slots.Chooser.probe`; a probe for the first training use of each layer in a check."""
        if self._check is None or layer in self._checked or use.is_replay or not use.is_training:
            return None
        self._checked.add(layer)
        recipe = self._layers[layer].recipe
        unquantized = {product: _unquantized_sides(recipe, product) for product in PRODUCTS}
        return ProductProbe(self._check, layer, unquantized)

    def check_next(self) -> None:
        """Check the next step as well; called within a step, the step after it. Call it on all ranks.

        Use it after layers have changed, for example after a late switch to high precision.
        """
        self._check_at = self.step + self._is_in_step

    look_next = check_next  # the former name

    def begin_step(self) -> None:
        """Call before the first forward of an optimizer step, and again when the step is retried.

        Raises:
            UserError: the controller was detached.
        """
        if not self._is_attached:
            raise UserError("this PrecisionController was detached from its model: create a new one")
        self._is_in_step = True
        self._checked.clear()
        self._check = None
        if self.step % self.settings.every == 0 or self.step == self._check_at:
            verify_every = self.settings.verify_every
            # corrections change fastest at the start of training
            is_verified = verify_every > 0 and (
                self._checks < verify_every or self._checks % verify_every == 0
            )
            self._check = PrecisionCheck(
                step=self.step,
                candidates=self.settings.candidates[:-1],
                estimator=self.settings.estimator,
                verify_size=self.settings.verify_size if is_verified else 0,
                findings=RankFindings(),
            )

    def end_step(self) -> SpeculationReport | None:
        """Call after the last backward of a step; collective in steps with a check.

        Returns:
            Results and decisions; `None` in steps without a check.

        Raises:
            UserError: `begin_step` was not called.
        """
        if not self._is_in_step:
            raise UserError("end_step was called outside a step: call begin_step before the first forward")
        check, self._check, self._is_in_step = self._check, None, False
        report = None
        if check is None:
            self._counters.count_step(Counter(self._states[gemm].precision for gemm in self._has_run))
        else:
            report = self._decide(check, self._pool(check))
            self._checks += 1
        self.step += 1
        return report

    def totals(self) -> SpeculationTotals:
        """Totals over all steps so far; the same on all ranks."""
        return self._counters.totals(self.settings.candidates)

    def detach(self) -> None:
        """Give the layers their own recipes back. The controller cannot be used afterwards."""
        if self._layers and self._is_attached:
            set_chooser(self._model, None)
        self._is_attached = False

    def state_dict(self) -> dict[str, Any]:
        """The whole state as plain JSON values; the same on all ranks, loadable on any number of them."""
        return {
            "step": self.step,
            "looks": self._checks,
            "look_at": self._check_at,
            "layers": {
                layer: {product: self._states[layer, product].to_dict() for product in PRODUCTS}
                for layer in self.layers
            },
            "has_run": [list(gemm) for gemm in self._states if gemm in self._has_run],
            "totals": self._counters.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; call it between two steps.

        Raises:
            UserError: the state has other layers or other candidates, or was not written by `state_dict`.
        """
        try:
            layers = state["layers"]
            self._check_names(layers)
            states = {
                (layer, product): self._policy.restore(layers[layer][product])
                for layer in self.layers
                for product in PRODUCTS
            }
            has_run = {(str(layer), str(product)) for layer, product in state["has_run"]}
            counters = PrecisionCounters.from_dict(state["totals"])
            step, checks = _count(state, "step"), _count(state, "looks")
            check_at = None if state["look_at"] is None else _count(state, "look_at")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the saved state of speculation is not readable ({error!r}): load one written by "
                f"PrecisionController.state_dict, or {RESTART}"
            ) from error
        self.step, self._checks, self._states = step, checks, states
        self._check_at, self._counters = check_at, counters
        self._has_run = has_run & states.keys()
        self._recipes.clear()
        self._is_in_step, self._check = False, None

    def _check_names(self, saved: Mapping[str, Any]) -> None:
        missing = [name for name in self.layers if name not in saved]
        foreign = [name for name in saved if name not in self.layers]
        if not missing and not foreign:
            return
        found = f"it lacks {shown(missing[0])}" if missing else f"it has {shown(foreign[0])}"
        more = len(missing) + len(foreign) - 1
        raise UserError(
            f"the saved state of speculation belongs to other layers: {found}"
            + (f" and {more} more differ" if more else "")
            + f"; load the state of this model, or {RESTART}"
        )

    def _pool(self, check: PrecisionCheck) -> Findings:
        unquantized = {
            (name, product): _unquantized_sides(layer.recipe, product)
            for name, layer in self._layers.items()
            for product in PRODUCTS
        }
        seen = next(iter(check.findings.statistics.values()), None)
        device = torch.device("cpu") if seen is None else seen.device
        decisions = [state.precision for state in self._states.values()]
        return self._exchange.pool(check.findings, unquantized, decisions, device)

    def _decide(self, check: PrecisionCheck, findings: Findings) -> SpeculationReport:
        rows, changes = [], []
        for gemm in self._states:
            if gemm not in findings.ran:
                continue
            self._has_run.add(gemm)
            row, change = self._decide_product(gemm, check.step, findings)
            rows.append(row)
            changes += [] if change is None else [change]
        self._recipes.clear()
        counts = Counter(row.precision for row in rows)
        hits = sum(row.is_hit is True for row in rows)
        misses = sum(row.is_hit is False for row in rows)
        self._counters.count_step(counts)
        self._counters.count_check(hits, misses, changes)
        shares = {
            candidate: counts[candidate] / len(rows) if rows else 0.0
            for candidate in self.settings.candidates
        }
        return SpeculationReport(
            step=check.step, rows=tuple(rows), changes=tuple(changes), shares=shares, hits=hits, misses=misses
        )

    def _decide_product(self, gemm: Gemm, step: int, findings: Findings) -> tuple[GemmRow, Change | None]:
        """Update the state of one product; returns its row of the report, and its change if it has one."""
        layer, product = gemm
        before, candidates = self._states[gemm], self.settings.candidates
        operands = [findings.statistics.get((layer, role)) for role in OPERANDS[product]]
        unquantized = findings.unquantized[gemm]
        # after a late switch the product already runs in high precision, whatever was decided before
        used = candidates[-1] if all(unquantized) else before.precision
        left, right = operands
        if left is None or right is None:  # empty operands
            return GemmRow(layer=layer, product=product, precision=used, reason=before.reason), None
        predicted = predict_candidates(left, right, len(candidates) - 1, unquantized=unquantized)
        state, is_hit, measured = before, None, math.nan
        verification = findings.verified.get(gemm)
        if verification is not None:
            if used != candidates[-1]:
                measured = verification.measured_db
                state, is_hit = self._policy.verify(state, step, measured)
            for index, candidate in enumerate(candidates[:-1]):
                state = self._policy.correct(state, candidate, verification.correction_db(index))
        state = self._policy.decide(state, step, predicted)
        self._states[gemm] = state
        row = GemmRow(
            layer=layer,
            product=product,
            precision=used,
            predicted_db=finite_or_none(self._policy.corrected(before, predicted)[candidates.index(used)]),
            measured_db=finite_or_none(measured),
            is_hit=is_hit,
            reason=before.reason,
            left_ratio=finite_or_none(left.ratio),
            right_ratio=finite_or_none(right.ratio),
        )
        if state.precision == used:
            return row, None
        next_db = self._policy.corrected(state, predicted)[candidates.index(state.precision)]
        return row, Change(
            layer=layer,
            product=product,
            before=used,
            after=state.precision,
            reason=state.reason,
            predicted_db=finite_or_none(next_db),
        )


def _unquantized_sides(recipe: Recipe, product: str) -> tuple[bool, bool]:
    """Whether a layer's own recipe leaves the left and right operand of a product unquantised."""
    left, right = operand_quantizers(recipe, product)
    return quantizer(left).is_identity, quantizer(right).is_identity


def _count(state: Mapping[str, Any], name: str) -> int:
    """A saved number of steps or checks."""
    count = state[name]
    if type(count) is not int or count < 0:
        raise ValueError(f"{name} = {count!r}")
    return count
