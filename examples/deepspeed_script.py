#!/usr/bin/env python
"""A stock DeepSpeed script whose `deepspeed.initialize` became `mlb.initialize`; the loop did not change.

`deepspeed examples/deepspeed_script.py --deepspeed_config configs/gpt2_tiny_fp4.json`. The configuration's
block "megalowbit" then acts: its recipe converts the model, and megalowbit's optimizer takes the steps.
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb

LENGTH = 64


def main() -> None:
    """Train a tiny GPT-2 on the standard library's source files, and save a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="runs/deepspeed_script")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()

    engine, _, loader, _ = mlb.initialize(  # total_steps is ours: this configuration's schedule needs it
        args=options, model=model, training_data=list(rows), total_steps=options.steps
    )
    if options.resume:  # also restores the position of stochastic rounding
        engine.load_checkpoint(options.out)
    first = engine.global_steps * engine.gradient_accumulation_steps()
    for step, batch in zip(range(options.steps * engine.gradient_accumulation_steps()), loader, strict=False):
        if step < first:  # trained on before
            continue
        tokens = batch.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"micro-batch {step}: loss {loss.item():.3f}, {engine.skipped_steps} steps skipped")
    engine.save_checkpoint(options.out)


if __name__ == "__main__":
    main()
