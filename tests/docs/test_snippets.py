"""Every Python block of a page runs with tiny models, and every JSON block is valid where it belongs.

Blocks of pages that have tests of their own are listed with them. A new block fails until it has a prelude in
`PRELUDES` or such a line.
"""

import ast
import json
import os

import pytest
import yaml
from forks import run_script
from page_blocks import blocks

from launchers import ROOT
from megalowbit.cluster.settings import ClusterSettings, ContainerSettings
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.sweep.study.study_file import RecipeEntry

PYTHON = [each for each in blocks() if each.language == "python"]
JSON = [each for each in blocks() if each.language == "json"]

# page, and a part of the block → the test that runs it
ELSEWHERE = {
    ("README.md", "mlb.initialize("): "tests/launch/test_readme.py::test_the_code_shown_trains_a_model",
    ("docs/library.md", "mlb.quantizer("): (
        "tests/launch/test_readme.py::test_the_packed_tensor_shown_comes_back_from_its_file"
    ),
    ("docs/library.md", "get_megatron_optimizer"): (
        "tests/examples/test_examples.py::test_the_loop_shown_in_the_readme_trains"
    ),
    ("docs/other-loops.md", ""): "tests/hf/test_other_loops_page.py::test_the_page_has_these_programs",
}

MODEL = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import megalowbit as mlb
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes))
tokens = torch.randint(0, 64, (2, 16))
loader = [{"input_ids": tokens, "labels": tokens}] * 3
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
json.dump({**settings, "megalowbit": {"recipe": "nvfp4"}}, open("ds.json", "w"))
"""
LLAMA = """
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32))
"""
SGD = "mlb.convert(model, 'nvfp4')\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
MEGATRON = "mlb.convert(model, 'nvfp4')\nconfig = mlb.OptimizerConfig(lr=1e-3, fp16=True)\nmodel.half()\n"
BF16 = """
mlb.convert(model.bfloat16(), "nvfp4")
config = mlb.OptimizerConfig(lr=1e-3, bf16=True, params_have_main_grad=False)
optimizer = mlb.get_megatron_optimizer(model, config)
"""
ENGINE = "engine, *_ = mlb.initialize(model=model, config='ds.json')\nstep = 1\n"
# page, and a part of the block → what comes before it, and what must hold after it
PRELUDES = {
    ("docs/library.md", "import megalowbit as mlb\n"): ("", "assert mlb.quantizer"),
    ("docs/library.md", "record_inputs"): (
        MODEL + "batches = [tokens]\n",
        "assert len(ranges.result().maxima) == 8",
    ),
    ("docs/coming-from.md", "mlb.initialize("): (MODEL, "assert engine.global_steps == 3"),
    ("docs/mixed-precision.md", "MaxNormGradScaler"): (
        MODEL + MEGATRON,
        "assert optimizer.get_loss_scale() > 1",
    ),
    ("docs/parallelism.md", "pipeline_module"): (None, "two ranks: tests/distributed/test_pipeline.py"),
    ("docs/parallelism.md", "CheckpointStore"): (MODEL + ENGINE, "assert state['anything']"),
    ("docs/schedules.md", "CosineSchedule"): (
        MODEL + BF16 + "model(**loader[0]).loss.backward()\n",
        "assert report.is_applied and scheduler.get_last_lr()[0] < 1e-3",
    ),
    ("docs/speculation.md", "PrecisionController"): (
        MODEL + SGD.replace("mlb.convert(model, 'nvfp4')\n", ""),
        "assert controller.totals()",
    ),
    ("docs/faults.md", "Watchdog("): (MODEL, "assert watchdog"),
    ("docs/export.md", "AutoModelForCausalLM"): (None, "tests/hf/packed loads such folders"),
    ("docs/export.md", "get_peft_model"): (
        MODEL + LLAMA + "from peft import LoraConfig, get_peft_model\n",
        "assert sum(p.requires_grad for p in model.parameters()) == 14",
    ),
    ("docs/export.md", "export_packed_checkpoint"): (None, "a part of a call"),
}


def table_key(block, table):
    return [key for key in table if key[0] == block.page and key[1] in block.text]


def place(block):
    return f"{block.page}:{block.line}"


def test_each_python_block_runs_here_or_in_a_named_test():
    lacking = [
        place(each) for each in PYTHON if not table_key(each, PRELUDES) and not table_key(each, ELSEWHERE)
    ]
    assert not lacking, "add a prelude to PRELUDES, or the test that runs the block to ELSEWHERE"


def test_no_line_of_the_tables_is_stale():
    used = {key for each in PYTHON for key in (*table_key(each, PRELUDES), *table_key(each, ELSEWHERE))}
    assert used == {*PRELUDES, *ELSEWHERE}
    for name in ELSEWHERE.values():
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


HERE = [(each, table_key(each, PRELUDES)[0]) for each in PYTHON if table_key(each, PRELUDES)]


@pytest.mark.parametrize(
    ("block", "key"),
    [pytest.param(*each, id=place(each[0])) for each in HERE if PRELUDES[each[1]][0] is not None],
)
def test_a_python_block_runs(block, key, tmp_path):
    before, after = PRELUDES[key]
    (tmp_path / "shown.py").write_text(f"{before}\n{block.text}\n{after}\n")
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    done = run_script(tmp_path / "shown.py", env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", PYTHON, ids=place)
def test_a_python_block_is_python(block):
    ast.parse(block.text)


def fragment(text):
    """A block as an object; several keys without braces are those of an object."""
    return json.loads(text if text.lstrip().startswith("{") else f"{{{text}}}")


@pytest.mark.parametrize("block", JSON, ids=place)
def test_a_json_block_is_valid_where_it_belongs(block, tmp_path):
    found = fragment(block.text)
    if "launcher" in found:
        assert ClusterSettings(**found).launcher == found["launcher"]
    elif "kind" in found:
        assert ContainerSettings(**found).kind == found["kind"]
    elif "set" in found:  # of a study
        assert recipe(RecipeEntry(**found).set["megalowbit.recipe"]).quantizes
    elif "base" in found:
        assert recipe(found) != recipe(found["base"])
    else:
        check_configuration(found, tmp_path)


def check_configuration(found, folder):
    """A configuration, or keys of the `"megalowbit"` block of one in configs/."""
    raw = json.loads((ROOT / "configs" / "llama_tiny_fp4.json").read_text(encoding="utf-8"))
    if "optimizer" in found:
        raw = found
    else:
        raw["megalowbit"].update(found.get("megalowbit", found))
    raw["megalowbit"]["model"]["config"] = str(ROOT / "configs" / "models" / "llama_tiny.json")
    data = raw["megalowbit"]["data"]
    if not {"corpus", "sources"} & data.keys():  # some keys of a section
        data.update(corpus="stdlib", tokenizer="byte", sequence_length=64)
    path = folder / "shown.json"
    path.write_text(json.dumps(raw))
    assert load_config(path, [], world_size=1).settings.run.steps > 0


@pytest.mark.parametrize("block", [each for each in blocks() if each.language == "yaml"], ids=place)
def test_a_yaml_block_is_yaml(block):
    assert isinstance(yaml.safe_load(block.text), dict)
