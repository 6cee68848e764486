"""Checks of the architecture: which folder imports which, no cycles, small folders and files.

Every import counts, also one inside a function or under TYPE_CHECKING. Changing the plan is allowed, on
purpose: here, in docs/architecture.md and with the reason in docs/decisions/.
"""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megalowbit"
# The ground: importable from anywhere, imports no room.
GROUND = {
    "errors",
    "durable_files",
    "json_text",
    "c_library",
    "collector",
    "values",
    "cuda_graphs",
    "derivative_checks",
    "labels",
    "one_line_parser",
    "processor",
    "shipped_files",
    "standard_streams",
}
ALLOWED = {
    "distributed": set(),
    "formats": set(),
    "quantize": {"formats"},
    "spectral": {"quantize"},
    "layers": {"quantize", "spectral", "distributed"},
    "families": {"layers"},
    "optim": {"distributed"},
    "telemetry": {"quantize", "distributed", "records"},
    "speculation": {"formats", "quantize", "layers", "telemetry", "distributed", "records"},
    "checkpoints": {"layers"},
    "data": {"distributed"},
    "hf": {"formats", "quantize", "families", "layers", "checkpoints"},
    "supervision": {"distributed"},
    "config": {"optim", "layers", "supervision"},
    "cluster": {"distributed"},
    "records": set(),
    "report": {"records", "telemetry"},
    "engine": {"distributed", "layers", "families", "optim", "checkpoints", "hf", "supervision", "config"},
    "pretrain": {
        "distributed",
        "quantize",
        "layers",
        "families",
        "optim",
        "telemetry",
        "speculation",
        "hf",
        "data",
        "supervision",
        "config",
        "engine",
        "records",
        "report",
    },
    "findings": {"config", "pretrain", "records"},
    "doctor": {
        "distributed",
        "quantize",
        "layers",
        "families",
        "optim",
        "telemetry",
        "hf",
        "data",
        "config",
        "cluster",
        "engine",
        "pretrain",
    },
    "commands": {
        "distributed",
        "layers",
        "hf",
        "data",
        "cluster",
        "config",
        "engine",
        "pretrain",
        "records",
        "report",
        "findings",
        "doctor",
    },
}
MAX_ENTRIES = 14  # of a folder; the rooms themselves are the plan
MAX_LINES = 500
SMALL = 100  # lines: such files may share a test file
FRAGMENT = 60  # a shorter file with a single importer belongs into that importer
ONE_FILE_EACH = {  # registries, whose entries may be as short as they are
    "megalowbit.families.registry",
    "megalowbit.findings.verdict",
    "megalowbit.optim.loss_scale.registry",
    "megalowbit.pretrain.components.registry",
}
DRAWERS = {"utils", "common", "helpers", "util", "misc"}
# What only this file may do; it holds collectives against NCCL's rules. Others may ask torch about groups.
COLLECTIVES = "megalowbit.distributed.collectives"
QUESTIONS = {
    "DistError",
    "DistNetworkError",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "TCPStore",
    "_get_default_store",
    "_world",
    "destroy_process_group",
    "distributed_c10d",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "is_available",
    "is_initialized",
    "is_nccl_available",
}
TORCH_GROUPS = ("torch.distributed", "torch.distributed.distributed_c10d", "deepspeed.comm")
# methods of torch's groups and of their backends, whatever the object is called
METHODS = {"allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "alltoall", "recv_anysource"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
FRONT_DOOR = "megalowbit"  # what users import; lazy, and imported by nothing inside
FRONT_DOORS = {FRONT_DOOR, "megalowbit.__main__"}  # the second is what users start


def imports_of(tree: ast.Module) -> set[str]:
    """Modules that a file imports, at any depth of it; those of this package as the file that is meant."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{node.module}: write absolute imports"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else str(node.module))
    return names


class Facts(NamedTuple):
    """What the tests ask of a module."""

    imports: set[str]
    communication: list[str]


@functools.cache
def all_facts() -> dict[str, Facts]:
    """Facts of each module, parsed once; read when a test asks, because every worker collects this file."""
    trees = ((name, ast.parse(path.read_text(encoding="utf-8"))) for name, path in MODULES.items())
    return {name: Facts(imports_of(tree), communication_of(tree)) for name, tree in trees}


def all_imports() -> dict[str, set[str]]:
    """What each module imports."""
    return {name: facts.imports for name, facts in all_facts().items()}


def inner_imports() -> dict[str, set[str]]:
    """What each module imports from this package; all modules but the front door."""
    return {
        name: {each for each in found if each in MODULES}
        for name, found in all_imports().items()
        if name not in FRONT_DOORS
    }


def room(module: str) -> str:
    return module.split(".")[1]


def corner(module: str) -> str:
    """A sub-folder of a room as one thing, or a file that lies in the room itself."""
    parts = module.split(".")
    return "/".join(parts[1:3]) + ("/" if len(parts) > 3 else "")


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Nodes that reach themselves, by taking away what imports nothing that is left."""
    left = {node: {each for each in targets if each != node} for node, targets in arrows.items()}
    while free := [node for node, targets in left.items() if not targets & set(left)]:
        for node in free:
            del left[node]
    return sorted([node, *sorted(targets & set(left))] for node, targets in left.items())


def test_folders_import_only_what_the_plan_allows():
    wrong = []
    for module, targets in inner_imports().items():
        if room(module) in GROUND:
            wrong += [f"{module} imports {each}" for each in targets if room(each) not in GROUND]
            continue
        allowed = ALLOWED[room(module)] | GROUND | {room(module)}
        wrong += [
            f"{module} imports {each}" for each in targets if each in FRONT_DOORS or room(each) not in allowed
        ]
    wrong += [
        f"{module} imports deepspeed"
        for module, names in all_imports().items()
        if module not in FRONT_DOORS
        and room(module) != "engine"
        and any(n.split(".")[0] == "deepspeed" for n in names)
    ]
    assert not wrong


def test_there_are_no_circular_imports():
    assert not circles(inner_imports())
    folders = defaultdict(set)
    for module, targets in inner_imports().items():
        folders[corner(module)] |= {corner(each) for each in targets}
    assert not circles(folders)


def test_folders_and_files_stay_small():
    importers = defaultdict(set)
    for module, targets in inner_imports().items():
        for each in targets:
            importers[each].add(module)
    wrong = []
    for folder in [path.parent for path in MODULES.values() if path.name == "__init__.py"]:
        entries = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
        if folder != PACKAGE and len(entries) > MAX_ENTRIES:
            wrong.append(f"{folder.relative_to(ROOT)}: {len(entries)} entries")
    for module, path in MODULES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            wrong.append(f"{module}: {lines} lines")
        is_entry = importers[module] <= ONE_FILE_EACH
        if lines < FRAGMENT and len(importers[module]) == 1 and path.name != "__init__.py" and not is_entry:
            wrong.append(f"{module}: {lines} lines, imported only by {importers[module].pop()}")
    wrong += [f"{path.relative_to(ROOT)}: a drawer" for path in PACKAGE.rglob("*") if path.stem in DRAWERS]
    assert not wrong


def dotted(node: ast.expr) -> str:
    """`a.b` for such an expression; nothing for any other, which no module is."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return owner and f"{owner}.{node.attr}"


def communication_of(tree: ast.Module) -> list[str]:
    """What a file takes from torch.distributed or deepspeed.comm beyond questions about groups."""
    modules, found = {"torch.distributed", "deepspeed.comm"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name in TORCH_GROUPS}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in TORCH_GROUPS:
                    modules.add(alias.asname or alias.name)
                elif str(node.module).startswith(TORCH_GROUPS):
                    found.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted(node.value) in modules or node.attr in METHODS):
            found.append(f"{ast.unparse(node.value)}.{node.attr}")
    return [each for each in found if each.rpartition(".")[2] not in QUESTIONS]


def test_collectives_are_issued_in_one_file():
    used = {
        name: facts.communication
        for name, facts in all_facts().items()
        if name != COLLECTIVES and facts.communication
    }
    assert not used


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch.distributed as d; d.all_reduce(x)", ["d.all_reduce"]),
        ("import torch; torch.distributed.barrier()", ["torch.distributed.barrier"]),
        ("from torch import distributed; distributed.send(x)", ["distributed.send"]),
        ("from torch.distributed import broadcast, get_rank", ["torch.distributed.broadcast"]),
        ("from torch.distributed.nn import all_reduce", ["torch.distributed.nn.all_reduce"]),
        ("from deepspeed import comm as dist; dist.all_gather(x)", ["dist.all_gather"]),
        ("def f(group): group.allreduce([x])", ["group.allreduce"]),
        ("import torch.distributed as dist; dist.get_rank(); dist.ReduceOp.MAX; tensors.gather(1)", []),
    ],
)
def test_a_collective_is_found_by_any_name(line, found):
    assert communication_of(ast.parse(line)) == found


def test_tests_mirror_the_package():
    """A folder's tests lie in the folder of that name; a file of some size has a test file of its name."""
    missing = []
    for module, path in MODULES.items():
        folder = ROOT / "tests" / path.relative_to(PACKAGE).parent
        is_small = len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        if path.name == "__init__.py":
            pattern = "**/test_*.py"
        else:
            pattern = "test_*.py" if is_small else f"test_{path.stem}*.py"
        if not list(folder.glob(pattern)):
            missing.append(module)
    assert not missing


def test_importing_the_package_is_light():
    code = (
        "import sys, megalowbit; "
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets', 'wandb'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
