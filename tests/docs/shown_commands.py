"""What the tests do with each command that a page shows: run it in a small version, or a reason why not.

`SMALL` has those that are run here. `ELSEWHERE` names the test that runs the same program, and `NOT_HERE`
has the rest, with a reason. test_commands.py fails for a command that is in none of them, and for a line that
stands for no command.
"""

import re

from page_blocks import Command

# made by the fixture `world` of test_commands.py: folders of runs and models that commands begin with
GPT2_RUN, LLAMA_RUN, LLAMA_MODEL = "gpt2", "llama", "llama/hf"
WORLD = {
    "runs/first": GPT2_RUN,
    "runs/gpt2": GPT2_RUN,
    "runs/gpt2_tiny_fp4": GPT2_RUN,
    "runs/validated": GPT2_RUN,
    "runs/blend": GPT2_RUN,
    "runs/bf16": GPT2_RUN,
    "runs/nvfp4": GPT2_RUN,
    "runs/nvfp4-seed-2": GPT2_RUN,
    "runs/llama": LLAMA_RUN,
    "runs/llama_tiny_fp4": LLAMA_RUN,
    "llama": LLAMA_MODEL,
    "path/to/hf_model": "gpt2/hf",
    "gpt2-folder": "gpt2/hf",
}

# Training of a small model: a few steps instead of hundreds, on a text of 60 kB.
FEW_STEPS = ("run.steps=3", "checkpoint.every=3", "lr_schedule.warmup_steps=1", "data.corpus=corpus.jsonl")
SMALL = (
    r"^megalowbit (--help|recipes|init) ?",
    r"^megalowbit doctor --ds-config llama3",
    r"^megalowbit (report|diagnose) runs/",
    r"^megalowbit generate",
    r"^megalowbit evaluate runs/",
    r"^megalowbit convert to-hf runs/",
    r"^megalowbit convert to-megalowbit path/",
    r"^megalowbit quantize",
    r"^megalowbit pretrain --ds-config (gpt2_tiny_fp4|runs/start-|metis_seed_gpt2)",
    r"^(python|megalowbit) (launch/slurm/submit.py|submit) .*--dry-run",
    r"^python launch/pretrain.py --ds-config configs/(gpt2|llama)_tiny_(?!quality)(?!.*--dry-run)",
    r"^python launch/pretrain.py .*--dry-run",
    r"^python tools/goodput.py",
    r"^python tools/study.py .*--list",
)

ELSEWHERE = {
    r"^make (install|pretrain|test|docs|dist)": (
        "tests/launch/test_makefile.py",
        "the targets; the suite is their product",
    ),
    r"^(\.venv/bin/)?python tools/write_reference.py": ("tests/config/test_reference_page.py", ""),
    r"^\.venv/bin/python tests/run_long.py": ("tests/test_run_long.py", ""),
    r"^\.venv/bin/python tests/launch/config_fuzz.py": ("tests/launch/test_config_fuzz.py", ""),
    r"^\.venv/bin/python tests/launch/golden_runs.py": ("tests/launch/test_golden_runs.py", ""),
    r"^python tests/launch/kill_soak.py": ("tests/launch/test_kill_soak.py", "hours; with fewer kills there"),
    r"^python benchmarks/(?!quality)": ("tests/test_benchmarks.py", "at small sizes"),
    r"^python tools/compile_kernels.py": ("tests/benchmarks/test_compiling.py", ""),
    r"^python tools/first_gpu_hour.py": ("tests/benchmarks/test_first_hour.py", "without a GPU"),
    r"^python tools/study.py (?!.*--list)": (
        "tests/commands/studies/test_study.py",
        "hours; a small study there",
    ),
    r"^python tools/calibrate_speculation.py": ("tests/commands/studies/test_calibrate.py", ""),
    r"^megalowbit plan-layers": ("tests/commands/studies/test_plan_layers.py", ""),
    r"^python tools/speculation_report.py": ("tests/speculation/test_report_tool.py", ""),
    r"^python tools/preprocess_data.py": (
        "tests/data/token_files/test_megatron.py",
        "with megatron-core as reader",
    ),
    r"^(deepspeed|torchrun) .*(--num_accelerators|--nproc-per-node) 2 launch/pretrain": (
        "tests/launch/test_launchers.py",
        "two ranks under each launcher; here the arguments are checked",
    ),
    r"^python launch/slurm/submit.py (?!.*--dry-run)": ("tests/slurm/test_jobs.py", "on a SLURM of its own"),
    r"^megalowbit submit (?!.*--dry-run)": ("tests/slurm/test_jobs.py", "on a SLURM of its own"),
    r"^megalowbit convert to-megalowbit (deepspeed_run|ds_run|megatron_run)": (
        "tests/hf/importers",
        "with such checkpoints",
    ),
    r"^megalowbit convert to-hf start/": ("tests/commands/models/test_convert.py", ""),
    r"^(pip install lm_eval|lm_eval)": (
        "tests/launch/test_lm_eval.py",
        "another task, with the same options",
    ),
    r"^megalowbit doctor (?!.*llama3)": (
        "tests/commands/runs/test_doctor.py",
        "it measures disk and network",
    ),
    r"^srun megalowbit doctor": ("tests/distributed/test_doctor.py", "on two ranks without SLURM"),
    r"^eval .*completion": ("tests/commands/test_table.py", "in bash and zsh"),
    r"^pip install \.": ("tests/commands/test_wheel.py", "builds and installs a wheel"),
}

NOT_HERE = {
    r"--nnodes=2|--hostfile=": "two nodes",
    r"^(torchrun|deepspeed) .*(--nproc-per-node|--num_gpus) 8": "eight GPUs",
    r"^python launch/pretrain.py .*--prepare-data": "a data set from a hub",
    r"^python launch/pretrain.py --ds-config configs/gpt2_tiny_quality": "half an hour of training",
    r"^python launch/pretrain.py …": "the reader's own configuration; the overrides are checked",
    r"^--set ": "overrides to add to a command; they are checked",
    r"^megalowbit evaluate gpt2-folder/ --ds-config my.json": "the reader's own configuration",
    r"^\.venv/bin/python -m pytest": "the suite itself",
    r"^python benchmarks/quality.py": "historical: commit 150a7cd",
    r"^python -m deepspeed.utils.zero_to_fp32": "DeepSpeed's script, on a run at ZeRO stage 1 to 3",
    r"^(docker|apptainer) build": "needs a container engine",
    r"^grep -hE": "reads the log of a job on SLURM",
    r"^mkdir -p docs/results": "copies a result into the repository",
    r"^\. \.venv/bin/activate": "the tests run in this environment",
    r"^pip install ('megalowbit\[wandb\]'|matplotlib|'megalowbit)": "from PyPI; the extras are checked",
}


def ways(command: Command) -> list[str]:
    """The patterns of all three tables that the command has; one of them for each command."""
    patterns = (*SMALL, *ELSEWHERE, *NOT_HERE)
    return [pattern for pattern in patterns if re.search(pattern, command.text)]


def is_small(command: Command) -> bool:
    """Whether the command is run here."""
    return any(re.search(pattern, command.text) for pattern in SMALL)
