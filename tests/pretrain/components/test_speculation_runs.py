"""Whole runs that choose precisions as they go, in this process."""

import json
import math
import shutil
from collections import Counter, defaultdict

import pytest
import torch
from quick_cases import slow_except

from launchers import SPEEDS
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, product_counts
from megalowbit.pretrain.components.speculation import Speculation
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain

PRODUCTS = {"output", "grad_input", "grad_weight"}
BLOCK = {"every": 2, "lookahead": 2, "verify_every": 1, "cooldown": 2, "threshold_db": 20}
ON = f"megalowbit.speculation={json.dumps(BLOCK)}"
RECIPE = "megalowbit.recipe=speculative-int8"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)
    return lines_of(folder / "metrics.jsonl")


def checks_of(folder):
    """The rows of each check, by step."""
    found = defaultdict(dict)
    for row in lines_of(folder / "speculation.jsonl"):
        gemm = (row["layer"], row["product"])
        assert gemm not in found[row["step"]]
        found[row["step"]][gemm] = row
    return dict(found)


def without_time(rows):
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in rows]


def shares_by_step(folder, steps):
    """At which precision each product ran in each step, counted from the lines of checks alone."""
    counts, running, by_step = Counter(), None, []
    for step in range(1, steps + 1):
        check = checks_of(folder).get(step)
        if running is None:
            running = dict.fromkeys(check, "bf16")
        if check is not None:
            assert {gemm: row["precision"] for gemm, row in check.items()} == running
        by_step.append(Counter(running.values()))
        counts += by_step[-1]
        if check is not None:
            running = {gemm: row["next_precision"] for gemm, row in check.items()}
    return by_step, counts


def test_a_run_records_and_summarises_its_decisions(resolve, tmp_path, capsys):
    folder = tmp_path / "run"
    rows = run(resolve(ON, RECIPE), folder)
    assert list(checks_of(folder)) == [1, 3, 5]
    layers = {name for name, _ in checks_of(folder)[1]}
    assert len(layers) == 8
    assert all(set(check) == {(name, product) for name in layers for product in PRODUCTS}
               for check in checks_of(folder).values())  # fmt: skip
    by_step, counts = shares_by_step(folder, 6)
    assert {row["reason"] for row in checks_of(folder)[1].values()} == {"start"}
    assert counts["int8"] > 0
    names = {f"speculation/share_{name}" for name in ("int8", "fp8", "bf16", "8bit_or_less")}
    for row, ran in zip(rows, by_step, strict=True):
        facts = {name: value for name, value in row.items() if name.startswith("speculation/")}
        if row["step"] not in (1, 3, 5):
            assert not facts
            continue
        assert facts.keys() == names | {f"speculation/{name}" for name in ("hit_rate", "misses", "changes")}
        for precision in ("int8", "fp8", "bf16"):
            assert facts[f"speculation/share_{precision}"] == pytest.approx(ran[precision] / 24)
        assert facts["speculation/share_8bit_or_less"] == pytest.approx(1 - ran["bf16"] / 24)
    outcomes = Counter(row["is_hit"] for check in checks_of(folder).values() for row in check.values())
    changes = sum(
        row["precision"] != row["next_precision"]
        for check in checks_of(folder).values()
        for row in check.values()
    )
    summary = json.loads((folder / "summary.json").read_text())["speculation"]
    assert summary["shares"] == pytest.approx(
        {name: counts[name] / (6 * 24) for name in ("int8", "fp8", "bf16")}
    )
    assert summary["share_8bit_or_less"] == pytest.approx(1 - counts["bf16"] / (6 * 24))
    assert (summary["hits"], summary["misses"]) == (outcomes[True], outcomes[False])
    assert outcomes[True] > 0
    assert summary["changes"] == changes == rows[4]["speculation/changes"]
    assert summary["hit_rate"] == rows[4]["speculation/hit_rate"]
    printed = capsys.readouterr().out.splitlines()
    assert "speculate int8, fp8, bf16 at 20 dB; check every 2 steps, all verified" in printed
    lines = [line for line in printed if line.startswith("step 1: ")]
    assert len(lines) == 4
    assert lines[-1].startswith("step 1: and ")
    assert all(len(line) <= 100 for line in printed if line.startswith("step "))
    assert [line for line in printed if line.startswith("low bits")]


def test_a_run_without_the_component_has_no_trace_of_it(resolve, tmp_path, capsys):
    rows = run(resolve("megalowbit.run.steps=2"), tmp_path / "run")
    assert not (tmp_path / "run" / "speculation.jsonl").exists()
    assert not [key for row in rows for key in row if "speculation" in key]
    assert "speculation" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    printed = capsys.readouterr().out
    assert "speculate " not in printed
    assert "low bits" not in printed


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Conv1D's weights lie transposed, which fp32 sums in another order
    slow_except([("bf16", 0)], [("bf16", 0), ("fp32", 1e-6)]),
)
def test_a_single_candidate_equals_the_unquantised_run(resolve, tmp_path, precision, tolerance):
    block = {**BLOCK, "candidates": ["bf16"]}
    kind = f"megalowbit.precision={precision}"
    rows = run(resolve(f"megalowbit.speculation={json.dumps(block)}", RECIPE, kind), tmp_path / "run")
    plain = run(resolve("megalowbit.recipe=bf16", kind), tmp_path / "plain")
    losses, expected = ([row["loss"] for row in each] for each in (rows, plain))
    assert losses == pytest.approx(expected, rel=tolerance, abs=0)
    assert rows[2]["speculation/share_bf16"] == 1


# between checks, and right after one
@pytest.mark.parametrize("stop", slow_except([3], [2, 3, 4]))
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(resolve, tmp_path, stop):
    settings = (ON, RECIPE, "megalowbit.checkpoint.every=1", "megalowbit.checkpoint.keep=null")
    whole = run(resolve(*settings), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "hf")
    for step in range(stop + 1, 7):  # as a kill after step 6 leaves it where saves came seldom
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / f"step-{step:08d}")
    with (tmp_path / "parts" / "speculation.jsonl").open("a") as file:
        file.write('{"step": 7, "layer": "tor')  # a torn line
    resumed = run(resolve(*settings), tmp_path / "parts", is_resume=True)
    assert without_time(resumed) == without_time(whole)
    texts = [(tmp_path / name / "speculation.jsonl").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert summaries[0]["speculation"] == summaries[1]["speculation"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (RECIPE, ON, 'megalowbit.speculation.candidates=["int8", "bf16"]'),
            r"candidates was \['int8', 'fp8', 'bf16'\] .* is \['int8', 'bf16'\] now: resume with",
        ),
        ((RECIPE, ON, "megalowbit.speculation.threshold_db=21"), r"threshold_db was 20\.0 .* is 21\.0 now"),
        ((RECIPE,), r"megalowbit\.speculation was on in the run to resume and is off now"),
    ],
)
def test_a_resume_with_other_decisions_is_rejected_and_the_run_is_unchanged(
    resolve, tmp_path, overrides, message
):
    folder = tmp_path / "run"
    run(resolve(ON, RECIPE, "megalowbit.run.steps=2"), folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        run(resolve(*overrides, "megalowbit.run.steps=4"), folder, is_resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_checkpoint_without_decisions_is_refused(build_job):
    job = build_job(RECIPE)
    train_step(job)
    job.save()
    with pytest.raises(UserError, match=r"^megalowbit\.speculation was off in the run to resume"):
        build_job(RECIPE, ON).resume()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("bf16", "'bf16': it quantises nothing; set recipe to"),
        ('{"base": "nvfp4", "split_input": {"rank": 2}}', "split_input splits an operand"),
        ('{"base": "nvfp4", "layout": "per_gemm", "hadamard": true}', "hadamard transforms"),
    ],
)
def test_a_recipe_with_nothing_to_choose_is_refused_before_a_folder_is_made(
    resolve, tmp_path, recipe, message
):
    with pytest.raises(UserError, match=rf"^megalowbit\.speculation: .*{message}"):
        run(resolve(ON, f"megalowbit.recipe={recipe}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["forward", "all"])
def test_after_a_late_switch_only_quantised_products_get_a_precision(resolve, tmp_path, capsys, scope):
    switch = f'megalowbit.late_switch={{"at": 3, "scope": "{scope}"}}'  # the next check would be at step 5
    folder = tmp_path / "run"
    settings = (ON, RECIPE, switch, "megalowbit.checkpoint.every=3", "megalowbit.checkpoint.keep=null")
    rows = run(resolve(*settings), folder)
    printed = capsys.readouterr().out.splitlines()
    line = next(n for n, text in enumerate(printed) if text.startswith("precision switched after step 3: 8"))
    assert (
        printed[line + 1]
        == {
            "forward": "speculation continues for grad_input and grad_weight",
            "all": "speculation has no product left to choose a precision for",
        }[scope]
    )
    found = checks_of(folder)
    assert list(found) == [1, 3, 4, 5]
    ran = {name: Counter() for name in PRODUCTS}
    for (_, product), row in found[4].items():
        ran[product][row["precision"]] += 1
    assert ran["output"] == {"bf16": 8}
    low = sum(ran[name][precision] for name in ("grad_input", "grad_weight") for precision in ("int8", "fp8"))
    assert low > 0 if scope == "forward" else low == 0
    assert rows[3]["speculation/share_8bit_or_less"] == pytest.approx(low / 24)
    after = {step: [row["next_precision"] for row in found[step].values()] for step in (1, 5)}
    by_step = [
        *([row["precision"] for row in found[step].values()] for step in found),
        *(after[step] for step in (1, 5)),  # what steps 2 and 6 ran at
    ]
    low_in_all = sum(precision != "bf16" for precisions in by_step for precision in precisions)
    summary = json.loads((folder / "summary.json").read_text())["speculation"]
    assert low_in_all > 0
    assert summary["share_8bit_or_less"] == pytest.approx(low_in_all / (6 * 24))
    if scope == "all":
        assert rows[5]["quantization/grad_output/snr_db"] is None  # nothing was quantised, as it says
    shutil.copytree(folder, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "hf")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    assert without_time(run(resolve(*settings), tmp_path / "parts", is_resume=True)) == without_time(rows)
    assert checks_of(tmp_path / "parts") == checks_of(folder)


def overflow_once(job, at_step):
    """Make a layer's output gradient infinite in the first attempt at a step; returns the attempts."""
    attempts = []

    def spoil(_, gradients):
        if job.step != at_step:
            return None
        attempts.append(1)
        return (torch.full_like(gradients[0], math.inf),) if len(attempts) == 1 else None

    job.engine.module.transformer.h[0].mlp.c_fc.register_full_backward_pre_hook(spoil)
    return attempts


def train_steps(job, count):
    """What became of the steps, and what was found in them."""
    found = [(train_step(job), job.find(Speculation).report) for _ in range(count)]
    return [step for step, _ in found], [check for _, check in found]


def test_of_a_repeated_step_only_the_last_record_counts(build_job):
    fp16 = ("megalowbit.precision=fp16", 'megalowbit.grad_scaler={"initial_scale": 1024, "hysteresis": 1}')
    one = ("gradient_accumulation_steps=1", "train_batch_size=2")
    job = build_job(ON, RECIPE, *fp16, *one, "megalowbit.run.overflow_retries=2")
    attempts = overflow_once(job, at_step=2)
    steps, checks = train_steps(job, 3)
    assert len(attempts) == 2
    assert [len(step.overflows) for step in steps] == [0, 0, 1]
    assert not any(step.is_skipped for step in steps)
    assert [check is not None for check in checks] == [True, False, True]
    assert job.find(Speculation).controller.step == 3
    rows = checks[2].rows
    assert len(rows) == 24
    assert all(row.left_ratio is not None and row.right_ratio is not None for row in rows)
    assert any(row.precision != "bf16" for row in rows)
    assert all(row.predicted_db is not None for row in rows if row.precision != "bf16")


def test_a_skipped_step_leaves_what_its_gradients_touched_at_bf16_for_patience_checks(build_job):
    fp16 = ("megalowbit.precision=fp16", 'megalowbit.grad_scaler={"initial_scale": 1024, "hysteresis": 1}')
    one = ("gradient_accumulation_steps=1", "train_batch_size=2")
    job = build_job(ON, RECIPE, *fp16, *one)
    overflow_once(job, at_step=2)
    steps, checks = train_steps(job, 9)
    assert [number for number, step in enumerate(steps) if step.is_skipped] == [2]
    layer, backward = "transformer.h.0.mlp.c_fc", {"grad_input", "grad_weight"}
    ran = {
        number: {row.product: row.precision for row in checks[number].rows if row.layer == layer}
        for number in (2, 4, 6, 8)
    }
    reasons = {
        number: {each.product: each.reason for each in checks[number].changes if each.layer == layer}
        for number in (2, 4, 6)
    }
    assert "bf16" not in ran[2].values()
    assert reasons[2] == dict.fromkeys(backward, "not finite")
    assert all(ran[number][product] == "bf16" for number in (4, 6) for product in backward)
    assert not backward & reasons[4].keys()
    # two checks in a row were finite and high enough
    assert {product: reasons[6].get(product) for product in backward} == dict.fromkeys(backward, "safe")
    assert all(ran[8][product] in ("int8", "fp8") for product in backward)
    assert all(ran[number]["output"] != "bf16" for number in ran)


def test_products_and_operands_are_counted_by_the_precision_they_ran_in(build_job):
    job = build_job(ON, RECIPE)
    first, second = (train_step(job) for _ in range(2))
    # 8 layers, two micro-batches, two steps
    assert product_counts(job.engine.module) == {product: {"bf16": 2 * 8 * 2} for product in PRODUCTS}
    assert first.facts["quantization/weight/snr_db"] is None  # all products began in bf16
    assert second.facts["quantization/weight/snr_db"] > 20
    choosers = {layer.chooser for layer in bit_layers(job.engine.module).values()}
    assert choosers == {job.find(Speculation).controller}
