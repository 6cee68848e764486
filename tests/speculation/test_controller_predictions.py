"""Predicted against measured SNR of all products of a tiny GPT-2 trained on the standard library's text.

It trains under a controller with the settings that users have by default, which also measures the other
candidates in its verified checks. At later checks, whether they are verified ones or not, all products run at
each candidate once. What the controller predicts, from samples and from corrections that it learnt at earlier
checks, is compared with what a second controller measures; the first one does not learn from it. How far
predictions are off at each candidate is a table, minutes long:

    pytest -q -s -m slow tests/speculation/test_controller_predictions.py

Whole products, with the corrections of the same batch, tell errors of the prediction from those of samples
and of earlier checks.
"""

import statistics
import sysconfig
from pathlib import Path

import pytest
import torch

import megalowbit as mlb
from megalowbit.layers import cpu_gemm
from megalowbit.layers.conversion.convert import set_chooser
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.settings import SpeculationSettings

pytestmark = pytest.mark.slow  # a model is trained; quick tests of predictions have operands made up
MODEL = Path(__file__).parents[2] / "configs" / "models" / "gpt2_tiny.json"
SEED = 0  # of the initial weights and the batches
TOKENS, ROWS = 128, 4
TRAINED, CHECKS, EVERY = 150, 6, 10
WHOLE = 1 << 20
CANDIDATES = ("int4", "nvfp4", "int8", "mixed", "fp8")
NEVER = 1000.0  # dB; the decisions are then those of the default candidates
SETTINGS = SpeculationSettings(
    candidates=(*CANDIDATES, "bf16"),
    threshold_db=dict.fromkeys(CANDIDATES, NEVER) | dict.fromkeys(("int8", "fp8"), 15.0),
)


@pytest.fixture(scope="module", autouse=True)
def products_in_fp32():
    """A step takes a third of the time on a CPU that emulates bf16. Only the last bits of sums differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_gemm.VARIABLE, "fp32")
        yield


@pytest.fixture(scope="module")
def corpus():
    """Two megabytes of Python source, byte by byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 2 << 20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def make():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config.from_json_file(MODEL)
    config.use_cache = False
    torch.manual_seed(SEED)
    model = transformers.GPT2LMHeadModel(config).train()
    mlb.convert(model, "speculative-int8", seed=SEED)
    return model


def batch(corpus, step):
    generator = torch.Generator().manual_seed(10_000 * SEED + step)
    starts = torch.randint(len(corpus) - TOKENS, (ROWS,), generator=generator)
    return torch.stack([corpus[start : start + TOKENS] for start in starts.tolist()])


def backward(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item()


def measured(model, controller, candidate, ids):
    """Rows of the coming step with all products at a candidate; the controller does not hear of it."""
    state = controller.state_dict()
    for layer in state["layers"].values():
        for product in layer.values():
            product["precision"] = candidate
    set_chooser(model, None)
    other = mlb.PrecisionController(model, SETTINGS.model_copy(update={"verify_every": 1}))
    other.load_state_dict(state)
    other.begin_step()
    backward(model, ids)
    model.zero_grad()
    rows = other.end_step().rows
    set_chooser(model, controller)
    return rows


@pytest.fixture(scope="module")
def trained(corpus):
    """The weights of a trained model, and rows of the last checks. A controller checks in its first step."""
    model = make()
    controller = mlb.PrecisionController(model, SETTINGS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows, losses = [], []
    for step in range(TRAINED + (CHECKS - 1) * EVERY + 1):
        ids = batch(corpus, step)
        if step >= TRAINED and step % EVERY == 0:
            for candidate in CANDIDATES:
                rows += measured(model, controller, candidate, ids)
        controller.begin_step()
        losses.append(backward(model, ids))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.end_step()
    assert losses[-1] < 0.7 * losses[0]
    return model.state_dict(), rows


@pytest.fixture(scope="module")
def weights(trained):
    return trained[0]


def share_near(found):
    return sum(abs(gap) <= 2 for gap in found) / len(found)


def gaps(rows, product, precision):
    """Predicted less measured in dB."""
    return [
        row.predicted_db - row.measured_db
        for row in rows
        if (row.product, row.precision) == (product, precision) and row.measured_db is not None
    ]


# Least and greatest median of predicted - measured in dB, its greatest 95 % quantile, which is the side that
# matters, and the least share within 2 dB. The trained model depends on the last bits of products, which
# differ between machines, as its seed does: with `SEED` 0, 1 and 2, in fp32 and in bf16, medians at all
# candidates were -0.5 … +0.2 for output, -1.6 … -0.5 for grad_input and -2.4 … +0.6 for grad_weight;
# quantiles were at most 5.4, 0.8 and 6.2 (3.5 for output but for one rounding of the products), shares at
# least .88, .60 and .36. The limits are about as far beyond these as the seeds are from each other. All
# grad_weights of a batch are too high or too low together, because corrections come from the batches of
# earlier checks: their median is uncertain by 1 dB.
LIMITS = {
    "output": (-1.2, 1.0, 7.0, 0.75),
    "grad_input": (-2.6, 0.5, 2.0, 0.45),
    "grad_weight": (-3.5, 1.8, 8.0, 0.25),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_predictions_at_each_candidate(trained, candidate, product):
    found = sorted(gaps(trained[1], product, candidate))
    assert len(found) == CHECKS * 16
    middle, spread, high = statistics.median(found), statistics.pstdev(found), found[int(0.95 * len(found))]
    print(
        f"\n{candidate:6} {product:12} {middle:+.1f} ± {spread:.1f} dB, {100 * share_near(found):.0f} % near,"
        f" 95 % below {high:+.1f}, {found[0]:+.1f} … {found[-1]:+.1f}"
    )
    least, most, highest, near = LIMITS[product]
    assert least <= middle <= most
    assert high <= highest
    assert share_near(found) >= near


def errors(weights, corpus, candidate, *, uses_correction):
    """(product, predicted - measured) of whole products at a precision, where a check of bf16 went before."""
    model = make()
    model.load_state_dict(weights)
    settings = {
        "candidates": [candidate, "bf16"], "threshold_db": 0, "hysteresis_db": 0, "every": 1, "lookahead": 0,
        "verify_every": 1, "verify_size": WHOLE, "use_alignment": uses_correction,
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


@pytest.mark.parametrize("candidate", ["int8", "fp8"])
def test_corrected_predictions_of_whole_products_match(weights, corpus, candidate):
    found = errors(weights, corpus, candidate, uses_correction=True)
    for product in ("output", "grad_input"):
        own = [error for name, error in found if name == product]
        assert len(own) >= 15
        assert abs(statistics.median(own)) < 0.8
        assert share_near(own) >= 0.8


def test_uncorrected_predictions_of_a_trained_model_are_low(weights, corpus):
    found = errors(weights, corpus, "int8", uses_correction=False)
    for product, most in (("output", -6), ("grad_input", -5), ("grad_weight", -0.5)):
        low = [error for name, error in found if name == product]
        assert len(low) >= 12  # at 0 dB and more
        print(f"\n{product} without correction: {statistics.median(low):+.1f} dB", end="")
        assert statistics.median(low) < most
