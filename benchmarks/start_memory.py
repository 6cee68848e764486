"""Host memory of every rank while a run builds its model and engine, on real ranks over gloo.

    python benchmarks/start_memory.py
    python benchmarks/start_memory.py --case "ZeRO 3" --ranks 8 --layers 12
    python benchmarks/start_memory.py --from-folder        # weights of a Hugging Face folder, not random ones

Prints the peak of each rank beyond what it had before its model was built (libraries, data), and, for the
version that has one, what `--dry-run` estimates. On a CPU the parameters, masters and buffers that a GPU
would hold are part of it. glibc gives memory of more than 32 MiB back to the system when it is freed, and
keeps smaller pieces. The tensors of large models are above that limit; here it is lowered, to 128 KiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MIB = 2**20
BUCKET = 2**18  # elements: DeepSpeed's default would hide the model
CASES: dict[str, Mapping[str, Any]] = {
    "ZeRO 0": {},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "tensor parallel 2": {"tensor_parallel": {"autotp_size": 2}},
    "pipeline 2": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
}


def llama(layers: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    """A LLaMA; by default 61.6 M parameters, 235 MiB in fp32, the largest tensor 24 MiB."""
    return {
        "model_type": "llama", "max_position_embeddings": 64, "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": vocabulary,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def write_files(case: Mapping[str, Any], model: Mapping[str, Any], folder: Path, *, is_folder: bool) -> Path:
    """Write the files of a run; returns its configuration."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (folder / "model.json").write_text(json.dumps(model))
    zero = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": BUCKET}
    block = case.get("zero_optimization")
    source = {"checkpoint": "hf"} if is_folder else {"config": "model.json"}
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **case,
        **({} if block is None else {"zero_optimization": {**zero, **block}}),
        "megalowbit": {
            "model": source,
            "data": {"corpus": "text.txt", "sequence_length": 32, "tokenizer": "byte"},
            "run": {"steps": 1},
            "recipe": "nvfp4",
            "precision": "bf16",
        },
    }
    (folder / "config.json").write_text(json.dumps(raw))
    tiny = {**raw["megalowbit"], "model": {"config": "tiny_model.json"}}
    (folder / "tiny_model.json").write_text(json.dumps(llama(2, 96, 512)))
    (folder / "tiny.json").write_text(json.dumps({**raw, "megalowbit": tiny}))
    if is_folder:
        from megalowbit.hf.folders.config_file import config_from_dict
        from megalowbit.hf.model import random_model

        random_model(config_from_dict(dict(model), {}, ""), seed=0).save_pretrained(
            folder / "hf", max_shard_size="100MB"
        )
    return folder / "config.json"


def measure(config_file: Path, folder: Path, out: Path) -> None:
    """One rank: assemble the job, and write the peak between the model's begin and the engine's end."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from megalowbit.distributed import process_group
    from megalowbit.engine.process_start import import_deepspeed, start_process_group, stop_process_group
    from megalowbit.pretrain import job
    from megalowbit.pretrain.config import load_config
    from megalowbit.pretrain.run_folder.folder import RunFolder

    import_deepspeed()
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401

    identity = process_group.identify()
    start_process_group(identity)
    torch.set_num_threads(1)
    facts: dict[str, int] = {}

    def before(work: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*arguments: Any, **named: Any) -> Any:
            ctypes.CDLL(None).malloc_trim(0)
            facts["base"] = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            return work(*arguments, **named)

        return begun

    def after(work: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*arguments: Any, **named: Any) -> Any:
            result = work(*arguments, **named)
            facts.update(peak=memory("VmHWM"), end=memory("VmRSS"))
            return result

        return ended

    job._prepared_model = before(job._prepared_model)
    job.initialize = after(job.initialize)  # type: ignore[attr-defined]
    (folder / "run").mkdir(exist_ok=True)
    # first a tiny model: libraries are imported, and kernels compiled, before anything is measured
    for file in (config_file.with_name("tiny.json"), config_file):
        config = load_config(file, [], world_size=identity.world_size)
        job.assemble(config, identity, RunFolder(folder / "run"))
        gc.collect()
    facts["estimate"], facts["reading"] = estimated(config)
    out.write_text(json.dumps(facts))
    stop_process_group()


def estimated(config: Any) -> tuple[int, int]:
    """What a dry run says of each rank, and of rank 0 in addition; zeros: this version says nothing."""
    from megalowbit.layers.recipe import recipe
    from megalowbit.pretrain.estimate.dry_run import estimate_run

    try:
        from megalowbit.pretrain.estimate.start_memory import estimate_start
    except ImportError:
        return 0, 0
    found = estimate_start(config, estimate_run(config, recipe(config.recipe)))
    return found.of_rank_on_cpu, found.reading


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_case(
    case: Mapping[str, Any], model: Mapping[str, Any], ranks: int, *, is_folder: bool
) -> list[dict[str, int]]:
    """The facts of every rank."""
    with tempfile.TemporaryDirectory(prefix="start-memory-") as name, socket.socket() as probe:
        folder = Path(name)
        config = write_files(case, model, folder, is_folder=is_folder)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        common = {
            **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "MEGALOWBIT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            "MALLOC_MMAP_THRESHOLD_": str(2**17),
        }  # fmt: skip
        outs = [folder / f"rank{rank}.json" for rank in range(ranks)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--measure", str(config), str(folder), str(out)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank, out in enumerate(outs)
        ]
        codes = [each.wait() for each in started]
        if any(codes):
            raise SystemExit(f"error: ranks ended with exit codes {codes}")
        return [json.loads(out.read_text()) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, help="by default all")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--from-folder", action="store_true", help="weights are read, not random")
    parser.add_argument("--json", type=Path, help="write the figures, in bytes")
    parser.add_argument("--measure", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    model = llama(options.layers, options.hidden, options.vocabulary)
    found = {}
    print(
        f"{options.ranks} ranks; MiB of each rank beyond its base: peak of rank 0 and the others, at the end"
    )
    for name in options.case or CASES:
        ranks = run_case(CASES[name], model, options.ranks, is_folder=options.from_folder)
        peaks = [(each["peak"] - each["base"]) / MIB for each in ranks]
        ends = [(each["end"] - each["base"]) / MIB for each in ranks]
        others = f"{min(peaks[1:]):.0f}–{max(peaks[1:]):.0f}" if len(peaks) > 1 else "–"
        estimates = [ranks[0]["estimate"] + reading for reading in (ranks[0]["reading"], 0)]
        said = "  estimates {:.0f}, {:.0f}".format(*(each / MIB for each in estimates)) * (estimates[1] > 0)
        print(f"{name:<20} {peaks[0]:6.0f} {others:>10} {max(ends):6.0f}{said}", flush=True)
        found[name] = ranks
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
