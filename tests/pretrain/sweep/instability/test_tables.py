from megalowbit.pretrain.sweep.instability.tables import markdown

SETTINGS = {"window": 5, "rise": 0.5, "gap": 0.25, "bucket": 10, "in_a_row": 2}


def run(stress, recipe, step=None, alarms=(), **more):
    breaks = [] if step is None else [{"kind": "rise", "step": step, "distance": 1.0}]
    leads = [{"metric": name, "step": at, "lead": None if step is None else step - at} for name, at in alarms]
    common = {"size": "s", "text": "t", "seed": 1, "is_broken_at_end": bool(breaks)}
    numbers = {"end_loss": 2.5, "gap": None, "cost": None}
    return {
        **common,
        **numbers,
        "stress": stress,
        "recipe": recipe,
        "breaks": breaks,
        "alarms": leads,
        "diagnosis": {"state": "healthy", "first": None, "step": None},
        **more,
    }


def lines(*runs, metrics=()):
    data = {"settings": SETTINGS, "baseline": "bf16", "runs": list(runs), "metrics": list(metrics)}
    return markdown(data).splitlines()


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_broken_run_has_only_the_alarms_before_its_break_and_at_most_three():
    alarms = [("a", 10), ("b", 20), ("c", 20), ("d", 30), ("e", 40), ("f", 50)]
    found = lines(run(None, "bf16"), run("hot", "nvfp4", 40, alarms, cost=0.5, gap=-0.125))
    (row,) = [cells_of(line) for line in found if line.startswith("| hot")]
    assert row[3:8] == ["40 (rise)", "broken", "2.500", "+0.500", "-0.125"]
    assert row[8] == "a at 10 (30 before), b at 20 (20 before), c at 20 (20 before), 1 more"
    assert "| none (s)" in "".join(found)


def test_an_intact_run_has_its_alarms_without_a_lead_and_a_recovered_one_is_called_so():
    found = lines(run("hot", "bf16", alarms=[("a", 10)]), run("hot", "x", 9, is_broken_at_end=False))
    rows = [cells_of(line) for line in found if line.startswith("| hot")]
    assert [row[4] for row in rows] == ["intact", "recovered"]
    assert [row[-2] for row in rows] == ["a at 10", "none"]


def test_recipes_that_broke_most_often_and_earliest_are_listed_first():
    hot = [run("hot", "a", 30), run("hot", "b", 9), run("hot", "b", 7), run("hot", "c"), run("hot", "d", 5)]
    found = lines(*hot, run("hot", "d"), run("cold", "a"))
    listed = "b 2 of 2 (from step 7), a 1 of 1 (from step 30), d 1 of 2 (from step 5)"
    assert f"Runs that broke under hot: {listed}." in found
    assert "Runs that broke under cold: none." in found


def test_texts_have_a_column_if_there_are_several():
    assert "| text" not in "".join(lines(run("hot", "a")))
    found = lines(run("hot", "a"), run("hot", "a", text="u"))
    assert [cells_of(line)[2] for line in found if line.startswith("| hot")] == ["t", "u"]


def test_metrics_that_no_judged_run_has_recorded_are_left_out():
    seen = {"metric": "m", "broken": 2, "warned": 2, "leads": [4, 9], "intact": 1}
    seen |= {"alarms_without_break": 0, "unstressed": 3, "false_alarms": 1}
    unseen = {**seen, "metric": "n", "broken": 0, "intact": 0}
    *_, last, _, _ = lines(run("hot", "a"), metrics=[seen, unseen])
    assert cells_of(last) == ["m", "2 of 2", "6.5 steps", "0 of 1", "1 of 3"]


def test_what_diagnose_names_first_stands_beside_a_run_and_a_stop_is_nothing():
    troubled = {"state": "troubled", "first": "killed", "step": None}
    stopped = {"state": "stopped", "first": "stopped", "step": 8}
    found = lines(
        run("hot", "a", 30, diagnosis=troubled), run("hot", "b", 9, diagnosis=stopped), run("hot", "c")
    )
    assert [cells_of(line)[-1] for line in found if line.startswith("| hot")] == ["killed", "–", "–"]
    assert found[-1].endswith("in 1 of 2 runs that broke, and in 0 of 1 others.")
    removed = {"state": "no records", "first": None, "step": None}
    found = lines(run("hot", "a", 30, diagnosis=removed), run("hot", "b", 9, diagnosis=troubled))
    assert cells_of(next(line for line in found if line.startswith("| hot")))[-1] == "no records"
    assert found[-1].endswith("in 1 of 1 runs that broke, and in 0 of 0 others. Runs without records: 1.")
