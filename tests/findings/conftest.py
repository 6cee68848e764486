"""A healthy run's records, which tests change before they are written."""

import random

import pytest
from small_runs import COUNTS, LAYERS, Records, begun, course, ended


@pytest.fixture
def records():
    draw = random.Random(5)
    rows = [
        {
            "step": step,
            "loss": course(step, draw),
            "lr": 3e-3 * min(1, step / 5),
            "grad_norm": 0.9 + 0.1 * draw.random(),
            "loss_scale": 1.0,
            "skipped_steps": 0,
            "tokens_per_second": 1000 + draw.random(),
        }
        for step in range(1, 61)
    ]
    tables = {
        step: {
            (layer, role): {
                **{name: round(value * draw.uniform(0.97, 1.03)) for name, value in COUNTS.items()},
                "elements": 4096, "blocks": 256, "nonfinite": 0, "nonfinite_quantizations": 0,
                "squared_norm": 2.0 * draw.uniform(0.97, 1.03), "squared_error": 0.02,
            }
            for layer in LAYERS
            for role in ("input", "weight", "grad_output")
        }
        for step in range(10, 61, 10)
    }  # fmt: skip
    config = {"megalowbit": {"run": {"steps": 60}, "precision": "bf16", "model": {"config": None}}}
    attempts = [begun(step=0), ended("finished", step=60)]
    return Records(rows, tables, attempts, config)
