"""The benchmarks run, on sizes that take no time, and print the ratios they promise."""

import importlib.util
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_script
from quick_cases import slow_except

ROOT = Path(__file__).parent.parent


def run(script, *arguments):
    done = run_script(ROOT / "benchmarks" / script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_linear_compares_every_recipe_with_a_bf16_layer():
    block = '{"base": "nvfp4", "layout": "per_gemm", "hadamard": true}'
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--recipe", "mxfp4", "--recipe", block)
    for name in ("BitLinear mxfp4", "BitLinear nvfp4 with own layout, hadamard"):
        time, memory = (line for line in printed.splitlines() if line.strip().startswith(name))
        assert "× nn.Linear bf16" in time
        assert float(memory.split()[-2]) < 0.3


@pytest.mark.slow
def test_linear_sums_gradients_in_fp32():
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--main-grad")
    assert "BitLinear nvfp4" in printed


@pytest.mark.slow
def test_linear_has_a_peer_for_recipes_that_split_the_output_gradient_and_counts_on_request():
    block = '{"base": "nvfp4", "name": "split", "split_grad_output": {"rank": 4}}'
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--recipe", block, "--counts")
    for name in ("BitLinear split", "BitLinear split, counted", "split in eager PyTorch, fp32"):
        assert any(line.strip().startswith(name) and "×" in line for line in printed.splitlines()), name


@pytest.mark.slow
def test_quantize_compares_with_a_copy_and_with_plain_torch():
    printed = run("quantize.py", "--rounds", "2", "--size", "64")
    for name in ("clone", "nvfp4e2m1b", "mxfp4e2m1bnosr", "int8 to bf16", "plain torch, int8", "int8b"):
        assert any(line.strip().startswith(name) and "GB/s" in line for line in printed.splitlines()), name


@pytest.mark.slow
def test_speculation_compares_checks_with_a_layer_without_a_controller():
    printed = run("speculation.py", "--rounds", "2", "--shape", "64x32x48", "--verify-size", "8")
    for name in ("no controller", "between checks", "check", "verified check"):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert len(lines) == 1, name
        assert "× no controller" in lines[0]
    assert "a check every 10 steps, one of 3 verified" in printed
    chain = run("speculation.py", "--rounds", "1", "--shape", "64x32x48", "--layers", "3", "--cpu-time")
    assert "64 tokens × 32→48, bf16, 3 layers\n" in chain


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to take a revision from")
def test_grad_buffer_compares_with_another_revision():
    printed = run("grad_buffer.py", "--rounds", "2", "--width", "8", "--against", "HEAD")
    for kind in ("list", "model", "hooks"):
        table = printed.split(f"\n{kind}\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in table] == ["HEAD", "here", "ratio"]


@pytest.mark.slow
def test_causality_prints_what_logits_depend_on(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=2, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    block = '{"base": "nvfp4", "name": "mean", "split_input": {"method": "mean"}}'
    printed = run("causality.py", "--checkpoint", tmp_path, "--recipe", "mxfp4", "--recipe", block)
    rows = [line.rsplit(maxsplit=6) for line in printed.splitlines()[2:]]
    found = {name.strip(): [float(number) for number in numbers] for name, *numbers in rows}
    assert found["bf16"][:2] == found["mxfp4"][:2] == [0, 0]
    assert found["mxfp4"][4] > 0.1
    assert found["mean"][1] > 0.1
    assert found["mean, static"][:3] == [0, 0, 0]
    assert found["mean, static"][4] > 0.1
    assert all(5 < numbers[5] < 6 for numbers in found.values())  # the loss of a model that was not trained


@pytest.mark.slow
def test_low_rank_compares_every_method_with_torchs():
    printed = run("low_rank.py", "--rounds", "2", "--shape", "96x64", "--rank", "4")
    for name in ("qb, warm", "full split, qb", "power, warm, one step", "random", "sampled, 2 %"):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert lines, name
        assert all("× torch.svd_lowrank fp32" in line for line in lines), name


@pytest.mark.slow  # DeepSpeed compiles its optimizer
def test_optimizer_compares_steps_with_torchs_deepspeeds_and_loops(tmp_path):
    sizes = ("--layers", "1", "--hidden", "32", "--vocabulary", "96", "--threads", "1", "--rounds", "2")
    printed = run("optimizer.py", *sizes, "--json", str(tmp_path / "times.json"))
    times = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert set(times) == {"fp16 and fp32", "bf16"}
    for name in (name for table in times.values() for name in table):
        lines = [line for line in printed.splitlines() if line.strip().startswith(f"{name}  ")]
        assert lines, name
        assert "× AdamW fused, fp32, alone" in lines[0], name
    assert printed.count("faster than loops over tensors") == 2
    assert all(len(values) == 2 for table in times.values() for values in table.values())


@pytest.mark.slow
def test_optimizer_passes_are_compared_with_torchs():
    sizes = ("--layers", "1", "--hidden", "32", "--vocabulary", "96", "--threads", "1", "--rounds", "2")
    printed = run("optimizer.py", "--passes", *sizes)
    for name in (
        "accumulate",
        "torch dot, fp32",
        "sums_of_squares, float64",
        "one pass",
        "one pass, gradients kept",
    ):
        assert any(
            line.strip().startswith(f"{name}  ") and "× torch" in line for line in printed.splitlines()
        ), name


@pytest.mark.slow
def test_loss_scales_counts_overflows_and_octaves_of_every_strategy():
    results = json.loads(run("loss_scales.py", "--steps", "500", "--json"))
    constant, megatron = results["constant 2^16"], results["megatron"]
    assert constant["steady"] == [0, 6.0]  # 2^16 where 2^22 would do
    draw = random.Random(0)
    spikes = [2**-6 * 2 ** draw.gauss(0, 0.5) * (100 if draw.random() < 0.01 else 1) for _ in range(500)]
    assert constant["spikes"][0] == sum(spike * 2**16 >= 65520 for spike in spikes) > 3
    assert megatron["spikes"][0] <= constant["spikes"][0]
    for strategy in ("max_value", "controller"):
        assert results[strategy]["decay"][1] < megatron["decay"][1]


COUNTED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, "benchmarks")
from collective_counter import CollectiveCounter, summed
counter = CollectiveCounter()
counter.install()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.zeros(8, dtype=torch.float64))
dist.all_gather_object([None], "x" * 100)
rows = {key[1:]: value for key, value in summed(counter.seen).items()}
assert rows[("allreduce", "float64")] == [1, 64]
calls, size = rows[("allgather", "uint8")]  # an object is two: its size, and what it is pickled to
assert calls == 1 and 100 < size < 200
assert rows[("allgather", "int64")] == [1, 8]
assert {each.phase for each in counter.seen} == {"start"}
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_collectives_are_counted_with_their_bytes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path / "store")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_collectives_compares_ours_with_plain_deepspeeds():
    printed = run("collectives.py", "--case", "ZeRO 1", "--rows").splitlines()
    ours, plain = (
        next(line for line in printed if f"ZeRO 1  {' ' * 12}{mode}" in line) for mode in ("ours", "plain")
    )
    assert float(ours.split()[-4]) == 3
    assert float(plain.split()[-4]) == 2
    facts = f"1.00 × {64 + 2 * 16} B"  # of the step, and of each of two ranks
    assert sum("telemetry/step_facts.py" in line and line.endswith(facts) for line in printed) == 1


@pytest.mark.slow
def test_restart_times_a_start_and_a_resume():
    printed = run("restart.py", "--rounds", "1")
    for name in ("imports", "engine", "verification", "load", "save"):
        assert any(line.startswith(f"{name} ") for line in printed.splitlines()), name


@pytest.mark.slow
def test_watchdog_prints_the_costs_of_a_mark_a_heartbeat_and_a_failure():
    printed = run("watchdog.py", "--rounds", "1", "--ranks", "300")
    for name in ("mark", "heartbeat", "all heartbeats"):
        assert any(line.startswith(f"  {name} ") and "×" in line for line in printed.splitlines()), name
    assert "300 ranks" in printed
    assert re.search(r"^a heartbeat: 1\d\d bytes$", printed, flags=re.MULTILINE)


MISTAKES = [("--recipe", "nvfp5"), ("--shape", "512,256"), ("--rounds", "0"), ("--device", "tpu")]


@pytest.mark.parametrize(("option", "value"), slow_except(MISTAKES[:1], MISTAKES))
def test_a_wrong_argument_is_one_line_of_usage_not_a_traceback(option, value):
    done = run_script(ROOT / "benchmarks" / "linear.py", option, value)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert value in done.stderr


@pytest.mark.slow
def test_launch_overhead_compares_with_tritons_launcher_and_counts_launches():
    pytest.importorskip("triton", reason="Triton is not installed")
    printed = run("launch_overhead.py", "--rounds", "3", "--threads", "1", "--recipe", "nvfp4")
    row = next(line.split() for line in printed.splitlines() if line.startswith("nvfp4"))
    assert printed.index("only the recipe `nvfp4` has one") < printed.index("\nnvfp4 ")
    ratio = 0.5 if row[6] in ("-", "noisy") else float(row[6])  # the machine may be busy
    plain, former, plans, floor, bare, over_floor, *counts = map(float, row[1:6] + row[7:])
    assert 0 < plain < plans < former
    assert 0 < bare < plans
    assert 0 < floor < plans
    assert 0 < ratio < 1 < over_floor
    launches, operations, bytecodes, of_floor = counts
    assert (launches, operations > launches) == (8, True)
    assert launches < of_floor < bytecodes


def test_mistakes_of_layer_kernels_are_told_before_torch_is_imported():
    code = (
        "import runpy, sys; sys.path.insert(0, 'benchmarks'); sys.argv = ['x', '--shape', '8x8']\n"
        "try:\n    runpy.run_path('benchmarks/layer_kernels.py', run_name='__main__')\n"
        "except SystemExit as error:\n    print(error.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2 False\n"
    assert "'8x8' is not tokens x in x out" in done.stderr


def test_ctrl_c_ends_the_compilation_of_kernels_in_one_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import compile_kernels

    def interrupt(_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_kernels, "compile_all", interrupt)
    assert compile_kernels.main([]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_the_ratio_of_host_times_is_made_in_each_round_and_left_out_if_it_varies():
    pytest.importorskip("triton", reason="Triton is not installed")
    from benchmarks import launch_overhead

    def found(factors):
        """Rounds in which the machine was slower by a factor; the layer adds 4 where it added 5."""
        times = {"plain": 1, "former": 6, "planned": 5}
        of = {name: [value * factor for factor in factors] for name, value in times.items()}
        return launch_overhead.Overhead(1, 6, 5, 8, 41, 9, None, launch_overhead.ratios_of(of))

    assert found([1, 10, 3, 2]).ratio == pytest.approx(0.8)
    assert f"{'0.80':>10}" in launch_overhead.row(found([1, 10, 3, 2]))
    noisy = found([1, 1])._replace(ratios=[0.1, 0.6, 0.9, 2.0, math.inf])
    assert f"{'noisy':>10}" in launch_overhead.row(noisy)
    assert not found([1, 1])._replace(ratios=[0.1, 0.75, 0.8, 0.9, math.inf]).is_noisy
    assert found([1, 1])._replace(ratios=[math.inf] * 4).is_noisy
    assert launch_overhead.ratios_of({"plain": [2], "former": [2], "planned": [3]}) == [math.inf]


@pytest.mark.slow
def test_the_floor_of_host_time_launches_computes_and_saves_what_the_layer_does():
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
from collections import Counter
from unittest.mock import patch
import torch, megalowbit as mlb
from torch.autograd.graph import saved_tensors_hooks
from benchmarks import launch_floor, launch_overhead as overhead
from megalowbit.layers.matmul import gemms

with overhead.on("cpu") as driver, overhead.unchecked_rounding():
    patch.object(gemms, "cpu_gemm", lambda: "bf16").start()
    layer = mlb.BitLinear(*overhead.SIZES[1:], dtype=torch.bfloat16)
    step = overhead.step_of(layer)
    step(), step()
    kept = launch_floor.layer_launches(step)
    steps = [step, *(overhead.step_of(layer, launch_floor.applied(layer, each)) for each in kept)]
    found = []
    for each in steps:
        saved = []
        note = lambda tensor: saved.append((str(tensor.dtype), tuple(tensor.shape))) or tensor
        with driver.recording() as launches, saved_tensors_hooks(note, lambda tensor: tensor):
            each()
        free = {"detach", "view", "t", "promote_types"}  # views, and a question about dtypes
        operations = Counter(name for name in overhead.operations_of(each) if name not in free)
        found.append((Counter(map(str, [one[:6] for one in launches])), operations, Counter(saved)))
    assert found[0] == found[1] == found[2], found
    assert [sum(each.values()) for each in (found[0][0], found[0][2])] == [8, 6], found[0]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_data_compares_with_the_tokenizer_alone_and_a_plain_read():
    printed = run("data.py", "--megabytes", "1", "--rounds", "1", "--steps", "3")
    lines = {line.strip()[:30].strip(): line.strip()[30:].split() for line in printed.splitlines()}
    assert float(lines["ratio"][0]) > 0.2
    rates = [
        float(lines[name][0]) for name in ("plain read, order known", "one corpus", "blend, choices recur")
    ]
    assert rates[0] > rates[1] > 0 < rates[2]
    memory = {name: float(lines[f"{name}, ours"][2]) for name in ("1 MB", "100 MB", "10 GB")}  # MiB more
    assert 0 < memory["10 GB"] < 1.2 * memory["100 MB"] + 4
    assert memory["100 MB"] < 1.2 * memory["1 MB"] + 4
    milliseconds = {name: float(lines[f"{name}, ours"][0]) for name in ("1 GB", "10 GB")}
    assert milliseconds["10 GB"] < 2 * milliseconds["1 GB"]
    assert float(lines["later start"][0]) < float(lines["first start"][0]) / 3
    assert float(lines["loader"][2].removesuffix("%")) < 1
    if importlib.util.find_spec("torchdata"):
        assert float(lines["torchdata, whole batches"][0]) > 0
    else:
        assert "pip install --no-deps --target FOLDER 'torchdata" in printed
