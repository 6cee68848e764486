"""LoRA by PEFT on converted models: the base in FP4, adapters in high precision."""

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_model

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.other_loops import check_training

# no random numbers, so that a reference can repeat the backward
RECIPE = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}  # c_proj: square and not
IDS = torch.arange(48).reshape(2, 24) * 7 % 64
SCALING = 2.0  # lora_alpha / r


def adapted(kind, recipe="nvfp4", **more):
    """A converted model with adapters that are not zero."""
    model = tiny_model(kind)
    mlb.convert(model, recipe)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[kind], task_type="CAUSAL_LM", **more)
    found = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return found


def adapters(model):
    """Layer → A (r, in) and B (out, r), in float64."""
    return {
        name: tuple(
            getattr(module, part)["default"].weight.detach().double() for part in ("lora_A", "lora_B")
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


@pytest.mark.parametrize("place", ["model.layers.1.mlp.down_proj", "transformer.h.1.attn.c_proj"])
def test_outputs_and_gradients_of_a_layer_are_those_of_float64(place):
    model = adapted("llama" if "down" in place else "gpt2", RECIPE)
    layer = model.get_submodule(f"base_model.model.{place}")
    base = layer.base_layer
    a, b = adapters(model)[f"base_model.model.{place}"]
    torch.manual_seed(2)
    x = torch.randn(32, base.in_features, requires_grad=True)
    gradient = torch.randn(32, base.out_features)
    output = layer(x)
    output.backward(gradient)
    quantize = mlb.quantizer("nvfp4e2m1bnosr")
    weight, g, inputs = base.weight.detach(), gradient.double(), x.detach().double()
    bias = 0 if base.bias is None else base.bias.detach().double()
    rounded = quantize(x.detach()).double() @ quantize(weight).double().T + bias
    expected = rounded + SCALING * inputs @ a.T @ b.T
    # the layout single_copy: both products have the same codes of the weight
    grad_input = quantize(gradient).double() @ quantize(weight).double() + SCALING * g @ b @ a
    for found, wanted in (
        (output, expected),
        (x.grad, grad_input),
        (layer.lora_A["default"].weight.grad, SCALING * b.T @ g.T @ inputs),
        (layer.lora_B["default"].weight.grad, SCALING * g.T @ inputs @ a.T),
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    assert (rounded - (inputs @ weight.double().T + bias)).abs().max() > 0.01  # the base is in FP4
    assert base.weight.grad is None


@pytest.mark.parametrize("kind", TARGETS)
def test_training_changes_the_adapters_only(kind):
    model = adapted(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_training(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(8):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert mlb.product_counts(model)["output"]["bf16"] == 8 * len(bit_layers(model))


@pytest.mark.parametrize("kind", TARGETS)
def test_merged_weights_are_the_sum_and_keep_their_orientation(kind):
    """Of square weights, too, where a transposed product would fit."""
    model = adapted(kind)
    expected = {
        name.removeprefix("base_model.model."): model.get_submodule(name).base_layer.weight.detach().double()
        + SCALING * b @ a
        for name, (a, b) in adapters(model).items()
    }
    merged = model.merge_and_unload()
    assert len(expected) == {"llama": 4, "gpt2": 6}[kind]
    for name, weight in expected.items():
        torch.testing.assert_close(merged.get_submodule(name).weight.double(), weight, rtol=0, atol=1e-6)
    low_bit = bit_layers(merged)
    assert expected.keys() < low_bit.keys()
    weights = {name: layer.weight.detach().clone() for name, layer in low_bit.items()}
    mlb.restore(merged)
    for name, weight in weights.items():
        plain = merged.get_submodule(name).weight
        assert plain.equal(weight.T if kind == "gpt2" else weight)


@pytest.mark.parametrize("kind", TARGETS)
def test_saved_adapters_are_loaded_into_converted_and_into_plain_models(kind, tmp_path):
    model = adapted(kind).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(IDS).logits
        base = tiny_model(kind)
        mlb.convert(base, "nvfp4")
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert loaded(IDS).logits.equal(expected)
    plain = PeftModel.from_pretrained(tiny_model(kind), tmp_path / "adapter").merge_and_unload()
    merged = model.merge_and_unload()
    mlb.restore(merged)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TARGETS)
def test_adapters_must_be_added_to_converted_models_and_removed_before_they_are_restored(kind):
    config = LoraConfig(r=4, target_modules=TARGETS[kind], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(kind), config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (model, model.base_model.model):
        with pytest.raises(UserError, match="convert is refused: convert the model before get_peft_model"):
            mlb.convert(each, "nvfp4")
    after = model.state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())
    with pytest.raises(UserError, match="restore is refused: merge_and_unload them first"):
        mlb.restore(adapted(kind))


def test_adalora_trains_whose_adapters_add_to_the_output_in_place():
    model = tiny_model("llama")
    mlb.convert(model, "nvfp4")
    config = AdaLoraConfig(target_modules=["q_proj", "down_proj"], total_step=10, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    adapted(IDS, labels=IDS).loss.backward()
    gradients = {
        name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad
    }
    assert len(gradients) == 12  # A, B and E of four layers
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())


def test_trainer_trains_adapters_and_modules_to_save(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = tiny_model("llama")
    mlb.convert(model, RECIPE)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    arguments = TrainingArguments(
        tmp_path / "out", max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, save_steps=4, disable_tqdm=True, seed=1,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = Trainer(adapted, arguments, train_dataset=rows)
    trainer.train()
    changed = {name for name, value in adapted.state_dict().items() if not value.equal(before[name])}
    assert changed
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    assert any("modules_to_save" in name for name in changed)
    base = tiny_model("llama")
    mlb.convert(base, RECIPE)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out" / "checkpoint-4")
    with torch.no_grad():
        assert loaded.eval()(IDS).logits.equal(adapted.eval()(IDS).logits)
