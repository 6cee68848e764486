"""Save at every ZeRO stage, continue at every other. Arguments: folder, `save` or `resume`.

`save` trains at each stage, saves, goes on, and writes what it saw beside the checkpoints; `resume` loads
each of them at each stage and goes on. The global batch is the same whatever the number of ranks.
"""

import sys
from pathlib import Path

import torch
from tiny_training import rank_and_size, report
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.engine.checkpoint import CheckpointStore
from megalowbit.engine.initialize import initialize

GLOBAL_BATCH, LENGTH, SAVED, STEPS = 6, 8, 3, 6
STAGES, MOMENTS = (0, 1, 2, 3), ("exp_avg", "exp_avg_sq")
folder, mode = Path(sys.argv[1]), sys.argv[2]
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
            "precision": "bf16" if sys.argv[3:] == ["bf16"] else "fp16",
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


def live_tensors(engine):
    """Masters and moments, gathered by DeepSpeed's public functions (stage 0: the optimizer's own)."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links states after the step of the first group, when the others have none yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    found[name] = {"weight": parameter.detach().clone()}
            else:
                found[name] = {"weight": parameter.detach().clone()}
        elif engine.zero_optimization_stage() == 0:
            master = engine.optimizer.master_of(parameter)
            state = engine.optimizer.optimizer.state[master]
            moments = {key: state[key].clone() for key in MOMENTS}
            found[name] = {"weight": master.detach().clone(), **moments}
        else:
            found[name] = {
                "weight": safe_get_full_fp32_param(parameter).clone(),
                **{
                    key: safe_get_full_optimizer_state(parameter, key).clone()
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }
    return found


def same(found, expected):
    """Names of tensors that differ by a bit."""
    return [
        f"{name}.{key}"
        for name, tensors in expected.items()
        for key, value in tensors.items()
        if not torch.equal(found[name][key].float(), value.float())
    ] + sorted(expected.keys() ^ found.keys())


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
else:
    for saved_stage in STAGES:
        for stage in STAGES:
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
report(result)
