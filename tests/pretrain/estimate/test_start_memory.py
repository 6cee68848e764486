"""The estimate of a run's start: closed forms at large sizes, real processes at small ones."""

import json

import pytest
from forks import run_script

from launchers import ROOT, write_config
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import describe, estimate_run
from megalowbit.pretrain.estimate.start_memory import estimate_start

MIB = 2**20
LLAMA_8B = ROOT / "configs" / "models" / "llama3_8b.json"
EMBEDDING = 128_256 * 4096 * 4  # bytes in fp32: the largest weight


def estimate(tmp_path, *overrides, processes=8, model=LLAMA_8B, **more):
    path = write_config(tmp_path, **more)
    settings = json.dumps({"config": str(model)})
    config = load_config(path, [f"megalowbit.model={settings}", *overrides], world_size=processes)
    return estimate_start(config, estimate_run(config, recipe(config.recipe))), config


def test_eight_ranks_of_eight_billion_parameters_need_one_tensor_on_their_host(tmp_path):
    found, config = estimate(tmp_path, zero_optimization={"stage": 3, "reduce_bucket_size": 1000})
    assert found.on_gpus == EMBEDDING  # 257 GB if each rank built the model
    count = 8_030_261_248
    # parameters in half precision, masters and gradients in fp32; the tensor that is broadcast, and a piece
    share = count / 8 * (2 + 4 + 4) + EMBEDDING * 9 / 8
    assert found.of_rank_on_cpu == pytest.approx(share, rel=1e-4)
    assert found.on_cpus == 8 * found.of_rank_on_cpu
    report = describe(config)
    assert "host memory at the start (estimate)\n  all processes, on GPUs        1.957 GiB" in report


def test_stored_and_padded_weights_are_further_copies_of_the_tensor_that_is_read(tmp_path):
    found, _ = estimate(tmp_path, "megalowbit.model.pad_vocab_to_multiple_of=1000", processes=1)
    padded = 129_000 * 4096 * 4
    assert (found.tensor, found.reading) == (padded, padded)
    assert found.on_gpus == 2 * padded


def test_offloaded_state_is_on_the_host_of_every_rank(tmp_path):
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found, _ = estimate(tmp_path, zero_optimization={"stage": 3, **offload})
    # parameters, gradients, masters and two moments
    assert found.offloaded == pytest.approx(8_030_261_248 / 8 * (2 + 4 * 4), rel=1e-4)
    assert found.on_gpus == EMBEDDING + 8 * found.offloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("ZeRO 0",), ("ZeRO 2",), ("ZeRO 3",), ("ZeRO 3", "--from-folder"), ("tensor parallel 2",)],
    ids=", ".join,
)
def test_real_ranks_need_what_is_estimated(tmp_path, arguments):
    script, out = ROOT / "benchmarks" / "start_memory.py", tmp_path / "figures.json"
    done = run_script(script, "--case", *arguments, "--ranks", 2, "--json", out, timeout=900)
    assert done.returncode == 0, done.stderr
    (ranks,) = json.loads(out.read_text()).values()
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        used, said = rank["peak"] - rank["base"], rank["estimate"] + rank["reading"] * (number == 0)
        # 10 MiB for modules, hooks and small tensors
        assert 0.85 * said < used < 1.02 * said + 10 * MIB, (number, used / MIB, said / MIB)
