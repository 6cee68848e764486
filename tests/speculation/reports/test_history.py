import itertools
import json
import math

import pytest
from run_files import made_up_rows, row, write_run

from megalowbit.errors import UserError
from megalowbit.speculation.reports.history import Gemm, Verified, read_history, short_names, table

LAYERS = [f"transformer.h.{block}.{name}" for block in range(2) for name in ("attn.c_attn", "mlp.c_fc")]
A, B = LAYERS[:2]


def precision_by_step(rows, steps):
    """(layer, product) → what it ran at in steps 1 … `steps`, step by step."""
    lines = {}
    for each in rows:
        lines.setdefault((each["layer"], each["product"]), []).append(each)
    found = {}
    for gemm, own in lines.items():
        found[gemm] = [
            next((each["precision"] for each in own if each["step"] >= step), own[-1]["next_precision"])
            for step in range(1, steps + 1)
        ]
    return found


@pytest.mark.parametrize("steps", [None, 391, 397])
def test_shares_and_spans_are_those_of_the_steps_one_by_one(tmp_path, steps):
    rows = list(made_up_rows(LAYERS, checks=40))
    history = read_history(write_run(tmp_path, rows, steps=steps))
    assert history.steps == (steps or 391)
    truth = precision_by_step(rows, history.steps)
    assert len({name for names in truth.values() for name in names}) == 3
    for gemm, names in truth.items():
        spans = history.spans[gemm]
        assert [name for start, end, name in spans for _ in range(start, end)] == names
        assert all(one.precision != two.precision for one, two in itertools.pairwise(spans))
    flat = [name for names in truth.values() for name in names]
    assert history.shares() == pytest.approx({n: flat.count(n) / len(flat) for n in ("int8", "fp8", "bf16")})
    of_a = [name for gemm, names in truth.items() if gemm[0] == A for name in names]
    shares = history.shares(Gemm(A, product) for product in ("output", "grad_input", "grad_weight"))
    assert shares["int8"] == pytest.approx(of_a.count("int8") / len(of_a))


def test_products_stand_in_their_order_whatever_the_order_of_the_lines(tmp_path):
    rows = [row(1, layer, product, "bf16") for layer in (B, A) for product in ("grad_weight", "output")]
    gemms = list(read_history(write_run(tmp_path, rows)).checks)
    assert gemms == [(B, "output"), (B, "grad_weight"), (A, "output"), (A, "grad_weight")]


def test_verified_products_have_the_prediction_for_the_same_step(tmp_path):
    rows = [
        row(1, A, "output", "bf16", next_precision="int8"),
        row(11, A, "output", "int8", predicted_db=20.0, measured_db=18.5, is_hit=True),
        row(
            21, A, "output", "int8", predicted_db=17.0, measured_db=12.0, is_hit=False, next_precision="bf16"
        ),
        row(31, A, "output", "bf16"),
        row(11, B, "output", "fp8", predicted_db=None, measured_db=25.0, is_hit=True),
    ]
    history = read_history(write_run(tmp_path, rows))
    assert history.verified[Gemm(A, "output")] == (
        Verified(11, "int8", 20.0, 18.5, True),
        Verified(21, "int8", 17.0, 12.0, False),
    )
    assert [check.gap_db for check in history.compared] == [-1.5, -5.0]
    assert len(history.verified[Gemm(B, "output")]) == 1  # a hit, though there is nothing to compare it with
    lines = table(history).splitlines()
    (line,) = [line for line in lines if line.startswith("0.attn.c_attn ")]
    assert line.split()[-8:] == ["2", "1", "of", "2", "-5.0", "dB,", "step", "21"]
    (line,) = [line for line in lines if line.startswith("all ")]
    assert line.split()[-7:-4] == ["2", "of", "3"]
    assert lines[-1].endswith("; 0.0 % of 2 predictions within 1 dB of the measured SNR")


def test_the_table_has_a_line_for_each_product_and_one_for_all(tmp_path):
    rows = list(made_up_rows(LAYERS, checks=40))
    lines = table(read_history(write_run(tmp_path, rows, steps=400))).splitlines()
    truth = precision_by_step(rows, 400)
    assert len(lines) == 3 + len(truth) + 2
    for line, (gemm, names) in zip(lines[3:], truth.items(), strict=False):
        words = line.split()
        if gemm[1] == "output":
            assert words.pop(0) == gemm[0].removeprefix("transformer.h.")
        assert words[0] == gemm[1]
        assert [float(words[at]) for at in (1, 3, 5)] == pytest.approx(
            [100 * names.count(name) / 400 for name in ("int8", "fp8", "bf16")], abs=0.06
        )
        assert int(words[7]) == sum(one != two for one, two in itertools.pairwise(names))


def test_a_running_run_may_have_an_incomplete_last_line(tmp_path):
    rows = list(made_up_rows([A], checks=4))
    folder = write_run(tmp_path, rows)
    whole = read_history(folder)
    with (folder / "speculation.jsonl").open("a") as file:
        file.write('{"step": 41, "layer": "trans')
    assert read_history(folder) == whole


def test_a_summary_of_an_earlier_end_does_not_cut_the_run(tmp_path):
    folder = write_run(tmp_path, list(made_up_rows([A], checks=4)), steps=12)
    assert read_history(folder).steps == 31


def damaged(**changes):
    return {**row(1, A, "output", "bf16"), **changes}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "it is not JSON"),
        ([1], "it is not an object"),
        ({"step": 1}, "layer, product, precision, predicted_db"),
        (damaged(step=True), "step = True is not possible"),
        (damaged(step=0), "step = 0 is not possible"),
        (damaged(precision="int4"), "precision = 'int4' is not possible"),
        (damaged(precision=["int8"]), "precision = ['int8'] is not possible"),
        (damaged(next_precision=None), "next_precision = None is not possible"),
        (damaged(product="loss"), "product = 'loss' is not possible"),
        (damaged(predicted_db="9"), "predicted_db = '9' is not possible"),
        (damaged(measured_db=True), "measured_db = True is not possible"),
        (damaged(is_hit=1), "is_hit = 1 is not possible"),
        (damaged(), "step 1 does not come after"),
        ("[" * 100_000, "it is not JSON"),
        (damaged(step=10**400), "step = 1000"),
        (damaged(step=10**15 + 1), "step = 1000000000000001 is not possible"),
        (damaged(left_ratio=10**400), "left_ratio = 1000"),
        (damaged(right_ratio=-0.5), "right_ratio = -0.5 is not possible"),
        (damaged(predicted_db=10**400), "predicted_db = 1000"),
        (damaged(predicted_db=1e308), "predicted_db = 1e+308 is not possible"),
        (damaged(measured_db=-1e308), "measured_db = -1e+308 is not possible"),
        (damaged(measured_db=math.nan), "measured_db = nan is not possible"),
        (damaged(is_hit=True), "is_hit = True without a measured_db is not possible"),
        (damaged(is_hit=False), "is_hit = False without a measured_db is not possible"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, record, message):
    folder = write_run(tmp_path, [row(1, A, "output", "bf16")])
    with (folder / "speculation.jsonl").open("a") as file:
        file.write((record if isinstance(record, str) else json.dumps(record)) + "\n")
    with pytest.raises(UserError) as caught:
        read_history(folder)
    assert "speculation.jsonl line 2 is damaged: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_raise_a_one_line_error(tmp_path):
    def message(folder):
        with pytest.raises(UserError) as caught:
            read_history(folder)
        return str(caught.value)

    assert "is not a run folder (no config.json)" in message(tmp_path / "nowhere")
    folder = write_run(tmp_path / "run", None)
    assert message(folder).endswith("wait for the run's first precision check")
    (folder / "speculation.jsonl").write_text("")
    assert "is empty" in message(folder)
    (folder / "speculation.jsonl").write_bytes(b"\xff\n")
    assert "cannot be read" in message(folder)
    (folder / "config.json").write_text('{"megalowbit": {"recipe": "nvfp4"}}')
    assert "did not use speculation" in message(folder)
    (folder / "config.json").write_text('{"megalowbit": {"speculation": {"candidates": ["int8"]}}}')
    assert "megalowbit.speculation.candidates" in message(folder)
    write_run(folder, [row(1, A, "output", "bf16")], steps="many")
    assert "steps = 'many' is not a number of steps" in message(folder)
    write_run(folder, [row(1, A, "output", "bf16")], steps=10**30)
    assert "is not a number of steps" in message(folder)


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        (["transformer.h.0.attn.c_attn", "transformer.h.11.mlp.c_fc"], ["0.attn.c_attn", "11.mlp.c_fc"]),
        (["model.layers.0.mlp.up_proj", "lm_head"], ["0.mlp.up_proj", "lm_head"]),
        (["model.encoder.0.fc", "model.decoder.0.fc"], ["encoder.0.fc", "decoder.0.fc"]),
        (["fc"], ["fc"]),
        (["0.fc", "1.fc"], ["0.fc", "1.fc"]),
        (["a.0.fc", "a.0.fc.0.fc", "b.0.fc"], ["a.0.fc", "a.0.fc.0.fc", "b.0.fc"]),
        (["h.0.a\nb", "h.1.\x1b[31m\x00"], [r"0.a\nb", r"1.\x1b[31m\x00"]),
        (["h.0.\ud800é\u202e", "h.1.fc"], [r"0.\ud800é\u202e", "1.fc"]),
    ],
)
def test_short_names_are_short_and_each_layers_own(layers, shown):
    assert list(short_names(layers).values()) == shown
