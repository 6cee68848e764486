"""Megatron-LM's checkpoints, written by `megatron_writer` from known models, and (slow) by megatron-core."""

import dataclasses
import functools
import os
import subprocess
from pathlib import Path

import megatron_writer
import pytest
import torch
from environments import environment_with
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import export_checkpoint, import_checkpoint, plan_import
from megalowbit.hf.importers.base import LazyWeights
from megalowbit.hf.importers.megatron import find_megatron, read_megatron
from megalowbit.hf.importers.registry import read_foreign
from megalowbit.hf.training_checkpoint import read_checkpoint

HERE = Path(__file__).parent
MEGATRON_CORE = "megatron-core==0.16.1"
SIZES = {"vocab_size": 60, "num_heads": 4, "num_layers": 4, "hidden_size": 32}
LAYOUTS = {
    "one rank": {},
    "two tensor ranks": {"ranks": 2},
    "two stages": {"stages": 2},
    "two ranks, two stages of two chunks": {"ranks": 2, "stages": 2, "chunks": 2},
    "fused norms, padding": {"names": megatron_writer.FUSED, "ranks": 2, "padding": 4},
    "former names": {"names": megatron_writer.FORMER, "ranks": 2, "stages": 2},
    "former names, version 2": {"names": megatron_writer.FORMER, "version": 2.0},
    "oldest names, version 1": {"names": megatron_writer.OLDEST, "ranks": 2, "version": 1.0},
    "oldest names, version 0": {"names": megatron_writer.OLDEST, "ranks": 2, "version": 0},
}
MODELS = {
    "gpt2": ("gpt2", {"n_inner": 56}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
}
QUICK = {("gpt2", "two ranks, two stages of two chunks"), ("llama", "fused norms, padding")}
QUICK |= {("gpt2", "oldest names, version 0")}


def known_model(name):
    kind, fields = MODELS[name]
    return tiny_model(kind, **SIZES, **fields)


def bits(model):
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.fixture
def saved(tmp_path):
    """A LLaMA on two ranks and two stages; the folder of its iteration."""
    megatron_writer.write(tmp_path / "run", known_model("llama"), ranks=2, stages=2)
    return tmp_path / "run" / "iter_0000012"


def change(saved, function, rank=0, stage=0):
    """Change the content of one rank's file."""
    file = saved / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    function(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
        for name in MODELS
        for layout in LAYOUTS
        if not ("llama" in name and LAYOUTS[layout].get("version", 3) < 2)
    ],
)
def test_every_weight_is_that_of_the_known_model(tmp_path, name, layout):
    model = known_model(name)
    megatron_writer.write(tmp_path / "run", model, **LAYOUTS[layout])
    import_checkpoint(tmp_path / "run", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "hf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    expected, found = bits(model), bits(back)
    assert expected.keys() == found.keys()
    for weight, value in expected.items():
        got = found[weight]
        if "embed" in weight or "wte" in weight or "lm_head" in weight:
            assert len(got) == 60 + LAYOUTS[layout].get("padding", 0)
            got = got[:60]
        assert got.equal(value), weight
    tokens = torch.arange(20)[None] * 7 % 60
    with torch.no_grad():
        assert back(tokens).logits[..., :60].equal(model.eval()(tokens).logits)


def test_a_configuration_removes_the_padding_and_adds_what_arguments_do_not_say(tmp_path):
    model = known_model("gpt2")
    megatron_writer.write(tmp_path / "run", model, ranks=2, padding=4)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 60, "eos_token_id": 3}')
    import_checkpoint(tmp_path / "run", tmp_path / "start", config=tmp_path)
    export_checkpoint(tmp_path / "start", tmp_path / "hf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert back.config.eos_token_id == 3
    assert back.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)


def test_bf16_weights_stay_bf16_and_are_not_rounded_again(tmp_path):
    model = known_model("llama").bfloat16()
    megatron_writer.write(tmp_path / "run", model, ranks=2)
    import_checkpoint(tmp_path / "run", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "hf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert {value.dtype for value in back.parameters()} == {torch.bfloat16}
    assert all(value.equal(bits(model)[name]) for name, value in bits(back).items())


def test_a_run_an_iteration_and_a_release_are_found(saved):
    run = saved.parent
    assert find_megatron(run) == find_megatron(saved) == saved
    (run / "latest_checkpointed_iteration.txt").write_text("release\n")
    with pytest.raises(UserError, match=r"says 'release', and .* has no release"):
        find_megatron(run)
    saved.rename(run / "release")
    assert find_megatron(run) == run / "release"
    assert find_megatron(run.parent) is None
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UserError, match=r"has no latest_checkpointed_iteration.txt: name one of .*: release"):
        find_megatron(run)
    with pytest.raises(UserError, match="is the folder of one rank"):
        find_megatron(run / "release" / "mp_rank_00_000")


def test_files_of_ranks_that_are_missing_or_do_not_belong_together_are_named(saved):
    change(saved, lambda content: content.update(iteration=11), rank=1, stage=1)
    with pytest.raises(
        UserError, match=r"mixes checkpoints: iteration is 12 on the first rank and 11 on tensor"
    ):
        read_megatron(saved, None)
    file = saved / "mp_rank_01_001" / "model_optim_rng.pt"
    file.rename(file.with_name("distrib_optim.pt"))
    with pytest.raises(UserError, match="mp_rank_01_001 holds only optimizer states"):
        read_megatron(saved, None)
    file.with_name("distrib_optim.pt").unlink()
    file.parent.rmdir()
    with pytest.raises(UserError, match="lacks the folder of tensor-parallel rank 1 of pipeline stage 1"):
        read_megatron(saved, None)
    (saved / "mp_rank_00_001").rename(saved.parent / "elsewhere")
    with pytest.raises(UserError, match="has folders of 1 pipeline ranks, but was saved by 2"):
        read_megatron(saved, None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda c: c.update(checkpoint_version=4.0),
            r"has version 4\.0: versions 0, 1\.0, 2\.0 and 3\.0 are supported",
        ),
        (lambda c: c["args"].__dict__.update(num_experts=8), "was trained with num_experts 8"),
        (lambda c: c["args"].__dict__.update(num_layers=None), "has num_layers None in its arguments"),
        (lambda c: c.pop("model"), "holds no model: it has only args, "),
        (
            lambda c: c["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(2)}),
            "experts are not",
        ),
        (
            lambda c: c["model"].update({"decoder.layers.0.x.weight": torch.ones(2)}),
            "layers.0.x.weight belongs",
        ),
        (
            lambda c: c["model"].pop("embedding.word_embeddings.weight", None),
            "has no word embeddings: it is not a GPT model",
        ),
        (
            lambda c: c["args"].__dict__.update(num_attention_heads=8),
            "does not fit the configuration's heads",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_in_one_line(saved, damage, message):
    for rank in (0, 1):
        for stage in (0, 1):
            change(saved, damage, rank, stage)
    with pytest.raises(UserError, match=message) as caught:
        read_megatron(saved, None)
    assert "\n" not in str(caught.value)


def test_ranks_whose_arguments_give_other_models_are_refused(saved):
    change(saved, lambda content: content["args"].__dict__.update(norm_epsilon=0.5), rank=1)
    with pytest.raises(UserError, match=r"arguments of ranks give rms_norm_eps 1e-\d+ and 0\.5"):
        read_megatron(saved, None)
    change(saved, lambda content: content.pop("args"), rank=1)
    assert read_megatron(saved, None).hf_config["rms_norm_eps"] < 0.5


def test_a_vocabulary_that_lost_rows_is_refused(saved):
    def shorten(content):
        name = "embedding.word_embeddings.weight"
        content["model"][name] = content["model"][name][:-1].clone()

    change(saved, shorten, rank=1)
    with pytest.raises(UserError, match="has 59 word embeddings, and 60 by its arguments"):
        read_megatron(saved, None)
    for rank in (0, 1):
        for stage in (0, 1):
            change(saved, lambda c: vars(c["args"]).pop("padded_vocab_size"), rank, stage)
    message = r"tokens\.weight has different shapes on its ranks, \(30, 32\), \(29, 32\): use a complete"
    with pytest.raises(UserError, match=message):
        read_megatron(saved, None)


def test_names_of_megatron_core_need_its_version(saved):
    for rank in (0, 1):
        for stage in (0, 1):
            change(saved, lambda content: content.pop("checkpoint_version"), rank, stage)
    with pytest.raises(UserError, match=r"has version 0 and names of Megatron Core, whose version is 3\.0"):
        read_megatron(saved, None)


def test_other_formats_are_refused(saved):
    (saved / "__0_0.distcp").touch()
    with pytest.raises(UserError, match="has the format torch_dist"):
        find_megatron(saved)
    (saved / "__0_0.distcp").unlink()
    (saved / "mp_rank_00_000").rename(saved / "mp_rank_00_000_000")
    with pytest.raises(UserError, match="expert-parallel ranks"):
        read_megatron(saved, None)


def test_copies_that_differ_are_reported_and_the_first_is_used(saved, caplog):
    change(saved, lambda content: content["model"]["decoder.layers.0.input_layernorm.weight"].add_(1), rank=1)
    found = read_megatron(saved, None).weights
    expected = known_model("llama").model.layers[0].input_layernorm.weight
    assert found["model.layers.0.input_layernorm.weight"].equal(expected)
    assert (
        "tensor-parallel ranks 0 and 1 have different values of norm1.weight: rank 0's are used"
        in caplog.text
    )


def test_a_tied_head_that_differs_from_its_embedding_is_refused(tmp_path):
    megatron_writer.write(tmp_path / "run", known_model("gpt2"), ranks=2, stages=2)
    saved = tmp_path / "run" / "iter_0000012"
    change(saved, lambda content: content["model"]["output_layer.weight"].add_(1), stage=1)
    with pytest.raises(UserError, match=r"lm_head\.weight differs from transformer.wte.weight"):
        import_checkpoint(saved, tmp_path / "start")


def test_a_checkpoint_without_arguments_needs_a_configuration(tmp_path):
    model = known_model("gpt2")
    megatron_writer.write(tmp_path / "run", model, names=megatron_writer.OLDEST, version=0)
    saved = tmp_path / "run" / "iter_0000012"
    file = saved / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["args"], content["checkpoint_version"]
    torch.save(content, file)
    with pytest.raises(UserError, match=r"has no arguments, so name a config.json with --config"):
        read_foreign(saved, None)
    found = read_foreign(saved, model.config.to_dict()).weights
    assert found["transformer.h.3.attn.c_attn.weight"].equal(model.transformer.h[3].attn.c_attn.weight)


def interrupt(plan, folder, last):
    """Run a conversion that is interrupted when it reads tensor number `last`."""
    names, read = iter(range(last)), plan.read

    def read_until(name):
        if next(names, None) is None:
            raise KeyboardInterrupt
        return read(name)

    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(plan, read=read_until).run(folder)


@pytest.mark.parametrize("change_of", [None, "rank", "configuration"])
def test_an_interrupted_import_continues_unless_the_source_has_changed(saved, tmp_path, change_of):
    plan = functools.partial(plan_import, saved, shard_size=20_000)
    interrupt(plan(), tmp_path / "start", 12)
    options = {}
    if change_of == "rank":
        for rank in (0, 1):
            change(saved, lambda content: content["model"]["decoder.final_layernorm.weight"].add_(1), rank, 1)
    elif change_of == "configuration":
        (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 59}')
        options["config"] = tmp_path / "config.json"
    read_again, again = [], plan(**options)
    read = again.read
    dataclasses.replace(again, read=lambda name: read_again.append(name) or read(name)).run(
        tmp_path / "start"
    )
    names = [each.name for shard in again.shards for each in shard.tensors]
    assert (len(read_again) < len(names)) == (change_of is None)
    assert read_again == names[-len(read_again) :]
    plan(**options).run(tmp_path / "at-once", is_verified=True)
    found, expected = (read_checkpoint(tmp_path / each).state_dict for each in ("start", "at-once"))
    assert all(found[name].equal(expected[name]) for name in names)


def test_a_plan_reads_no_weight_and_a_conversion_each_once(saved, tmp_path, monkeypatch):
    reads, get = [], LazyWeights.__getitem__
    monkeypatch.setattr(LazyWeights, "__getitem__", lambda self, name: reads.append(name) or get(self, name))
    plan = plan_import(saved)
    assert "weights.safetensors: " in plan.describe(tmp_path / "start")
    assert not reads
    plan.run(tmp_path / "start")
    assert reads == [each.name for each in plan.tensors]


@pytest.fixture(scope="module")
def core_models(tmp_path_factory):
    """Folders of models that megatron-core has saved on one and on two ranks, with its logits."""
    folder = tmp_path_factory.mktemp("core")
    python = environment_with(folder, MEGATRON_CORE, "--no-deps") / "bin" / "python"
    for size in (1, 2):
        (folder / str(size)).mkdir()
        ranks = []
        for rank in range(size):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
            command = [python, HERE / "megatron_core_models.py", folder / str(size)]
            with (folder / f"{size}.{rank}.txt").open("w") as output:
                ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * size, (folder / f"{size}.0.txt").read_text()[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "case", ["gpt2", "gpt2 with fused gelu", "llama", "llama with biases, tied", "llama 3.1", "qwen3"]
)
def test_logits_are_those_of_megatron_core(core_models, tmp_path, case, size):
    source = core_models / str(size) / case
    import_checkpoint(source, tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens, expected = torch.load(source / "logits.pt")
    with torch.no_grad():
        found = model(tokens).logits
    # both compute in fp32 and add in different orders; logits have a size of 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
