"""What convert and restore refuse, because it would go wrong in silence, and what they warn of."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.refusals import refuse_partitioned


def model():
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))


def test_a_model_with_full_parameters_passes():
    refuse_partitioned(model())


def test_a_partitioned_parameter_is_rejected_before_any_layer_is_converted():
    net = model()
    net[1].weight.data = torch.zeros(0)  # as DeepSpeed leaves it
    net[1].weight.ds_id = 0
    for refused in (refuse_partitioned, mlb.convert):
        message = r"^parameter 1\.weight is already partitioned, .*outside of zero\.Init"
        with pytest.raises(UserError, match=message):
            refused(net)
    assert type(net[0]) is torch.nn.Linear


def gpt2(**more):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **more))


def llama(kind=LlamaForCausalLM, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(LlamaConfig(**sizes, vocab_size=64, **more))


IDS = torch.arange(32).view(2, 16)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_layers_with_hooks_of_accelerate_are_refused_until_these_are_removed(build):
    hooks = pytest.importorskip("accelerate.hooks")
    net = build().eval()
    hooks.attach_execution_device_hook(
        net, "cpu"
    )  # as from_pretrained(device_map="auto") does on two devices
    with pytest.raises(UserError, match=r"^layer \S+ has a forward of its own.*remove_hook_from_module"):
        mlb.convert(net, "nvfp4")
    assert not bit_layers(net)
    hooks.remove_hook_from_module(net, recurse=True)
    plain = net(IDS).logits
    mlb.convert(net, "nvfp4")
    hooks.attach_execution_device_hook(net, "cpu")
    assert not torch.equal(net(IDS).logits, plain)
    with pytest.raises(UserError, match=r"has a forward of its own.*then restore, then"):
        mlb.restore(net)
    hooks.remove_hook_from_module(net, recurse=True)
    mlb.restore(net)
    assert torch.equal(net(IDS).logits, plain)


def test_a_compiled_layer_is_refused_and_one_that_was_compiled_later_is_plain_again():
    net = model()
    net[1].compile(backend="eager")
    with pytest.raises(UserError, match=r"^layer 1 is compiled, .*: compile it after convert$"):
        mlb.convert(net, "nvfp4")
    net = model()
    x = torch.randn(16, 32)
    plain = net(x)
    mlb.convert(net, "nvfp4")
    net[0].compile(backend="eager")
    assert not torch.equal(net(x), plain)
    mlb.restore(net)
    assert torch.equal(net(x), plain)


def test_a_transposed_weight_that_is_computed_is_refused():
    net = gpt2()
    prune.l1_unstructured(net.transformer.h[0].mlp.c_fc, "weight", 0.5)
    with pytest.raises(UserError, match=r"c_fc computes its weight .* which convert would not turn: call"):
        mlb.convert(net, "nvfp4")
    prune.remove(net.transformer.h[0].mlp.c_fc, "weight")
    mlb.convert(net, "nvfp4")
    prune.l1_unstructured(net.transformer.h[0].mlp.c_fc, "weight", 0.5)
    with pytest.raises(UserError, match=r"c_fc computes its weight .* which restore would not turn"):
        mlb.restore(net)


def test_a_layer_with_a_parametrization_is_not_restored():
    net = model()
    mlb.convert(net, "nvfp4")
    parametrizations.weight_norm(net[0])
    with pytest.raises(UserError, match=r"layer 0 computes its weight .*remove_parametrizations"):
        mlb.restore(net)
    parametrize.remove_parametrizations(net[0], "weight")
    mlb.restore(net)
    assert net(torch.randn(16, 32)).shape == (16, 32)


def test_restore_says_that_an_optimizer_must_be_built_again(caplog):
    net = gpt2()
    mlb.convert(net, "nvfp4")
    net.eval()(IDS)
    mlb.restore(net)
    assert caplog.text == ""
    mlb.convert(net.train(), "nvfp4")
    net(IDS)
    mlb.restore(net)
    assert (
        "restore has given 8 layers new parameters, which an optimizer or engine that was built"
        in caplog.text
    )
    caplog.clear()
    same = llama()
    mlb.convert(same, "nvfp4")
    same(IDS)
    mlb.restore(same)
    assert caplog.text == ""


def test_rounded_positions_are_told_at_the_first_training_forward(caplog):
    cast = llama(max_position_embeddings=64).bfloat16()
    mlb.convert(cast, "nvfp4")
    cast(IDS)
    assert "inv_freq is in torch.bfloat16, so positions are rounded" in caplog.text
    caplog.clear()
    built = AutoModelForCausalLM.from_config(cast.config, dtype=torch.bfloat16)
    mlb.convert(built, "nvfp4")
    built(IDS)
    assert caplog.text == ""
    assert {each.dtype for each in built.parameters()} == {torch.bfloat16}
    assert built.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (LlamaForSequenceClassification, "score"),
        (LlamaForTokenClassification, "score"),
        (LlamaForQuestionAnswering, "qa_outputs"),
    ],
)
def test_heads_of_other_tasks_stay_in_high_precision(kind, head):
    net = llama(kind, pad_token_id=0)
    report = mlb.convert(net, "nvfp4")
    assert [(each.name, each.reason) for each in report.kept] == [(head, "a head, outside the base model")]
    assert len(report.swapped) == 14


def test_layers_that_torch_reads_without_calling_them_are_kept():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    net = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoder(layer, 2)).eval()
    report = mlb.convert(net, "nvfp4")
    assert [each.name for each in report.swapped] == ["0"]
    reasons = {each.reason for each in report.kept if each.name.endswith(("linear1", "linear2"))}
    assert reasons == {"nn.TransformerEncoderLayer reads its weight in evaluation, without calling it"}
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        fast = net(x)
    torch.testing.assert_close(net(x), fast)
