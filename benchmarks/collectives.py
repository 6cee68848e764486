"""Collectives of our engine and of plain DeepSpeed: real ranks over gloo, every collective counted.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --case "ZeRO 1" --case speculation --rows

A tiny GPT-2 (LLaMA for tensor parallelism) trains a few steps in bf16, saves, and is resumed. Calls and bytes
are those of one rank. Large collectives, whose bytes grow with the model, are counted separately. No times
are printed: gloo on one machine says nothing about a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collective_counter import Collective, steps_of, summed

HERE = Path(__file__).parent
STEPS, VOCABULARY, SECONDS = 4, 256, 600
GPT2 = {"model_type": "gpt2", "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
LLAMA = {
    "model_type": "llama", "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
ONCE_A_STEP = "telemetry/step_facts.py"
SMALL = 4096  # bytes a call: collectives up to here do not grow with the model

Case = Mapping[str, Any]
CASES: dict[str, Case] = {
    **{f"ZeRO {stage}": {"deepspeed": {"zero_optimization": {"stage": stage}}} for stage in range(4)},
    "tensor parallel 2": {"deepspeed": {"tensor_parallel": {"autotp_size": 2}}, "model": LLAMA},
    "pipeline 2": {"deepspeed": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}},
    "speculation": {
        "block": {"recipe": "speculative-int8", "speculation": {"every": 2, "candidates": ["int8", "bf16"]}}
    },
    "fp16, max_value": {"block": {"precision": "fp16", "grad_scaler": {"type": "max_value"}}},
}


def configuration(case: Case, folder: Path) -> Path:
    """Write the files of a case; returns its configuration."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    names = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "model.json").write_text(json.dumps({**case.get("model", GPT2), **names}))
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **case.get("deepspeed", {}),
        "megalowbit": {
            "model": {"config": "model.json"},
            "data": {"corpus": "text.txt", "sequence_length": 32, "tokenizer": "byte"},
            "run": {"steps": STEPS},
            "recipe": "nvfp4",
            "precision": "bf16",
            "checkpoint": {"every": 2},
            "telemetry": {"layers_every": 2, "count_every": 1},
            **case.get("block", {}),
        },
    }
    (folder / "config.json").write_text(json.dumps(raw))
    plain = {key: value for key, value in raw.items() if key != "megalowbit"}
    plain["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    (folder / "plain.json").write_text(json.dumps({**plain, "bf16": {"enabled": True}}))
    return folder / "config.json"


def counted(mode: str, case: Case, processes: int) -> list[Collective]:
    """Run a case (ours twice, to resume) and return the collectives of rank 0."""
    with tempfile.TemporaryDirectory(prefix="collectives-") as name:
        folder = Path(name)
        config = configuration(case, folder)
        if mode == "plain":
            more = [str(folder / "plain.json"), str(folder / "model.json"), str(STEPS), str(folder / "saved")]
            return launched(mode, more, folder, processes)
        first = ["--ds-config", str(config), "--run-dir", str(folder / "run")]
        resume = ["--resume", "auto", "--set", f"megalowbit.run.steps={STEPS + 1}"]
        return launched(mode, first, folder, processes) + launched(mode, [*first, *resume], folder, processes)


def launched(mode: str, arguments: Sequence[str], folder: Path, processes: int) -> list[Collective]:
    """Start the ranks, wait for them, and return the collectives that rank 0 has counted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(processes):
        environ = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "collectives_rank.py"), mode, str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen([*command, *arguments], env=environ, stdout=log, stderr=subprocess.STDOUT)
            )
    end = time.monotonic() + SECONDS
    try:
        while not all(rank.poll() == 0 for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > end:
                raise SystemExit(f"a rank failed or timed out: {arguments}\n{logs(folder)}")
            time.sleep(0.1)
    finally:
        for each in ranks:
            each.kill()
    return [Collective(**each) for each in json.loads((folder / "0.json").read_text())]


def logs(folder: Path) -> str:
    """The end of each rank's output."""
    return "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))


def of_steps(seen: list[Collective], mode: str) -> tuple[list[Collective], int]:
    """The collectives of all steps but the first, which initialises; and how many steps these are."""
    if mode == "plain":
        whole = [each for each in seen if each.phase == "step"]
        return whole, STEPS
    steps = steps_of(seen, ONCE_A_STEP)[1:]
    return [each for step in steps for each in step], len(steps)


def totals(seen: Iterable[Collective], *, is_small: bool) -> tuple[int, int]:
    """Calls and bytes of the small collectives, or of the large ones."""
    chosen = [each for each in seen if (each.size <= SMALL) == is_small]
    return len(chosen), sum(each.size for each in chosen)


def print_steps(name: str, mode: str, seen: list[Collective], *, is_detailed: bool) -> None:
    """Print one line with the collectives of a step; `is_detailed` adds a line for each file."""
    collectives, count = of_steps(seen, mode)
    few, large = (totals(collectives, is_small=each) for each in (True, False))
    print(
        f"{name:20}{mode:8}{few[0] / count:10.1f}{few[1] / count:12,.0f}{large[0] / count:12.1f}"
        f"{large[1] / count:14,.0f}",
        flush=True,
    )
    rows = summed(collectives)
    for (issued_by, kind, dtype), (calls, size) in sorted(rows.items(), key=lambda row: -row[1][1]):
        if is_detailed:
            print(f"    {issued_by:44}{kind:22}{dtype:10}{calls / count:8.2f} × {size / calls:,.0f} B")


def print_phases(name: str, seen: list[Collective], *, is_detailed: bool) -> None:
    """Print calls and bytes of every phase but the steps."""
    for phase in ("start", "overflow table", "save", "load", "export"):
        chosen = [each for each in seen if each.phase == phase]
        print(f"{name:20}{phase:16}{len(chosen):8}{sum(each.size for each in chosen):14,}")
        for (issued_by, kind, dtype), (calls, size) in summed(chosen).items():
            if is_detailed:
                print(f"    {issued_by:44}{kind:22}{dtype:10}{calls:8} × {size / calls:,.0f} B")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="repeat the flag for several (default: all)"
    )
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4), help="ranks (default: 2)")
    parser.add_argument("--rows", action="store_true", help="also print the collectives of each file")
    options = parser.parse_args()
    print(f"a step of {options.processes} ranks: small collectives (up to {SMALL:,} B) and large ones")
    print(f"{'':28}{'calls':>10}{'bytes':>12}{'calls':>12}{'bytes':>14}")
    ours = {}
    for name in options.case or list(CASES):
        ours[name] = counted("ours", CASES[name], options.processes)
        print_steps(name, "ours", ours[name], is_detailed=options.rows)
        if name.startswith("ZeRO"):
            plain = counted("plain", CASES[name], options.processes)
            print_steps(name, "plain", plain, is_detailed=options.rows)
    print("\noutside steps: two starts, three saves and one load")
    for name, seen in ours.items():
        print_phases(name, seen, is_detailed=options.rows)


if __name__ == "__main__":
    main()
