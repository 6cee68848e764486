import itertools
import json
import random

import pytest

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.precision_switch import switched
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.checks import check_config
from megalowbit.pretrain.components.speculation import (
    Speculation,
    change_lines,
    check_facts,
    describe_speculation,
    line_after_switch,
    speculation_summary,
    summary_row,
)
from megalowbit.pretrain.estimate.dry_run import describe, estimate_run
from megalowbit.pretrain.estimate.saved_tensors import saved_for_backward
from megalowbit.speculation.precisions import recipe_with
from megalowbit.speculation.report import Change, GemmRow, SpeculationReport, SpeculationTotals
from megalowbit.speculation.settings import SpeculationSettings

ON = "megalowbit.speculation={}"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def change(before, after, *, layer="h.0", product="output", reason="safe", predicted_db=20.0):
    return Change(
        layer=layer, product=product, before=before, after=after, reason=reason, predicted_db=predicted_db
    )


def report(*changes, step=119, rows=(), shares=None):
    return SpeculationReport(step=step, rows=tuple(rows), changes=changes, shares=shares or {})


def test_three_changes_are_listed_misses_first_and_the_others_counted():
    changes = [change("bf16", "int8", layer=f"h.{n}") for n in range(40)]
    changes += [change("int8", "fp8", layer="grew", reason="trend", predicted_db=16.24)]
    changes += [change("fp8", "bf16", layer="missed", reason="missed", predicted_db=None)]
    assert change_lines(report(*changes)) == [
        "step 120: missed output fp8 → bf16 (missed)",
        "step 120: grew output int8 → fp8 at 16.2 dB (trend)",
        "step 120: h.0 output bf16 → int8 at 20.0 dB (safe)",
        "step 120: and 39 more, 39 to int8",
    ]
    assert change_lines(report(*changes[:2])) == [
        "step 120: h.0 output bf16 → int8 at 20.0 dB (safe)",
        "step 120: h.1 output bf16 → int8 at 20.0 dB (safe)",
    ]
    assert change_lines(report()) == []


def test_a_miss_is_reported_with_the_measured_snr():
    row = GemmRow(
        layer="h.0", product="output", precision="int8", reason="safe", measured_db=2.46, is_hit=False
    )
    missed = change("int8", "bf16", reason="missed", predicted_db=None)
    assert change_lines(report(missed, rows=[row])) == [
        "step 120: h.0 output int8 → bf16 (missed: 2.5 dB measured)"
    ]


def test_lines_of_changes_are_at_most_100_characters_and_keep_the_end_of_a_long_name():
    name = "model.decoder.transformer.layers.117.feed_forward.experts.shared.down_projection"
    reasons = ("start", "safe", "predicted", "trend", "missed", "waiting", "not finite", "unquantised")
    for reason, db in itertools.product(reasons, (None, -103.456, 60.0)):
        long = change("nvfp4", "mixed", layer=name, product="grad_weight", reason=reason, predicted_db=db)
        (line,) = change_lines(report(long, step=9_999_998))
        assert len(line) <= 100
        foretold = "" if db is None else f" at {db:.1f} dB"
        assert line.endswith(f"shared.down_projection grad_weight nvfp4 → mixed{foretold} ({reason})")
        assert "step 9999999: ..model" not in line


def test_the_candidates_are_described_on_one_line():
    settings = SpeculationSettings(
        candidates=["int4", "int8", "bf16"], threshold_db={"int4": 12.5, "int8": 20}, every=1, verify_every=1
    )
    assert describe_speculation(settings) == (
        "int4 ≥ 12.5 dB, int8 ≥ 20 dB, bf16; check every step, all verified"
    )
    assert describe_speculation(SpeculationSettings()) == (
        "int8, fp8, bf16 at 15 dB; check every 10 steps, 1 of 3 verified"
    )
    assert describe_speculation(SpeculationSettings(verify_every=0)).endswith("none verified")
    for low in (5.5, {"int8": 20, "fp8": 5}):
        line = describe_speculation(SpeculationSettings(threshold_db=low))
        assert line.endswith("; unreliable below 6 dB")
    assert describe_speculation(SpeculationSettings(candidates=["bf16"], threshold_db={})).startswith("bf16;")
    candidates = ["int4", "nvfp4", "int8", "mixed", "fp8", "bf16"]
    longest = SpeculationSettings(
        candidates=candidates, threshold_db=12.25, every=1000, lookahead=0, verify_every=10
    )
    assert len("speculate " + describe_speculation(longest)) <= 100


def test_facts_of_a_check_and_the_summary_equal_report_and_totals():
    shares = {"int4": 0.25, "mixed": 0.5, "bf16": 0.25}
    totals = SpeculationTotals(
        shares={"int4": 0.1, "mixed": 0.2, "bf16": 0.7},
        share_8bit=0.3,
        hits=9,
        misses=3,
        changes=7,
        rollbacks=3,
    )
    assert check_facts(report(shares=shares), totals) == {
        "speculation/share_int4": 0.25,
        "speculation/share_mixed": 0.5,
        "speculation/share_bf16": 0.25,
        "speculation/share_8bit_or_less": 0.75,
        "speculation/hit_rate": 0.75,
        "speculation/misses": 3,
        "speculation/changes": 7,
    }
    assert speculation_summary(totals) == {
        "share_8bit_or_less": 0.3,
        "shares": {"int4": 0.1, "mixed": 0.2, "bf16": 0.7},
        "hit_rate": 0.75,
        "hits": 9,
        "misses": 3,
        "changes": 7,
        "rollbacks": 3,
    }
    row = ("low bits", "30.00% of products", "verified", "12, 75.00% hits")
    assert summary_row(totals) == row
    unverified = SpeculationTotals(shares={"bf16": 1.0}, share_8bit=0.0)
    assert summary_row(unverified)[3] == "nothing"
    assert check_facts(report(shares={"bf16": 1.0}), unverified)["speculation/hit_rate"] is None


def write_checks(folder, resume_step, *checks):
    component = Speculation(controller=None)
    component.open_records(folder, resume_step)
    for check in checks:
        component.report = check
        component.after_step(check.step + 1, {})
    component.close_records()


def test_speculation_records_have_the_precision_used_and_the_next_one(tmp_path):
    rows = [
        GemmRow(
            layer="a", product=product, precision="int8", predicted_db=20.5, measured_db=None, is_hit=None,
            reason="safe", left_ratio=31.0, right_ratio=4.5,
        )
        for product in ("output", "grad_input")
    ]  # fmt: skip
    missed = report(change("int8", "bf16", layer="a", reason="missed"), rows=rows, step=9)
    write_checks(tmp_path, None, missed, report(rows=rows[:1], step=19))
    lines = [json.loads(line) for line in (tmp_path / "speculation.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 10, "layer": "a", "product": "output", "precision": "int8", "predicted_db": 20.5,
        "measured_db": None, "is_hit": None, "reason": "safe", "left_ratio": 31.0, "right_ratio": 4.5,
        "next_precision": "bf16",
    }  # fmt: skip
    found = [(each["step"], each["product"], each["next_precision"]) for each in lines]
    assert found == [(10, "output", "bf16"), (10, "grad_input", "int8"), (20, "output", "int8")]
    write_checks(tmp_path, 15, report(rows=rows[:1], step=19))
    lines = [json.loads(line) for line in (tmp_path / "speculation.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [10, 10, 20]
    with pytest.raises(UserError, match="already holds a run"):
        write_checks(tmp_path, None)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("bf16", "recipe 'bf16': it quantises nothing; set recipe to"),
        ({"base": "nvfp4", "split_weight": {"rank": 4}}, "split_weight splits an operand; set"),
        ({"base": "nvfp4", "layout": "per_gemm"}, "layout 'per_gemm' needs"),
        ({"base": "nvfp4", "layout": "per_gemm", "hadamard": True}, "hadamard transforms"),
        ({"base": "mxfp4", "gemm": "fp8"}, "gemm 'fp8' supports one format only"),
    ],
)
def test_a_recipe_that_leaves_nothing_to_choose_is_refused_in_one_line(resolve, block, message):
    choice = f"megalowbit.recipe={json.dumps(block)}"
    check_config(resolve(choice))
    with pytest.raises(UserError) as caught:
        check_config(resolve(choice, ON))
    assert str(caught.value).startswith("megalowbit.speculation: speculation cannot choose")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_after_a_switch_the_log_names_the_products_with_a_choice():
    forward = switched(recipe("nvfp4"), "forward")
    assert line_after_switch(forward) == "speculation continues for grad_input and grad_weight"
    assert line_after_switch(switched(recipe("nvfp4"), "all")).startswith("speculation has no product left")
    assert (
        line_after_switch(recipe("nvfp4"))
        == "speculation continues for output and grad_input and grad_weight"
    )


@pytest.mark.parametrize("key", ["candidates", "candidats", "threshold_db", "estimator"])
def test_mistakes_in_the_section_are_answered_without_torch(resolve, key):
    values = {
        "candidates": ('["int8", "fp9", "bf16"]', r"speculation\.candidates = .*did you mean 'fp8'"),
        "candidats": (
            '["int8", "bf16"]',
            r"speculation\.candidats': did you mean 'megalowbit\.speculation\.candidates'",
        ),
        "threshold_db": ('{"int8": 15}', r"speculation\.threshold_db = .*no threshold for fp8: add it"),
        "estimator": ('{"smple": 64}', r"did you mean 'megalowbit\.speculation\.estimator\.sample'"),
    }
    value, message = values[key]
    with pytest.raises(UserError, match=message):
        resolve(f"megalowbit.speculation.{key}={value}")


def test_the_dry_run_describes_the_candidates_and_rejects_the_same_values_as_a_run(resolve):
    parts = dict(part.split("\n", 1) for part in describe(resolve(ON)).removeprefix("== ").split("\n\n== "))
    assert parts["speculation"] == describe_speculation(SpeculationSettings())
    assert json.loads(parts["configuration"])["megalowbit"]["speculation"]["candidates"] == [
        "int8",
        "fp8",
        "bf16",
    ]
    assert "upper bound" in parts["memory of the only process (estimate)"]
    assert "speculation\n" not in describe(resolve())
    with pytest.raises(UserError, match=r"^megalowbit\.speculation: .*'bf16': it quantises nothing"):
        describe(resolve(ON, "megalowbit.recipe=bf16"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_memory_estimate_uses_the_largest_candidate(tmp_path, resolve, family):
    config = resolve(ON)
    if family == "llama":
        (tmp_path / "model.json").write_text(json.dumps(LLAMA))
    base = recipe("nvfp4")
    model = build_model(config.settings.model, seed=0)
    convert(model, base)
    model.bfloat16()
    layers = list(bit_layers(model).values())
    choices = list(itertools.product(("int8", "fp8", "bf16"), repeat=3))

    def kept(chosen):
        for layer, choice in zip(layers, chosen, strict=True):
            layer.recipe = recipe_with(base, choice)
        return saved_for_backward(model, 2, 32)

    draw = random.Random(1)
    sizes = [kept([choice] * len(layers)) for choice in choices]
    sizes += [kept([draw.choice(choices) for _ in layers]) for _ in range(60)]
    estimated = estimate_run(config, base).saved_for_backward
    assert max(sizes) <= estimated
    # codes on top where the input is kept anyway: k and v after q, o_proj after attention, up after gate
    kept_anyway = {"llama": (1, 2, 3, 5), "gpt2": ()}[family]
    largest = [("bf16", "int8", "int8" if number in kept_anyway else "bf16") for number in range(len(layers))]
    assert max(*sizes, kept(largest)) == kept(largest)
    assert kept(largest) <= estimated <= 1.03 * kept(largest)  # the fake attention keeps a little more


def test_the_memory_of_a_run_without_speculation_is_that_of_its_recipe(resolve):
    config = resolve()
    plain = estimate_run(config, recipe("nvfp4"))
    bf16 = estimate_run(config, recipe("bf16"))
    speculating = estimate_run(resolve(ON), recipe("nvfp4"))
    assert plain.saved_for_backward < bf16.saved_for_backward < speculating.saved_for_backward
    assert plain.parameters == speculating.parameters
