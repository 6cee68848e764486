"""Damage checkpoints and load them. Arguments: folder, ZeRO stage, first seed, cases or seconds as `60s`."""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from checkpoint_fuzz import DAMAGES, fuzz
from tiny_training import TinyModel, config, make, report, train_step

folder, stage, first_seed, amount = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
logging.disable(logging.WARNING)


def build():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 7}}
    settings = config("fp16", scaler={"initial_scale": 1024.0, "growth_interval": 3}, scheduler=scheduler)
    return make(TinyModel(dropout=0.1), {**settings, "zero_optimization": {"stage": stage}})[0]


damages = tuple(each for each in DAMAGES if each.__name__.startswith(tuple(sys.argv[5:]) or ""))
limit = {"seconds": float(amount[:-1])} if amount.endswith("s") else {"cases": int(amount)}
torch.set_num_threads(1)
failures, counts = fuzz(build, train_step, folder, first_seed=first_seed, damages=damages, **limit)
if "RESULTS" in os.environ:
    report({"failures": failures, "counts": counts})
else:
    print(json.dumps(counts, indent=1))
    print(
        "\n\n".join(failures), f"\n{len(failures)} failures in {sum(counts.values()) + len(failures)} cases"
    )
