"""Runs whose weights are split into parameters on the way: resumed, exported, started from."""

import json
import shutil

import pytest
import torch
import transformers
from quick_cases import slow_except
from safetensors.torch import load_file

from megalowbit.commands.models import convert
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.components.parameter_split import ParameterSplitting
from megalowbit.pretrain.estimate.dry_run import describe
from megalowbit.pretrain.estimate.memory import estimate_memory
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.run import pretrain

STEPS, RANK = 7, 4
SPLIT = {"rank": RANK, "warmup_steps": 3, "merge_steps": 2, "merged_lr": 1e-3}
RECIPE = f"megalowbit.recipe={json.dumps({'base': 'nvfp4', 'parameter_split': SPLIT})}"
SETTINGS = (
    RECIPE,
    f"megalowbit.run.steps={STEPS}",
    "megalowbit.checkpoint.every=1",
    "megalowbit.checkpoint.keep=null",
)
WEIGHT = "transformer.h.1.mlp.c_fc"  # a Conv1D of transformers, (in, out)


def run(config, folder, *, is_resume=False):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=is_resume)


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step-{step:08d}" / "mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def whole(module, name):
    """(in, out) in fp32, from the parts of a checkpoint."""
    w, u, s, v = (module[f"{name}.{part}"].double() for part in ("weight", *SPLIT_NAMES))
    return (w + u @ torch.diag(s) @ v).float().to(module[f"{name}.weight"].dtype).t()


@pytest.fixture(scope="module")
def split_run(tmp_path_factory):
    return tmp_path_factory.mktemp("split")


@pytest.fixture
def finished(resolve, split_run, capsys):
    """A run of seven steps that splits before the fourth and the sixth, and its output; trained once."""
    folder, output = split_run / "run", split_run / "output.txt"
    if not output.exists():
        run(resolve(*SETTINGS), folder)
        output.write_text(capsys.readouterr().out)
    return folder, output.read_text()


@pytest.fixture
def converter():
    """The command `megalowbit convert`, as a module."""
    yield convert
    transformers.utils.logging.enable_progress_bar()


def assert_same(found, expected):
    """Nested states with equal bits."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_splits_happen_when_due_and_are_logged_and_recorded(finished):
    folder, output = finished
    lines = [line for line in output.splitlines() if "weights split" in line]
    assert lines == [
        "before step 4: 8 weights split at rank 4; optimizer state projected; learning rate times 0.3333",
        "before step 6: 8 weights split at rank 4; optimizer state projected",
    ]
    assert [row["step"] for row in rows(folder) if row["weights_split"] == 8] == [4, 6]
    assert [row["weights_split"] for row in rows(folder)] == [0, 0, 0, 8, 0, 8, 0]
    for step, is_split in ((3, False), (4, True)):
        module = checkpoint(folder, step)["module"]
        assert all(
            bool(value.any()) is is_split
            for name, value in module.items()
            if name.rpartition(".")[2] in SPLIT_NAMES
        )


@pytest.mark.parametrize("saved", slow_except([3, 4], [2, 3, 4, 5]))
def test_a_run_resumed_before_at_or_after_a_split_equals_an_uninterrupted_one_bitwise(
    finished, resolve, tmp_path, saved
):
    folder, _ = finished
    other = tmp_path / "resumed"
    shutil.copytree(folder, other)
    for step in range(saved + 1, STEPS + 1):
        shutil.rmtree(other / "checkpoints" / f"step-{step:08d}")
    run(resolve(*SETTINGS), other, is_resume=True)
    for name in ("module", "optimizer"):
        assert_same(checkpoint(other, STEPS)[name], checkpoint(folder, STEPS)[name])
    for key in ("loss", "lr", "grad_norm", "weights_split"):
        assert [row[key] for row in rows(other)] == [row[key] for row in rows(folder)]


@pytest.mark.slow
def test_output_gradients_stay_warm_after_the_first_split(resolve, tmp_path, caplog):
    block = {"base": "nvfp4", "split_grad_output": {"rank": 2}, "parameter_split": SPLIT}
    settings = (f"megalowbit.recipe={json.dumps(block)}", *SETTINGS[1:])
    run(resolve(*settings), tmp_path / "run")
    whole_run = json.loads((tmp_path / "run" / "summary.json").read_text())["splits"]
    uses = 8 * 2 * STEPS  # layers, micro-batches of a step
    assert {name: count for name, count in whole_run.items() if count} == {
        "cold": 8,
        "warm": uses - 8,
    }
    assert "did not fit" not in caplog.text
    for saved in (3, 5):  # between the split of weights and the last checkpoint before it, and later
        for step in range(saved + 1, STEPS + 1):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        run(resolve(*settings), tmp_path / "run", is_resume=True)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["splits"] == whole_run
    assert "did not fit" not in caplog.text


def test_the_export_holds_plain_merged_weights(finished):
    folder, _ = finished
    exported, module = load_file(folder / "hf" / "model.safetensors"), checkpoint(folder, STEPS)["module"]
    assert not [name for name in exported if "split" in name]
    assert torch.equal(exported[f"{WEIGHT}.weight"], whole(module, WEIGHT))
    assert torch.equal(exported[f"{WEIGHT}.bias"], module[f"{WEIGHT}.bias"])


@pytest.mark.parametrize("step", [2, 6])
def test_a_new_run_starts_from_the_merged_weights_of_a_checkpoint(finished, step):
    folder, _ = finished
    source = folder / "checkpoints" / f"step-{step:08d}"
    model = build_model(ModelSettings(checkpoint=source), seed=0)
    module = checkpoint(folder, step)["module"]
    found = model.get_submodule(WEIGHT)
    assert not bit_layers(model)
    assert found.weight.dtype == torch.float32
    w, u, s, v = (module[f"{WEIGHT}.{part}"].double() for part in ("weight", *SPLIT_NAMES))
    assert bool(u.any()) is (step == 6)
    merged = (w + u @ torch.diag(s) @ v).t()
    # the fp32 masters of the parts, which the checkpoint's own weights are rounded from
    torch.testing.assert_close(found.weight.double(), merged, rtol=2**-8, atol=6e-4)
    assert not torch.equal(found.weight.double(), merged)


@pytest.mark.parametrize("step", [2, 6])
def test_the_converter_takes_checkpoints_of_before_and_after_a_split(finished, converter, tmp_path, step):
    folder, _ = finished
    source = folder / "checkpoints" / f"step-{step:08d}"
    assert converter.main(["to-hf", str(source), str(tmp_path / "out")]) == 0
    exported, module = load_file(tmp_path / "out" / "model.safetensors"), checkpoint(folder, step)["module"]
    assert not [name for name in exported if "split" in name]
    assert exported[f"{WEIGHT}.weight"].dtype == torch.bfloat16
    # merged from fp32 masters, and then rounded once
    torch.testing.assert_close(exported[f"{WEIGHT}.weight"], whole(module, WEIGHT), rtol=2**-7, atol=6e-4)


def test_before_its_first_split_a_run_equals_an_unsplit_one_bitwise(resolve, tmp_path):
    # Without clipping: the norm adds up in pieces of the gradient buffer, which has zeros in between.
    settings = ("gradient_clipping=0", "megalowbit.run.steps=4", "megalowbit.checkpoint.every=3")
    plain, folder = tmp_path / "plain", tmp_path / "able"
    run(resolve(*settings, "megalowbit.recipe=nvfp4"), plain)
    run(resolve(*settings, RECIPE), folder)
    for key in ("loss", "lr"):
        assert [row[key] for row in rows(plain)[:3]] == [row[key] for row in rows(folder)[:3]]
    norms = [[row["grad_norm"] for row in rows(each)[:3]] for each in (plain, folder)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert "weights_split" not in rows(plain)[0]
    module = checkpoint(folder, 3)["module"]
    for name, value in checkpoint(plain, 3)["module"].items():
        assert torch.equal(value, module[name])


def test_layers_that_no_longer_quantise_are_not_split(build_job):
    job = build_job(RECIPE)
    splitting = job.find(ParameterSplitting)
    for _ in range(3):
        assert splitting.before_step(job.step) is None
        train_step(job)
    for layer in bit_layers(job.engine.module).values():
        layer.recipe = recipe("bf16")
    assert splitting.before_step(job.step) is None
    layer.recipe = job.recipe
    assert splitting.before_step(job.step) == "before step 4: 1 weight split at rank 4; optimizer state " + (
        "projected; learning rate times 0.3333"
    )


@pytest.mark.slow
def test_memory_and_dry_run_count_the_factors(resolve):
    config = resolve(RECIPE)
    sizes = {"precision": "bf16", "optimizer_type": "AdamW", "has_momentum": False}
    sizes |= {"micro_batch_size": 2, "sequence_length": 32}
    split, plain = (
        estimate_memory(config.settings.model, recipe(value), **sizes) for value in (config.recipe, "nvfp4")
    )
    # per block: 32 → 96, 32 → 32, 32 → 128, 128 → 32
    factors = 2 * RANK * sum(n + 1 for n in (32 + 96, 32 + 32, 32 + 128, 128 + 32))
    assert split.parameters - plain.parameters == 2 * factors
    assert split.optimizer_moments - plain.optimizer_moments == 8 * factors
    assert split.saved_for_backward == plain.saved_for_backward  # of the factors, parameters alone
    swapped = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + factors
    assert f"of which {swapped:,} (" in describe(config)
