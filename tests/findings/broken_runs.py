"""Runs of the tiny model that are broken on purpose, and healthy ones: real processes with real records.

Each `Case` names what its run is to be diagnosed with. Faults come from the configuration (a learning rate,
a corrupt source of a blend) or from `faults`, which act inside the processes. The cases of `TUNED` were at
hand while thresholds were chosen; `HELD_OUT` has the same faults with other seeds, models, recipes, layers,
ranks and steps, and was run once afterwards (docs/diagnose.md has both tables).
"""

import json
import random
import shutil
import signal
from dataclasses import dataclass, field

from forked_ranks import Ranks

from launchers import write_config

SECTIONS = {
    "telemetry": {"log_every": 1, "count_every": 1, "layers_every": 5, "tensorboard": False},
    "checkpoint": {"every": 20, "export_hf": False},
    "watchdog": {"timeout": 12.0, "silence": 5.0},
}
FP16 = {
    "precision": "fp16",
    "grad_scaler": {"type": "dynamic", "initial_scale": 65536, "growth_interval": 20, "hysteresis": 1},
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
THREE_BLOCKS = {"n_layer": 3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and its diagnosis.

    Attributes:
        expected: name of the first cause, or "healthy".
        subject: what the cause must name, such as a layer or a rank.
        sets: overrides of the configuration.
        ranks: number of processes.
        fault: name of a function of `faults`.
        where: its variables.
        model: keys of the model's configuration.
        lr: peak learning rate; None: as in `write_config`.
        warmup: steps; None: no schedule at all.
        act: called with the ranks and the run folder while it runs.
        before: called with the working folder before the start.
        file_sizes: bytes that ranks may write to a file.
        resumed: overrides of a second start, with --resume auto; None: there is none.
    """

    expected: str
    subject: str = ""
    sets: tuple[str, ...] = ()
    steps: int = 60
    ranks: int = 1
    fault: str | None = None
    where: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    lr: float = 3e-3
    warmup: int | None = 5
    act: object = None
    before: object = None
    file_sizes: dict | None = None
    resumed: tuple[str, ...] | None = None
    block: dict = field(default_factory=dict)
    deepspeed: dict = field(default_factory=dict)


def noise(length, seed):
    """Bytes without any order: a shard that was decompressed wrongly, or is encrypted."""
    draw = random.Random(seed)
    return "".join(chr(draw.randrange(33, 127)) for _ in range(length))


def spoiled_phase(kind, first, last, *, steps):
    """A blend whose second source is spoiled and gives all samples of some steps."""
    good, bad = {"good": 1, "bad": 0}, {"good": 0, "bad": 1}
    phases = [{"from_step": first, "weights": bad}, {"from_step": last + 1, "weights": good}]
    sources = {"good": {"corpus": "text.txt", "weight": 1}, "bad": {"corpus": f"{kind}.txt", "weight": 0}}
    data = {
        "sources": sources,
        "phases": [each for each in phases if each["from_step"] <= steps],
        "sequence_length": 32,
    }
    return {"data": data}


def delete_folder(after):
    def act(ranks, run):
        ranks.reach(run, after)
        shutil.rmtree(run)

    return act


def send(number, victims, after):
    def act(ranks, run):
        ranks.reach(run, after)
        ranks.send(number, victims)

    return act


def damage_checkpoint(run):
    """Overwrite the middle of the newest checkpoint's largest file, as a failing disk does."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    path = max(newest.glob("*.pt"), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def start(case, folder, *, seed):
    """Run a case in `folder`; returns its run folder, after all its processes have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    block = {"run": {"steps": case.steps, "seed": seed}, **SECTIONS, **case.block}
    path = write_config(folder, block=block, **case.deepspeed)
    raw = json.loads(path.read_text())
    raw["optimizer"]["params"]["lr"] = case.lr
    if case.warmup is None:
        del raw["scheduler"]
    else:
        raw["scheduler"]["params"]["warmup_num_steps"] = case.warmup
    path.write_text(json.dumps(raw))
    model = json.loads((folder / "model.json").read_text())
    if "model_type" in case.model:
        model = {name: model[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    (folder / "model.json").write_text(json.dumps(model | case.model))
    (folder / "noise.txt").write_text(noise(60_000, seed))
    (folder / "same.txt").write_text("a" * 60_000)
    run = folder / "run"
    _run(case, folder, run, ())
    if case.resumed is not None:
        damage_checkpoint(run)
        _run(case, folder, run, ("--resume", "auto"), case.resumed)
    return run


def _run(case, folder, run, more, overrides=()):
    sets = [word for each in (*case.sets, *overrides) for word in ("--set", each)]
    with Ranks(
        folder, "--ds-config", "tiny.json", "--run-dir", run.name, *more, *sets,
        world_size=case.ranks,
        hook=case.fault and f"tests.findings.faults.{case.fault}",
        file_sizes=case.file_sizes,
        **{f"FAULT_{name}": str(value) for name, value in case.where.items()},
    ) as ranks:  # fmt: skip
        if case.act is not None:
            case.act(ranks, run)
        assert ranks.wait(), ranks.output()


C_FC, C_PROJ, C_ATTN = (f"transformer.h.1.{each}" for each in ("mlp.c_fc", "mlp.c_proj", "attn.c_attn"))
TUNED = {
    "lr-300": Case(expected="learning rate", lr=1.0),
    "lr-late": Case(expected="learning rate", lr=3.0, warmup=50),
    "no-warm-up": Case(expected="learning rate", lr=0.5, warmup=None),
    "lr-zero": Case(expected="no learning", lr=1e-7),
    "row": Case(expected="layer", subject=C_FC, fault="scale_a_row", where={"STEP": 30, "LAYER": C_FC}),
    "element": Case(
        expected="layer", subject=C_PROJ, fault="scale_an_element", where={"STEP": 20, "LAYER": C_PROJ}
    ),
    "nan-fp16": Case(
        expected="non-finite gradients", subject=C_FC, fault="nan_gradient",
        where={"STEP": 30, "LAYER": C_FC}, block=FP16,
    ),
    "nan-rank": Case(
        expected="non-finite gradients", subject="rank 1", fault="nan_gradient", ranks=2,
        where={"STEP": 20, "LAYER": C_FC, "RANK": 1},
    ),
    "nan-activation": Case(
        expected="non-finite loss", fault="nan_activation", where={"STEP": 25, "LAYER": C_ATTN}
    ),
    "noise-block": Case(expected="data", subject="bad", block=spoiled_phase("noise", 30, 40, steps=60)),
    "same-block": Case(expected="data", subject="bad", block=spoiled_phase("same", 35, 45, steps=60)),
    "noise-only": Case(expected="unpredictable labels", sets=("megalowbit.data.corpus=noise.txt",)),
    "slow-rank": Case(
        expected="slow rank", subject="rank 1", fault="slow_forward", ranks=2,
        where={"STEP": 20, "RANK": 1, "FACTOR": 0.15}, steps=40,
    ),
    "astray": Case(
        expected="replicas differ", fault="scale_all_weights", ranks=2, where={"STEP": 30, "RANK": 1}
    ),
    "killed-rank": Case(
        expected="lost rank", subject="rank 1", fault="kill_self", ranks=2, where={"STEP": 10, "RANK": 1},
    ),
    "killed": Case(expected="killed", fault="kill_self", where={"STEP": 10}),
    "hang": Case(expected="hang", subject="rank 1", fault="hang", ranks=2, where={"STEP": 8, "RANK": 1}),
    "memory": Case(expected="out of memory", fault="out_of_memory", where={"STEP": 8}),
    "defect": Case(expected="error", fault="crash", where={"STEP": 8}),
    "disk": Case(expected="disk full", file_sizes={0: 250_000}),
    "time-limit": Case(expected="stopped", act=send(signal.SIGTERM, [0], 8)),
    "deleted": Case(expected="folder deleted", act=delete_folder(8), steps=300),
    "damaged": Case(expected="damaged checkpoint", steps=40, resumed=("megalowbit.run.steps=50",)),
}  # fmt: skip
H0 = "transformer.h.0."
HELD_OUT = {
    "lr-100": Case(expected="learning rate", lr=0.5, model=LLAMA, warmup=3, steps=50),
    "lr-late": Case(expected="learning rate", lr=5.0, warmup=40, sets=("megalowbit.recipe=bf16",)),
    "no-warm-up": Case(expected="learning rate", lr=1.0, warmup=None, model=THREE_BLOCKS),
    "lr-zero": Case(expected="no learning", lr=3e-7, sets=("megalowbit.recipe=mxfp4",), steps=80),
    "row": Case(
        expected="layer", subject=H0 + "attn.c_proj", fault="scale_a_row", model=THREE_BLOCKS,
        where={"STEP": 22, "LAYER": H0 + "attn.c_proj", "FACTOR": 1000}, sets=("megalowbit.recipe=mxfp4",),
    ),
    "element": Case(
        expected="layer", subject="model.layers.1.mlp.up_proj", fault="scale_an_element", model=LLAMA,
        where={"STEP": 33, "LAYER": "model.layers.1.mlp.up_proj", "FACTOR": 1e4},
    ),
    "nan-fp16": Case(
        expected="non-finite gradients", subject=H0 + "mlp.c_proj", fault="nan_gradient",
        where={"STEP": 12, "LAYER": H0 + "mlp.c_proj"}, block=FP16, model=THREE_BLOCKS,
    ),
    "nan-rank": Case(
        expected="non-finite gradients", subject="rank 0", fault="nan_gradient", ranks=2,
        where={"STEP": 15, "LAYER": C_ATTN, "RANK": 0}, block=FP16, steps=40,
    ),
    "nan-activation": Case(
        expected="non-finite loss", fault="nan_activation", model=LLAMA,
        where={"STEP": 18, "LAYER": "model.layers.0.self_attn.o_proj"},
    ),
    "noise-block": Case(
        expected="data", subject="bad", block=spoiled_phase("noise", 22, 27, steps=50), steps=50, model=LLAMA
    ),
    "same-block": Case(
        expected="data", subject="bad", block=spoiled_phase("same", 40, 60, steps=50), steps=50,
        sets=("megalowbit.recipe=bf16",),
    ),
    "noise-only": Case(
        expected="unpredictable labels", model=LLAMA, steps=90,
        sets=("megalowbit.data.corpus=noise.txt", "megalowbit.recipe=bf16"),
    ),
    "slow-rank": Case(
        expected="slow rank", subject="rank 0", fault="slow_forward", ranks=2,
        where={"STEP": 12, "RANK": 0, "FACTOR": 0.3}, steps=36, deepspeed={"zero_optimization": {"stage": 2}},
    ),
    "astray": Case(
        expected="replicas differ", fault="scale_all_weights", ranks=2,
        where={"STEP": 25, "RANK": 0, "FACTOR": 1.0}, sets=("megalowbit.recipe=bf16",),
    ),
    "killed-rank": Case(
        expected="lost rank", subject="rank 1", fault="kill_self", ranks=2, where={"STEP": 5, "RANK": 1},
        deepspeed={"zero_optimization": {"stage": 2}},
    ),
    "killed": Case(expected="killed", act=send(signal.SIGKILL, [0, 1], 9), ranks=2, steps=3000),
    "hang": Case(expected="hang", subject="rank 0", fault="hang", ranks=2, where={"STEP": 5, "RANK": 0}),
    "memory": Case(
        expected="out of memory", fault="out_of_memory", where={"STEP": 4, "RANK": 1}, ranks=2
    ),
    "defect": Case(expected="error", fault="crash", where={"STEP": 3, "RANK": 1}, ranks=2),
    "disk": Case(
        expected="disk full", file_sizes={1: 150_000}, ranks=2, deepspeed={"zero_optimization": {"stage": 1}}
    ),
    "time-limit": Case(expected="stopped", act=send(signal.SIGUSR1, [0], 6), ranks=2, steps=3000),
    "deleted": Case(expected="folder deleted", act=delete_folder(12), steps=3000, ranks=2),
    "damaged": Case(
        expected="damaged checkpoint", steps=20, resumed=("megalowbit.run.steps=30",), ranks=2,
        deepspeed={"zero_optimization": {"stage": 1}},
    ),
}  # fmt: skip
HEALTHY = {
    "default": Case(expected="healthy"),
    "fp16": Case(expected="healthy", block=FP16, steps=80),
    "fp16-high-scale": Case(
        expected="healthy", block={**FP16, "grad_scaler": {**FP16["grad_scaler"], "initial_scale": 2**32}}
    ),
    "two-ranks": Case(expected="healthy", ranks=2, deepspeed={"zero_optimization": {"stage": 2}}),
    "llama-mxfp4": Case(expected="healthy", model=LLAMA, sets=("megalowbit.recipe=mxfp4",)),
    "bf16-long": Case(expected="healthy", sets=("megalowbit.recipe=bf16",), steps=250),
    "no-schedule": Case(expected="healthy", warmup=None, lr=2e-3),
    "short": Case(expected="healthy", steps=6),
    "high-lr": Case(expected="healthy", lr=0.01, steps=80),
    "late-switch": Case(expected="healthy", block={"late_switch": {"at": 0.5, "scope": "forward"}}),
    "blend": Case(expected="healthy", block=spoiled_phase("noise", 61, 62, steps=60)),
}

QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
HEALTHY_HELD_OUT = {
    "three-blocks": Case(expected="healthy", model=THREE_BLOCKS, steps=70),
    "qwen-fp16": Case(expected="healthy", model=QWEN, block=FP16, steps=50),
    "llama-two-ranks": Case(expected="healthy", model=LLAMA, ranks=2, lr=5e-3),
    "wsd": Case(
        expected="healthy", warmup=None, steps=90,
        block={"lr_schedule": {"type": "wsd", "warmup_steps": 8, "decay_steps": 30}},
    ),
    "fp8": Case(expected="healthy", sets=("megalowbit.recipe=fp8",), steps=100),
    "small-batch": Case(
        expected="healthy", steps=150,
        deepspeed={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
    ),
    "no-clipping": Case(expected="healthy", deepspeed={"gradient_clipping": 0.0}, lr=6e-3),
    "two-epochs": Case(expected="healthy", steps=120, sets=("megalowbit.recipe=bf16",), lr=1e-3),
}  # fmt: skip


def named_right(case, found):
    """Whether a diagnosis (`diagnose --json`) names the case's cause first, and its subject."""
    first = found["first"]
    if case.expected == "healthy":
        return first is None and found["state"] == "healthy"
    if first is None or first["name"] != case.expected:
        return False
    return case.subject in first["title"] + " ".join(each["text"] for each in first["evidence"])
