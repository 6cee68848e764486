"""`megalowbit init`: a configuration for a model size and a machine: micro-batch and ZeRO stage that fit.

Everything but the sizes is that of a shipped configuration. The lowest ZeRO stage is taken at which one
sequence fits into a process's memory, because higher stages communicate more; then the largest micro-batch
that fits, because larger products are faster. What fits is decided by the estimate that `--dry-run` prints.
If not even stage 3 fits, all blocks are recomputed in backward. Tensor and pipeline parallelism are never
chosen.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megalowbit.errors import UserError
from megalowbit.hf.folders.new_folder import new_folder
from megalowbit.json_text import read_json_object, short_json
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import estimate_run
from megalowbit.pretrain.estimate.memory import GIB, MemoryEstimate
from megalowbit.shipped_files import shipped_configs
from megalowbit.values import BLOCK

SIZES = {"0.8M": "gpt2_tiny_fp4", "124M": "gpt2_124m_fp4", "1B": "llama_1b_fp4", "8B": "llama3_8b_fp4"}
USABLE = 0.9  # of the memory: the estimate leaves out fragmentation
LARGEST_MICRO_BATCH = 32
GROWTH = 1 / 8  # at most, of a batch that the processes do not divide
CONFIG, MODEL = "run.json", "model.json"


class Machine(NamedTuple):
    """Where a run is to train.

    Attributes:
        processes: one for each GPU; 1 on CPUs.
        gib: memory of each process.
        is_cpu: whether the processes compute on CPUs.
    """

    processes: int
    gib: float
    is_cpu: bool = False

    def __str__(self) -> str:
        if self.is_cpu:
            return f"CPUs with {self.gib:.0f} GiB"
        if self.processes == 1:
            return f"1 GPU with {self.gib:g} GiB"
        return f"{self.processes} GPUs with {self.gib:g} GiB each"


@dataclass(frozen=True, kw_only=True)
class StartingConfig:
    """A configuration that fits.

    Attributes:
        size: of `SIZES`.
        machine: for which it was made.
        content: of the DeepSpeed JSON file; it names `MODEL` beside it.
        model: of the model's file.
        memory: the estimate of one process.
    """

    size: str
    machine: Machine
    content: Mapping[str, Any]
    model: Mapping[str, Any]
    memory: MemoryEstimate

    def write(self, folder: Path) -> None:
        """Write the two files and a README into a new folder, completely or not at all.

        Raises:
            UserError: the folder exists and is not empty, or cannot be written.
        """
        with new_folder(folder) as draft:
            write_files(draft, self.content, self.model)
            (draft / "README.md").write_text(readme(self, folder), encoding="utf-8")


def starting_config(size: str, machine: Machine, scratch: Path) -> StartingConfig:
    """Choose micro-batch and ZeRO stage.

    Args:
        size: a key of `SIZES`.
        machine: where the run is to train.
        scratch: an empty folder for drafts, because configurations are read from files.

    Raises:
        UserError: the model does not fit; the message says what one process would need.
    """
    base = shipped_configs()[SIZES[size]]
    content = read_json_object(base)
    model = read_json_object(base.parent / content[BLOCK]["model"]["config"])
    content[BLOCK]["model"]["config"] = MODEL
    batch = _batch_size(content, machine.processes)

    def estimate(stage: int, micro_batch: int, *, recomputes: bool) -> tuple[dict[str, Any], MemoryEstimate]:
        draft = _draft(content, batch, stage, micro_batch, recomputes=recomputes)
        write_files(scratch, draft, model)
        config = load_config(scratch / CONFIG, [], world_size=machine.processes)
        return draft, estimate_run(config, recipe_of(config.recipe))

    stages = (0, 1, 2, 3) if machine.processes > 1 else (0,)
    ways = [(stage, False) for stage in stages] + [(stages[-1], True)]
    for stage, recomputes in ways:
        draft, memory = estimate(stage, 1, recomputes=recomputes)
        if not _fits(memory, machine):
            continue
        for micro_batch in _larger_micro_batches(batch // machine.processes):
            larger = estimate(stage, micro_batch, recomputes=recomputes)
            if not _fits(larger[1], machine):
                break
            draft, memory = larger
        return StartingConfig(size=size, machine=machine, content=draft, model=model, memory=memory)
    raise UserError(
        f"{size} does not fit on {machine}: one process needs {_needed(memory, machine) / GIB:.1f} GiB with "
        f"ZeRO stage {stages[-1]}, one sequence and recomputation: use more or larger GPUs, or divide the "
        "model as in docs/parallelism.md"
    )


def write_files(folder: Path, content: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Write the configuration and the model's file."""
    for name, value in ((CONFIG, content), (MODEL, model)):
        (folder / name).write_text(short_json(value) + "\n", encoding="utf-8")


def _batch_size(content: Mapping[str, Any], processes: int) -> int:
    """Sequences of an optimizer step: those of the shipped configuration, or a little more.

    Where the processes do not divide them, each gets the number with the most divisors up to `GROWTH` more,
    because micro-batches divide it: of a prime number they would have one sequence or all.
    """
    batch = _shipped_batch(content)
    if batch % processes == 0:
        return batch
    least = -(-batch // processes)
    most = max(least, int(batch * (1 + GROWTH) / processes))
    return processes * max(range(least, most + 1), key=lambda each: (_num_divisors(each), -each))


def _num_divisors(number: int) -> int:
    return sum(number % each == 0 for each in range(1, number + 1))


def _shipped_batch(content: Mapping[str, Any]) -> int:
    batch = content.get("train_batch_size")
    if batch is None:
        batch = content["train_micro_batch_size_per_gpu"] * content.get("gradient_accumulation_steps", 1)
    return int(batch)


def _draft(
    content: Mapping[str, Any], batch: int, stage: int, micro_batch: int, *, recomputes: bool
) -> dict[str, Any]:
    left_out = ("gradient_accumulation_steps", "tensor_parallel", "train_batch_size")
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch}
    others = {key: value for key, value in content.items() if key not in left_out}
    block = {key: value for key, value in content[BLOCK].items() if key != "activation_checkpointing"}
    if recomputes:
        block["activation_checkpointing"] = {"every": 1}
    return {**others, **sizes, "zero_optimization": {"stage": stage}, BLOCK: block}


def _larger_micro_batches(most: int) -> list[int]:
    """Micro-batches above 1 to try, the smallest first: a larger one never needs less memory."""
    return [size for size in range(2, min(most, LARGEST_MICRO_BATCH) + 1) if most % size == 0]


def _needed(memory: MemoryEstimate, machine: Machine) -> int:
    """Bytes of one process; on CPUs there is no context, but what is on the host counts."""
    if machine.is_cpu:
        return memory.total - memory.context_and_communication + memory.on_the_host
    return memory.total


def _fits(memory: MemoryEstimate, machine: Machine) -> bool:
    return _needed(memory, machine) <= USABLE * machine.gib * GIB


def _of_batch(config: StartingConfig) -> str:
    """Why the batch is not that of the shipped configuration."""
    usual = _shipped_batch(read_json_object(shipped_configs()[SIZES[config.size]]))
    if config.content["train_batch_size"] == usual:
        return ""
    return (
        f"; {usual} in the shipped configuration, which {config.machine.processes} processes do not divide; "
        "steps and learning rate are as there"
    )


def _rows(config: StartingConfig) -> dict[str, tuple[Any, str]]:
    """For each key of the README's table, its value, and why it has that."""
    block, batch = config.content[BLOCK], config.content["train_batch_size"]
    tokens, steps = batch * block["data"]["sequence_length"], block["run"]["steps"]
    micro = config.content["train_micro_batch_size_per_gpu"]
    rows: dict[str, tuple[Any, str]] = {
        "train_batch_size": (batch, f"sequences of an optimizer step: {tokens:,} tokens{_of_batch(config)}"),
        "train_micro_batch_size_per_gpu": (
            micro,
            f"the largest divisor up to {LARGEST_MICRO_BATCH} that fits; the rest is accumulated",
        ),
        "zero_optimization.stage": (
            config.content["zero_optimization"]["stage"],
            "the lowest that fits: 1 divides optimizer state, 2 also gradients, 3 also parameters",
        ),
        "optimizer.params.lr": (config.content["optimizer"]["params"]["lr"], "peak of the learning rate"),
        "megalowbit.model.config": (MODEL, "the architecture, as Hugging Face writes it"),
        "megalowbit.data.corpus": (block["data"]["corpus"], "a file, a folder or a data set: name yours"),
        "megalowbit.data.tokenizer": (
            block["data"]["tokenizer"],
            "byte, bpe (trained on it) or a folder",
        ),
        "megalowbit.recipe": (block["recipe"], "what runs in FP4; `megalowbit recipes` lists others"),
        "megalowbit.late_switch": (
            json.dumps(block.get("late_switch")),
            "from this share of the steps on, the forward runs in high precision",
        ),
        "megalowbit.run.steps": (steps, f"{tokens * steps / 1e9:,.3g} billion tokens in total"),
        "megalowbit.checkpoint.every": (block["checkpoint"]["every"], "steps between checkpoints"),
    }
    if "activation_checkpointing" in block:
        rows["megalowbit.activation_checkpointing"] = (
            json.dumps(block["activation_checkpointing"]),
            "blocks are computed again in backward: a third more time, but they fit",
        )
    return rows


def readme(config: StartingConfig, folder: Path) -> str:
    """What the keys of the configuration mean, why they have these values, and how to start."""
    table = "\n".join(f"| `{key}` | `{value}` | {why} |" for key, (value, why) in _rows(config).items())
    processes = config.machine.processes
    start = f"deepspeed --num_gpus {processes} --module megalowbit pretrain"
    if processes == 1:
        start = "megalowbit pretrain"
    path = shlex.quote(str(folder / CONFIG))
    return f"""# {config.size} on {config.machine}

`{CONFIG}` is a DeepSpeed configuration with a `"megalowbit"` block, made by `megalowbit init {config.size}`.

```
megalowbit pretrain --ds-config {path} --dry-run --processes {processes}   # what will run, and its memory
{start} --ds-config {path} --run-dir runs/first
```

| key | value | why |
|---|---|---|
{table}

`--set KEY=VALUE` overrides a key for one run. docs/configuration.md explains all of them.

Estimated memory of one process, of {config.machine.gib:g} GiB:

```
{config.memory}
```
"""
