"""Predicted against measured ratios of all products of a tiny GPT-2 trained on the standard library's text.

It is trained under a controller with the settings that users have by default. At later checks, whether they
are verified ones or not, what the controller predicts, from samples, from alignments and corrections that
it learnt at earlier checks, is compared with what a second controller measures in that step; the first one
does not learn from it. How far predictions are off at each candidate is a table, minutes long:

    pytest -q -s -m slow tests/speculation/test_controller_predictions.py

Whole products, with the alignment of the same batch, tell the noise model's own errors from those of samples
and of earlier checks.
"""

import copy
import statistics
import sysconfig
from pathlib import Path

import pytest
import torch

import megalowbit as mlb
from megalowbit.layers.conversion.convert import set_chooser
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.settings import SpeculationSettings

pytestmark = pytest.mark.slow  # a model is trained; quick tests of the noise model have operands made up
MODEL = Path(__file__).parents[2] / "configs" / "models" / "gpt2_tiny.json"
TOKENS, ROWS = 128, 4
TRAINED, LEARNT, EVERY = 150, 30, 10
WHOLE = 1 << 20


@pytest.fixture(scope="module")
def corpus():
    """Two megabytes of Python source, byte by byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 2 << 20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def make(*, seed=0):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config.from_json_file(MODEL)
    config.use_cache = False
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(config).train()
    mlb.convert(model, "speculative-int8", seed=seed)
    return model


def batch(corpus, step):
    starts = torch.randint(len(corpus) - TOKENS, (ROWS,), generator=torch.Generator().manual_seed(step))
    return torch.stack([corpus[start : start + TOKENS] for start in starts.tolist()])


def backward(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item()


def measured(model, controller, ids):
    """Rows of the coming step, all of them verified; the controller does not hear of it."""
    settings = controller.settings.model_copy(update={"verify_every": 1})
    set_chooser(model, None)
    other = mlb.PrecisionController(model, settings)
    other.load_state_dict(controller.state_dict())
    other.begin_step()
    backward(model, ids)
    model.zero_grad()
    rows = other.end_step().rows
    set_chooser(model, controller)
    return rows


def train(model, optimizer, controller, corpus, steps, *, first_measured):
    """Losses, and rows of all checks from a step on. A new controller checks in its first step."""
    rows, losses = [], []
    for step in steps:
        ids = batch(corpus, step)
        if step >= first_measured and (step - steps.start) % EVERY == 0:
            rows += measured(model, controller, ids)
        controller.begin_step()
        losses.append(backward(model, ids))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.end_step()
    return losses, rows


@pytest.fixture(scope="module")
def by_default(corpus):
    """A trained model, its optimizer, and rows of the last checks."""
    model = make()
    controller = mlb.PrecisionController(model, SpeculationSettings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = range(TRAINED + 3 * EVERY + 1)
    losses, rows = train(model, optimizer, controller, corpus, steps, first_measured=TRAINED)
    assert losses[-1] < 0.7 * losses[0]
    return model, optimizer, rows


def gaps(rows, product, precision):
    """Predicted less measured in dB."""
    return [
        row.predicted_db - row.measured_db
        for row in rows
        if (row.product, row.precision) == (product, precision) and row.measured_db is not None
    ]


def share_near(found):
    return sum(abs(gap) <= 2 for gap in found) / len(found)


def test_predictions_from_earlier_checks_are_within_two_decibels(by_default):
    _, _, rows = by_default
    output = gaps(rows, "output", "int8")
    assert len(output) == 4 * 16
    assert share_near(output) >= 0.88, share_near(output)
    assert abs(statistics.median(output)) < 0.5
    for product in ("grad_input", "grad_weight"):
        found = gaps(rows, product, "int8")
        assert len(found) > 30
        assert abs(statistics.median(found)) < 1.5
        assert max(map(abs, found)) < 12


def test_predictions_are_at_most_a_few_decibels_too_high(by_default):
    """The side that matters: a product that is noisier than predicted."""
    _, _, rows = by_default
    found = [gap for product in PRODUCTS for gap in gaps(rows, product, "int8")]
    assert sorted(found)[int(0.95 * len(found))] < 4


# candidate → least share of predictions within 2 dB: output, grad_input, grad_weight. The trained model
# depends on bits of bf16 products, which differ between machines: shares of grad_weight by up to 0.1.
LEAST_NEAR = {
    "int8": (0.88, 0.84, 0.5),
    "mixed": (0.86, 0.72, 0.42),
    "fp8": (0.89, 0.86, 0.5),
    "nvfp4": (0.87, 0.82, 0.45),
    "int4": (0.76, 0.9, 0.45),
}


@pytest.mark.parametrize("candidate", ["int8", "mixed", "fp8", "nvfp4", "int4"])
def test_predictions_at_each_candidate(by_default, weights, corpus, candidate):
    """All products held there: INT4 would not stay at any threshold that a configuration may have.

    The trained model goes on under a new controller, which learns for `LEARNT` steps before it is measured.
    """
    settings = SpeculationSettings(candidates=(candidate, "bf16")).model_copy(
        update={"threshold_db": -1000.0}
    )
    model = make()
    model.load_state_dict(weights)
    controller = mlb.PrecisionController(model, settings)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(by_default[1].state_dict()))
    first = TRAINED + 3 * EVERY + 1
    steps = range(first, first + LEARNT + 6 * EVERY + 1)
    _, rows = train(model, optimizer, controller, corpus, steps, first_measured=first + LEARNT)
    for product in PRODUCTS:
        found = gaps(rows, product, candidate)
        assert len(found) == 7 * 16
        middle, spread = statistics.median(found), statistics.pstdev(found)
        near, worst = 100 * share_near(found), max(found, key=abs)
        print(
            f"\n{candidate:6} {product:12} {middle:+.1f} ± {spread:.1f} dB, "
            f"{near:.0f} % near, worst {worst:+.1f}"
        )
        assert abs(middle) < 1
        assert share_near(found) >= LEAST_NEAR[candidate][PRODUCTS.index(product)]


def errors(weights, corpus, candidate, *, uses_alignment, signal="bulk"):
    """(product, predicted - measured) of whole products at a precision, where a check of bf16 went before."""
    model = make()
    model.load_state_dict(weights)
    settings = {
        "candidates": [candidate, "bf16"], "threshold_db": 0, "hysteresis_db": 0, "every": 1, "lookahead": 0,
        "verify_every": 1, "verify_size": WHOLE, "signal": signal, "use_alignment": uses_alignment,
    }  # fmt: skip
    controller = mlb.PrecisionController(model, settings)
    for _ in range(2):
        controller.begin_step()
        backward(model, batch(corpus, 1000))
        model.zero_grad()
        report = controller.end_step()
    assert len(report.rows) == 4 * 4 * 3
    return [
        (row.product, row.predicted_db - row.measured_db)
        for row in report.rows
        if row.measured_db is not None and row.predicted_db is not None
    ]


@pytest.fixture(scope="module")
def weights(by_default):
    return by_default[0].state_dict()


@pytest.mark.parametrize("candidate", ["int8", "fp8"])
def test_full_products_match_their_predictions_with_alignment(weights, corpus, candidate):
    found = errors(weights, corpus, candidate, uses_alignment=True)
    for product in ("output", "grad_input"):
        own = [error for name, error in found if name == product]
        assert len(own) >= 15
        assert abs(statistics.median(own)) < 0.8
        assert share_near(own) >= 0.8


def test_without_alignment_predictions_of_a_trained_model_are_low(weights, corpus):
    found = errors(weights, corpus, "int8", uses_alignment=False)
    for product, most in (("output", -6), ("grad_input", -5), ("grad_weight", -0.5)):
        low = [error for name, error in found if name == product]
        assert len(low) >= 12  # at 0 dB and more
        print(f"\n{product} without alignment: {statistics.median(low):+.1f} dB", end="")
        assert statistics.median(low) < most


def test_signals_of_full_products_match_their_predictions(weights, corpus):
    """As they came out: the rounding of outputs to bf16, 55 dB down, is in what is measured."""
    found = errors(weights, corpus, "fp8", uses_alignment=True, signal="all")
    own = [error for name, error in found if name != "grad_weight"]
    assert abs(statistics.median(own)) < 0.8
    assert share_near(own) >= 0.75
