"""Cases of ranks_reshape.py beside the plain ones: CPU offload, low-bit recipes, stages, tensor ranks.

Each is saved on two ranks and continued on one; there it is saved again and continued on two. The batches
are the same on any grid, and they are few, so that losses fall and show it where a step is not the same.
"""

import torch
import torch.distributed as dist
from tensor_parallel_cases import NEAREST, make_model
from tiny_training import rank_and_size

import megalowbit as mlb
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.layers.conversion.carried_state import (
    OWN_ROLES,
    SHARED_ROLES,
    load_split_state_dict,
    split_state_dict,
)
from megalowbit.layers.conversion.convert import random_stream
from megalowbit.layers.recipe import recipe

SAVED, STEPS, MICRO_BATCHES = 2, 4, 2
MOMENTS = ("exp_avg", "exp_avg_sq")
SPLIT = {
    "base": "nvfp4",
    "q_backward_outputgrad": "nvfp4e2m1bnosr",
    "split_weight": {"rank": 2, "refresh_every": 4},
    "split_input": {"rank": 2},
}
METIS = {
    "base": "metis-nvfp4",
    "split_weight": {"rank": 2, "refresh_every": 3},
    "split_grad_output": {"rank": 2, "refresh_every": 3},
}
ZERO = {
    **{
        f"offload {stage}": {"stage": stage, "is_offloaded": True, "recipe": "bf16", "precision": "fp16"}
        for stage in (1, 2, 3)
    },
    **{
        f"{name} {stage}": {"stage": stage, "recipe": chosen, "dropout": 0.1}
        for name, chosen in (("nvfp4", "nvfp4"), ("nvidia-nvfp4", "nvidia-nvfp4"), ("metis", METIS))
        for stage in (1, 2, 3)
    },
}
STAGES = {
    "stages gpt2": {"is_tied": True, "recipe": NEAREST},
    "stages gpt2 1": {"is_tied": True, "recipe": NEAREST, "stage": 1},
    "stages llama": {"family": "llama", "recipe": SPLIT, "precision": "fp32"},
}
TENSOR = {
    "tensor gpt2 0": {"is_tied": True, "recipe": NEAREST, "precision": "fp32"},
    "tensor gpt2 1": {"is_tied": True, "recipe": NEAREST, "stage": 1},
    "tensor gpt2 plain": {"is_tied": True, "recipe": "bf16"},
    "tensor llama 0": {"family": "llama", "recipe": NEAREST},
    "tensor llama 1": {"family": "llama", "recipe": NEAREST, "stage": 1, "precision": "fp32"},
    "tensor llama 3": {"family": "llama", "recipe": NEAREST, "stage": 3},
}
AGAIN = {*STAGES, *TENSOR, "metis 2", "offload 3"}  # saved on one rank, too
QUICK = {"offload 3", "metis 2", "stages llama", "tensor llama 3"}
# tensor-parallel ones last: DeepSpeed keeps their groups for the process
CASES = {**ZERO, **STAGES, **TENSOR}


def build(name, seed):
    """The case's engine: cut as `name` says on two ranks, not at all on one."""
    case, (_, size) = CASES[name], rank_and_size()
    model = make_model({"family": "gpt2", **case})
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = case.get("dropout", 0.0)
    data_size = size if name in ZERO else 1
    zero = {"stage": case.get("stage", 0), "stage3_param_persistence_threshold": 100}
    if case.get("is_offloaded"):
        zero["offload_optimizer"] = {"device": "cpu"}
        if case["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    settings = {
        "train_micro_batch_size_per_gpu": 2 // data_size,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-2, "warmup_num_steps": 8}},
        "zero_optimization": zero,
        "megalowbit": {"precision": case.get("precision", "bf16"), "recipe": case["recipe"]},
    }
    if case.get("precision") == "fp16":
        settings["megalowbit"]["grad_scaler"] = {
            "type": "dynamic", "initial_scale": 256.0, "growth_interval": 2,
        }  # fmt: skip
    if name in TENSOR and size > 1:
        settings["tensor_parallel"] = {"autotp_size": size}
    if name in STAGES and size > 1:
        settings["pipeline"] = {"stages": size}
        model = mlb.pipeline_module(model, num_stages=size)
    return mlb.initialize(model=model, config=settings, seed=seed)[0]


def train(engine, steps):
    """Mean loss over the whole batch, scale and learning rate of each step."""
    grid, seen = engine.process_grid, []
    for step in steps:
        tokens = torch.randint(0, 128, (4, 12), generator=torch.Generator().manual_seed(step % 2))
        mine = [each.chunk(grid.data_size)[grid.data_rank] for each in tokens.chunk(MICRO_BATCHES)]
        batches = [{"input_ids": each, "labels": each} for each in mine]
        if grid.pipeline_size > 1:
            loss = engine.train_batch(iter(batches)).item()
        else:
            total = torch.zeros((), dtype=torch.float64)
            for each in batches:
                out = engine(**each).loss
                engine.backward(out)
                engine.step()
                total += out.detach()
            dist.all_reduce(total)
            loss = total.item() / MICRO_BATCHES / dist.get_world_size()
        seen.append([loss, engine.optimizer.loss_scale, engine.get_lr()[0]])
    return seen


def live_tensors(engine):
    """Masters and moments of this rank, by DeepSpeed's public functions (stage 0: the optimizer's own)."""
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
            moments = {key: safe_get_full_optimizer_state(parameter, key).clone() for key in MOMENTS}
            found[name] = {"weight": safe_get_full_fp32_param(parameter).clone(), **moments}
    return found


def whole_tensors(name, engine):
    """`live_tensors` of the whole model on every rank, put together without the code under test."""
    live, grid = live_tensors(engine), engine.process_grid
    if grid.model_parallel_size == 1:
        return live
    everyone = [None] * grid.world_size
    dist.all_gather_object(everyone, live)
    if grid.tensor_size > 1:
        is_plain = CASES[name]["recipe"] == "bf16"
        return {
            each: {key: joined(each, [rank[each][key] for rank in everyone], is_plain) for key in tensors}
            for each, tensors in live.items()
        }
    found = {}
    for stage in everyone:
        for each, tensors in stage.items():
            is_head = each == "lm_head.weight" and CASES[name].get("is_tied")
            each = "transformer.wte.weight" if is_head else each
            assert all(torch.equal(value, tensors[key]) for key, value in found.get(each, {}).items()), each
            found[each] = tensors
    return found


def joined(name, shards, is_plain):
    """A parameter of GPT-2 or LLaMA from its two shards; a plain GPT-2's projections are Conv1D."""
    layer, kind = name.split(".")[-2:]
    is_projection = layer.startswith("c_")
    if layer == "c_attn":  # q, k and v are cut one by one
        parts = [shard.chunk(3) for shard in shards]
        whole = torch.cat([part[index] for index in range(3) for part in parts])
    elif layer in ("c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        whole = torch.cat(shards)
    elif layer in ("c_proj", "o_proj", "down_proj") and kind == "weight":
        whole = torch.cat(shards, 1)
    else:
        assert torch.equal(*shards), name
        whole = shards[0]
    return whole.t().contiguous() if is_projection and is_plain and kind == "weight" else whole


def same(found, expected):
    """Names of tensors that differ by a bit."""
    return [
        f"{name}.{key}"
        for name, tensors in expected.items()
        for key, value in tensors.items()
        if name not in found or not torch.equal(found[name][key].float(), value.float())
    ] + sorted(expected.keys() ^ found.keys())


def save(engine, name, folder, step):
    """A checkpoint as a run writes it, and its tensors beside it."""
    case, module = CASES[name], engine.module
    ours = {
        "format": 1, "step": step, "config": {}, "recipe": recipe(case["recipe"]).to_dict(),
        "hf_config": module.config.to_dict(),
    }  # fmt: skip
    stream = random_stream(module)
    state = {
        "megalowbit": ours,
        "stream": None if stream is None else stream.state_dict(),
        "weight_splits": split_state_dict(module, SHARED_ROLES),
    }
    CheckpointStore(folder).save(engine, step, state, split_state_dict(module, OWN_ROLES))
    live = whole_tensors(name, engine)
    if dist.get_rank() == 0:
        torch.save(live, folder / f"live{step}.pt")


def load(engine, name, folder):
    """Continue from the newest; what came back."""
    store = CheckpointStore(folder)
    path = store.latest()
    state = store.load(engine, path)
    if state["stream"] is not None:
        random_stream(engine.module).load_state_dict(state["stream"])
    own = store.rank_state(engine, path)
    if name in ZERO or (folder.name == name and dist.get_world_size() == 2):
        load_split_state_dict(engine.module, state["weight_splits"], SHARED_ROLES)
    load_split_state_dict(engine.module, own or {}, OWN_ROLES)
    expected = torch.load(folder / f"live{int(path.name.split('-')[1])}.pt")
    return {"differing": same(whole_tensors(name, engine), expected), "has_own_state": own is not None}


def cases_of(part):
    """Names: `"quick"` the representative ones, `"rest"` the others."""
    return [name for name in CASES if (name in QUICK) == (part == "quick")]


def save_all(folder, part):
    """Train each case on two ranks, save, go on."""
    result = {}
    for name in cases_of(part):
        engine = build(name, seed=1)
        before = train(engine, range(SAVED))
        save(engine, name, folder / name, SAVED)
        result[name] = {"before": before, "after": train(engine, range(SAVED, STEPS))}
        engine.destroy()
    return result


def resume_all(folder, part):
    """Continue each case: on one rank, saving again; on two from both checkpoints."""
    result, size = {}, dist.get_world_size()
    for name in cases_of(part):
        engine = build(name, seed=2)
        seen = load(engine, name, folder / name)
        seen["after"] = train(engine, range(SAVED, STEPS))
        if size == 1 and name in AGAIN:
            save(engine, name, folder / f"{name} again", STEPS)
            seen["later"] = train(engine, range(STEPS, STEPS + 1))
        engine.destroy()
        if size == 2 and name in AGAIN:
            engine = build(name, seed=3)
            seen["again"] = load(engine, name, folder / f"{name} again")
            seen["later"] = train(engine, range(STEPS, STEPS + 1))
            engine.destroy()
        result[name] = seen
    return result
