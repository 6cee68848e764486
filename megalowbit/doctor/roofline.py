"""Estimates the time of a step: a roofline of products, memory and messages, with stated assumptions.

    step = (micro-batches + stages − 1) · (products + attention + quantisation + element-wise)
           + update + messages

Each term is work ÷ (vendor's peak · an efficiency of `EFFICIENCY`); a product also takes at least the time to
read and write its matrices. Terms do not overlap, except messages that DeepSpeed overlaps. The efficiencies
are assumptions, not measurements of this project: docs/doctor.md compares the result with published runs of
other programs. `--assume-mfu` replaces all of it by one number:

    step = FLOPs of the model for the step's tokens ÷ (processes · peak · MFU)

The peak is that of the run's precision, and FLOPs are the counted ones, as for the MFU of a run.

Not covered: kernels' launches, the data loader, host reads, splits, speculation, saves, validation, failures;
stragglers and congestion; power limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalowbit.doctor.gemms import ProductFormat, product_format, product_formats
from megalowbit.doctor.plan import Projection, RunPlan
from megalowbit.doctor.target import Target
from megalowbit.families.registry import family
from megalowbit.layers.layer_recipe import PRODUCTS
from megalowbit.layers.matmul.quantizations import Quantizations
from megalowbit.layers.recipe import Recipe

EFFICIENCY = MappingProxyType(
    {
        "products": 0.7,  # of the peak, in large products
        "attention": 0.4,  # of the peak in half precision, forward and backward
        "memory": 0.85,
        "network": 0.8,  # of link and network, in large messages
    }
)
# bytes for one element; quantising reads it twice (amax, then codes), writes codes and the product's operand
QUANTIZE_BYTES = 2 + 2 + 0.5625 + 2
DECODE_BYTES = 0.5625 + 2  # of kept codes, in backward
OPERAND_BYTES = MappingProxyType({"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625})
# Adam in fp32: gradient read and cleared, master and two moments read and written, half weight written
UPDATE_BYTES = 8 + 8 + 16 + 2
ACCUMULATE_BYTES = 8  # the fp32 sum of a weight's gradient, read and written in each micro-batch
# Element-wise operations of a block that is not compiled, in bytes an element in half precision: of the
# residual stream (two norms through fp32, two sums), of what rotary positions or biases touch, of the MLP's
# activation
RESIDUAL_BYTES, HEADS_BYTES, ACTIVATION_BYTES = 84, 20, 10
LOGIT_BYTES = 34  # logits and their gradients, in both precisions
ATTENTION_WORK = 7 / 6  # fused attention computes the scores again in backward
AMAX_CALLS, SMALL_MESSAGE = 12, 15e-6  # of a block and micro-batch with tensor parallelism (docs/scaling.md)
PCIE, HOST_MEMORY = 25e9, 100e9  # bytes/s of a device and of a host's share, for what ZeRO offloads


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step on the target.

    Attributes:
        terms: seconds by name; their sum is the step, unless an MFU is assumed.
        seconds: of a step.
        mfu: model FLOPs utilisation.
        assumed_mfu: as given; None: the roofline's.
        devices: processes.
        tokens: of a step.
        share: of the run's steps that take so long.
    """

    terms: dict[str, float]
    seconds: float
    mfu: float
    assumed_mfu: float | None
    devices: int
    tokens: int
    share: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds

    @property
    def roofline_seconds(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds_per_step": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.devices,
            "mfu": self.mfu,
            "assumed_mfu": self.assumed_mfu,
            "roofline_seconds_per_step": self.roofline_seconds,
            "roofline_terms": dict(self.terms),
            "share_of_steps": self.share,
        }


def peak_of(plan: RunPlan, target: Target, dtype: str) -> float | None:
    """FLOP/s of a device in a dtype; `telemetry.peak_tflops` replaces the vendor's in the run's precision."""
    own = plan.config.settings.telemetry.peak_tflops
    peak = own if own is not None and dtype == plan.precision else target.peak(dtype)
    return None if peak is None else peak * 1e12


def why_unknown(plan: RunPlan, target: Target, assumed_mfu: float | None) -> str | None:
    """Why no time can be estimated, with the remedy; None if it can."""
    if peak_of(plan, target, plan.precision) is None:
        return (
            f"the peak of {target.name} in {plan.precision} is unknown: name a --target, or set "
            "megalowbit.telemetry.peak_tflops; pretrain --benchmark measures this machine"
        )
    if target.bandwidth is None and assumed_mfu is None:
        return f"the bandwidth of {target.name} is unknown: give --assume-mfu, or name a --target"
    return None


def step_times(plan: RunPlan, target: Target, assumed_mfu: float | None) -> list[StepTime]:
    """The time of a step in each phase of the run; empty if it is unknown, see `why_unknown`."""
    if why_unknown(plan, target, assumed_mfu) is not None:
        return []
    peak = peak_of(plan, target, plan.precision)
    assert peak is not None  # checked above
    work = plan.flops.counted * plan.step_tokens / plan.processes
    found = []
    for phase in plan.phases:
        terms = {} if target.bandwidth is None else _terms(plan, target, phase.recipe)
        seconds = sum(terms.values()) if assumed_mfu is None else work / (peak * assumed_mfu)
        found.append(
            StepTime(
                terms=terms,
                seconds=seconds,
                mfu=work / (peak * seconds),
                assumed_mfu=assumed_mfu,
                devices=plan.processes,
                tokens=plan.step_tokens,
                share=phase.share,
            )
        )
    return found


def run_seconds(plan: RunPlan, times: Sequence[StepTime]) -> float:
    """Of all steps, without saves, validation and failures."""
    return sum(each.seconds * each.share for each in times) * plan.steps


def _terms(plan: RunPlan, target: Target, recipe: Recipe) -> dict[str, float]:
    stages = plan.config.grid.pipeline_size
    ways = plan.accumulation + stages - 1  # of a micro-batch through a stage, with the pipeline's bubble
    of_micro_batch = {
        "products": _products(plan, target, recipe) / stages,
        "attention": _attention(plan, target) / stages,
        "quantisation": _quantisation(plan, target, recipe) / stages,
        "element-wise": _element_wise(plan, target) / stages,
        "gradient sums": plan.rank_parameters * ACCUMULATE_BYTES / _memory(target),
    }
    if plan.config.grid.tensor_size > 1:
        of_micro_batch["tensor parallelism"] = _tensor_messages(plan, target)
    terms = {name: ways * seconds for name, seconds in of_micro_batch.items()}
    computing = sum(terms.values())
    terms["update"] = _update(plan, target)
    terms["messages"] = _messages(plan, target, computing)
    return terms


def _memory(target: Target) -> float:
    assert target.bandwidth is not None  # without it there is no roofline
    return target.bandwidth * 1e9 * EFFICIENCY["memory"]


def _products(plan: RunPlan, target: Target, recipe: Recipe) -> float:
    """Seconds of all matrix products of a micro-batch on one rank that holds all blocks."""
    total = 0.0
    for projection in plan.projections:
        for product in PRODUCTS:
            found = product_format(projection, product, recipe, plan, target)
            seconds = _product(plan, target, projection, found)
            times = 1.0
            if product == "output":
                chunked = projection.is_head and plan.config.chunks_loss(plan.model.vocab_size)
                times += float(chunked) if projection.is_head else plan.recomputed_share
            total += projection.layers * times * seconds
    return total


def _product(plan: RunPlan, target: Target, projection: Projection, found: ProductFormat) -> float:
    rows, n, k = plan.micro_tokens, projection.out_features, projection.in_features
    peak = peak_of(plan, target, found.unit) or peak_of(plan, target, plan.precision)
    assert peak is not None  # step_times has checked it
    size = OPERAND_BYTES[found.unit]
    operands = {
        "output": (rows * k, n * k),
        "grad_input": (rows * n, n * k),
        "grad_weight": (rows * n, rows * k),
    }
    results = {"output": rows * n, "grad_input": rows * k, "grad_weight": n * k}
    moved = size * sum(operands[found.product]) + plan.weight_bytes * results[found.product]
    return max(2.0 * rows * n * k / (peak * EFFICIENCY["products"]), moved / _memory(target))


def _attention(plan: RunPlan, target: Target) -> float:
    """Seconds of fused attention; with a mask, kernels do not skip what is after a token."""
    peak = peak_of(plan, target, plan.precision)
    assert peak is not None
    share = (1.0 if plan.has_mask else 0.5) / plan.config.grid.tensor_size
    work = plan.flops.pair * sum(plan.flops.spans) * plan.micro_tokens * ATTENTION_WORK * share
    forward = 2 / 7 * plan.recomputed_share  # of the work; once more
    return work * (1 + forward) / (peak * EFFICIENCY["attention"])


def _quantisation(plan: RunPlan, target: Target, recipe: Recipe) -> float:
    """Seconds to round operands, and to decode those that are kept for backward."""
    moved = 0.0
    for projection in plan.projections:
        if not projection.is_lowbit:
            continue
        made = Quantizations.of(recipe.of_layer(projection.layer))
        rows, n, k = plan.micro_tokens, projection.out_features, projection.in_features
        elements = {"input": rows * k, "weight": n * k, "grad_output": rows * n}
        for each in dict.fromkeys(made):
            if not each.quantizer.is_identity:
                moved += projection.layers * elements[each.operand] * QUANTIZE_BYTES
        for each in (made.backward_input, made.backward_weight):
            if not each.quantizer.is_identity:
                moved += projection.layers * elements[each.operand] * DECODE_BYTES
    return moved * (1 + plan.recomputed_share / 3) / _memory(target)


def _element_wise(plan: RunPlan, target: Target) -> float:
    names, tensor_size = family(plan.model.model_type), plan.config.grid.tensor_size
    hidden = getattr(plan.model, names.hidden_size)
    expansion = max(each.out_features for each in plan.projections if _expands(plan, each))
    heads = 2 * hidden / tensor_size
    of_block = RESIDUAL_BYTES * hidden + HEADS_BYTES * heads + ACTIVATION_BYTES * expansion
    forward_and_backward = 3 + plan.recomputed_share
    logits = LOGIT_BYTES * plan.model.vocab_size
    wide = plan.weight_bytes / 2
    return (
        plan.micro_tokens
        * wide
        * (of_block * forward_and_backward * plan.num_blocks + logits)
        / _memory(target)
    )


def _expands(plan: RunPlan, projection: Projection) -> bool:
    """Whether it makes the wide activations of an MLP, of which a tensor-parallel rank has its share."""
    shape = family(plan.model.model_type).projection(projection.name)
    return shape is not None and not shape.is_row and ".mlp." in projection.name


def _update(plan: RunPlan, target: Target) -> float:
    share = plan.rank_parameters / (plan.config.grid.data_size if plan.zero_stage else 1)
    if plan.memory.on_the_host:
        return share * (UPDATE_BYTES / HOST_MEMORY + (4 + plan.weight_bytes) / PCIE)
    return share * UPDATE_BYTES / _memory(target)


def bus(target: Target, ranks: Sequence[int]) -> float:
    """Bytes/s at which a ring of these ranks passes its messages on; 0: unknown.

    Within a domain it is the link. Between domains each rank has a network adapter, and ranks of one domain
    use theirs together, as NCCL does. A vendor's figure counts at `EFFICIENCY`, a measured one in full.
    """
    if target.link is None or target.network is None:
        return 0.0
    of_domain = Counter(rank // target.domain for rank in ranks)
    link = target.link * (1 if "link" in target.measured else EFFICIENCY["network"])
    adapter = target.network * (1 if "network" in target.measured else EFFICIENCY["network"])
    speed = link if len(of_domain) == 1 else min(link, min(of_domain.values()) * adapter)
    return speed * 1e9


def _tensor_messages(plan: RunPlan, target: Target) -> float:
    """Seconds of a micro-batch: two sums of activations forward and two backward in a block; the amaxes."""
    grid = plan.config.grid
    speed = bus(target, grid.tensor_ranks)
    if not speed:
        return 0.0
    hidden = getattr(plan.model, family(plan.model.model_type).hidden_size)
    size = plan.micro_tokens * hidden * plan.weight_bytes
    ring = 2 * (grid.tensor_size - 1) / grid.tensor_size * size / speed
    amaxes = AMAX_CALLS * SMALL_MESSAGE if plan.recipe.quantizes else 0.0
    return plan.num_blocks * ((4 + 2 * plan.recomputed_share) * ring + amaxes)


def _messages(plan: RunPlan, target: Target, computing: float) -> float:
    """Seconds of a step that gradients and weights need between data-parallel ranks, as far as not hidden."""
    grid = plan.config.grid
    speed = bus(target, grid.data_ranks)
    if grid.data_size == 1 or not speed:
        return 0.0
    part = (grid.data_size - 1) / grid.data_size * plan.rank_parameters / speed
    gradients, weights = 4 * part, plan.weight_bytes * part  # a ring's pass over fp32 gradients, over weights
    micro = plan.accumulation
    exposed = {
        0: 2 * gradients,
        1: gradients + weights,
        2: micro * gradients + weights,
        3: micro * (gradients + 2 * weights),
    }[plan.zero_stage]
    zero = plan.config.parts.deepspeed.get("zero_optimization") or {}
    is_hidden = plan.zero_stage == 3 or bool(zero.get("overlap_comm"))
    return max(0.0, exposed - computing) if is_hidden else exposed


def _unknown_peaks(plan: RunPlan, target: Target) -> list[str]:
    """One line if the plan has products in formats whose peak is unknown."""
    formats = [found for phase in plan.phases for found in product_formats(plan, target, phase.recipe)]
    units = sorted({found.unit for found in formats if peak_of(plan, target, found.unit) is None})
    if not units:
        return []
    names = " and ".join(units)
    return [
        f"the peak of {target.name} in {names} is unknown: such products count at that of {plan.precision}"
    ]


def assumptions(plan: RunPlan, target: Target, assumed_mfu: float | None) -> list[str]:
    """The assumptions behind the time, one line each."""
    peak = peak_of(plan, target, plan.precision)
    if peak is None:
        return []
    lines = [
        f"peak of {target.name} in {plan.precision}: {peak / 1e12:,.0f} TFLOP/s, dense",
        f"{plan.flops.counted / 1e9:.4g} GFLOP a token (counted: products with weights, and attention over "
        "all positions), as for a run's MFU",
    ]
    if assumed_mfu is not None:
        lines.append(f"MFU {assumed_mfu:.1%}, as given: it stands for everything else")
    if target.bandwidth is not None:
        shares = ", ".join(f"{name} {value:.0%}" for name, value in EFFICIENCY.items())
        lines += [
            f"roofline at these shares of the peaks: {shares}",
            *_unknown_peaks(plan, target),
            f"memory {target.bandwidth:,.0f} GB/s; element-wise operations of a model that is not compiled",
            "nothing overlaps but messages of ZeRO 3 and overlap_comm; no launches, data loader, saves or "
            "failures",
        ]
        if plan.processes > 1:
            lines.append(
                f"{target.link or 0:,.0f} GB/s in each direction between {target.domain} devices, beyond "
                f"{target.network or 0:,.0f} GB/s for each; gradients in fp32"
            )
            if target.measured:
                lines.append(f"{' and '.join(target.measured)} as NCCL reached it here, in full")
    return lines
