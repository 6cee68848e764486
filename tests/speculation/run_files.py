"""Run folders with a made-up history of speculation, in the format that runs write."""

import json
import random
from dataclasses import asdict

from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.report import GemmRow


def row(step, layer, product, precision, **more):
    fields = asdict(GemmRow(layer=layer, product=product, precision=precision))
    return {"step": step, **fields, "next_precision": precision, **more}


def write_run(folder, rows, *, steps=None, **speculation):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"megalowbit": {"speculation": speculation}}))
    if rows is not None:
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / "speculation.jsonl").write_text(text, encoding="utf-8")
    if steps is not None:
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    return folder


def made_up_rows(layers, checks, every=10, verify_every=5, seed=0):
    """Products that settle at a candidate each, drift and are verified now and then."""
    draw = random.Random(seed)
    gemms = [(layer, product) for layer in layers for product in PRODUCTS]
    level = {gemm: draw.gauss(19, 3) for gemm in gemms}
    slope = {gemm: draw.choice([0, 0, 0, -0.3, 0.2]) for gemm in gemms}
    precision, blocked = dict.fromkeys(gemms, "bf16"), dict.fromkeys(gemms, 0)
    for check in range(checks):
        for gemm in gemms:
            level[gemm] = min(35.0, max(4.0, level[gemm] + slope[gemm] + draw.gauss(0, 0.2)))
            ran = precision[gemm]
            predicted = {"int8": level[gemm], "fp8": level[gemm] + 5, "bf16": None}[ran]
            measured = hit = None
            if check % verify_every == 0 and ran != "bf16":
                measured = predicted + draw.gauss(0, 0.5) - (4 if draw.random() < 0.01 else 0)
                hit = measured >= 15
                blocked[gemm] = blocked[gemm] if hit else check + 10
            chosen = "int8" if level[gemm] > 17 else "fp8" if level[gemm] > 12 else "bf16"
            precision[gemm] = "bf16" if check < blocked[gemm] else chosen
            more = {"predicted_db": predicted, "measured_db": measured, "is_hit": hit, "reason": "predicted"}
            more |= {"left_ratio": 20.0, "right_ratio": 12.0, "next_precision": precision[gemm]}
            yield row(check * every + 1, *gemm, ran, **more)
