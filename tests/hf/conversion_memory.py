"""Converts a model of several shards in all directions, and prints the peak memory of each.

`python conversion_memory.py FOLDER`: prints lines `name bytes bound largest`; the memory is that of the
process beyond what it had before, mapped files included.
"""

import os
import sys
from pathlib import Path

import deepspeed_writer
import megatron_writer
import torch
from tiny_models import tiny_config
from transformers import LlamaForCausalLM

from megalowbit.checkpoints.layout import Layout, Slice, StoredParameter
from megalowbit.checkpoints.shards import model_file, optimizer_file
from megalowbit.durable_files import write_manifest
from megalowbit.hf.checkpoint import plan_export, plan_import
from megalowbit.hf.folders.shards import file_size
from megalowbit.hf.training_checkpoint import read_checkpoint

SHARD_SIZE = 2**24


def config(num_layers):
    """22 MB of fp32 weights in a block, the largest 8 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_heads": 8, "num_key_value_heads": 2}
    return tiny_config("llama", vocab_size=2048, num_layers=num_layers, **sizes)


def write_zero_two(start, folder, ranks=2):
    """A checkpoint of ZeRO 2 on several ranks with the weights of another one."""
    step = folder / "checkpoints" / "step-00000007"
    step.mkdir(parents=True)
    stored = read_checkpoint(start)
    names = [
        name for name in stored.state_dict if name not in stored.header["megalowbit_engine"]["layout"]["tied"]
    ]
    values = {name: stored.state_dict[name].clone() for name in names}
    flat = torch.cat([value.flatten() for value in values.values()])
    size = -(-flat.numel() // ranks)
    parameters, offset = [], 0
    for name, value in values.items():
        place = {
            "group": 0,
            "offset": offset,
            "state": 0,
            "optimizer_group": 0,
            "weight": (model_file(2, 0), name),
        }
        parameters.append(StoredParameter(name=name, shape=tuple(value.shape), dtype="bfloat16", **place))
        offset += value.numel()
    part = Slice(parameters=tuple(parameters), partition_sizes=(size,))
    layout = Layout(stage=2, data_size=ranks, slices=(part,))
    header = {**stored.header, "module": {name: value.bfloat16() for name, value in values.items()}}
    header["megalowbit_engine"] = {"layout": layout.to_dict()}
    del header["megalowbit_origin"]
    torch.save(header, step / model_file(2, 0))
    for rank in range(ranks):
        own = flat[rank * size : (rank + 1) * size].clone()
        state = {"single_partition_of_fp32_groups": [own], "base_optimizer_state": {"state": {}}}
        torch.save({"optimizer_state_dict": state}, step / optimizer_file(0, rank))
    write_manifest(step)


def peak_of(work):
    """Bytes of memory that `work` needs at most beyond what the process has."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return memory("VmHWM") - before


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def convert_all(folder, num_layers):
    """Every direction once; yields name, peak memory, its bound and the largest shard."""
    LlamaForCausalLM(config(num_layers)).save_pretrained(folder / "hf")

    def plans():
        yield "import", "start", plan_import(folder / "hf", shard_size=SHARD_SIZE)
        yield "export", "back", plan_export(folder / "start", shard_size=SHARD_SIZE)
        write_zero_two(folder / "start", folder / "run")
        yield "export of ZeRO 2", "masters", plan_export(folder / "run", torch.float32, shard_size=SHARD_SIZE)
        yield "export of ZeRO 2 in bf16", "half", plan_export(folder / "run", shard_size=SHARD_SIZE)
        for name, plan in plans_of_imports(folder):
            yield f"import of {name}", name, plan

    for name, target, plan in plans():
        trim()
        peak = peak_of(lambda plan=plan, target=target: plan.run(folder / target, is_verified=True))
        yield name, peak, plan.peak_memory, max(map(file_size, plan.shards))


def plans_of_imports(folder):
    """Imports of the same model from checkpoints of other programs, on two ranks each."""
    model = LlamaForCausalLM.from_pretrained(folder / "hf")
    megatron_writer.write(folder / "of Megatron-LM", model, ranks=2)
    for stage in (2, 3):
        deepspeed_writer.write(folder / f"of ZeRO {stage}", model, stage=stage)
    del model
    for name, config in (("Megatron-LM", folder / "hf"), ("ZeRO 2", None), ("ZeRO 3", None)):
        yield name, plan_import(folder / f"of {name}", config=config, shard_size=SHARD_SIZE)


def trim():
    """Give freed memory back to the system."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for place, layers in (("warm", 1), ("measured", int(os.environ.get("LAYERS", "6")))):
        for facts in convert_all(folder / place, layers):
            if place == "measured":
                print(*facts, sep="\t", flush=True)
