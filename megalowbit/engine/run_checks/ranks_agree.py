"""Checks that all ranks were started with the same code, settings and model; if not, every rank raises.

Ranks with different code, settings or models diverge, or wait forever in the first collective that differs.
Therefore they exchange two digests each before anything else. If the digests differ, the facts behind them
are gathered, and the error names the difference and its ranks. Facts of the run must be equal on all ranks;
facts of the model must be equal on ranks that hold the same part of it.
Not covered: values of weights, which DeepSpeed broadcasts; paths, whose contents are compared instead.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import gather, gather_bytes, raised_on_all_ranks
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.errors import shown
from megalowbit.layers.conversion.convert import random_stream
from megalowbit.values import BLOCK

Facts = Mapping[str, str]

DISTRIBUTIONS = ("torch", "deepspeed", "transformers", "triton")
# these select the kernels and their rounding
ENVIRONMENT = (
    "MEGALOWBIT_BACKEND",
    "MEGALOWBIT_CPU_GEMM",
    "MEGALOWBIT_APEX",
    "TRITON_INTERPRET",
    "DS_ACCELERATOR",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
SOURCES = frozenset({".py", ".c", ".cpp", ".h", ".cu", ".cuh"})
# paths may differ between nodes: their contents are compared by fingerprint, or broadcast
PLACES = tuple(
    f"{BLOCK}.{key}"
    for key in (
        "data.cache_dir",
        "data.corpus",
        "data.validation.corpus",
        "data.sources.*.corpus",
        "data.tokenizer",
        "model.config",
        "model.checkpoint",
    )
)
REMEDIES = {
    "code": "install the same megalowbit on every node",
    "version": "install the same packages on every node",
    "environment": "export the same value on every node",
    "device": "use one kind of device",
    "configuration": "give every rank the same configuration",
    "parameter": "build the same model on every rank",
    "random": "convert with the same seed on every rank; the rank itself makes the numbers differ",
    "argument": "call megalowbit.initialize with the same arguments on every rank",
}
PACKAGE = Path(__file__).parents[2]
DIGEST_BYTES = 32
RANKS_NAMED = 4


def installation_facts() -> dict[str, str]:
    """Code, versions, kernel selection and device type of this process."""
    facts = {"code of megalowbit": package_digest()}
    facts |= {f"version of {name}": version_of(name) or "not installed" for name in DISTRIBUTIONS}
    facts |= {f"environment variable {name}": shown(os.environ.get(name)) for name in ENVIRONMENT}
    facts["device"] = "cpu"
    if torch.cuda.is_available():
        facts["device"] = "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return facts


def configuration_facts(parts: DeepSpeedConfigParts) -> dict[str, str]:
    """Dotted name → value of all keys except paths, of DeepSpeed's part and ours."""
    # effective values, because the block omits defaults
    block = {**parts.megalowbit, **parts.settings.model_dump(mode="json")}
    flat = _flat({**parts.deepspeed, BLOCK: block}, "")
    return {f"configuration key {key}": value for key, value in flat.items() if not _is_place(key)}


def _is_place(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in PLACES)


def model_facts(model: torch.nn.Module) -> dict[str, str]:
    """Number, names, shapes and dtypes of a model's parameters; the random stream of a converted model."""
    parameters = {name: (p, getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    count = sum(torch.Size(shape).numel() for _, shape in parameters.values())
    stream = random_stream(model)
    numbers = {} if stream is None else {"random stream": f"seed {stream.seed}, micro-batch {stream.step}"}
    return {
        **numbers,
        "parameter count": f"{count:,}",
        **{
            f"parameter {name}": f"{str(p.dtype).removeprefix('torch.')} {tuple(shape)}"
            + ("" if p.requires_grad else " frozen")
            for name, (p, shape) in parameters.items()
        },
    }


def check_ranks_agree(
    everywhere: Facts, *, of_this_part: Facts | None = None, grid: ProcessGrid | None = None
) -> None:
    """Check that all ranks were started with the same facts; collective.

    Args:
        everywhere: facts that must be equal on all ranks, name → value: `{"seed": "0"}`.
        of_this_part: facts that must be equal on ranks with the same tensor rank and stage.
        grid: defines tensor rank and stage; None: the same for all ranks.

    Raises:
        UserError: on every rank; names the first difference and the value on each rank.
    """
    if process_group.world_size() == 1:
        return
    part = (0, 0) if grid is None else (grid.stage, grid.tensor_rank)
    own = (dict(everywhere), dict(of_this_part or {}), part)
    digests = [bytes(row.tolist()) for row in gather_bytes(b"".join(map(_digest, own)))]
    if len({each[:DIGEST_BYTES] for each in digests}) == 1:
        # compare the model's digests among the ranks of each part
        of_parts = defaultdict(set)
        for each in digests:
            of_parts[each[2 * DIGEST_BYTES :]].add(each[DIGEST_BYTES : 2 * DIGEST_BYTES])
        if all(len(found) == 1 for found in of_parts.values()):
            return
    raise raised_on_all_ranks(_first_difference(gather(own)))


def _first_difference(gathered: Sequence[tuple[Facts, Facts, tuple[int, int]]]) -> str:
    differing = _differing({rank: facts for rank, (facts, _, _) in enumerate(gathered)})
    parts: dict[tuple[int, int], dict[int, Facts]] = defaultdict(dict)
    for rank, (_, facts, part) in enumerate(gathered):
        parts[part][rank] = facts
    for peers in parts.values():
        differing = differing or _differing(peers)
    (what, of_rank), others = differing[0], differing[1:]
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, value in of_rank.items():
        holders[value].append(rank)
    values = ", ".join(f"{value} on {_name_ranks(ranks)}" for value, ranks in holders.items())
    more = f" (and on {len(others)} more, such as {others[0][0]})" if others else ""
    remedy = REMEDIES.get(what.split(" ")[0], "start every rank with the same one")
    return f"ranks disagree on {what}: {values}{more}; {remedy}"


def _differing(facts_of: Mapping[int, Facts]) -> list[tuple[str, dict[int, str]]]:
    """Facts that differ, in order, with the value on each rank."""
    names = dict.fromkeys(name for facts in facts_of.values() for name in facts)
    found = {name: {rank: facts.get(name, "none") for rank, facts in facts_of.items()} for name in names}
    return [(name, values) for name, values in found.items() if len(set(values.values())) > 1]


def _name_ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:RANKS_NAMED]))
    more = f" and {len(ranks) - RANKS_NAMED} more" if len(ranks) > RANKS_NAMED else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {named}{more}"


@functools.cache
def version_of(distribution: str) -> str | None:
    """The installed version, None if there is none; read once, because a process imports it once."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def package_digest() -> str:
    """`code_digest` of this package; computed once, because a process imports it once."""
    return code_digest(PACKAGE)


def code_digest(folder: Path) -> str:
    """First 12 hexadecimal digits of a SHA-256 over names and contents of a package's source files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _digest(values: object) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _text(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    # long values are shortened; a digest makes sure that different ones still differ
    return text if shown(text) == repr(text) else f"{shown(text)} ({_digest(text).hex()[:8]})"
