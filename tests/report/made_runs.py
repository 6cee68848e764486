"""Run folders that were not trained: records with known numbers, of any length; pictures read back."""

import json
import math
import struct
import zlib

import numpy as np

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "megalowbit": {
        "model": {"config": "models/gpt2.json", "checkpoint": None},
        "data": {
            "corpus": "stdlib",
            "split": "train",
            "tokenizer": "byte",
            "sequence_length": 128,
            "seed": 1234,
        },
        "run": {"steps": 0, "name": "made", "seed": 1234},
        "telemetry": {"layers_every": 100},
        "precision": "bf16",
        "recipe": "nvfp4",
    },
}
ROLES = ("input", "weight", "grad_output")
TOKENS = 512


def config_with(changes):
    """The configuration with values set by dotted keys."""
    made = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *sections, last = key.split(".")
        inner = made
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return made


def add_attempt(folder, facts):
    """Append the line that an attempt at a run writes when it begins."""
    with (folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"event": "begun", "time": 1.0, **facts}) + "\n")


def write_run(
    folder, steps=200, *, losses=None, changes=None, seed=0, tokens=TOKENS, rows=None, is_done=True
):
    """A run folder with metrics; `rows` changes the record of a step (1, 2, …) before it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"megalowbit.run.steps": steps, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config_with(changes)))
    noise = np.random.default_rng(seed)
    drawn = noise.normal(size=(steps, 3))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 2.5 + 3 * math.exp(-8 * step / steps) + 0.1 * drawn[step - 1, 0]
            record = {
                "step": step,
                "loss": loss if losses is None else losses[step - 1],
                "lr": 0.003 * min(1.0, 10 * step / steps),
                "grad_norm": 1.0 + 0.1 * abs(drawn[step - 1, 1]),
                "loss_scale": 65536.0,
                "skipped_steps": 0,
                "tokens_per_second": 5000.0 + 100 * drawn[step - 1, 2],
                "tokens": tokens * step,
                "mfu": 0.4,
                "host_memory_gib": 1.5,
            }
            if step == 1 or step % 10 == 0:
                for role in ROLES:
                    record |= {
                        f"quantization/{role}/saturation_rate": 0.03,
                        f"quantization/{role}/underflow_rate": 0.08,
                        f"quantization/{role}/snr_db": 20.0,
                    }
            record = rows(step, record) if rows else record
            if record is not None:
                file.write(json.dumps(record) + "\n")
    if is_done:
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
        (folder / "DONE").write_text(json.dumps({"step": steps}))
    return folder


def write_layers(folder, *, steps, every=100, layers=48, counted=1000):
    """`overflow_layers.jsonl`: totals that grow by `counted` elements a table.

    Of these, layer n saturates n elements, and a tenth becomes zero.
    """
    with (folder / "overflow_layers.jsonl").open("w") as file:
        for number, step in enumerate(range(every, steps + 1, every), start=1):
            for layer in range(layers):
                for role in ROLES:
                    row = {
                        "step": step, "layer": f"transformer.h.{layer // 4}.mlp.{'abcd'[layer % 4]}",
                        "role": role, "saturation_rate": layer / counted, "underflow_rate": 0.1,
                        "upper_half_rate": 0.3, "scale_saturation_rate": 0.0, "zero_block_rate": 0.0,
                        "snr_db": 20.0, "elements": number * counted, "saturated": number * layer,
                        "upper_half": 0, "underflow": number * counted // 10, "nonfinite": 0,
                        "blocks": number, "saturated_scales": 0, "zero_blocks": 0, "quantizations": number,
                        "quantizations_with_overflow": number, "nonfinite_quantizations": 0,
                        "squared_error": 0.01 * number, "squared_norm": 1.0 * number,
                    }  # fmt: skip
                    file.write(json.dumps(row) + "\n")


def write_checks(folder, *, steps, every=10, layers=4, candidates=("int8", "bf16")):
    """`speculation.jsonl`: the products of even layers run at the first candidate, others at the last."""
    with (folder / "speculation.jsonl").open("w") as file:
        for step in range(1, steps + 1, every):
            for layer in range(layers):
                for product in ("output", "grad_input", "grad_weight"):
                    name = candidates[0] if layer % 2 == 0 else candidates[-1]
                    row = {
                        "step": step, "layer": f"h.{layer}.attn", "product": product, "precision": name,
                        "predicted_db": 20.0, "measured_db": 21.0 if layer % 2 == 0 else None,
                        "is_hit": layer % 2 == 0 or None, "reason": "", "left_ratio": 4.0, "right_ratio": 4.0,
                        "next_precision": name,
                    }  # fmt: skip
                    file.write(json.dumps(row) + "\n")


def decoded(png):
    """Indices of a PNG with a palette, as the specification defines the file."""
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + data)
        chunks[name] = data
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:], chunks
