"""`PrecisionController`: each product of a model at the cheapest precision that is foreseen to be safe.

    controller = mlb.PrecisionController(model, {"ladder": ["int8", "fp8", "bf16"], "threshold_db": 15})
    for batch in batches:
        controller.begin_step()
        ...                              # forward and backward, as many as a step has; optimizer
        report = controller.end_step()   # of a step that was looked at, otherwise None

Every `every` steps is a look: of the first training use of each layer in the step, operands are described on
the device, and the first looks and then every `verify_every`-th one also compare products with high-precision
ones (`probe`). So does, for a layer in which a product has come to another quantised precision, the next
look, for nothing has been measured there yet. `end_step` pools that over all ranks (`exchange`), reads it
once, foretells what each precision would do (`noise`) and decides (`policy`). Decisions hold until the next
look; in between a layer costs one search of a dictionary. A layer that does not run in a step that is looked
at keeps its precision.

Recipes with splits, Hadamard transforms or a copy for each product are refused. A layer used several times in
a step is judged by its first use. Each rank knows the decisions of all layers, also of other pipeline stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.layers.conversion.convert import bit_layers, set_chooser
from megalowbit.layers.matmul.slots import Probe
from megalowbit.layers.matmul.use_counter import Use
from megalowbit.layers.recipe import Recipe, operand_quantizers
from megalowbit.quantize.names import quantizer
from megalowbit.speculation.agreement import agreed
from megalowbit.speculation.counters import PrecisionCounters
from megalowbit.speculation.exchange import Findings, Verification
from megalowbit.speculation.noise.product import predict_snr_db
from megalowbit.speculation.policy import GemmState, Policy, finite_or_none
from megalowbit.speculation.precisions import OPERANDS, PRODUCTS, quantizers_of, recipe_with
from megalowbit.speculation.probe import PrecisionCheck, ProductProbe, RankFindings
from megalowbit.speculation.report import Change, GemmRow, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import SpeculationSettings
from megalowbit.speculation.statistics import OperandStatistics

Gemm = tuple[str, str]  # layer, product
IDENTITY = "fp32"


class PrecisionController:
    """Chooses precisions of a model's products between optimizer steps; the layers' `Chooser`.

    Args:
        model: converted with a recipe that `precisions.check_base` accepts; a pipeline stage may have none.
        settings: of speculation, or a mapping of them.
        group: ranks that decide together; `None`: all. Making a controller is collective over it.

    Attributes:
        settings: validated.
        step: optimizer steps finished.

    Raises:
        UserError: settings, a recipe or a layer do not allow it; on all ranks alike.
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
        self._looks = 0
        self._look_at: int | None = None  # a step to be looked at whatever `every` says
        # at a precision which they have not been measured at since they came
        self._unproven: set[Gemm] = set()
        self._states = {(name, product): self._policy.start() for name in self.layers for product in PRODUCTS}
        self._has_run: set[Gemm] = set()
        self._counters = PrecisionCounters()
        self._recipes: dict[str, tuple[Recipe, Recipe]] = {}  # layer → its own recipe, what it runs with
        self._is_in_step = False
        self._look: PrecisionCheck | None = None
        self._looked: set[str] = set()
        self._is_attached = True
        if self._layers:
            set_chooser(model, self)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of all ranks."""
        return self._exchange.layers

    def precision(self, layer: str, product: str) -> str:
        """What a product of a layer runs at now.

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
        """See `matmul.slots.Chooser.probe`: looks at the first training use of each layer in a step."""
        if self._look is None or layer in self._looked or use.is_replay or not use.is_training:
            return None
        self._looked.add(layer)
        is_unproven = any((layer, product) in self._unproven for product in PRODUCTS)
        if is_unproven and self.settings.verify_every:
            return ProductProbe(replace(self._look, verify_size=self.settings.verify_size), layer)
        return ProductProbe(self._look, layer)

    def look_next(self) -> None:
        """Look at the coming step, whatever `every` says; in a step, the one after it. All ranks alike.

        For whoever knows that products have changed, as by a late switch of layers to full precision.
        """
        self._look_at = self.step + self._is_in_step

    def begin_step(self) -> None:
        """Call before the first forward of an optimizer step; once more where the step is begun anew.

        Raises:
            UserError: the controller was detached.
        """
        if not self._is_attached:
            raise UserError("this PrecisionController was detached from its model: make another one")
        self._is_in_step = True
        self._looked.clear()
        self._look = None
        if self.step % self.settings.every == 0 or self.step == self._look_at:
            verify_every = self.settings.verify_every
            # alignment changes fastest at the beginning
            is_verified = verify_every > 0 and (self._looks < verify_every or self._looks % verify_every == 0)
            self._look = PrecisionCheck(
                step=self.step,
                estimator=self.settings.estimator,
                signal=self.settings.signal,
                verify_size=self.settings.verify_size if is_verified else 0,
                sheet=RankFindings(),
            )

    def end_step(self) -> SpeculationReport | None:
        """Call after the last backward of a step; collective in steps that are looked at.

        Returns:
            What was found and decided; `None` in steps without a look.

        Raises:
            UserError: no step was begun.
        """
        if not self._is_in_step:
            raise UserError(
                "end_step ends a step that was not begun: call begin_step before its first forward"
            )
        look, self._look, self._is_in_step = self._look, None, False
        report = None
        if look is None:
            self._counters.count_step(Counter(self._states[gemm].precision for gemm in self._has_run))
        else:
            report = self._decide(look, self._pool(look))
            self._looks += 1
        self.step += 1
        return report

    def totals(self) -> SpeculationTotals:
        """All steps so far; the same on all ranks."""
        return self._counters.totals(self.settings.ladder)

    def detach(self) -> None:
        """Let the layers run with their own recipes again; the controller is at its end."""
        if self._layers and self._is_attached:
            set_chooser(self._model, None)
        self._is_attached = False

    def state_dict(self) -> dict[str, Any]:
        """All decisions rest on, as plain JSON values; the same on all ranks, to be loaded by any number."""
        return {
            "step": self.step,
            "looks": self._looks,
            "look_at": self._look_at,
            "layers": {
                layer: {product: self._states[layer, product].to_dict() for product in PRODUCTS}
                for layer in self.layers
            },
            "has_run": [list(gemm) for gemm in self._states if gemm in self._has_run],
            "unproven": [list(gemm) for gemm in self._states if gemm in self._unproven],
            "totals": self._counters.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue between two steps where `state_dict` was taken.

        Raises:
            UserError: it is of other layers, of another ladder, or was not written by `state_dict`.
        """
        try:
            layers = state["layers"]
            self._check_names(layers)
            states = {
                (layer, product): self._policy.restore(layers[layer][product])
                for layer in self.layers
                for product in PRODUCTS
            }
            has_run, unproven = (
                {(str(layer), str(product)) for layer, product in state[name]}
                for name in ("has_run", "unproven")
            )
            counters = PrecisionCounters.from_dict(state["totals"])
            step, looks = _count(state, "step"), _count(state, "looks")
            look_at = None if state["look_at"] is None else _count(state, "look_at")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the saved state of speculation is not readable ({error!r}): "
                "load one written by PrecisionController.state_dict, or start decisions anew"
            ) from error
        self.step, self._looks, self._states = step, looks, states
        self._look_at, self._counters = look_at, counters
        self._has_run, self._unproven = has_run & states.keys(), unproven & states.keys()
        self._recipes.clear()
        self._is_in_step, self._look = False, None

    def _check_names(self, saved: Mapping[str, Any]) -> None:
        missing = [name for name in self.layers if name not in saved]
        foreign = [name for name in saved if name not in self.layers]
        if not missing and not foreign:
            return
        found = f"it lacks {shown(missing[0])}" if missing else f"it has {shown(foreign[0])}"
        more = len(missing) + len(foreign) - 1
        raise UserError(
            f"the saved state of speculation is of other layers: {found}"
            + (f" and {more} more differ" if more else "")
            + "; load the state of this model, or start decisions anew"
        )

    def _pool(self, look: PrecisionCheck) -> Findings:
        unquantized = {
            (name, product): _sides_left_alone(layer.recipe, product)
            for name, layer in self._layers.items()
            for product in PRODUCTS
        }
        seen = next(iter(look.sheet.statistics.values()), None)
        device = torch.device("cpu") if seen is None else seen.device
        decisions = [state.precision for state in self._states.values()]
        return self._exchange.pool(look.sheet, unquantized, decisions, device)

    def _decide(self, look: PrecisionCheck, findings: Findings) -> SpeculationReport:
        rows, changes = [], []
        for gemm in self._states:
            if gemm not in findings.ran:
                continue
            self._has_run.add(gemm)
            row, change = self._judge(gemm, look.step, findings)
            rows.append(row)
            changes += [] if change is None else [change]
        self._recipes.clear()
        counts = Counter(row.precision for row in rows)
        hits, misses = (sum(row.is_hit is verdict for row in rows) for verdict in (True, False))
        self._counters.count_step(counts)
        self._counters.count_look(hits, misses, changes)
        shares = {
            candidate: counts[candidate] / len(rows) if rows else 0.0 for candidate in self.settings.ladder
        }
        return SpeculationReport(
            step=look.step, rows=tuple(rows), changes=tuple(changes), shares=shares, hits=hits, misses=misses
        )

    def _judge(self, gemm: Gemm, step: int, findings: Findings) -> tuple[GemmRow, Change | None]:
        """What a product did in the step, and what it is to do; its state moves on."""
        layer, product = gemm
        before, ladder = self._states[gemm], self.settings.ladder
        operands = [findings.statistics.get((layer, role)) for role in OPERANDS[product]]
        left_alone = findings.unquantized[gemm]
        used = ladder[-1] if all(left_alone) else before.precision  # a late switch is in force at once
        left, right = operands
        if left is None or right is None:  # empty operands
            return GemmRow(layer=layer, product=product, precision=used, reason=before.reason), None
        predicted = self._predicted(product, left, right, left_alone)
        state, is_hit, measured = before, None, math.nan
        verification = findings.verified.get(gemm)
        if verification is not None:
            self._unproven.discard(gemm)
            if used != ladder[-1]:
                measured = verification.measured_db
            state, is_hit = self._learnt(state, step, predicted[ladder.index(used)], verification, used)
        state = self._policy.decide(state, step, predicted)
        self._states[gemm] = state
        if state.precision not in (before.precision, ladder[-1]):
            self._unproven.add(gemm)
        row = GemmRow(
            layer=layer,
            product=product,
            precision=used,
            predicted_db=finite_or_none(self._policy.corrected(before, predicted)[ladder.index(used)]),
            measured_db=finite_or_none(measured),
            is_hit=is_hit,
            reason=before.reason,
            left_ratio=finite_or_none(left.ratio),
            right_ratio=finite_or_none(right.ratio),
        )
        if state.precision == used:
            return row, None
        foretold = self._policy.corrected(state, predicted)[ladder.index(state.precision)]
        return row, Change(
            layer=layer,
            product=product,
            before=used,
            after=state.precision,
            reason=state.reason,
            predicted_db=finite_or_none(foretold),
        )

    def _learnt(
        self, state: GemmState, step: int, predicted: float, verification: Verification, used: str
    ) -> tuple[GemmState, bool | None]:
        """State after a measurement at the precision `used`, and whether it was a hit."""
        is_hit = None
        if used != self.settings.ladder[-1]:
            measured = verification.measured_db
            state, is_hit = self._policy.verify(state, step, measured)
            residual = measured - predicted - verification.alignment_db
            state = self._policy.correct(state, used, residual)
        state = self._policy.fade(state, used)
        return self._policy.align(state, verification.alignment_db), is_hit

    def _predicted(
        self,
        product: str,
        left: OperandStatistics,
        right: OperandStatistics,
        left_alone: tuple[bool, bool],
    ) -> list[float]:
        """Ratio in dB of each candidate, uncorrected; inf where nothing is quantised."""
        found = []
        for candidate in self.settings.ladder[:-1]:
            names = [
                IDENTITY if is_left_alone else name
                for name, is_left_alone in zip(quantizers_of(candidate, product), left_alone, strict=True)
            ]
            found.append(
                predict_snr_db(
                    (names[0], left),
                    (names[1], right),
                    model=self.settings.model,
                    signal=self.settings.signal,
                )
            )
        return [*found, math.inf]


def _sides_left_alone(recipe: Recipe, product: str) -> tuple[bool, bool]:
    """Whether a layer's own recipe leaves the left and right operand of a product as they are."""
    left, right = operand_quantizers(recipe, product)
    return quantizer(left).is_identity, quantizer(right).is_identity


def _count(state: Mapping[str, Any], name: str) -> int:
    """A saved number of steps or looks."""
    count = state[name]
    if type(count) is not int or count < 0:
        raise ValueError(f"{name} = {count!r}")
    return count
