"""The runs that a soak test kills, which together cover all state, and the comparison of their results."""

import json

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launchers import SPEEDS, write_config
from megalowbit.checkpoints.shards import ORIGIN_KEY

# measured with a clock, and so of the process that measured it
TIMES = {*SPEEDS, "seconds"}
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
# gradients overflow at the start, and again each time the scale has grown
RESTLESS = {"type": "dynamic", "initial_scale": 2.0**22, "growth_interval": 2, "hysteresis": 1}
SPLITS = {
    "base": "nvfp4",
    "split_input": {"rank": 2},
    "split_weight": {"rank": 2, "refresh_every": 4},
    "split_grad_output": {"rank": 4, "refresh_every": 3},
}


def shared(steps):
    return {
        "run": {"steps": steps, "overflow_retries": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "telemetry": {"log_every": 1, "layers_every": 3},
        "late_switch": {"at": steps - 5},
        "watchdog": {"timeout": 60.0},
    }


def splits(steps):
    return {"zero_optimization": {"stage": 2}}, {
        **shared(steps), "recipe": SPLITS, "precision": "fp16", "grad_scaler": RESTLESS,
        "regularizer": {"strength": 1e-6},
    }  # fmt: skip


def ladder(steps):
    settings = {"every": 2, "lookahead": 2, "verify_every": 2, "cooldown": 4, "threshold_db": 20}
    return {"zero_optimization": {"stage": 1}}, {
        **shared(steps), "recipe": "speculative-int8", "speculation": settings, "precision": "bf16",
        "run": {"steps": steps},
    }  # fmt: skip


def parameters(steps):
    scaler = {"type": "controller", "initial_scale": 2.0**22}
    split = {"rank": 4, "warmup_steps": 3, "merge_steps": 4}
    return {"zero_optimization": {"stage": 0}}, {
        **shared(steps), "recipe": {"base": "nvfp4", "parameter_split": split}, "precision": "fp16",
        "grad_scaler": scaler, "layer_scaling": {"enabled": True},
    }  # fmt: skip


RUNS = {"splits": splits, "ladder": ladder, "parameters": parameters}


def write_run(folder, name, steps):
    """The configuration of a run in a folder that is made for it; returns its path."""
    folder.mkdir(exist_ok=True)
    deepspeed, block = RUNS[name](steps)
    return write_config(folder, model=DROPOUT, block=block, **deepspeed)


def lines(path):
    """Of a record, as they were written but for times."""
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [json.dumps({key: value for key, value in row.items() if key not in TIMES}) for row in rows]


def curves(folder):
    """What TensorBoard shows: values of each step, by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag not in TIMES and tag.removeprefix("perf/") not in TIMES
    }


def tensors_and_numbers(folder):
    """Everything in the files of a checkpoint: generators, moments, scaler, totals."""
    contents = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}
    for content in contents.values():
        content[ORIGIN_KEY].pop("digest")  # of times as well
    return contents


def differences(mine, theirs, where=""):
    """Places where two nests of containers, tensors and numbers differ in a bit; times left out."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        found = [f"{where}: keys {sorted(map(str, mine.keys() ^ theirs.keys()))}"]
        found = found if mine.keys() != theirs.keys() else []
        for key in mine.keys() & theirs.keys() - TIMES:
            found += differences(mine[key], theirs[key], f"{where}.{key}")
        return found
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs):
            return [f"{where}: {len(mine)} and {len(theirs)} entries"]
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{where}[{number}]")]
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        is_alike = mine.dtype == theirs.dtype and torch.equal(as_bytes(mine), as_bytes(theirs))
    else:
        is_alike = repr(mine) == repr(theirs)
    return [] if is_alike else [f"{where}: {str(mine)[:60]} and {str(theirs)[:60]}"]


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def compare(run, undisturbed):
    """Differences between two finished runs, a line each."""
    found = []
    for name in ("metrics.jsonl", "overflow_layers.jsonl", "speculation.jsonl"):
        mine, theirs = lines(run / name), lines(undisturbed / name)
        if mine != theirs:
            pairs = zip(mine or [], theirs or [], strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (len(mine or []), len(theirs or [])))
            found.append(f"{name}: {first[0]}\n   instead of {first[1]}")
    for name in ("summary.json", "DONE"):
        mine, theirs = (json.loads((each / name).read_text()) for each in (run, undisturbed))
        found += differences(mine, theirs, name)
    for name in ("model.safetensors", "config.json") if (undisturbed / "hf").exists() else ():
        if (run / "hf" / name).read_bytes() != (undisturbed / "hf" / name).read_bytes():
            found.append(f"hf/{name} differs")
    newest = [max((each / "checkpoints").glob("step-*")) for each in (run, undisturbed)]
    found += differences(*(tensors_and_numbers(each) for each in newest), "checkpoint")
    found += differences(*(curves(each / "tensorboard") for each in (run, undisturbed)), "TensorBoard")
    drafts = [path.name for path in [*run.glob(".*"), *run.glob("checkpoints/.*")] if path.suffix == ".tmp"]
    return [*found, *(f"left behind: {name}" for name in drafts)]
