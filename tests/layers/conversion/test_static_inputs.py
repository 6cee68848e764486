"""Recorded ranges against brute force; with them, a token's numbers depend on no other token."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.conversion.evaluation import evaluation
from megalowbit.layers.conversion.precision_switch import switch_precision
from megalowbit.layers.conversion.static_inputs import (
    InputRanges,
    StaticInputs,
    beyond_range,
    needs_static_inputs,
    record_inputs,
    static_inputs_of,
    use_static_inputs,
    why_not_static,
)
from megalowbit.layers.recipe import recipe, recipes

LENGTH, WIDTH = 32, 64
OUTLIER = 3e5  # a power-of-two tensor scale matters to much smaller blocks only
FIELDS = ("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight")
NVFP4_FP32_SCALE = {"base": "nvfp4", **dict.fromkeys(FIELDS, "nvfp4e2m1bnosr:fp32_scale")}
MEAN_FP32_SCALE = {**NVFP4_FP32_SCALE, "split_input": {"method": "mean"}}
STATIC = {
    "nvfp4": "nvfp4",
    "fp32_scale": NVFP4_FP32_SCALE,
    "mean": "metis-nvfp4",
    "mean, fp32_scale": MEAN_FP32_SCALE,
    "mean of mxfp4": {"base": "mxfp4", "split_input": {"method": "mean"}},
    "per_gemm": {"base": "nvidia-nvfp4", "keep_last": 0},
    "fp8": "fp8",
}


def llama(chosen, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    convert(model, chosen)
    return model


def gpt2(chosen, dtype=torch.float64):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(dtype).eval()
    with torch.no_grad():
        model.transformer.wte.weight[1] *= 30  # makes the scale of a batch depend on who is in it
    convert(model, chosen)
    return model


def layer(chosen, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 48)).to(dtype)
    convert(model, chosen)
    return model.eval()


def inputs_of(model, batches):
    """All inputs of each layer, (tokens, in_features), as its forwards get them."""
    seen, hooks = {}, []
    for name, each in bit_layers(model).items():
        keep = seen.setdefault(name, [])
        hooks.append(
            each.register_forward_pre_hook(
                lambda _, x, keep=keep: keep.append(x[0].detach().flatten(0, -2).clone())
            )
        )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(each).double() for name, each in seen.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", ["nvfp4", "metis-nvfp4"])
def test_recorded_numbers_are_those_of_all_inputs(chosen, dtype):
    model = llama(chosen, dtype).eval()
    batches = [torch.randint(0, 64, (rows, 16)) for rows in (3, 1, 2)]
    seen = inputs_of(model, batches)
    with record_inputs(model) as ranges, torch.inference_mode():
        for batch in batches:
            model(batch)
    found = ranges.result()
    assert list(found.maxima) == list(seen)
    for name, inputs in seen.items():
        assert found.maxima[name] == inputs.abs().max()
        if chosen == "nvfp4":
            continue
        torch.testing.assert_close(found.means[name].double(), inputs.mean(0), rtol=1e-4, atol=1e-6)
        residual = (inputs - found.means[name].double()).abs().max()
        assert found.residual_maxima[name] == pytest.approx(residual.item(), rel=1e-6)
    assert (found.means == {}) == (found.residual_maxima == {}) == (chosen == "nvfp4")
    attention = "model.layers.0.self_attn."
    assert len({found.maxima[attention + name] for name in ("q_proj", "k_proj", "v_proj")}) == 1
    assert all(each.input_record is None for each in bit_layers(model).values())


def test_a_record_is_made_in_training_and_once_for_a_repeated_forward():
    model = llama("metis-nvfp4")
    x = torch.randn(2, 16, WIDTH, requires_grad=True)
    block = model.model.layers[0].mlp
    with record_inputs(model) as ranges:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    state = ranges.state_dict()
    assert state["model.layers.0.mlp.up_proj"]["sums"][1].unique().tolist() == [32]
    assert "model.layers.1.mlp.up_proj" not in state
    switch_precision(model, "forward")  # whoever exports needs the range of inputs that are not quantised
    with record_inputs(model) as ranges:
        block(x)
    assert ranges.result().maxima["model.layers.0.mlp.up_proj"] == x.abs().max()


def test_an_evaluation_in_training_is_not_recorded():
    model = llama("nvfp4")
    with record_inputs(model) as ranges:
        with evaluation(model, [0]):
            model(torch.zeros(1, 4, dtype=torch.long))
        assert ranges.state_dict() == {}
        model(torch.zeros(1, 4, dtype=torch.long))
        assert len(ranges.state_dict()) == len(bit_layers(model))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_not_finite_are_left_out(value):
    x = torch.randn(8, WIDTH)
    bad = x.clone()
    bad[3, 5] = value
    for chosen in ("nvfp4", "metis-nvfp4"):
        model = layer(chosen)
        with record_inputs(model) as ranges:
            model(x)
            model(2 * bad)
        found = ranges.result()
        if chosen == "nvfp4":
            assert found.maxima["0"] == x.abs().max()  # of the first input
            continue
        others = [column for column in range(WIDTH) if column != 5]
        both = torch.cat([x, 2 * bad])[:, others]
        torch.testing.assert_close(found.means["0"][others], both.mean(0))
        torch.testing.assert_close(found.means["0"][5], x[:, 5].mean())
        assert found.maxima["0"] == max(both.abs().max(), x.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", STATIC.values(), ids=STATIC)
def test_a_layer_with_static_inputs_treats_each_token_alone(chosen, dtype):
    model = layer(chosen, dtype)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    turned = x.clone()
    turned[:, LENGTH // 2 :] *= OUTLIER
    with record_inputs(model) as ranges:
        model(x)
    for is_static in (False, True):
        use_static_inputs(model, ranges.result() if is_static else None)
        with torch.no_grad():
            before, after = (model(each)[:, : LENGTH // 2] for each in (x, turned))
        assert torch.equal(before, after) == is_static


def test_the_quantised_input_is_that_of_the_recorded_numbers():
    """Against NVFP4 in float64: scales relative to the recorded maximum, elements rounded to E2M1."""
    model = layer(MEAN_FP32_SCALE, torch.float64)
    x = torch.randn(5, WIDTH, dtype=torch.float64) + 1
    mean = torch.linspace(-1, 1, WIDTH)
    numbers = {"maxima": {"0": 9.0}, "means": {"0": mean}, "residual_maxima": {"0": 2.5}}
    use_static_inputs(model, StaticInputs.from_dict(numbers))
    encode = 448 * 6 / 2.5
    residual = (x - mean).reshape(5, -1, 16)
    scales = (residual.abs().amax(2, keepdim=True) / 6 * encode).clamp(max=448)
    scales = scales.float().to(torch.float8_e4m3fn).double()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    wanted = (residual.abs() * encode / scales).clamp(max=6)
    rounded = grid[(wanted.unsqueeze(-1) - grid).abs().argmin(-1)] * residual.sign()
    decoded = (rounded * scales / encode).reshape(5, WIDTH) + mean
    weight = model[0].weight
    quantised = mlb.quantizer("nvfp4e2m1bnosr:fp32_scale")(weight)
    expected = decoded @ quantised.T + model[0].bias
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        use_static_inputs(model, None)
        assert (model(x) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("chosen", ["fp32_scale", "mean, fp32_scale", "fp8"])
def test_logits_do_not_depend_on_batch_padding_later_tokens_or_cache(chosen):
    model = gpt2(STATIC[chosen])  # in float64: sums in another order must turn no code
    tokens = torch.randint(2, 64, (8, LENGTH))
    tokens[3:, 20:] = 1  # the rare token of large inputs
    with record_inputs(model) as ranges, torch.no_grad():
        model(tokens)
    for is_static in (False, True):
        use_static_inputs(model, ranges.result() if is_static else None)
        with torch.no_grad():
            whole = model(tokens).logits
            alone = torch.cat([model(each[None]).logits for each in tokens])
            half = model(tokens[:, : LENGTH // 2]).logits
            padded = torch.nn.functional.pad(tokens[:1], (9, 0))
            mask = torch.nn.functional.pad(torch.ones_like(tokens[:1]), (9, 0))
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            behind = model(padded, attention_mask=mask, position_ids=positions).logits[:, 9:]
            past = model(tokens[:, :12], use_cache=True).past_key_values
            cached = model(tokens[:, 12:13], past_key_values=past).logits
        pairs = {
            "batch": (alone, whole),
            "later": (half, whole[:, : LENGTH // 2]),
            "padding": (behind, whole[:1]),
            "cache": (cached, whole[:, 12:13]),
        }
        changes = {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}
        if is_static:
            assert max(changes.values()) < 1e-9, changes
        else:
            assert min(changes.values()) > 1e-4, changes


def test_training_mode_is_as_without():
    x = torch.randn(4, WIDTH)
    model = layer("metis-nvfp4").train()
    with record_inputs(model) as ranges, torch.no_grad():
        model(x / 10)
    before = model(x)
    use_static_inputs(model, ranges.result())
    assert torch.equal(model(x), before)
    assert not torch.equal(model.eval()(x), before)


def test_elements_beyond_the_recorded_range_saturate_and_are_counted():
    model = llama("fp8").eval()
    block = model.model.layers[0].mlp
    x = torch.randn(4, 8, WIDTH)
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    maxima = {**dict.fromkeys(bit_layers(model), 1e3), **dict.fromkeys(names, 1.0)}
    use_static_inputs(model, StaticInputs(maxima=maxima), count_beyond=True)
    with torch.no_grad():
        block(x)
        elements, beyond = beyond_range(model).tolist()
        assert beyond == (x.abs() > 1).sum()
        assert elements == x.numel() + 4 * 8 * 96  # gate and up quantise theirs once
        assert torch.equal(block.gate_proj(10 * x.sign()), block.gate_proj(x.sign()))
    use_static_inputs(model, StaticInputs(maxima=maxima))
    assert beyond_range(model).tolist() == [0, 0]


def test_ranges_continue_from_a_saved_state():
    x = torch.randn(6, WIDTH)
    for chosen in ("nvfp4", "metis-nvfp4"):
        model = layer(chosen)
        with record_inputs(model) as whole:
            model(x)
        with record_inputs(model) as first:
            model(x[:2])
        ranks = [InputRanges(model, model[0].recipe) for _ in range(2)]
        for rank, ranges in enumerate(ranks):
            ranges.load_state_dict({**first.state_dict(), "another": {}}, is_first=rank == 0)
            ranges.record(is_on=True)
            model(x[2 + 2 * rank : 4 + 2 * rank])
            ranges.record(is_on=False)
        states = [ranges.state_dict()["0"] for ranges in ranks]
        summed = {"bounds": torch.maximum(*(each["bounds"] for each in states))}
        if chosen != "nvfp4":
            summed["sums"] = states[0]["sums"] + states[1]["sums"]
        found, expected = static_inputs_of({"0": summed}), whole.result()
        assert found.maxima == expected.maxima
        for name, mean in expected.means.items():
            torch.testing.assert_close(found.means[name], mean)
        other = InputRanges(layer("metis-nvfp4" if chosen == "nvfp4" else "nvfp4"), recipe("nvfp4"))
        ranks[0].clear()
        assert ranks[0].state_dict() == {}
        if chosen != "nvfp4":
            with pytest.raises(UserError, match="do not fit the recipe"):
                other.load_state_dict(whole.state_dict(), is_first=True)


def test_copies_keep_static_inputs_but_no_record_and_restored_layers_are_plain():
    model = layer("nvfp4")
    with record_inputs(model) as ranges:
        model(torch.randn(4, WIDTH))
        assert copy.deepcopy(model)[0].input_record is None
    use_static_inputs(model, ranges.result())
    assert copy.deepcopy(model)[0].static_input.maximum == ranges.result().maxima["0"]
    restore(model)
    assert "static_input" not in model[0].__dict__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_input": {"method": "qb", "rank": 4}}, "split_input 'qb' takes directions from each batch"),
        ({"layout": "per_gemm", "hadamard": ["output"]}, "after a Hadamard transform is not recorded"),
        ({"q_forward_input": "1p58bit"}, "'1p58bit' scales by the mean magnitude"),
    ],
)
def test_recipes_whose_inputs_depend_on_a_batch_otherwise_are_refused(changes, message):
    model = layer({"base": "nvfp4", **changes})
    with pytest.raises(UserError, match=message):
        use_static_inputs(model, StaticInputs(maxima={"0": 1.0}))
    assert model[0].static_input is None


def test_what_was_not_recorded_is_refused():
    for chosen, what in (("nvfp4", "the inputs of 0"), ("metis-nvfp4", "the mean of the inputs of 0")):
        with pytest.raises(UserError, match=f"{what} were not recorded"):
            use_static_inputs(layer(chosen), StaticInputs(maxima={}))
    use_static_inputs(layer("mxfp4"), StaticInputs(maxima={}))  # needs none
    short = {"maxima": {}, "means": {"0": torch.zeros(3)}, "residual_maxima": {"0": 1.0}}
    with pytest.raises(UserError, match="has 3 features, and the layer 64"):
        use_static_inputs(layer("metis-nvfp4"), StaticInputs.from_dict(short))
    with pytest.raises(UserError, match="has no BitLinear layer"), record_inputs(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "static inputs are 3"),
        ({"maxima": 3}, "static inputs are"),
        ({"maxima": {"a": math.nan}}, "maximum of the inputs of a is nan"),
        ({"maxima": {"a": "1"}}, "maximum of the inputs of a is '1'"),
        ({"maxima": {}, "means": {"a": torch.tensor([math.inf])}}, "mean of the inputs of a"),
    ],
)
def test_stored_values_are_checked(values, message):
    with pytest.raises(UserError, match=message):
        StaticInputs.from_dict(values)


def test_which_recipes_need_static_inputs():
    causal = {"mxfp4", "mxfp4-rht", "speculative-int8", "metis-seed", "mxfp8", "fp8-blocks", "bf16"}
    causal |= {"nvfp4-token-scale", "quartet", "hif4", "ue5m3-fp4"}
    needing = {name for name, each in recipes().items() if needs_static_inputs(each)}
    assert needing == recipes().keys() - causal
    refused = {name: reason for name in recipes() if (reason := why_not_static(recipe(name)))}
    assert refused.keys() == {"tetrajet-2"}
    assert refused["tetrajet-2"].startswith("split_input 'channels' takes directions from each batch")
