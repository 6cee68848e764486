"""Conversions as a whole: memory, dry run, space, verification, and going on after an interruption."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quick_cases import every_value
from safetensors import safe_open
from tiny_models import KINDS, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import export_checkpoint, import_checkpoint, plan_export, plan_import
from megalowbit.hf.folders import conversion as module
from megalowbit.hf.folders.conversion import identity_of
from megalowbit.hf.folders.unfinished import JOURNAL, unfinished
from megalowbit.hf.model import load_weights
from megalowbit.hf.training_checkpoint import read_checkpoint

TESTS = Path(__file__).parents[2]
SHARD_SIZE = 20_000
OF_THE_FILE = {"_from_model_config", "transformers_version"}


@pytest.fixture
def source(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return found


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].equal(value), name


@every_value(kind=KINDS, dtype=[torch.float32, torch.bfloat16])
def test_there_and_back_gives_what_transformers_saves(tmp_path, kind, dtype):
    tiny_model(kind).to(dtype).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": [0, 3]})
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    model.save_pretrained(tmp_path / "saved", max_shard_size=SHARD_SIZE)
    plan_import(tmp_path / "hf", shard_size=SHARD_SIZE).run(tmp_path / "start", is_verified=True)
    plan_export(tmp_path / "start", shard_size=SHARD_SIZE).run(tmp_path / "back", is_verified=True)
    # which tensors are in which file may differ: transformers sorts those of a model that it has loaded
    names = {path.name for path in (tmp_path / "saved").iterdir() if path.suffix == ".json"}
    assert {path.name for path in (tmp_path / "back").iterdir() if path.suffix == ".json"} == names
    assert (tmp_path / "back" / "README.md").is_file()
    check_same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "saved"))
    config, expected = (
        json.loads((tmp_path / each / "config.json").read_text()) for each in ("back", "saved")
    )
    assert config == expected
    back, saved = (GenerationConfig.from_pretrained(tmp_path / each) for each in ("back", "saved"))
    assert back.to_diff_dict() == saved.to_diff_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_file", [True, False])
def test_an_import_describes_the_model_that_transformers_loads(tmp_path, kind, has_file):
    tiny_model(kind).half().save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "temperature": 0.5, "top_k": 7}))
    if not has_file:
        (tmp_path / "hf" / "generation_config.json").unlink()
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config
    model = load_weights(config, tmp_path / "hf", dtype="auto")
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    stored = read_checkpoint(tmp_path / "start")
    not_of_the_model = {"_name_or_path", "architectures", "temperature", "top_k"}
    found, expected = (
        {name: value for name, value in each.items() if name not in not_of_the_model}
        for each in (stored.hf_config, model.config.to_dict())
    )
    assert found == expected
    text = json.loads(model.generation_config.to_json_string(use_diff=True))
    stored_text = stored.generation["generation_config"]
    assert {k: v for k, v in stored_text.items() if k not in OF_THE_FILE} == {
        k: v for k, v in text.items() if k not in OF_THE_FILE
    }


@pytest.mark.slow
def test_memory_is_below_twice_the_largest_shard(tmp_path):
    """Peak of the resident memory, mapped files included, while 125 MB are converted in files of 16 MB."""
    done = subprocess.run(
        [sys.executable, TESTS / "hf" / "conversion_memory.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        # fixes the size from which malloc returns memory at once, which else adapts to such small tensors
        env={
            "PYTHONPATH": f"{TESTS.parent}:{TESTS / 'families'}:{TESTS / 'hf' / 'importers'}",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "OMP_NUM_THREADS": "1",
            "LAYERS": "4",
        },
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    imports = ["Megatron-LM", "ZeRO 2", "ZeRO 3"]
    names = ["import", "export", "export of ZeRO 2", "export of ZeRO 2 in bf16"]
    assert [row[0] for row in rows] == names + [f"import of {each}" for each in imports]
    for name, peak, bound, largest in rows:
        assert int(peak) < 2 * int(largest), name
        assert int(peak) < int(bound), name
    check_same(tensors_of(tmp_path / "measured" / "masters"), tensors_of(tmp_path / "measured" / "hf"))
    half = {name: value.bfloat16() for name, value in tensors_of(tmp_path / "measured" / "hf").items()}
    check_same(tensors_of(tmp_path / "measured" / "half"), half)
    expected = read_checkpoint(tmp_path / "measured" / "start").state_dict
    for name in imports:
        found = read_checkpoint(tmp_path / "measured" / name).state_dict
        assert found.keys() == expected.keys()
        assert all(found[each].equal(expected[each]) for each in expected), name


def test_a_dry_run_names_the_files_that_are_written(source, tmp_path):
    plan = plan_import(source, shard_size=SHARD_SIZE)
    text = plan.describe(tmp_path / "start")
    assert not (tmp_path / "start").exists()
    plan.run(tmp_path / "start")
    files = sorted((tmp_path / "start" / "step-00000000").glob("*.safetensors"))
    assert len(files) > 3
    for path in files:
        assert f"step-00000000/{path.name}: {path.stat().st_size:,} bytes" in text
    assert f"weights: {sum(path.stat().st_size for path in files):,} bytes; free: " in text
    assert text.count("float32") == len(files)
    memory = re.search(r"memory: at most ([\d,]+) bytes", text)[1]
    assert int(memory.replace(",", "")) >= max(spec.nbytes for spec in plan.tensors)


def test_too_little_space_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
    plan = plan_import(source)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=plan.nbytes - 1))
    with pytest.raises(
        UserError, match=f"start needs {plan.nbytes:,} bytes, and {plan.nbytes - 1:,} are free"
    ):
        plan.run(tmp_path / "start")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_verification_finds_a_bit_that_changed_on_the_disk(source, tmp_path, monkeypatch):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(module, "_drop_from_cache", flip)
    with pytest.raises(UserError, match=r"in weights\.safetensors is not that of"):
        plan_import(source).run(tmp_path / "start", is_verified=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


class Interrupted:
    """Reads as a conversion does, and is interrupted before tensor number `last`; notes what it has read."""

    def __init__(self, read, last):
        self.read, self.last, self.names = read, last, []

    def __call__(self, name):
        if len(self.names) == self.last:
            raise KeyboardInterrupt
        self.names.append(name)
        return self.read(name)


def run_until(plan, folder, last):
    """Run a conversion with an interruption; returns the names that it has read."""
    reading = Interrupted(plan.read, last)
    object.__setattr__(plan, "read", reading)
    if last is None:
        plan.run(folder)
    else:
        with pytest.raises(KeyboardInterrupt):
            plan.run(folder)
    return reading.names


def test_an_interrupted_conversion_continues_with_its_finished_files(source, tmp_path):
    start = tmp_path / "start"
    first = run_until(plan_import(source, shard_size=SHARD_SIZE), start, 9)
    assert not start.exists()
    (draft,) = unfinished(start)
    whole = sorted(path.name for path in (draft / "step-00000000").iterdir())[:-1]
    second = run_until(plan_import(source, shard_size=SHARD_SIZE), start, None)
    shards = plan_import(source, shard_size=SHARD_SIZE).shards
    kept = [each.name for shard in shards if shard.file in whole for each in shard.tensors]
    assert kept
    assert first[: len(kept)] == kept
    assert second == [each.name for shard in shards for each in shard.tensors][len(kept) :]
    assert not unfinished(start)
    import_checkpoint(source, tmp_path / "at-once")
    check_same(read_checkpoint(start).state_dict, read_checkpoint(tmp_path / "at-once").state_dict)
    assert not list(start.rglob(JOURNAL))


@pytest.mark.parametrize("change", ["source", "dtype", "file", "journal"])
def test_files_that_may_be_of_something_else_are_written_again(source, tmp_path, change):
    import_checkpoint(source, tmp_path / "start")
    out = tmp_path / "out"
    run_until(plan_export(tmp_path / "start", shard_size=SHARD_SIZE), out, 9)
    (draft,) = unfinished(out)
    dtype = None
    if change == "source":
        shutil.rmtree(tmp_path / "start")
        tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
        import_checkpoint(tmp_path / "other", tmp_path / "start")
    elif change == "dtype":
        dtype = torch.bfloat16
    elif change == "file":
        path = sorted(draft.glob("*.safetensors"))[0]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        (draft / JOURNAL).write_text('{"format": 1')
    plan = plan_export(tmp_path / "start", dtype, shard_size=SHARD_SIZE)
    names = [each.name for shard in plan.shards for each in shard.tensors]
    read = run_until(plan, out, None)
    assert read[: len(plan.shards[0].tensors)] == names[: len(plan.shards[0].tensors)]
    assert (len(read) == len(names)) == (change != "file")
    export_checkpoint(tmp_path / "start", tmp_path / "at-once", dtype)
    check_same(tensors_of(out), tensors_of(tmp_path / "at-once"))
    assert not unfinished(out)


def test_an_identity_changes_when_a_file_is_written(tmp_path):
    (tmp_path / "a").write_text("1")
    before = identity_of([tmp_path / "a"], tmp_path)
    assert identity_of([tmp_path / "a"], tmp_path) == before
    (tmp_path / "a").write_text("2")
    assert identity_of([tmp_path / "a"], tmp_path) != before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for screen, number in ((Terminal(), 0), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stderr", screen)
        plan_import(source).run(tmp_path / str(number), is_verified=True)
        assert ("writing" in screen.getvalue()) == ("verifying" in screen.getvalue()) == (number == 0)
