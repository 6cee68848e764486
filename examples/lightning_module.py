#!/usr/bin/env python
"""FP4 pretraining with Lightning: `pip install lightning`, then `python examples/lightning_module.py`."""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megalowbit as mlb

LENGTH, SIZES = 64, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class LowBitModule(lightning.LightningModule):
    """A tiny LLaMA with FP4 projections; what is written here fits any converted model."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, **SIZES)
        self.model = LlamaForCausalLM(config)
        mlb.convert(self.model, recipe="nvfp4")

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:  # after Lightning has cast and moved the model
        is_bf16 = next(self.parameters()).dtype == torch.bfloat16  # clip_grad is 1 by default
        is_alone = self.trainer.world_size == 1
        config = mlb.OptimizerConfig(lr=3e-3, bf16=is_bf16, params_have_main_grad=is_alone)
        return mlb.get_megatron_optimizer(self.model, config)

    def on_train_start(self) -> None:
        mlb.check_training(self, optimizer=self.optimizers())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random_stream"] = mlb.random_stream(self).state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mlb.random_stream(self).load_state_dict(checkpoint["random_stream"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    lightning.seed_everything(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    trainer = lightning.Trainer(max_steps=options.steps, precision="bf16-true", default_root_dir=options.out)
    trainer.fit(LowBitModule(), loader)
    trainer.lightning_module.model.save_pretrained(f"{options.out}/model")
