"""Internals of DeepSpeed's ZeRO optimizers and pipelines that the package uses, and in which files.

`used()` searches the package's source for every name that DeepSpeed's sources define and ours do not. A new
use without an entry in `engine.versions.internals.INTERNALS` is found, whatever the variable is called.
"""

import ast
from functools import cache
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from megalowbit.engine.versions.internals import DEFINING

ENGINE = Path(__file__).parents[3] / "megalowbit" / "engine"
READ = (
    *sorted(ENGINE.glob("zero/*.py")),
    *sorted(ENGINE.glob("pipeline/*.py")),
    *(ENGINE / "checkpoints" / f"{n}.py" for n in ("reshape", "layout")),
    ENGINE / "parameters" / "full_weights.py",
    ENGINE / "run_checks" / "model.py",
    ENGINE / "tensor_parallel" / "shard_model.py",
)
DEEPSPEED = Path(deepspeed.__file__).parent
# no ZeRO internals, though DeepSpeed defines them too: engine attributes (test_index.py) or names of ours
ELSEWHERE = frozenset({
    "all_parameters", "cur_scale", "device", "dynamic_shape", "enabled", "get_data_parallel_group",
    "get_model_parallel_group", "get_tensor_model_parallel_world_size", "gradient_accumulation_steps",
    "gradients", "group", "is_first_stage", "is_last_stage", "loss_scale", "module", "mpu", "rank", "report",
    "start", "step", "world_group", "world_size",
})  # fmt: skip
BY_NAME = frozenset({"getattr", "hasattr", "setattr"})


@cache
def tree(path):
    """A source, parsed once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_by_deepspeed():
    """Names of attributes, methods and fields in DeepSpeed's ZeRO and pipeline sources."""
    names = set()
    for path in DEFINING:
        for node in ast.walk(ast.parse((DEEPSPEED / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def used():
    """DeepSpeed's name → our files that use it."""
    known = defined_by_deepspeed()
    classes = (torch, torch.Tensor, torch.nn.Module, dist, dict, str)
    of_torch = {name for each in classes for name in dir(each)} | {"grad"}
    found = {}
    for path in READ:
        for node in ast.walk(tree(path)):
            name, owner = None, None
            if isinstance(node, ast.Attribute):
                name, owner = node.attr, node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
                name = getattr(node.args[1], "value", None)
            is_optimizer = "optimizer" in (getattr(owner, "id", None), getattr(owner, "attr", None))
            if name in known and (is_optimizer or name not in of_torch):
                found.setdefault(name, set()).add(path.name)
    return {name: files for name, files in found.items() if name not in ELSEWHERE}
