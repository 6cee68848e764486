import dataclasses
import json
import math
import statistics
from collections import Counter
from pathlib import Path

import cpu_products
import pytest
from forks import run_script

from launchers import environment, write_config
from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.calibration import Calibration, CalibrationPlan, ThresholdOutcome, calibrate
from megalowbit.pretrain.sweep.runs import Gap

ROOT = Path(__file__).parents[3]
TOOL = "tools/calibrate_speculation.py"
STEPS = 11  # three checks
NEVER = 1000.0  # dB: no product can be this good, so all of them stay at bf16
BLOCK = {
    "recipe": "speculative-int8",
    "speculation": {"candidates": ["int8", "bf16"], "every": 5, "lookahead": 5, "verify_every": 1},
}


def plan(folder, *, block=BLOCK, **changes):
    values = {
        "config": write_config(folder, block=block),
        "thresholds": (NEVER, 3.0),
        "seeds": (1,),
        "steps": STEPS,
        "last": 4,
        "out": folder / "out",
        "jobs": 2,
        "max_gap": 0.3,
        "program": ROOT / "launch" / "pretrain.py",
    }
    return CalibrationPlan(**{**values, **changes})


def tool(*arguments, cwd):
    env = {**environment(Path(cwd) / "cache"), "PYTHONPATH": str(ROOT)}
    return run_script(ROOT / TOOL, *arguments, cwd=cwd, env=env)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_calibration_compares_thresholds_with_bf16_and_can_be_resumed(tmp_path, capsys):
    arguments = ["--ds-config", write_config(tmp_path, block=BLOCK), "--threshold", NEVER, "--threshold", "3"]
    arguments += ["--steps", STEPS, "--seed", "1", "--last", "4", "--out", "out", "--max-gap", "90"]
    done = tool(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[3/3]" in done.stdout
    out = tmp_path / "out"
    losses = {
        name: statistics.mean(row["loss"] for row in lines_of(out / f"{name}-seed-1" / "metrics.jsonl")[-4:])
        for name in ("bf16", "3-dB", "1000-dB")
    }
    found = json.loads((out / "table.json").read_text())
    low, never = found["thresholds"]
    assert (low["threshold_db"], never["threshold_db"]) == (3, NEVER)
    assert low["losses"]["1"] == pytest.approx(losses["3-dB"])
    assert low["gap_percent"] == pytest.approx(100 * (losses["3-dB"] / losses["bf16"] - 1), abs=1e-9) != 0
    assert low["gap_half_width_percent"] is None
    # what never leaves bf16 is the reference itself, bit by bit where all layouts give equal sums
    tolerance = 0 if cpu_products.has_fast_bf16() else 1e-4
    assert losses["1000-dB"] == pytest.approx(losses["bf16"], rel=tolerance, abs=0)
    assert never["gap_percent"] == pytest.approx(0, abs=100 * tolerance)
    assert never["share_8bit_or_less"] == 0
    # step 1 is the first check; a check's precision has run since the check before
    checks = lines_of(out / "3-dB-seed-1" / "speculation.jsonl")
    ran = Counter()
    for check in checks:
        ran[check["precision"]] += 1 if check["step"] == 1 else 5
    assert {check["step"] for check in checks} == {1, 6, 11}
    assert low["shares"] == pytest.approx({name: ran[name] / ran.total() for name in ("int8", "bf16")})
    assert low["share_8bit_or_less"] > 0.6
    verdicts = [check["is_hit"] for check in checks if check["is_hit"] is not None]
    assert (low["hits"], low["misses"]) == (verdicts.count(True), verdicts.count(False))
    assert low["hits"] > 0
    assert found["suggested_threshold_db"] == 3
    assert "suggested: megalowbit.speculation.threshold_db = 3, with" in done.stdout
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "table.txt").read_text()
    assert table in done.stdout

    same = {"steps": STEPS, "last": 4, "max_gap": 90.0}
    calibrate(plan(tmp_path, **same))
    again = capsys.readouterr().out
    assert "[1/" not in again
    assert table in again
    with pytest.raises(
        UserError, match="bf16-seed-1 contains a run with other settings: choose another --out"
    ):
        calibrate(plan(tmp_path, **{**same, "steps": STEPS + 1}))


def outcome(threshold, gaps, share=0.9):
    """An outcome whose losses are above those of a reference of 1 by `gaps` %."""
    losses = {seed: 1 + gap / 100 for seed, gap in enumerate(gaps)}
    gap = Gap.between({seed: 100 * loss for seed, loss in losses.items()}, dict.fromkeys(losses, 100))
    is_diverged = any(map(math.isnan, gaps))
    return ThresholdOutcome(
        threshold_db=threshold,
        losses=losses,
        gap=gap,
        shares={} if is_diverged else {"int8": share, "bf16": 1 - share},
        share_8bit=math.nan if is_diverged else share,
        hits=0 if is_diverged else 99,
        misses=0 if is_diverged else 1,
    )


def calibration(*outcomes):
    seeds = len(outcomes[0].losses)
    return Calibration(
        config="tiny.json",
        steps=100,
        last=20,
        max_gap=0.3,
        reference=dict.fromkeys(range(seeds), 1.0),
        outcomes=outcomes,
    )


def test_the_lowest_threshold_whose_gap_is_allowed_is_suggested():
    found = calibration(
        outcome(5, [math.nan, 0.1, 0.1]),
        outcome(10, [0.7, 0.5, 0.6]),
        outcome(15, [0.1, 0.12, 0.11], share=0.8),
        outcome(20, [0.0, 0.0, 0.03]),
    )
    assert found.suggestion.threshold_db == 15
    lines = found.table().splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["bf16", "5", "10", "15", "20"]
    assert lines[3].split() == ["5", "dB", "diverged"]
    half = 4.30265 * statistics.stdev([0.1, 0.12, 0.11]) / math.sqrt(3)
    assert lines[5].split() == (
        f"15 dB 1.0011 +0.11 % ± {half:.2f} % 80.0 % 80.0 % 20.0 % 99.0 % of 100".split()
    )
    assert lines[8:] == [
        "suggested: megalowbit.speculation.threshold_db = 15, with 80.0 % at 8 bits or fewer and a gap of "
        f"+0.11 % ± {half:.2f} % (allowed: 0.3 %)"
    ]


@pytest.mark.parametrize(
    ("outcomes", "last_lines"),
    [
        (
            [outcome(5, [0.8, 0.9]), outcome(10, [0.4, 0.5])],
            [
                "no threshold keeps the gap within 0.3 %: the smallest is +0.45 % ± 0.64 %, at 10 dB",
                "try higher thresholds, or candidates without the cheapest precision",
            ],
        ),
        ([outcome(5, [math.nan])], ["no threshold keeps the gap within 0.3 %: all runs diverged"]),
        ([outcome(5, [0.1])], ["how uncertain the gap is, is unknown with one seed: use three or more"]),
        (
            [outcome(5, [0.0, 0.4])],
            ["within its interval, that gap may exceed 0.3 %: use more seeds or steps"],
        ),
        (
            [outcome(5, [0.1, 0.1]), outcome(10, [0.5, 0.6])],
            ["a higher threshold has a larger gap, so gaps of this size are noise: use more seeds"],
        ),
        (
            [outcome(5, [0.1, 0.1]), outcome(10, [0.1, 0.1]), outcome(15, [0.1, math.nan])],
            [
                "suggested: megalowbit.speculation.threshold_db = 5, with 90.0 % at 8 bits or fewer and a "
                "gap of +0.10 % ± 0.00 % (allowed: 0.3 %)",
                "15 dB diverged but 5 dB did not: inspect those runs, or use more seeds",
            ],
        ),
        (
            [
                outcome(5, [0.1, 0.1]),
                outcome(10, [0.6, 0.6]),
                outcome(15, [math.nan, 0.1]),
                outcome(20, [math.nan, math.nan]),
            ],
            [
                "a higher threshold has a larger gap, so gaps of this size are noise: use more seeds",
                "15 dB and 20 dB diverged but 5 dB did not: inspect those runs, or use more seeds",
            ],
        ),
    ],
)
def test_uncertain_estimates_are_marked(outcomes, last_lines):
    found = calibration(*outcomes)
    assert found.table().splitlines()[-len(last_lines) :] == last_lines
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["suggested_threshold_db"] == (
        None if last_lines[0].startswith("no threshold") else 5
    )


def test_runs_on_another_kind_of_processor_are_counted():
    found = dataclasses.replace(calibration(outcome(5, [0.1, 0.1])), num_mixed=2)
    assert found.table().splitlines()[-1] == (
        "2 runs had another kind of processor than bf16 with the same seed, which adds noise to the gap"
    )


def test_thresholds_are_sorted_and_each_runs_once_in_addition_to_bf16(tmp_path):
    own = plan(tmp_path, thresholds=(20.0, 7.5, 20.0), seeds=(2, 1, 2))
    runs = own.runs()
    assert [(run.label, run.seed) for run in runs] == [
        (label, seed) for seed in (2, 1) for label in ("bf16", "7.5-dB", "20-dB")
    ]
    assert len({run.folder for run in runs}) == len(runs)
    resolved = [run.resolved() for run in runs[:2]]
    assert (resolved[0].recipe, resolved[0].settings.speculation) == ("bf16", None)
    assert resolved[1].recipe == "speculative-int8"
    assert resolved[1].settings.speculation.threshold_db == 7.5
    assert resolved[1].settings.speculation.candidates == ("int8", "bf16")
    assert {config.settings.run.steps for config in resolved} == {STEPS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"last": -1}, "--last -1 must be at least 1"),
        ({"jobs": 0}, "--jobs 0 must be at least 1"),
        ({"max_gap": 0.0}, "--max-gap 0.0 is not a gap in %"),
        ({"max_gap": math.inf}, "--max-gap inf is not a gap in %"),
        (
            {"thresholds": (-1.0,)},
            "--threshold -1.0 is not an SNR in dB: give a number ≥ 0, such as 15",
        ),
        ({"thresholds": (15.0, math.nan)}, "--threshold nan is not an SNR in dB"),
        ({"thresholds": (math.inf, 15.0)}, "--threshold inf is not an SNR in dB"),
        (
            {"thresholds": (10.00000000000001, 7.0, 10.0)},
            "--threshold 10.0 and --threshold 10.00000000000001 have the same name, 10 dB: leave one out",
        ),
        (
            {"thresholds": (1e-20, 1e20)},  # "1e+20" and "1e-20" are one folder
            "--threshold 1e-20 and --threshold 1e+20 have the same name",
        ),
        ({"seeds": (-1,)}, "megalowbit.run.seed"),
        ({"block": {"recipe": "speculative-int8"}}, "has no megalowbit.speculation section"),
        ({"block": {**BLOCK, "recipe": "bf16"}}, "megalowbit.speculation: "),
        ({"config": Path("nowhere.json")}, "nowhere.json"),
    ],
)
def test_mistakes_are_found_before_the_first_run(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        calibrate(plan(tmp_path, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_diverging_reference_is_reported(tmp_path):
    own = plan(tmp_path, thresholds=(3.0,))
    for run in own.runs():
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text(json.dumps(run.resolved().to_dict()))
        (run.folder / "summary.json").write_text(json.dumps({"steps": STEPS}))
        losses = [3.0] * (STEPS - 1) + [None if run.label == "bf16" else 2.0]
        rows = [{"step": step, "loss": loss, "skipped_steps": 0} for step, loss in enumerate(losses, start=1)]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="bf16, seed 1, ended at a loss of nan"):
        calibrate(own, has_picture=False)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "has no speculation section (None): choose another --out"),
        (
            {"shares": {"fp8": 1.0}},
            "is damaged (speculation.shares do not match the candidates): remove that",
        ),
        ({"shares": [1, 2]}, "is damaged (speculation.shares do not match the candidates): remove that"),
        ({"hits": "many"}, "is damaged (speculation contains an invalid share or count): remove that run's"),
        (
            {"shares": {"int8": 10**400, "bf16": 0}},
            "is damaged (speculation contains an invalid share or count)",
        ),
        ({}, None),
    ],
)
def test_a_damaged_summary_is_named(tmp_path, section, message):
    own = plan(tmp_path, thresholds=(3.0,))
    whole = {"shares": {"bf16": 0.2, "int8": 0.8}, "share_8bit_or_less": 0.8, "hits": 3, "misses": 1}
    for run in own.runs():
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text(json.dumps(run.resolved().to_dict()))
        summary = {"steps": STEPS, "speculation": None if section is None else {**whole, **section}}
        (run.folder / "summary.json").write_text(json.dumps(summary))
        rows = [{"step": step, "loss": 2.0, "skipped_steps": 0} for step in range(1, STEPS + 1)]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if message is None:
        assert calibrate(own, has_picture=False).suggestion.share_8bit == 0.8
        return
    with pytest.raises(UserError) as caught:
        calibrate(own, has_picture=False)
    assert str(caught.value).startswith(f"{own.out / '3-dB-seed-1' / 'summary.json'} {message}")
    assert "\n" not in str(caught.value)


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match=r"--out .*out is not a writable folder .*: choose another --out"):
        calibrate(plan(tmp_path), has_picture=False)
