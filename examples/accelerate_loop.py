#!/usr/bin/env python
"""FP4 pretraining in a loop with Accelerate: `python examples/accelerate_loop.py`, or `accelerate launch`.

Under `accelerate launch --use_deepspeed` the optimizer is torch's AdamW, which DeepSpeed's ZeRO wraps.
"""

import argparse
import os
from pathlib import Path

import accelerate
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import megalowbit as mlb

LENGTH, SIZES = 64, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def main() -> None:
    """Train a tiny LLaMA on the standard library's source files; save the state and a plain model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="runs/accelerate")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    mlb.convert(model.to(accelerator.device), recipe="nvfp4")  # before the optimizer is built
    accelerator.register_for_checkpointing(mlb.random_stream(model))  # save_state then includes it
    if accelerator.distributed_type == accelerate.DistributedType.DEEPSPEED:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:  # Accelerate clips; several processes average .grad, one alone sums it in fp32
        is_alone = accelerator.num_processes == 1
        settings = mlb.OptimizerConfig(lr=3e-3, bf16=True, clip_grad=0, params_have_main_grad=is_alone)
        optimizer = mlb.get_megatron_optimizer(model, settings)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    mlb.check_training(model, optimizer=optimizer)
    for step, batch in zip(range(2 * options.steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"micro-batch {step}: loss {loss.item():.3f}")
    accelerator.save_state(f"{options.out}/state")
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(f"{options.out}/model", state_dict=whole)


if __name__ == "__main__":
    main()
