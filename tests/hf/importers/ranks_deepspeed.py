"""Ranks that train tiny Hugging Face models with plain DeepSpeed, and save checkpoints and their weights.

Arguments: a folder, and names of cases. Each case writes `<case>/global_step3/` and `<case>/latest` as
DeepSpeed does, `<case>/config.json`, and `<case>/expected.pt`: the weights of the live engine, whole, by
DeepSpeed's own interface, which knows nothing about files.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed_cases import CASES, FROZEN, ODD

sys.path.insert(0, str(Path(__file__).parents[2] / "families"))
from tiny_models import tiny_model


def groups_of(model):
    """Two groups, as most programs have them: with and without weight decay."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0},
    ]


def whole(engine, stage):
    """The weights of a live engine: fp32 masters if there are any."""
    found = {}
    if stage == 0 and hasattr(engine.optimizer, "fp32_groups"):
        pairs = [
            zip(*groups, strict=True)
            for groups in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        ]
        masters = {id(half): master for group in pairs for half, master in group}
        return {name: masters[id(each)].detach().clone() for name, each in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters(parameter, enabled=stage == 3):
                found[name] = parameter.detach().float().clone()
            continue
        master = safe_get_full_fp32_param(parameter) if stage or hasattr(parameter, "_hp_mapping") else None
        found[name] = (parameter if master is None else master).detach().float().cpu().clone()
    return found


def run(folder, case):
    kind, stage, settings = CASES[case]
    model = tiny_model(kind, **ODD[kind])
    if "frozen" in case:
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(False)
    zero = {"stage3_param_persistence_threshold": 100, **settings.get("zero_optimization", {"stage": stage})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **settings,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    model.config.save_pretrained(folder / case)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups_of(model))
    rank = dist.get_rank()
    for step in range(3):
        tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder / case))
    weights = whole(engine, stage)
    if rank == 0:
        torch.save(weights, folder / case / "expected.pt")
    dist.barrier()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(target / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # it only asks for speed
    for case in sys.argv[2:]:
        run(target, case)
    dist.destroy_process_group()
