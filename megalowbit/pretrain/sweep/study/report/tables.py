"""The results of a study as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalowbit.pretrain.sweep.study.report.analysis import Group, Row
from megalowbit.pretrain.sweep.study.report.costs import RecipeCost
from megalowbit.pretrain.sweep.study.report.sizes import SizeTrends
from megalowbit.pretrain.sweep.study.report.statistics import Estimate
from megalowbit.values import counted


def markdown(groups: Sequence[Group]) -> str:
    """A table for each group, and the lines below it."""
    return "\n\n".join(
        "\n".join([f"**{group.title}**", "", *_table(_rows(group)), "", *notes(group)]) for group in groups
    )


def headings(group: Group) -> list[str]:
    """Titles of the columns."""
    marks = [f"to {mark}" for mark in group.marks[:-1]]
    end = ["end [95 %]", "%", "steps behind"]
    return ["recipe", "pairs", *marks, *end, "held out, bf16", "forward noise", "CPU time"]


def cells(group: Group, row: Row) -> list[str]:
    """The texts of a row."""
    gaps = [row.gaps.get(mark) for mark in group.marks]
    end = gaps[-1]
    name = row.label if row.reference == group.study.baseline else f"{row.label} − {row.reference}"
    pairs = "0" if end is None else str(end.num_pairs)
    if row.num_diverged:
        pairs += f" ({row.num_diverged} diverged)"
    return [
        name,
        pairs,
        *("–" if gap is None else signed(gap.mean) for gap in gaps[:-1]),
        interval(end),
        "–" if row.percent is None else f"{row.percent.mean:+.2f}",
        "–" if row.steps_behind is None else _share(row.steps_behind, group.steps) + uncertainty(end),
        interval(row.heldout_bf16),
        "–" if row.forward_noise is None else signed(row.forward_noise.mean),
        "–" if row.cpu is None else f"× {row.cpu:.2f}",
    ]


def notes(group: Group) -> list[str]:
    """What the table of a group says, in sentences."""
    found = []
    loss = group.baseline_loss()
    if loss is not None:
        forks = [fork for fork in group.study.baseline_forks if fork in group.members]
        baseline = " and ".join([group.study.baseline, *forks])
        window = min(group.study.window, group.steps)
        found.append(
            f"Gaps to {'the mean of ' if forks else ''}{baseline} in nats, means of {window} steps; "
            f"{'their' if forks else 'its'} loss at the end is {loss:.4f}. Rows marked ≈ have an interval "
            "that contains 0; with ? there is one pair and no interval."
        )
    if missing := group.num_without_fork():
        found.append(f"Pairs that are left out, because a fork is not finished or has diverged: {missing}.")
    if group.without_value:
        texts = " and ".join(sorted(group.texts))
        found.append(
            f"Without a gap, because no seed has a whole pair on {texts}: {', '.join(group.without_value)}."
        )
    if diverged := group.diverged_baselines:
        seeds = ", ".join(f"{seed} ({text})" for text, seed in diverged)
        found.append(f"{group.study.baseline} has diverged with seed {seeds}: no gap from then on.")
    found += _of_noise(group)
    found += _of_ranking(group)
    return [*found, *map(_of_learning_rates, group.learning_rates())]


def _of_noise(group: Group) -> list[str]:
    """The lines on how far equal runs drift apart, and on pairs that were not made alike."""
    found = []
    floor, deviation = group.noise_floor(), group.seed_deviation()
    if floor is not None:
        pairs = f"root mean square of {len(group.drifts)} pairs"
        found.append(f"Noise floor: runs that should be equal differ by {floor:.4f} ({pairs}).")
    elif group.rows:
        found.append("Noise floor: not known, because no fork of the baseline and no replica is finished.")
    if deviation is not None:
        found.append(f"Standard deviation of {group.study.baseline} over seeds: {deviation:.4f}.")
    if group.num_mixed_pairs:
        found.append(
            f"The cells of {counted(group.num_mixed_pairs, 'pair')} are of different kinds of processor, or "
            "have GEMMs in different dtypes. They differ in the last bits, which adds noise as that of "
            "replicas."
        )
    if group.num_unknown_pairs:
        found.append(
            f"The cells of {counted(group.num_unknown_pairs, 'pair')} are of processors of one name, whose "
            "instructions are not recorded: these may be of different kinds, too."
        )
    for package, count in group.mixed_versions.items():
        found.append(
            f"The two cells of {counted(count, 'pair')} were made with different versions of {package}."
        )
    return found


def _of_ranking(group: Group) -> list[str]:
    """The lines on which recipes differ."""
    found = []
    if group.not_ranked:
        found.append(f"Not ranked, because a run has diverged: {', '.join(group.not_ranked)}.")
    comparisons = group.comparisons()
    separated = [each for each in comparisons if each.is_separated]
    if separated:
        listed = []
        for each in separated:
            lower, higher = (
                (each.first, each.second) if each.difference.mean < 0 else (each.second, each.first)
            )
            listed.append(f"{lower} < {higher}")
        found.append(
            f"Separated after Holm's correction over {len(comparisons)} comparisons: {', '.join(listed)}."
        )
    elif comparisons:
        found.append(
            f"No two recipes are separated after Holm's correction over {len(comparisons)} comparisons."
        )
    return found


def _of_learning_rates(rates: Mapping[str, Any]) -> str:
    """The line on the sweep of a recipe."""
    if not rates["num_seeds"]:
        factors = ", ".join(f"× {factor}" for factor in rates["mean_losses"])
        return f"Learning rate of {rates['recipe']}: {factors}: one has diverged runs, or no seed has all."
    losses = ", ".join(f"× {factor}: {mean:.4f}" for factor, mean in rates["mean_losses"].items())
    effect = "the learning rate matters" if rates["matters"] else "no difference is significant"
    effect = effect if rates["is_known"] else "too few pairs to tell"
    best = f"best × {rates['best_factor']}"
    if (gap := rates["gap"]) is not None:
        best += f", gap there {interval(Estimate(**gap))} ({counted(gap['num_pairs'], 'pair')})"
    seeds = counted(rates["num_seeds"], "seed")
    return f"Learning rate of {rates['recipe']}: {losses} ({seeds}); {best}; {effect}."


def interval(value: Estimate | None) -> str:
    """`+0.0123 [+0.0101, +0.0145]`, with ≈ if the interval contains 0, and ? without one."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return f"{signed(value.mean)}{uncertainty(value)}"
    return f"{signed(value.mean)} [{signed(value.low)}, {signed(value.high)}]{uncertainty(value)}"


def uncertainty(value: Estimate | None) -> str:
    """` ≈` if an interval contains 0, ` ?` without one."""
    if value is None or value.low is None or value.high is None:
        return " ?"
    return "" if value.excludes_zero else " ≈"


def _share(steps: float, of: int) -> str:
    """`20 (2.0 %)`."""
    return f"{steps:.0f} ({100 * steps / of:.1f} %)"


def signed(value: float) -> str:
    """A number of nats."""
    return f"{value:+.4f}"


def _rows(group: Group) -> list[list[str]]:
    return [headings(group), *(cells(group, row) for row in (*group.rows, *group.noise))]


COST_HEADINGS = ["recipe", "bytes kept", "time of products", "products in FP4"]
COST_NOTE = (
    "Computed, relative to the baseline. Bytes: what linear layers keep for backward, of a micro-batch; with "
    "a late switch, in the part of the run that keeps more. Time: on a GPU whose 8-bit units are twice and "
    "whose FP4 units are four times as fast as those of bf16, without rounding and transforms. In FP4: "
    "multiply-adds whose operands both have 4 bits. Time and share are means over the run."
)


def costs_markdown(costs: Sequence[RecipeCost], baseline: str) -> str:
    """A table of costs for each size, and what its columns mean."""
    tables = [
        "\n".join([f"**{title}**", "", *_table([COST_HEADINGS, *rows])])
        for title, rows in cost_tables(costs, baseline).items()
    ]
    return "\n\n".join([*tables, COST_NOTE]) if tables else ""


def cost_tables(costs: Sequence[RecipeCost], baseline: str) -> dict[str, list[list[str]]]:
    """Title → rows, for each size; for each of its lengths where they differ. Without the baseline, none."""
    by_size: dict[str, dict[int, dict[str, list[str]]]] = {}
    reference = {(each.size, each.steps): each for each in costs if each.label == baseline}
    for each in costs:
        if (peer := reference.get((each.size, each.steps))) is not None:
            by_size.setdefault(each.size, {}).setdefault(each.steps, {})[each.label] = [
                each.label,
                f"× {each.bytes_kept / peer.bytes_kept:.2f}",
                f"× {each.product_time / peer.product_time:.2f}",
                f"{100 * each.fp4_share:.0f} %",
            ]
    found = {}
    for size, lengths in by_size.items():
        title = f"Cost of the linear layers, {size}"
        merged: dict[str, list[str]] = {}
        for rows in lengths.values():
            merged |= rows
        if all(merged[label] == row for rows in lengths.values() for label, row in rows.items()):
            found[title] = list(merged.values())
        else:
            found |= {f"{title}, {steps} steps": list(rows.values()) for steps, rows in lengths.items()}
    return found


TREND_HEADINGS = ["recipe", "gap there", "exponent b [95 %]", "p of the law", "what the data support"]


def trends_markdown(trends: Sequence[SizeTrends]) -> str:
    """A table of power laws for each length and text, and a line below it."""
    return "\n\n".join(
        "\n".join(
            [f"**{each.title}**", "", *_table([TREND_HEADINGS, *trend_rows(each)]), "", trend_note(each)]
        )
        for each in trends
    )


def trend_rows(trends: SizeTrends) -> list[list[str]]:
    """The texts of the rows."""
    found = []
    for label, law in trends.laws.items():
        exponent = "–" if law.exponent is None else f"{law.exponent:+.2f}"
        if law.exponent is not None and law.p_of_fit is not None:
            low = "-∞" if law.low is None else f"{law.low:+.2f}"
            high = "+∞" if law.high is None else f"{law.high:+.2f}"
            exponent += f" [{low}, {high}]"
        p = "–" if law.p_of_fit is None else f"{law.p_of_fit:.2f}"
        found.append([label, signed(law.gap), exponent, p, law.conclusion])
    return found


def trend_note(trends: SizeTrends) -> str:
    """What the table of power laws means."""
    law = next(iter(trends.laws.values()))
    sizes = ", ".join(f"{size / 1e6:.2f}" for size in law.estimates)
    return (
        f"Gaps at the end to {trends.baseline}, fitted as gap = A·(N / {law.size / 1e6:.2f}M)^b at N = "
        f"{sizes} million parameters, with equal tokens. The laws hold between these sizes only."
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
