#!/usr/bin/env python
"""FP4 pretraining with Hugging Face's Trainer: `python examples/hf_trainer.py --out runs/trainer`.

On several GPUs, `torchrun --nproc-per-node 8 examples/hf_trainer.py`. With `--deepspeed ds.json`, DeepSpeed's
optimizer takes the steps; without, megalowbit's does. `--resume` continues from the last checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import megalowbit as mlb

LENGTH, SIZES = 64, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def read_rows() -> list[dict[str, torch.Tensor]]:
    """The bytes of the standard library's source files, in rows: a vocabulary of 256 tokens."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train a tiny LLaMA, and save it as a plain model of transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="runs/hf_trainer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--deepspeed", help="a DeepSpeed configuration")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    mlb.convert(model, recipe="nvfp4")
    args = TrainingArguments(
        options.out, max_steps=options.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=3e-3, warmup_steps=5, bf16=True, logging_steps=1, save_steps=10, report_to=[],
        deepspeed=options.deepspeed, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        args,
        train_dataset=read_rows(),
        optimizers=mlb.trainer_optimizers(model, args),
        callbacks=[mlb.MegalowbitCallback()],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(Path(options.out) / "final"))  # what from_pretrained reads


if __name__ == "__main__":
    main()
