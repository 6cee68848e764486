"""Step 7: memory of LLaMA blocks in training against the estimate, and what a block keeps for backward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, expect, skip
from benchmarks.first_hour.session import NO_GPU, Session

STEPS = 3
SHARING = (  # projections of a block that read the same tensor
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
KEPT_GOAL = 0.30  # of what bf16 layers keep


def check(session: Session) -> Iterator[Finding]:
    """Peak of three steps, and bytes kept for backward by one block."""
    yield from peak(session)
    for recipe in ("nvfp4", "mxfp4"):
        ratio = kept(session, recipe) / kept(session, "bf16")
        yield at_most(f"kept for backward by a {recipe} block ÷ bf16's", ratio, 1, " ×", warn=KEPT_GOAL)


def llama(session: Session, **changes: Any) -> nn.Module:
    """LLaMA blocks; four of 7B's on a GPU, small ones on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, length = session.size((4096, 8192), (64, 32))
    sizes = {
        "hidden_size": width,
        "intermediate_size": width * 11008 // 4096 // 16 * 16,
        "num_hidden_layers": 4,
    }
    sizes |= {"num_attention_heads": width // session.size(128, 16), "max_position_embeddings": length}
    config = LlamaConfig(**{"vocab_size": session.size(32000, 256), **sizes, **changes}, use_cache=False)
    with torch.device(session.device):  # a CPU needs many seconds for random weights
        return LlamaForCausalLM(config)


def peak(session: Session) -> Iterator[Finding]:
    """Train in DeepSpeed's engine and compare the allocator's peak with `--dry-run`."""
    from megalowbit.layers.recipe import recipe
    from megalowbit.pretrain.config import load_config
    from megalowbit.pretrain.estimate.dry_run import estimate_run

    model = llama(session)
    path = write_config(session, model.config)
    config = load_config(path, [], world_size=1)
    estimate = estimate_run(config, recipe("nvfp4"))
    estimated = estimate.total - estimate.context_and_communication  # the allocator does not see these
    engine, *_ = mlb.initialize(model=model, config=str(path), model_parameters=model.parameters())
    if session.is_gpu:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        torch.cuda.reset_peak_memory_stats()
    length = model.config.max_position_embeddings
    for _ in range(STEPS):
        ids = torch.randint(0, model.config.vocab_size, (1, length), device=session.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    check = "peak ÷ estimate of --dry-run"
    if not session.is_gpu:
        yield skip(check, f"{NO_GPU}; the steps themselves ran")
        return
    found = torch.cuda.max_memory_allocated()
    torch.cuda.memory._dump_snapshot(str(session.folder / "memory.pickle"))
    note = f"{found / 2**30:.1f} GiB, estimated {estimated / 2**30:.1f} GiB"
    yield verdict(check, found / estimated, note)


def verdict(check: str, ratio: float, note: str) -> Finding:
    """Fail above 1.15: the estimate promises that a run fits. Elsewhere outside .90 to 1.10, warn."""
    return expect(
        check,
        0.9 <= ratio <= 1.1,
        round(ratio, 3),
        ".90 to 1.10 ×",
        " ×",
        note=note,
        is_hard=not ratio <= 1.15,
    )


def write_config(session: Session, config: Any) -> Path:
    """The same run as a configuration file."""
    folder = session.folder / "memory"
    folder.mkdir(exist_ok=True)
    config.to_json_file(str(folder / "model.json"))
    length = config.max_position_embeddings
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"corpus": "stdlib", "tokenizer": "byte", "sequence_length": length},
            "recipe": "nvfp4",
            "precision": "bf16",
            "run": {"steps": STEPS},
        },
    }
    (folder / "ds.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "ds.json"


def kept(session: Session, recipe: str) -> int:
    """Bytes that the projections of a block keep for backward, without what they keep of their weights."""
    length = session.size(8192, 32)
    model = llama(session, num_hidden_layers=1).to(session.device, torch.bfloat16)
    if recipe != "bf16":
        mlb.convert(model, recipe)
    block = model.model.layers[0]
    return saved_by(block, 2 * length) - saved_by(block, length)


def saved_by(block: nn.Module, length: int) -> int:
    """Bytes of the storages that autograd keeps for some tokens."""
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for names in SHARING:
            modules = [block.get_submodule(name) for name in names]
            weight = modules[0].weight
            x = torch.randn(1, length, weight.shape[1], device=weight.device, dtype=weight.dtype)
            x.requires_grad_()
            outputs += [module(x) for module in modules]
    return sum(saved.values())
