"""docs/other-loops.md: each of its programs runs as it stands, with a tiny LLaMA, on one rank and on two.

Those with DeepSpeed start with the page's lines for CPUs, and their facts say what engine was in play.
"""

import json
import os
import re

import pytest
from forks import Forked
from quick_cases import slow_except

from launchers import ROOT, free_port

PAGE = (ROOT / "docs" / "other-loops.md").read_text(encoding="utf-8")
ENGINE_ON_CPU, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("trainer", "trainer_deepspeed", "accelerate", "accelerate_deepspeed", "deepspeed", "ddp", "fsdp")
# what the page calls model, dataset and loader
BEFORE = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, use_cache=False, **sizes))
rows = [torch.arange(start, start + 8) for start in range(16)]
dataset = [{"input_ids": row, "labels": row} for row in rows]
loader = torch.utils.data.DataLoader(dataset, batch_size=2)
first, converted = model.lm_head.weight.detach().float().clone(), model
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""
AFTER = """
import hashlib
import megalowbit as mlb
from megalowbit.layers.conversion.other_loops import find_engine
engine = find_engine(converted)
if "trainer" in globals():
    assert engine is getattr(trainer, "deepspeed", None)
def whole(weight):
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().float()
with deepspeed.zero.GatheredParameters(list(converted.parameters())):
    values = [whole(each) for each in converted.parameters()]
    moved = not torch.equal(whole(converted.lm_head.weight), first)
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in values)).hexdigest()
facts = {
    "products": mlb.product_counts(converted), "step": mlb.random_stream(converted).step,
    "rank": mlb.random_stream(converted).rank, "is_moved": moved, "weights": digest,
    "stage": None if engine is None else engine.zero_optimization_stage(),
}
print("facts " + json.dumps(facts), flush=True)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""
MICRO_BATCHES = {"trainer": 4, "trainer_deepspeed": 8}  # of each rank; the loader's otherwise


def run_ranks(folder, text, world_size):
    """Exit codes and logs."""
    script, port = folder / "program.py", free_port()
    script.write_text(BEFORE + text + AFTER)
    ranks = []
    for rank in range(world_size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in {**place, **address}.items()}}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        if ENGINE_ON_CPU not in text:
            env["ACCELERATE_USE_CPU"] = "true"
        ranks.append(Forked(script, output=folder / f"{rank}.log", env=env, cwd=folder))
    codes = [rank.wait() for rank in ranks]
    logs = [(folder / f"{rank}.log").read_text() for rank in range(world_size)]
    return codes, logs


def run_program(folder, text, world_size):
    """Facts and logs of each rank."""
    codes, logs = run_ranks(folder, text, world_size)
    assert codes == [0] * world_size, "\n".join(logs)
    return [json.loads(re.search(r"^facts (.*)$", log, re.MULTILINE)[1]) for log in logs], logs


def program(name, stage=2):
    """As the page has it, with what it says about CPUs."""
    text = BLOCKS[NAMES.index(name)].replace('TrainingArguments(\n    "out"', 'TrainingArguments("out"')
    cpu = "use_cpu=True, report_to=[]"
    if name in ("trainer_deepspeed", "accelerate_deepspeed"):
        text, cpu = ENGINE_ON_CPU + text, cpu + ', accelerator_config={"use_configured_state": True}'
    text = text.replace('TrainingArguments("out"', f'TrainingArguments("out", {cpu}')
    return text.replace('{"stage": 2}', json.dumps({"stage": stage}))


def test_the_page_has_these_programs():
    assert len(BLOCKS) == len(NAMES)


@pytest.mark.parametrize("name", slow_except(["trainer_deepspeed"], NAMES))
def test_a_program_of_the_page_trains_in_low_precision(tmp_path, name):
    world_size = 2
    facts, _ = run_program(tmp_path, program(name), world_size)
    for rank, fact in enumerate(facts):
        assert fact["is_moved"]
        assert fact["rank"] == rank
        assert fact["stage"] == (2 if "deepspeed" in name else None)
        is_split = name.startswith("accelerate")  # prepare() deals the loader's batches to ranks
        expected = MICRO_BATCHES.get(name, 8 // world_size if is_split else 8)
        assert fact["step"] == expected
        assert sum(fact["products"]["output"].values()) == 14 * expected  # 2 blocks of 7 projections
    if name != "fsdp":  # which has one copy of the weights
        assert len({fact["weights"] for fact in facts}) == 1, "ranks have trained apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("trainer_deepspeed", 0),
        ("trainer_deepspeed", 1),
        ("trainer_deepspeed", 3),
        ("deepspeed", 0),
        ("deepspeed", 1),
    ],
)
def test_other_zero_stages_train_equally(tmp_path, name, stage):
    facts, _ = run_program(tmp_path, program(name, stage), 2)
    assert [fact["stage"] for fact in facts] == [stage, stage]
    assert all(fact["is_moved"] and fact["step"] == 8 for fact in facts)
    assert facts[0]["weights"] == facts[1]["weights"], "ranks have trained apart"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_with_an_engine_resumes_with_the_same_weights(tmp_path, stage):
    text = program("trainer_deepspeed", stage).replace("max_steps=4", "max_steps=4, save_steps=2")
    whole, _ = run_program(tmp_path, text, 2)
    resumed = text.replace("trainer.train()", 'trainer.train(resume_from_checkpoint="out/checkpoint-2")')
    assert resumed != text
    facts, _ = run_program(tmp_path, resumed, 2)
    for fact, expected in zip(facts, whole, strict=True):
        assert (fact["weights"], fact["step"]) == (expected["weights"], 8)


@pytest.mark.slow
def test_a_stock_engine_in_half_precision_is_reported_once(tmp_path):
    text = "import logging; logging.basicConfig()\n" + BLOCKS[NAMES.index("deepspeed")]
    _, logs = run_program(tmp_path, text, 2)
    counts = [log.count("low-bit layers train in an engine of stock DeepSpeed") for log in logs]
    assert counts == [1, 0]


@pytest.mark.slow
def test_a_trainer_whose_block_names_another_recipe_ends_with_a_line_on_each_rank(tmp_path):
    text = program("trainer_deepspeed")
    text = text.replace('settings["megalowbit"]["recipe"]', '"mxfp4"')
    codes, logs = run_ranks(tmp_path, text, 2)
    assert codes == [1, 1]
    for log in logs:
        assert "UserError: megalowbit.recipe is 'nvfp4', and layer model.layers.0.self_attn.q_proj has" in log


STATE = """
accelerator.register_for_checkpointing(mlb.random_stream(converted))
accelerator.save_state("out")
def weights():
    with deepspeed.zero.GatheredParameters(list(converted.parameters())):
        return [each.detach().clone() for each in converted.parameters()]
def epoch():
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) is not None
        optimizer.step()
        optimizer.zero_grad()
epoch()
expected = weights()
accelerator.load_state("out")
epoch()
assert all(map(torch.equal, weights(), expected))
assert accelerator.unwrap_model(model) is converted
whole = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    converted.save_pretrained("model", state_dict=whole)
    from safetensors.torch import load_file  # from_pretrained would partition at stage 3, on all ranks
    read = load_file("model/model.safetensors")
    for (name, _), value in zip(converted.named_parameters(), expected, strict=True):
        assert torch.equal(read[name], value.to(read[name].dtype)), name
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_with_deepspeed_saves_loads_and_unwraps(tmp_path, stage):
    text = program("accelerate_deepspeed").replace(
        '{"stage": 2}', f'{{"stage": {stage}, "stage3_gather_16bit_weights_on_model_save": True}}'
    )
    facts, _ = run_program(tmp_path, text + STATE, 2)
    assert [fact["stage"] for fact in facts] == [stage, stage]
    assert facts[0]["weights"] == facts[1]["weights"]


GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
sizes = dict(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
model = converted = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
first = model.lm_head.weight.detach().float().clone()
"""
SAVED = """
exported = trainer.accelerator.get_state_dict(trainer.deepspeed)
converted.save_pretrained("own")  # which rank 0 writes
torch.distributed.barrier()  # rank 0 has written both
folders = ("out/checkpoint-4", "own")
read = [GPT2LMHeadModel.from_pretrained(each, dtype="auto").state_dict() for each in folders]
mlb.restore(converted)
for name, value in converted.state_dict().items():
    assert all(torch.equal(each[name], value) for each in (*read, exported)), name
mlb.convert(converted, "nvfp4")
"""


@pytest.mark.slow
def test_trainer_checkpoints_hold_a_gpt2_in_transformers_layout(tmp_path):
    facts, _ = run_program(tmp_path, GPT2 + program("trainer_deepspeed") + SAVED, 2)
    assert [(fact["stage"], fact["is_moved"]) for fact in facts] == [(2, True), (2, True)]


@pytest.mark.slow
def test_trainer_at_stage_three_refuses_a_gpt2_before_the_first_step(tmp_path):
    codes, logs = run_ranks(tmp_path, GPT2 + program("trainer_deepspeed", 3), 2)
    assert codes == [1, 1]
    for log in logs:
        assert "UserError: at ZeRO stage 3 this engine and DeepSpeed's tools export the weight of" in log
        assert "on_train_begin" in log


@pytest.mark.slow
def test_layers_that_stock_tensor_parallelism_replaces_end_the_first_forward(tmp_path):
    text = BLOCKS[NAMES.index("deepspeed")]
    text = text.replace('"zero_optimization": {"stage": 2}', '"tensor_parallel": {"autotp_size": 2}')
    codes, logs = run_ranks(tmp_path, text, 2)
    assert codes == [1, 1]
    for log in logs:
        assert "UserError: 14 of 14 low-bit layers were replaced after the model was converted" in log


@pytest.mark.slow
def test_loading_an_accelerate_state_restores_the_random_stream(tmp_path):
    text = BLOCKS[NAMES.index("accelerate")] + "\nstream.advance()\naccelerator.load_state('out')\n"
    facts, _ = run_program(tmp_path, text, 1)
    assert facts[0]["step"] == 8
