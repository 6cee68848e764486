import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, convert, random_stream, restore, set_observer
from megalowbit.layers.recipe import recipe
from megalowbit.layers.settings import DEFAULT_RECIPE


def gpt2(**kwargs) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **kwargs))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


IDS = torch.arange(32).view(2, 16)


def test_gpt2_projections_are_swapped_and_the_head_is_kept():
    model = gpt2()
    report = convert(model, "nvfp4")
    names = [each.name for each in report.swapped]
    assert names == [
        f"transformer.h.{block}.{name}"
        for block in (0, 1)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert list(bit_layers(model)) == names
    assert [(each.name, each.reason) for each in report.kept] == [("lm_head", "output head")]
    first = report.swapped[0]
    assert (first.kind, first.in_features, first.out_features) == ("Conv1D", 32, 96)
    assert {layer.layer_name for layer in bit_layers(model).values()} == set(names)


def test_llama_projections_are_swapped_with_their_own_parameters():
    model = llama()
    before = dict(model.named_parameters())
    report = convert(model)
    assert len(report.swapped) == 14
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_converting_and_restoring_gives_back_model_state_and_output(build):
    model = build().eval()
    reference = copy.deepcopy(model)
    kinds = [type(module) for module in model.modules()]
    convert(model)
    assert list(model.state_dict()) == list(reference.state_dict())
    restore(model)
    assert [type(module) for module in model.modules()] == kinds
    for (name, value), (_, expected) in zip(
        model.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert torch.equal(value, expected), name
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert random_stream(model) is None
    assert not model._forward_pre_hooks
    assert str(model) == str(reference)


def test_conv1d_weights_are_transposed_and_trained_values_come_back_exactly():
    model = gpt2()
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    convert(model)
    layer = model.transformer.h[0].mlp.c_fc
    assert torch.equal(layer.weight, before.t())
    assert layer.weight.is_contiguous()
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        layer.weight -= 0.1 * layer.weight.grad
    trained = layer.weight.detach().clone()
    restore(model)
    restored = model.transformer.h[0].mlp.c_fc
    assert type(restored) is Conv1D
    assert torch.equal(restored.weight, trained.t())
    assert (restored.nx, restored.nf) == (32, 128)


def test_logits_stay_close_to_those_of_the_plain_model():
    model = gpt2().eval()
    plain = model(IDS).logits
    convert(model)
    low = model(IDS).logits
    assert 0 < (low - plain).norm() / plain.norm() < 0.3


def test_dtype_training_mode_hooks_and_frozen_parameters_are_preserved():
    model = mlp().to(torch.bfloat16)
    model[2].eval().requires_grad_(False)
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    convert(model)
    assert (model[0].training, model[2].training) == (True, False)
    assert not model[2].weight.requires_grad
    assert model[0].weight.dtype == torch.bfloat16
    model(torch.randn(3, 32, dtype=torch.bfloat16))
    handle.remove()
    model(torch.randn(3, 32, dtype=torch.bfloat16))
    assert seen == [1]


def test_a_frozen_conv1d_stays_frozen():
    model = gpt2().requires_grad_(False)
    convert(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_meta_models_can_be_converted():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    report = convert(model, "nvfp4")
    assert len(report.swapped) == 48
    assert model.transformer.h[0].attn.c_attn.weight.shape == (2304, 768)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_keep_patterns_match_layers_or_the_modules_that_contain_them():
    model = gpt2()
    report = convert(model, {"base": "nvfp4", "keep": ["transformer.h.0", "*.h.1.mlp.c_f?"]})
    swapped = {each.name for each in report.swapped}
    assert swapped == {f"transformer.h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")}
    assert sum("keep" in each.reason for each in report.kept) == 5


def test_a_keep_pattern_that_matches_nothing_names_the_nearest_layer():
    with pytest.raises(
        UserError, match=r"'transformer\.h\.7\.mlp\.c_fc' matches no .*'transformer\.h\.[01]\.mlp\.c_fc'"
    ):
        convert(gpt2(), {"base": "nvfp4", "keep": ["transformer.h.7.mlp.c_fc"]})


@pytest.mark.parametrize(
    ("model", "kept"),
    [(gpt2(), {"transformer.h.0.attn.c_attn"}), (gpt2().transformer, {"h.0.attn.c_attn"}), (llama(), set())],
)
def test_keep_if_present_may_match_nothing(caplog, model, kept):
    """Position embeddings are read by one layer of GPT-2, and by none of a model with rotary positions."""
    report = convert(model)  # the default
    assert report.recipe == recipe("nvfp4-first-block-fp8")
    assert BitLinear(4, 4).recipe == recipe("nvfp4")  # a layer has no blocks
    named = {each.name for each in report.kept if each.reason == "named by the recipe's keep_if_present"}
    assert named == kept
    assert not kept & {each.name for each in report.swapped}
    assert len(report.swapped) >= 7
    assert not caplog.records
    assert report.unmatched == ()  # nobody has named it for this model
    assert "names no layer" not in str(report)


def test_keep_if_present_of_the_user_that_matches_nothing_is_reported():
    shipped = recipe("nvfp4-first-block-fp8").keep_if_present
    report = convert(llama(), {"base": "nvfp4", "keep_if_present": [*shipped, "*.h.0.*"]})
    assert report.unmatched == ("*.h.0.*",)
    assert "keep_if_present names no layer of this model: *.h.0.*" in str(report).splitlines()


def test_without_position_embeddings_the_default_has_the_bits_of_nvfp4():
    tokens, found = torch.arange(64).reshape(2, 32) % 48, []
    for chosen in (DEFAULT_RECIPE, "nvfp4"):
        torch.manual_seed(0)
        model = llama()
        convert(model, chosen)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight


class OwnLinear(nn.Linear):
    pass


def test_tied_layers_subclasses_and_bitlinears_are_kept_with_a_reason():
    model = Tied()
    model.own, model.low = OwnLinear(4, 4), BitLinear(4, 4)
    report = convert(model)
    reasons = {each.name: each.reason for each in report.kept}
    assert [each.name for each in report.swapped] == ["inner"]
    assert "tied" in reasons["head"]
    assert "subclass" in reasons["own"]
    assert "already" in reasons["low"]
    assert model.low.random_stream is random_stream(model)
    assert model.head.weight is model.embedding.weight


def test_the_head_of_a_wrapped_model_is_kept():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = llama()

    report = convert(Wrapper())
    assert [(each.name, each.reason) for each in report.kept] == [("module.lm_head", "output head")]


def test_a_module_registered_twice_is_replaced_in_both_places():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = convert(model)
    assert model[0] is model[2]
    assert isinstance(model[0], BitLinear)
    assert len(report.swapped) == 1
    restore(model)
    assert model[0] is model[2]
    assert type(model[0]) is nn.Linear


def test_the_bf16_recipe_swaps_nothing_and_the_report_says_so():
    model = gpt2()
    report = convert(model, "bf16")
    assert report.swapped == ()
    assert "quantises nothing" in str(report)
    assert bit_layers(model) == {}
    assert random_stream(model) is None


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        (
            nn.Sequential(nn.LayerNorm(4)),
            "nvfp4",
            "converts no layer of Sequential .it has no linear layers.*'bf16'",
        ),
        (mlp(), {"base": "nvfp4", "keep": ["*"]}, "converts no layer.*keep"),
        (nn.Linear(4, 4), "nvfp4", "itself a Linear.*nn.Sequential"),
        (mlp(), "nvfp5", "unknown recipe"),
    ],
)
def test_a_conversion_that_is_not_possible_is_rejected(model, recipe, message):
    with pytest.raises(UserError, match=message):
        convert(model, recipe)


def test_a_rejected_conversion_changes_nothing():
    model = mlp()
    with pytest.raises(UserError):
        convert(model, {"base": "nvfp4", "keep": ["nowhere"]})
    assert type(model[0]) is nn.Linear
    assert not model._forward_pre_hooks


def test_converting_twice_is_rejected_until_restored():
    model = mlp()
    convert(model)
    with pytest.raises(UserError, match=r"converted before.*restore"):
        convert(model)
    restore(model)
    assert len(convert(model).swapped) == 2


def test_restoring_a_bare_bitlinear_is_rejected():
    with pytest.raises(UserError, match="cannot replace the model itself"):
        restore(BitLinear(4, 4))


def test_each_training_forward_is_one_step_of_the_stream():
    model = mlp()
    convert(model, seed=9, rank=3)
    stream = random_stream(model)
    assert (stream.seed, stream.rank, stream.step) == (9, 3, 0)
    x = torch.randn(4, 32, requires_grad=True)
    model(x)
    model(x).sum().backward()
    assert stream.step == 2
    model.eval()(x)
    assert stream.step == 2
    model.train()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert stream.step == 3
    restore(model)
    model(x)
    assert stream.step == 3


def test_a_resumed_stream_repeats_gradients_bit_for_bit():
    def gradient(model):
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    first = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    convert(first, seed=4)
    gradient(first)
    state = random_stream(first).state_dict()
    expected = gradient(first)
    resumed = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    convert(resumed, seed=0)
    unlike = gradient(resumed)
    random_stream(resumed).load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(gradient(resumed), expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(unlike, expected, strict=True))


def test_ranks_round_gradients_with_different_random_numbers():
    grads = []
    for rank in (0, 1):
        model = mlp()
        convert(model, seed=1, rank=rank)
        model(torch.ones(4, 32)).square().sum().backward()
        grads.append(model[0].weight.grad)
    assert not torch.equal(*grads)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_advances_its_own_stream(duplicate):
    model = mlp()
    convert(model)
    copied = duplicate(model)
    copied(torch.randn(2, 32))
    assert random_stream(copied).step == 1
    assert random_stream(model).step == 0
    assert all(layer.random_stream is random_stream(copied) for layer in bit_layers(copied).values())


def test_an_observer_is_set_on_every_layer_and_removed_again():
    class Silent:
        def observe(self, layer, role, counts, error):
            pass

    model = mlp()
    convert(model)
    observer = Silent()
    set_observer(model, observer)
    assert all(layer.observer is observer for layer in bit_layers(model).values())
    set_observer(model, None)
    assert all(layer.observer is None for layer in bit_layers(model).values())


def test_converting_does_not_change_the_random_state():
    model = gpt2()
    state = torch.get_rng_state()
    convert(model)
    restore(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_plain_torch_models_are_converted_without_importing_transformers():
    code = (
        "import sys; from torch import nn; "
        "from megalowbit.layers.conversion.convert import convert, restore; "
        "model = nn.Sequential(nn.Linear(4, 4)); convert(model); restore(model); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
@pytest.mark.parametrize("numbers", [{"seed": 1.7}, {"seed": "x"}, {"seed": None}, {"rank": -1}])
def test_a_seed_or_rank_that_is_not_a_number_is_rejected_before_any_layer_is_swapped(recipe, numbers):
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(UserError, match=f"random stream {next(iter(numbers))} = "):
        convert(model, recipe, **numbers)
    assert type(model[0]) is nn.Linear
