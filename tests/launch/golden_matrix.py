"""The runs that golden_runs.py records: the shipped configurations, and a small matrix of what a run can be.

Models have two blocks of 32 features and runs a few steps: bits differ there as surely as in a large run.
Settings that no entry has are not held.
"""

import json
import random
from dataclasses import dataclass

GPT2 = {
    "model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_num_steps": 2,
            "warmup_min_lr": 1e-3,
            "warmup_max_lr": 5e-3,
        },
    },
    "megalowbit": {
        "model": {"config": "model.json"},
        "data": {"corpus": "text.txt", "sequence_length": 32},
        "run": {"steps": 4},
        "checkpoint": {"every": 2, "keep": None, "export_hf": False},
        "telemetry": {"log_every": 1, "count_every": 1, "tensorboard": False},
        "watchdog": {"slow_step": None},
    },
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of the matrix.

    Attributes:
        block: merged into `BASE`'s block "megalowbit".
        deepspeed: merged into `BASE`.
        model: a Hugging Face configuration.
        shipped: name of a file in configs/, used in place of `BASE`.
        sets: overrides on the command line; `<folder>` is the run's working folder.
        processes: number of ranks.
        is_dry: only print what would be run.
        is_continued: also continue its first checkpoint.
        continued_on: further ways to continue it: overrides, and number of ranks.
        is_exported: also export it with the conversion tool, and import that again.
    """

    block: dict | None = None
    deepspeed: dict | None = None
    model: dict | None = None
    shipped: str = ""
    sets: tuple[str, ...] = ()
    processes: int = 1
    is_dry: bool = False
    is_continued: bool = True
    continued_on: tuple = ()
    is_exported: bool = False


def shipped(name, *sets, **more):
    steps = ("megalowbit.run.steps=4", "megalowbit.checkpoint.every=2", "megalowbit.checkpoint.keep=null")
    quick = (
        "megalowbit.telemetry.log_every=1",
        "megalowbit.telemetry.count_every=1",
        "megalowbit.watchdog.slow_step=null",
    )
    return Run(shipped=name, sets=(*steps, *quick, *sets), **more)


def small(name, model, *sets, **more):
    """A large shipped configuration on the small text, with another model."""
    data = ("corpus=<folder>/text.txt", "corpus_config=null", "sequence_length=32")
    every = (f"data.{each}" for each in data)
    overrides = json.dumps(model)
    common = (f"megalowbit.{each}" for each in (*every, f"model.overrides={overrides}"))
    return shipped(name, *common, "megalowbit.checkpoint.export_hf=false", *sets, **more)


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def fp16(*, steps=6, recipe="nvfp4", **scaler):
    return {"precision": "fp16", "grad_scaler": scaler, "run": {"steps": steps}, "recipe": recipe}


WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
HIGH = {"initial_scale": 2.0**20}  # of which gradients overflow
QUICK = {"type": "dynamic", **HIGH, "growth_interval": 2, "hysteresis": 1}
SPECULATION = {
    "candidates": ["int8", "fp8", "bf16"],
    "every": 1,
    "lookahead": 2,
    "patience": 1,
    "cooldown": 2,
}
SPLIT = {"rank": 4, "warmup_steps": 1, "merge_steps": 2, "merged_lr": 1e-3}
TP2 = {"tensor_parallel": {"autotp_size": 2}}
PP2 = {"pipeline": {"stages": 2}}
ONE = (("zero_optimization.stage=0",), 1)
SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
SMALL_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # shards hold whole blocks
BYTE = ("megalowbit.data.tokenizer=byte", "megalowbit.data.vocab_size=null")
BATCH = ("train_batch_size=8", "train_micro_batch_size_per_gpu=2")
SEED_SPLIT = {"base": "metis-seed", "split_grad_output": {"rank": 8}}

DRY_RUNS = {
    f"dry-{name}": Run(shipped=name, sets=("megalowbit.data.cache_dir=<folder>",), is_dry=True)
    for name in (
        "gpt2_124m_fp4", "gpt2_tiny_fp16", "gpt2_tiny_fp4", "gpt2_tiny_quality", "gpt2_tiny_speculative",
        "llama3_8b_fp4", "llama_tiny_fp4", "metis_seed_gpt2", "metis_seed_llama",
    )
}  # fmt: skip
SHIPPED_RUNS = {
    "gpt2_tiny_fp4": shipped("gpt2_tiny_fp4", is_exported=True),
    "gpt2_tiny_fp16": shipped("gpt2_tiny_fp16", "megalowbit.run.steps=7"),
    "gpt2_tiny_quality": shipped("gpt2_tiny_quality", is_continued=False),
    "gpt2_tiny_speculative": shipped("gpt2_tiny_speculative"),
    "llama_tiny_fp4": shipped("llama_tiny_fp4", "megalowbit.data.corpus=<folder>/text.txt"),
    "gpt2_124m_fp4": small("gpt2_124m_fp4", SMALL_GPT2, *BATCH, "megalowbit.data.vocab_size=512"),
    "llama3_8b_fp4": small(
        "llama3_8b_fp4", SMALL_LLAMA | WIDE, *BATCH, "megalowbit.data.vocab_size=512",
        "tensor_parallel.autotp_size=2", processes=2,
    ),
    "metis_seed_gpt2": small(
        "metis_seed_gpt2", SMALL_GPT2, *BYTE, *BATCH, f"megalowbit.recipe={json.dumps(SEED_SPLIT)}"
    ),
    "metis_seed_llama": small(
        "metis_seed_llama", SMALL_LLAMA, *BYTE, *BATCH, f"megalowbit.recipe={json.dumps(SEED_SPLIT)}"
    ),
}  # fmt: skip
GRID_RUNS = {
    "bf16-llama": Run(model=LLAMA, is_exported=True),
    "fp32": Run(block={"precision": "fp32"}),
    "no-recipe": Run(block={"recipe": "bf16"}),
    "zero0-ranks2": Run(processes=2, continued_on=(((), 1),)),
    "zero1-ranks2": Run(deepspeed=zero(1), processes=2),
    "zero2-ranks1": Run(deepspeed=zero(2), model=LLAMA),
    "zero2-ranks2": Run(deepspeed=zero(2), processes=2, continued_on=(ONE,), is_exported=True),
    "zero2-offload": Run(deepspeed=zero(2, offload_optimizer={"device": "cpu"})),
    "zero3-ranks2": Run(deepspeed=zero(3), processes=2, continued_on=(ONE,), is_exported=True),
    "tp2": Run(deepspeed=TP2, processes=2, is_exported=True),
    "tp2-llama-zero1": Run(
        deepspeed={**TP2, **zero(1)}, model=LLAMA | WIDE, processes=2,
        continued_on=((("tensor_parallel.autotp_size=1",), 1),),
    ),
    "pp2": Run(
        deepspeed=PP2, processes=2, is_exported=True, continued_on=((("pipeline.stages=1",), 1),),
        model=GPT2 | WITHOUT_DROPOUT,
    ),
    "pp2-llama": Run(deepspeed=PP2, model=LLAMA, processes=2),
}  # fmt: skip
SCALE_RUNS = {
    "scale-deepspeed": Run(block=fp16(type="dynamic", mode="deepspeed", growth_interval=2, **HIGH)),
    "scale-torch": Run(block=fp16(type="dynamic", mode="torch", growth_interval=2, **HIGH)),
    "scale-clean-step": Run(block=fp16(type="dynamic", mode="clean_step", growth_interval=2, **HIGH)),
    "scale-max-value": Run(block=fp16(type="max_value", update_every=1, target=256.0, **HIGH)),
    "scale-norm-ratio": Run(block=fp16(type="norm_ratio", update_every=1, probe_every=1, **HIGH)),
    "scale-max-norm": Run(block=fp16(type="max_norm", update_every=1, target=256.0, **HIGH)),
    "scale-controller": Run(block=fp16(type="controller", update_every=1, target=256.0, **HIGH)),
    "scale-constant": Run(block=fp16(type="constant", scale=1024.0), is_continued=False),
    "scale-megatron-retries": Run(block=fp16(**QUICK) | {"run": {"steps": 6, "overflow_retries": 3}}),
    "scale-stock-block": Run(
        deepspeed={"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}}
    ),
    "fp16-zero1": Run(block=fp16(**QUICK), deepspeed=zero(1), processes=2),
    "fp16-zero2": Run(block=fp16(type="max_value", **HIGH), deepspeed=zero(2), is_continued=False),
    "fp16-zero3": Run(block=fp16(**QUICK), deepspeed=zero(3), processes=2),
    "fp16-tp2": Run(block=fp16(**QUICK), deepspeed=TP2, processes=2, is_continued=False),
    "fp16-pp2": Run(block=fp16(**QUICK), deepspeed=PP2, processes=2, is_continued=False),
    "layer-scaling": Run(block=fp16(**QUICK) | {"layer_scaling": {"enabled": True}}),
    "autocast": Run(block=fp16(**QUICK) | {"autocast": True, "fp32_norms": True}),
}
OTHER_RUNS = {
    "regularizer": Run(block={"regularizer": {"strength": 1e-4}}, model=LLAMA),
    "regularizer-zero3": Run(
        block={"regularizer": {"strength": 1e-4}}, deepspeed=zero(3), processes=2, is_continued=False
    ),
    "norms-and-zeros": Run(block={"gradient_norm": "sum_of_norms", "log_num_zeros_in_grad": True}),
    "norms-and-zeros-zero2": Run(
        block={"gradient_norm": "sum_of_norms", "log_num_zeros_in_grad": True}, deepspeed=zero(2),
        processes=2, is_continued=False,
    ),
    "speculation": Run(block={"recipe": "speculative-int8", "speculation": SPECULATION}, model=LLAMA),
    "speculation-ranks2": Run(
        block={"recipe": "speculative-int8", "speculation": SPECULATION}, deepspeed=zero(1), processes=2
    ),
    "late-switch": Run(block={"late_switch": {"at": 3, "scope": "forward"}}),
    "late-switch-all": Run(
        block={"late_switch": {"at": 2, "scope": "all"}}, deepspeed=zero(1), is_continued=False
    ),
    "loss-guard": Run(
        block={
            "loss_guard": {
                "spike": "rollback", "window": 32, "spike_deviations": 0.5, "patience": 1, "max_rollbacks": 9
            },
            "run": {"steps": 40},
            "checkpoint": {"every": 10, "keep": None, "export_hf": False},
        },
        # so slowly that losses of single steps stand out
        deepspeed={"scheduler": {"params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-6}}},
    ),
    "parameter-split": Run(block={"recipe": {"base": "nvfp4", "parameter_split": SPLIT}}, is_exported=True),
    "operand-splits": Run(
        block={
            "recipe": {
                "base": "metis-nvfp4", "split_weight": {"rank": 4, "refresh_every": 2},
                "split_grad_output": {"method": "svd_lowrank", "rank": 4},
            }
        },
    ),
    "recipe-nvidia": Run(block={"recipe": "nvidia-nvfp4"}),
    "recipe-mxfp4-fp8": Run(block={"recipe": {"base": "mxfp4", "gemm": "fp8"}}),
    "recipe-fp8": Run(block={"recipe": "fp8"}, model=LLAMA, is_continued=False),
    "kept-layers": Run(
        block={"recipe": {"base": "nvfp4", "keep": ["*.attn.*"], "keep_last": 1}}, is_continued=False
    ),
    "sgd": Run(
        deepspeed={
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3}},
        },
        is_continued=False,
    ),
    "one-cycle": Run(
        deepspeed={
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 2,
                    "cycle_momentum": False,
                },
            }
        },
    ),
    "tables": Run(
        block={
            "telemetry": {
                "log_every": 2, "layers_every": 1, "count_every": 1, "tensorboard": True, "timers": True,
            },
            "checkpoint": {"every": 2, "keep": 1, "export_hf": True},
            "validation": {"every": 3, "tokens": 64, "bf16": True},
        },
        sets=("megalowbit.data.validation.corpus=stdlib",),
        is_continued=False,
    ),
}  # fmt: skip
RUNS = DRY_RUNS | SHIPPED_RUNS | GRID_RUNS | SCALE_RUNS | OTHER_RUNS


def merged(base, changes):
    """A copy of nested objects with some values changed; an object with a type replaces the other."""
    if not isinstance(base, dict) or not isinstance(changes, dict) or "type" in changes:
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def write_inputs(run, folder, tree):
    """Write the text, the model and the configuration of a run; returns the configuration's path."""
    draw = random.Random(0)
    numbers = [(draw.randrange(100), draw.randrange(100)) for _ in range(4000)]
    text = "".join(f"{a} and {b} are {a + b}\n" for a, b in numbers)
    (folder / "text.txt").write_text(text)
    if run.shipped:
        return tree / "configs" / f"{run.shipped}.json"
    (folder / "model.json").write_text(json.dumps(run.model or GPT2))
    config = merged(merged(BASE, run.deepspeed or {}), {"megalowbit": run.block or {}})
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"
