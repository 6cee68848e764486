"""Save at every ZeRO stage, continue at every other.

Arguments: folder, `save` or `resume`, `quick` for representative cases or `rest` for the others.

`save` trains at each stage, saves, goes on, and writes what it saw beside the checkpoints; `resume` loads
each of them at each stage and goes on. The global batch is the same whatever the number of ranks.
"""

import sys
from pathlib import Path

import checkpoint_cases
import checkpoint_method_cases
import torch
from checkpoint_cases import live_tensors, same
from tiny_training import rank_and_size, report
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize

GLOBAL_BATCH, LENGTH, SAVED, STEPS = 6, 8, 3, 6
STAGES = (0, 1, 2, 3)
QUICK_PAIRS = {(0, 2), (1, 1), (2, 3), (3, 0)}  # each stage saves once and resumes once
folder, mode, part = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, world_size = rank_and_size()
torch.set_num_threads(1)


def make_engine(stage, seed):
    torch.manual_seed(seed)
    config = GPT2Config(  # odd sizes, so that nothing divides by the ranks; its embedding is tied
        vocab_size=37, n_positions=LENGTH, n_embd=20, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.transformer.h[0].ln_1.bias.requires_grad = False  # a frozen one is saved elsewhere
    settings = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 5000,
            "stage3_param_persistence_threshold": 100,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 8}},
        "megalowbit": {
            "precision": "bf16" if sys.argv[4:] == ["bf16"] else "fp16",
            "grad_scaler": {"type": "dynamic", "initial_scale": 256.0, "growth_interval": 2},
        },
    }
    if settings["megalowbit"]["precision"] == "bf16":
        del settings["megalowbit"]["grad_scaler"]
    return initialize(model=model, config=settings)[0]


def train(engine, steps):
    """Mean losses over all ranks, and scales, of the steps."""
    seen = []
    per_rank = GLOBAL_BATCH // world_size
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 37, (GLOBAL_BATCH, LENGTH), generator=generator)
        mine = batch[rank * per_rank : (rank + 1) * per_rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        seen.append([total.item() / world_size, engine.optimizer.loss_scale, engine.get_lr()[0]])
    return seen


result = {}
if mode == "save":
    for stage in STAGES:
        engine = make_engine(stage, seed=1)
        before = train(engine, range(SAVED))
        live = live_tensors(engine)
        store = CheckpointStore(folder / str(stage))
        store.save(engine, SAVED, {"note": stage})
        if rank == 0:
            torch.save(live, folder / f"live{stage}.pt")
        result[stage] = {"before": before, "after": train(engine, range(SAVED, STEPS))}
        engine.destroy()
    if part == "quick":
        result["methods"] = checkpoint_method_cases.run_all(folder, make_engine, train)
    result["cases"] = checkpoint_cases.save_all(folder, part)
else:
    for saved_stage in STAGES:
        for stage in STAGES:
            if ((saved_stage, stage) in QUICK_PAIRS) != (part == "quick"):
                continue
            engine = make_engine(stage, seed=2)
            store = CheckpointStore(folder / str(saved_stage))
            state = store.load(engine, store.latest())
            expected = torch.load(folder / f"live{saved_stage}.pt")
            differing = same(live_tensors(engine), expected)
            result[f"{saved_stage} {stage}"] = {
                "differing": differing,
                "state": state,
                "counters": [engine.global_steps, engine.skipped_steps, engine.global_samples],
                "after": train(engine, range(SAVED, STEPS)),
            }
            engine.destroy()
    if world_size < 3:
        result["cases"] = checkpoint_cases.resume_all(folder, part)
    if part == "quick":
        engine = checkpoint_method_cases.load_drawn(folder / "drawn")
        result["cases"]["position"] = checkpoint_method_cases.position_of(engine)
        engine.destroy()
report(result)
