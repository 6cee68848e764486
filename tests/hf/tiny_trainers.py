"""A tiny LLaMA, and Hugging Face's Trainer around it, on a CPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megalowbit as mlb

ROWS = [torch.arange(start, start + 8) for start in range(32)]
DATASET = [{"input_ids": row, "labels": row} for row in ROWS]
STEPS, ACCUMULATED = 4, 2


def llama(recipe="nvfp4", dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=16, use_cache=False, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).to(dtype)
    if recipe is not None:
        mlb.convert(model, recipe)
    return model


def make(folder, model=None, *, callbacks=None, optimizers=(None, None), **settings):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATED, "max_steps": STEPS,
        "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": 2,
        **settings,
    }  # fmt: skip
    return Trainer(
        model=llama() if model is None else model,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=DATASET,
        eval_dataset=DATASET[:4],
        optimizers=optimizers,
        callbacks=[mlb.MegalowbitCallback()] if callbacks is None else callbacks,
    )


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def differing(first, second):
    return [name for name in first if not torch.equal(first[name], second[name])]
