"""One rank of `collectives.py`: trains a few steps and writes the collectives it counted.

collectives_rank.py ours OUT.json ARGUMENTS-OF-PRETRAIN… -- FURTHER-ARGUMENTS-TO-RESUME…
collectives_rank.py plain OUT.json CONFIG.json MODEL.json STEPS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from collective_counter import CollectiveCounter


def ours(arguments: list[str]) -> None:
    """Run `launch/pretrain.py`."""
    from megalowbit.pretrain.command_line import main

    if (code := main(arguments)) != 0:
        raise SystemExit(code)


def plain(arguments: list[str]) -> None:
    """Train the same model with plain DeepSpeed: its optimizer, checkpoints and precision."""
    import deepspeed
    import torch

    from megalowbit.engine.process_start import start_process_group, stop_process_group
    from megalowbit.hf.folders.config_file import config_from_dict
    from megalowbit.hf.model import random_model

    config, model_file, steps, folder = arguments
    start_process_group()
    raw = json.loads(Path(config).read_text())
    model = random_model(config_from_dict(json.loads(Path(model_file).read_text()), {}, ""), seed=0)
    engine, *_ = deepspeed.initialize(model=model, config=raw, model_parameters=model.parameters())
    tokens = torch.arange(64).reshape(2, 32)

    def plain_step() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            loss: Any = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()

    for _ in range(int(steps)):
        plain_step()
    engine.save_checkpoint(folder)
    stop_process_group()


if __name__ == "__main__":
    mode, out, *rest = sys.argv[1:]
    counter = CollectiveCounter()
    counter.install()
    {"ours": ours, "plain": plain}[mode](rest)
    Path(out).write_text(json.dumps([each._asdict() for each in counter.seen]))
