import json
import math
import statistics
from pathlib import Path

import pytest
from studies import RESULT

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.report.analysis import groups_of
from megalowbit.pretrain.sweep.study.report.tables import interval, markdown, notes
from megalowbit.pretrain.sweep.study.study_file import study_of

STEPS = 20
SWEPT = [{"name": "bf16", "lr_factors": [1, 2]}, {"name": "good", "lr_factors": [1, 2]}]
STUDY = {
    "base": "base.json",
    "sizes": [{"name": "s"}],
    "texts": [{"name": "one", "source": "stdlib"}, {"name": "two", "source": "stdlib"}],
    "seeds": [1, 2, 3],
    "steps": [STEPS],
    "recipes": [{"name": "bf16"}, {"name": "good", "lr_factors": [1, 2]}, {"name": "bad"}],
    "baseline": "bf16",
    "replicas": [{"name": "again", "of": "good", "lr_factor": 1.000001}],
    "window": 5,
    "marks": [10, 12, 40],
}
# gap to bf16 from step 11 on, by text and seed
GAPS = {"good": 0.01, "bad": 0.05, "good@lr2": 0.2, "again": 0.011}


def result_of(cell, **more):
    """A made-up result: noise by seed and step, the same in all recipes of a pair, and a known gap."""
    shift = cell.seed + (0.5 if cell.text == "two" else 0.0)
    noise = [math.sin(7 * step + 3 * shift) for step in range(STEPS)]
    gap = GAPS.get(cell.label, 0.0) * (1 + 0.01 * cell.seed) * (1.4 if cell.text == "two" else 1)
    losses = [3 + shift + each + (gap if step >= 10 else 0.0) for step, each in enumerate(noise)]
    own = 0.002 if cell.label != "bf16" else 0.0
    cpu = 2.0 if cell.label == "bf16" else 3.0
    return {
        **RESULT,
        "losses": losses,
        "tokens": 640,
        "heldout": {"bf16": 3 + shift + gap / 2, "own": 3 + shift + gap / 2 + own, "tokens": 99},
        "cost": {**RESULT["cost"], "cpu_seconds": cpu, "steps": STEPS},
        **more,
    }


@pytest.fixture
def cells(tmp_path):
    (tmp_path / "base.json").write_text('{"megalowbit": {}}')
    study = study_of(STUDY, "study", tmp_path)
    cells = cells_of(study, tmp_path, Path(__file__).parents[5] / "launch" / "pretrain.py")
    for cell in cells:
        cell.write("result.json", result_of(cell))
    return cells


def group_of(cells, text="all"):
    return next(group for group in groups_of(cells[0].study, cells) if group.text == text)


def test_gaps_are_taken_within_pairs_and_all_texts_give_one_value_a_seed(cells):
    assert [group.text for group in groups_of(cells[0].study, cells)] == ["one", "two", "all"]
    rows = {row.label: row for row in group_of(cells).rows}
    assert set(rows) == {"good", "good@lr2", "bad"}
    good = rows["good"]
    expected = [0.01 * 1.2 * (1 + 0.01 * seed) for seed in (1, 2, 3)]
    assert list(good.gaps) == [10, 12, 20]  # 40 is after the end
    assert good.gaps[10].mean == pytest.approx(0, abs=1e-12)
    assert good.gaps[20].mean == pytest.approx(statistics.mean(expected))
    half = 4.3026527 * statistics.stdev(expected) / math.sqrt(3)
    assert good.gaps[20].high == pytest.approx(statistics.mean(expected) + half)
    assert good.gaps[20].num_pairs == 3
    ends = [statistics.mean(cell.result().losses[15:]) for cell in cells if cell.label == "bf16"]
    assert good.percent.mean == pytest.approx(100 * statistics.mean(expected) / statistics.mean(ends))
    assert good.heldout_bf16.mean == pytest.approx(statistics.mean(expected) / 2)
    assert good.forward_noise.mean == pytest.approx(0.002)
    assert good.cpu == pytest.approx(1.5)
    assert good.curve[20] == pytest.approx(good.gaps[20].mean)
    assert good.curve[12] == pytest.approx(good.gaps[20].mean * 2 / 5)  # two of the five steps have the gap


def fall(cells, gaps):
    """Give all cells losses that fall by .1 a step, and by half of it in text two.

    `gaps[label, text, seed]` is added; NaN: the run diverges.
    """
    for cell in cells:
        gap = gaps.get((cell.label, cell.text, cell.seed), 0.0)
        slope = 0.1 if cell.text == "one" else 0.05
        losses = [9 + cell.seed - slope * step + (0 if math.isnan(gap) else gap) for step in range(STEPS)]
        more = {"diverged_at": 3} if math.isnan(gap) else {}
        cell.write("result.json", result_of(cell, losses=losses, **more))


def steps_behind(cells, text):
    return {row.label: row.steps_behind for row in group_of(cells, text).rows}


def test_a_gap_is_worth_more_steps_where_the_loss_falls_slowly(cells):
    for_good = {1: 0.2, 2: 0.3, 3: math.nan}
    gaps = {("good", text, seed): gap for text in ("one", "two") for seed, gap in for_good.items()}
    gaps |= {("bad", "one", 1): -0.1, ("bad", "two", 1): -0.1, ("good@lr2", "two", 1): 9.0}
    gaps |= {("good@lr2", "one", seed): 1.45 for seed in (1, 2, 3)}
    fall(cells, gaps)
    assert steps_behind(cells, "one")["good"] == pytest.approx(2.5)  # the mean of .2 and .3, by .1
    assert steps_behind(cells, "two")["good"] == pytest.approx(5)
    assert steps_behind(cells, "all")["good"] == pytest.approx(0.25 / 0.075)
    assert {steps_behind(cells, text)["bad"] for text in ("one", "two", "all")} == {0}
    assert steps_behind(cells, "one")["good@lr2"] == pytest.approx(14.5)  # between the first two windows
    assert steps_behind(cells, "two")["good@lr2"] is None  # above the first
    table = markdown([group_of(cells, "two")])
    assert "| 5 (25.0 %) " in next(line for line in table.splitlines() if line.startswith("| good  "))
    late = next(line for line in table.splitlines() if line.startswith("| good@lr2 ")).split("|")
    assert (
        late[[each.strip() for each in table.splitlines()[2].split("|")].index("steps behind")].strip() == "–"
    )


def test_steps_behind_are_those_of_the_seeds_and_runs_of_the_gap(cells):
    """A seed that has diverged in one text is in no value of both, and forks lower the curve."""
    gaps = {("good", text, seed): 0.1 * seed for text in ("one", "two") for seed in (1, 2, 3)}
    fall(cells, {**gaps, ("good", "two", 3): math.nan})
    assert steps_behind(cells, "one")["good"] == pytest.approx(2)  # seeds 1 to 3
    assert steps_behind(cells, "two")["good"] == pytest.approx(3)  # seeds 1 and 2
    assert steps_behind(cells, "all")["good"] == pytest.approx(0.15 / 0.075)
    with_forks = forked(cells, dict.fromkeys((1, 2, 3), 0.0))
    lower = {("fork", text, seed): -0.1 for text in ("one", "two") for seed in (1, 2, 3)}
    fall(with_forks, {**gaps, **lower})
    assert steps_behind(with_forks, "one")["good"] == pytest.approx((0.2 + 0.05) / 0.1)


def test_a_diverged_run_of_the_baseline_is_in_no_deviation_over_seeds(cells):
    cell = next(each for each in cells if each.name == "s,one,20,bf16,2")
    cell.write("result.json", result_of(cell, diverged_at=12))
    group = group_of(cells, "one")
    others = [
        statistics.mean(each.result().losses[15:])
        for each in cells
        if each.name in ("s,one,20,bf16,1", "s,one,20,bf16,3")
    ]
    assert group.seed_deviation() == pytest.approx(statistics.stdev(others))
    assert "bf16 over seeds" in markdown([group])


def test_a_baseline_without_cpu_time_has_no_ratio(cells):
    for cell in cells:
        if cell.label == "bf16":
            cell.write("result.json", result_of(cell, cost={**result_of(cell)["cost"], "cpu_seconds": 0.0}))
    assert all(row.cpu is None for row in group_of(cells).rows)


def test_steps_behind_do_without_a_window_whose_losses_are_lost(cells):
    fall(cells, {("good", "one", seed): 0.2 for seed in (1, 2, 3)})
    cell = next(each for each in cells if each.name == "s,one,20,bf16,2")
    losses = [None if 5 <= step < 10 else loss for step, loss in enumerate(cell.result().losses)]
    cell.write("result.json", result_of(cell, losses=losses))
    assert steps_behind(cells, "one")["good"] == pytest.approx(2)


def test_recipes_are_ranked_only_if_separated_and_replicas_give_the_noise_floor(cells):
    group = group_of(cells, "one")
    assert [row.label for row in group.noise] == ["again"]
    drift = [0.001 * (1 + 0.01 * seed) for seed in (1, 2, 3)]
    assert group.noise_floor() == pytest.approx(math.sqrt(statistics.mean(x**2 for x in drift)))
    baseline = [
        statistics.mean(cell.result().losses[15:]) for cell in cells if cell.name.startswith("s,one,20,bf16")
    ]
    assert group.seed_deviation() == pytest.approx(statistics.stdev(baseline))
    found = {(each["lower"], each["higher"]) for each in group.to_dict()["separated"]}
    assert found == {("bf16", "good"), ("bf16", "bad"), ("good", "bad")}
    (rates,) = group.learning_rates()
    assert (rates["recipe"], rates["best_factor"], rates["matters"]) == ("good", "1", True)
    text = "\n".join(line for line in markdown([group]).splitlines() if "Separated" in line)
    assert text == (
        "Separated after Holm's correction over 3 comparisons: bf16 < good, bf16 < bad, good < bad."
    )


def forked(cells, luck):
    """The cells of a study with forks that end `luck[seed]` above the baseline; NaN: that diverge."""
    recipes = [*STUDY["recipes"], {"name": "fork"}]
    study = study_of({**STUDY, "recipes": recipes, "baseline_forks": ["fork"]}, "study", cells[0].folder)
    found = cells_of(study, cells[0].folder, cells[0].program)
    for cell in found:
        if cell.label == "fork" and cell.seed in luck:
            result, more = result_of(cell), luck[cell.seed]
            if math.isnan(more):
                cell.write("result.json", {**result, "diverged_at": 5})
                continue
            heldout = {**result["heldout"], "bf16": result["heldout"]["bf16"] + more}
            losses = [loss + more for loss in result["losses"]]
            cell.write("result.json", {**result, "losses": losses, "heldout": heldout})
    return found


def test_gaps_are_to_the_mean_of_the_baseline_and_its_forks(cells):
    luck = {1: 0.008, 2: -0.002, 3: 0.003}
    group = group_of(forked(cells, luck))
    good = next(row for row in group.rows if row.label == "good")
    alone = {seed: 0.01 * 1.2 * (1 + 0.01 * seed) for seed in luck}
    expected = [alone[seed] - luck[seed] / 2 for seed in luck]
    assert good.gaps[20].mean == pytest.approx(statistics.mean(expected))
    spread = 4.3026527 * statistics.stdev(expected) / math.sqrt(3)
    assert good.gaps[20].high == pytest.approx(good.gaps[20].mean + spread)
    heldout = [alone[seed] / 2 - luck[seed] / 2 for seed in luck]
    assert good.heldout_bf16.mean == pytest.approx(statistics.mean(heldout))
    # the fork itself, and replicas, are compared with a single run
    assert {row.label: row.gaps[20].mean for row in group.noise} == {
        "fork": pytest.approx(0.003),
        "again": pytest.approx(0.001 * 1.2 * 1.02),
    }
    drifts = [*luck.values()] * 2  # not the replicas, which stay near the path that they repeat
    assert group.noise_floor() == pytest.approx(math.sqrt(statistics.mean(each**2 for each in drifts)))
    comparisons = {(each.first, each.second): each.difference.mean for each in group.comparisons()}
    assert comparisons[("bf16", "good")] == pytest.approx(-statistics.mean(expected))
    assert len(comparisons) == 3  # of bf16, good and bad
    plain = group.to_dict()
    assert plain["baseline"]["forks"] == ["fork"]
    ends = [statistics.mean(cell.result().losses[15:]) for cell in cells if cell.label == "bf16"]
    loss = statistics.mean(ends) + 0.003 / 2
    assert plain["baseline"]["losses"]["20"] == pytest.approx(loss)
    assert good.percent.mean == pytest.approx(100 * good.gaps[20].mean / loss)
    text = "\n".join(notes(group))
    assert "Gaps to the mean of bf16 and fork in nats, means of 5 steps;" in text
    assert f"their loss at the end is {loss:.4f}." in text
    assert "left out" not in text
    (rates,) = group.learning_rates()  # of single runs
    assert rates["gap"]["mean"] == pytest.approx(statistics.mean(alone.values()))


@pytest.mark.parametrize("luck", [{1: 0.008, 2: -0.002}, {1: 0.008, 2: -0.002, 3: math.nan}])
def test_pairs_without_a_fork_are_left_out_and_counted(cells, luck):
    group = group_of(forked(cells, luck))
    good = next(row for row in group.rows if row.label == "good")
    assert good.gaps[20].num_pairs == 2
    assert good.gaps[20].mean == pytest.approx(0.01 * 1.2 * 1.015 - 0.003 / 2)
    assert "Pairs that are left out, because a fork is not finished or has diverged: 2." in notes(group)


def test_all_texts_need_a_seed_on_each_of_them(cells):
    (cell,) = [each for each in cells if each.name == "s,two,20,good,2"]
    (cell.path / "result.json").unlink()
    (row,) = [row for row in group_of(cells).rows if row.label == "good"]
    assert row.gaps[20].num_pairs == 2
    assert row.gaps[20].mean == pytest.approx(0.01 * 1.2 * 1.02)  # of seeds 1 and 3


def test_a_text_that_few_cells_have_is_named_where_it_leaves_no_pair(cells):
    for cell in cells:
        if cell.text == "two" and (cell.label, cell.seed) not in (("bf16", 1), ("good", 1)):
            (cell.path / "result.json").unlink()
    group = group_of(cells)
    assert [row.label for row in group.rows] == ["good"]
    assert group.rows[0].gaps[20].num_pairs == 1
    assert group.without_value == ["good@lr2", "bad", "again"]
    assert "Without a gap, because no seed has a whole pair on one and two: good@lr2, bad, again." in notes(
        group
    )
    (good,) = [cell for cell in cells if cell.name == "s,two,20,good,1"]
    (good.path / "result.json").unlink()  # nothing is left, and the group still says so
    group = group_of(cells)
    assert group.rows == []
    assert (
        "Without a gap, because no seed has a whole pair on one and two: good, good@lr2, bad, again."
        in notes(group)
    )
    assert "| recipe " in markdown([group])


def test_a_diverged_run_is_counted_also_where_its_pair_lacks_a_fork(cells):
    for cell in cells:
        if cell.label == "bad" and cell.seed == 2:
            cell.write("result.json", result_of(cell, diverged_at=12))
    (bad,) = [row for row in group_of(forked(cells, {1: 0.0}), "one").rows if row.label == "bad"]
    assert (bad.num_diverged, bad.gaps[20].num_pairs) == (1, 1)


def test_a_diverged_baseline_leaves_the_gaps_before_and_is_named(cells):
    for cell in cells:
        if cell.label == "bf16":
            cell.write("result.json", result_of(cell, diverged_at=12))
    group = group_of(cells, "one")
    (good,) = [row for row in group.rows if row.label == "good"]
    assert list(good.gaps) == [10]
    assert "bf16 has diverged with seed 1 (one), 2 (one), 3 (one): no gap from then on." in notes(group)
    assert "| good " in markdown([group])


def test_a_fork_that_is_not_finished_leaves_the_noise_floor_to_replicas(cells):
    group = group_of(forked(cells, {}), "one")
    drift = [0.001 * (1 + 0.01 * seed) for seed in (1, 2, 3)]
    assert group.noise_floor() == pytest.approx(math.sqrt(statistics.mean(x**2 for x in drift)))


def test_a_share_of_the_loss_is_of_the_seeds_of_the_gap(cells):
    for cell in cells:
        if cell.name in ("s,two,20,bf16,3", "s,one,20,bad,1"):
            (cell.path / "result.json").unlink()
    ends = {
        (c.text, c.seed): statistics.mean(c.result().losses[15:])
        for c in cells
        if c.result() and c.label == "bf16"
    }
    (bad,) = [row for row in group_of(cells).rows if row.label == "bad"]  # of seed 2 only
    loss = statistics.mean(ends[text, 2] for text in ("one", "two"))
    assert bad.percent.mean == pytest.approx(100 * 0.05 * 1.2 * 1.02 / loss)


def test_a_run_that_was_slow_for_another_reason_does_not_change_the_cpu_time(cells):
    (cell,) = [each for each in cells if each.name == "s,one,20,bf16,2"]
    cell.write("result.json", result_of(cell, cost={**result_of(cell)["cost"], "cpu_seconds": 30.0}))
    (row,) = [row for row in group_of(cells, "one").rows if row.label == "bad"]
    assert row.cpu == pytest.approx(1.5)


def test_recipes_are_compared_at_their_best_learning_rates_within_pairs(cells):
    study = study_of({**STUDY, "recipes": SWEPT, "replicas": []}, "study", cells[0].folder)
    swept = cells_of(study, cells[0].folder, cells[0].program)
    drops = {"bf16": 0.0, "bf16@lr2": -0.03, "good": 0.01, "good@lr2": -0.005}  # by a rate of 2
    for cell in swept:
        result = result_of(cell)
        shift = drops[cell.label] * (1 + 0.01 * cell.seed) - GAPS.get(cell.label, 0) * (1 + 0.01 * cell.seed)
        cell.write("result.json", {**result, "losses": [loss + shift for loss in result["losses"]]})
    (unpaired,) = [each for each in swept if each.name == "s,one,20,good@lr2,3"]
    (unpaired.path / "result.json").unlink()  # seed 3 is high, and would make the other rate look worse
    group = group_of(swept, "one")
    rates = {each["recipe"]: each for each in group.learning_rates()}
    assert [rates[name]["best_factor"] for name in ("bf16", "good")] == ["2", "2"]
    assert rates["bf16"]["gap"] is None
    gap = rates["good"]["gap"]
    assert gap["mean"] == pytest.approx(0.025 * 1.015)  # to bf16 at its best rate, seeds 1 and 2
    assert gap["num_pairs"] == 2
    (usual,) = [each for each in swept if each.name == "s,one,20,good,1"]
    (usual.path / "result.json").unlink()  # the pair at the best rate stays
    (good,) = [each for each in group_of(swept, "one").learning_rates() if each["recipe"] == "good"]
    assert good["gap"]["num_pairs"] == 2
    assert good["mean_losses"].keys() == {"1", "2"}
    assert any("Learning rate of good" in line and "gap there +0.0254" in line for line in notes(group))


def test_the_cpu_time_of_an_interrupted_run_is_unknown(cells):
    for cell in cells:
        if cell.label == "good" and cell.seed != 1:
            cost = {**RESULT["cost"], "cpu_seconds": 90.0, "steps": 3}  # of the last three steps
            cell.write("result.json", result_of(cell, cost=cost))
    (row,) = [row for row in group_of(cells, "one").rows if row.label == "good"]
    assert row.cpu == pytest.approx(1.5)  # of seed 1


def test_a_recipe_of_which_a_run_has_diverged_is_not_ranked(cells):
    """What is left of it is no fair sample: the seeds it survived may be the easy ones."""
    before = {(each.first, each.second) for each in group_of(cells).comparisons()}
    assert ("good", "bad") in before
    for cell in cells:
        if cell.label == "good" and cell.seed == 1:
            cell.write("result.json", result_of(cell, diverged_at=12, losses=[4.0] * 11, heldout=None))
    group = group_of(cells)
    assert {(each.first, each.second) for each in group.comparisons()} == {("bf16", "bad")}
    assert "Not ranked, because a run has diverged: good." in notes(group)
    assert group.to_dict()["not_ranked"] == ["good"]


def test_a_diverged_fork_of_the_baseline_leaves_it_out_of_the_ranking(cells):
    cells = forked(cells, {1: 0.008, 2: -0.002, 3: math.nan})
    group = group_of(cells)
    assert group.not_ranked == ["bf16"]
    assert all("bf16" not in (each.first, each.second) for each in group.comparisons())


def test_a_learning_rate_with_a_diverged_run_is_not_called_the_best(cells):
    (before,) = group_of(cells).learning_rates()
    assert before["best_factor"] == "1"
    for cell in cells:
        if cell.label == "good" and cell.seed == 1:
            cell.write("result.json", result_of(cell, diverged_at=12, losses=[4.0] * 11, heldout=None))
    group = group_of(cells)
    (rates,) = group.learning_rates()
    assert rates["best_factor"] is None
    assert "Learning rate of good: × 1, × 2: one has diverged runs, or no seed has all." in notes(group)


def test_a_fork_of_the_baseline_from_elsewhere_makes_the_pairs_mixed(cells):
    luck = {1: 0.008, 2: -0.002, 3: 0.003}
    here = {**RESULT["made_with"], "units": "avx2"}
    cells = forked(cells, luck)
    for cell in cells:
        place = {**here, "units": "avx512f"} if cell.label == "fork" else here
        result = json.loads((cell.path / "result.json").read_text())
        cell.write("result.json", {**result, "made_with": place})
    group = group_of(cells, "one")
    found = group.to_dict()
    # good, good at twice the learning rate and bad with the fork, and the fork with bf16; not the replica
    assert (found["pairs"], found["mixed_pairs"], found["unknown_pairs"]) == (15, 12, 0)
    assert any("The cells of 12 pairs are of different kinds of processor" in each for each in notes(group))


def test_pairs_of_unknown_instructions_are_counted_and_their_times_compared(cells):
    group = group_of(cells, "one")
    found = group.to_dict()
    assert (found["pairs"], found["mixed_pairs"], found["unknown_pairs"]) == (12, 0, 12)
    assert any("The cells of 12 pairs are of processors of one name" in each for each in notes(group))
    assert group.rows[0].cpu == pytest.approx(1.5)


def test_pairs_of_other_versions_are_counted(cells):
    assert group_of(cells).mixed_versions == {}
    others = {**RESULT["made_with"], "torch": "2.4.0", "transformers": "4.0"}
    for cell in cells:
        if cell.label == "good" and cell.seed < 3:
            cell.write("result.json", result_of(cell, made_with=others))
    group = group_of(cells, "one")
    assert group.to_dict()["mixed_versions"] == {"torch": 2, "transformers": 2}
    assert "The two cells of 2 pairs were made with different versions of torch." in notes(group)


def test_cpu_times_of_other_numbers_of_threads_are_not_compared(cells):
    for cell in cells:
        if cell.label == "good":
            cost = {**result_of(cell)["cost"], "threads": 8}
            cell.write("result.json", result_of(cell, cost=cost))
    cpu = {row.label: row.cpu for row in group_of(cells).rows}
    assert cpu["good"] is None
    assert cpu["bad"] == pytest.approx(1.5)


def test_noise_that_differs_between_pairs_separates_nothing(cells):
    for cell in cells:
        result = result_of(cell)
        sign = (-1) ** cell.seed * (1 if cell.label == "bad" else 0)
        cell.write("result.json", {**result, "losses": [loss + sign for loss in result["losses"]]})
    group = group_of(cells, "one")
    pairs = [(each.first, each.second) for each in group.comparisons() if each.is_separated]
    assert pairs == [("bf16", "good")]
    (row,) = [row for row in group.rows if row.label == "bad"]
    assert interval(row.gaps[20]).endswith("≈")


def test_unfinished_cells_and_diverged_ones_are_no_pairs(cells):
    for cell in cells:
        if cell.label == "bad" and cell.seed == 1:
            (cell.path / "result.json").unlink()
        if cell.label == "bad" and cell.seed == 2:
            cell.write(
                "result.json",
                result_of(cell, diverged_at=18, heldout=None, losses=[3.0] * 17 + [None] * 3, tokens=640),
            )
    (row,) = [row for row in group_of(cells, "one").rows if row.label == "bad"]
    assert row.num_diverged == 1
    assert row.gaps[20].num_pairs == row.heldout_bf16.num_pairs == 1
    (line,) = [line for line in markdown([group_of(cells, "one")]).splitlines() if line.startswith("| bad")]
    assert "| 1 (1 diverged) |" in line
    assert interval(row.gaps[20]) == "+0.0515 ?"
