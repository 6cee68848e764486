"""W4A4: what a loaded model does to its inputs, compared with the forward of the training."""

import math

import pytest
import torch
from packed_models import PROMPT, converted_model, emulated, greedy
from transformers import AutoModelForCausalLM

from megalowbit.hf.packed.export import export_packed_model
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.quantize.names import quantizer

TEXT = torch.arange(240).reshape(4, 60) * 7 % 64


def largest_inputs(model, tokens):
    """Layer → largest magnitude of its input in the model's forward."""
    found = {}

    def record(name):
        def hook(_, inputs):
            found[name] = max(found.get(name, 0.0), inputs[0].detach().abs().max().item())

        return hook

    handles = [layer.register_forward_pre_hook(record(name)) for name, layer in bit_layers(model).items()]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return found


def nearest(x):
    """E2M1 numbers, ties to the even code."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (x.abs().clamp(max=6).unsqueeze(-1) - grid).abs()
    is_near = distance == distance.amin(-1, keepdim=True)
    order = torch.tensor([0, 9, 1, 9, 1, 9, 1, 9])  # of two codes as near, the even one
    return torch.sign(x) * grid[torch.where(is_near, order, 10).argmin(-1)]


def as_compressed_tensors(x, largest):
    """How the package rounds a bf16 input: as NVFP4, but the maximum of a block is divided by 6 in bf16.

    Block scales are E4M3 numbers under the tensor scale of the file, elements are rounded to nearest even.
    """
    encode = 2.0 ** math.floor(math.log2(2688 / largest))
    blocks = x.unflatten(-1, (-1, 16))
    sixth = blocks.abs().amax(-1, keepdim=True) / 6
    scale = (sixth.float() * encode).to(torch.float8_e4m3fn).double() / encode
    scale = torch.where(scale == 0, 0.125 / encode, scale)
    wanted = (blocks.double() / scale).float().double()  # the package divides in fp32
    return (nearest(wanted) * scale).to(x.dtype).flatten(-2)


def hooked(model, round_input):
    """The model with `round_input(layer name, input)` before each of these layers."""
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.register_forward_pre_hook(lambda _, inputs, name=name: (round_input(name, inputs[0]),))
    return model


@pytest.fixture
def exported(tmp_path):
    model = converted_model("llama", "nvfp4").eval()
    maxima = largest_inputs(model, TEXT)
    maxima["model.layers.0.self_attn.k_proj"] *= 4  # fused layers get one scale, that of the largest
    report = export_packed_model(
        model, tmp_path / "packed", "compressed-tensors", precision="w4a4", input_maxima=maxima
    )
    assert "(w4a4, compressed-tensors)" in str(report)
    for name in ("q_proj", "v_proj"):
        maxima[f"model.layers.0.self_attn.{name}"] = maxima["model.layers.0.self_attn.k_proj"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    return model, maxima, loaded, emulated(model, tmp_path / "plain")


def test_a_loaded_model_rounds_inputs_with_the_recorded_scales(exported):
    """The reference is the emulated model with the package's way to round inputs, written out above."""
    _, maxima, loaded, reference = exported
    tokens, logits = greedy(loaded)
    hooked(reference, lambda name, x: as_compressed_tensors(x, maxima[name]))
    expected_tokens, expected_logits = greedy(reference)
    assert len(set(tokens.flatten().tolist())) > 5
    assert tokens.equal(expected_tokens)
    assert logits.equal(expected_logits)
    for name, largest in maxima.items():
        scale = loaded.get_submodule(name).input_global_scale.item()
        assert scale == 2.0 ** math.floor(math.log2(2688 / largest))


def test_the_package_rounds_few_blocks_of_inputs_otherwise_than_the_training(exported):
    """It divides in bf16, and then a block scale may be the neighbour; all else is the quantizer's."""
    _, maxima, _, reference = exported
    differing = total = 0

    def compare(name, x):
        nonlocal differing, total
        ours = quantizer("nvfp4e2m1bnosr").quantize(x, tensor_amax=maxima[name]).dequantize()
        theirs = as_compressed_tensors(x, maxima[name])
        differs = (ours != theirs).unflatten(-1, (-1, 16)).any(-1)
        differing, total = differing + int(differs.sum()), total + differs.numel()
        return ours

    with torch.no_grad():
        hooked(reference, compare)(TEXT)
    assert 0 < differing < 0.02 * total


def test_mxfp4_needs_no_recorded_inputs(tmp_path):
    """Its scales come from each block; the package rounds them by its own rule, up from 1.75 · 2ⁿ."""
    model = converted_model("llama", "mxfp4")
    export_packed_model(model, tmp_path / "packed", "compressed-tensors", precision="w4a4")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    reference = emulated(model, tmp_path / "plain")

    def round_input(_, x):
        blocks = x.unflatten(-1, (-1, 32)).double()
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # mantissa in [0.5, 1)
        scale = torch.exp2((exponent - 1 + (mantissa >= 0.875).int() - 2).double())
        return (nearest(blocks / scale) * scale).flatten(-2).to(x.dtype)

    hooked(reference, round_input)
    with torch.no_grad():
        assert loaded(PROMPT).logits.equal(reference(PROMPT).logits)
