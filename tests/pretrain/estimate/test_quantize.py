"""`python -m megalowbit quantize`: its files, figures and refusals, against references written here."""

import json
import math
import sys

import pytest
import tokenizers
import torch
from packed_decoding import e2m1, e4m3, times_blocks
from packed_models import SIZES
from safetensors import safe_open
from test_rounded_inputs import nearest
from tiny_models import tiny_model
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from launchers import training_text
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.pretrain.estimate.quantize import REPORT_FILE, TextOptions, quantize

LENGTH = 64
TEXT = training_text()[:1000]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder with a model of bytes, whose head prefers some tokens, and a text beside it."""
    monkeypatch.setenv("MEGALOWBIT_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", vocab_size=256, **SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_({"v_proj": 0.1, "up_proj": 4.0}.get(name.split(".")[-2], 1.0))
            parameter.mul_(3.0 if name.endswith("proj.weight") else 30.0 if "lm_head" in name else 1.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "hf"


def options(source, **more):
    return TextOptions(str(source.parent / "text.txt"), "byte", sequence_length=LENGTH, **more)


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def decoded(found, name):
    """A layer of the ModelOpt layout, in float64, from its bits."""
    values = times_blocks(e2m1(found[f"{name}.weight"]), e4m3(found[f"{name}.weight_scale"]))
    return torch.from_numpy(values) * found[f"{name}.weight_scale_2"].double()


def served_model(source, packed):
    """The model with weights decoded here."""
    model, found = AutoModelForCausalLM.from_pretrained(source).eval(), tensors_of(packed)
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            with torch.no_grad():
                layer.weight.copy_(decoded(found, name))
    return model


def rounded(x, encode):
    """E2M1 · E4M3 in blocks of 16 under a given tensor scale, a power of two.

    Elements are multiplied by the inverse scale in fp32: numbers in bf16 often are ties, which this decides.
    """
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (
        (blocks.abs().amax(-1, keepdim=True) / 6 * encode.float())
        .clamp(max=448)
        .to(torch.float8_e4m3fn)
        .float()
    )
    codes = nearest((blocks * torch.where(scale > 0, encode.float() / scale, 0.0)).double())
    return (codes * scale / encode).flatten(-2)


def loss_of(model, numbers):
    """Mean loss in nats of the tokens first + 1 … last, one sequence after the other, in float64."""
    ids = torch.tensor([*TEXT.encode(), 0])  # the byte tokenizer ends a document with 0
    total, count = 0.0, 0
    for number in numbers:
        first = number * LENGTH
        last = min(first + LENGTH, len(ids) - 1)
        start = max(0, last - LENGTH)
        with torch.no_grad():
            logits = model(ids[start : start + LENGTH][None], use_cache=False).logits[0].double()
        for place in range(first, last):
            total -= logits[place - start].log_softmax(-1)[ids[place + 1]].item()
            count += 1
    return total / count, count


def numbers_of(is_static):
    count = math.ceil(len(TEXT.encode()) / LENGTH)
    return [number for number in range(count) if not is_static or number % 4]


@pytest.mark.parametrize("inputs", ["none", "static"])
def test_the_report_has_the_losses_of_the_served_model_and_the_errors_of_its_weights(source, capsys, inputs):
    is_static, packed = inputs == "static", source.parent / "packed"
    report = quantize(source, packed, layout="modelopt", inputs=inputs, text=options(source))
    assert report == json.loads((packed / REPORT_FILE).read_text())
    plain, found = AutoModelForCausalLM.from_pretrained(source).eval(), tensors_of(packed)
    numbers = numbers_of(is_static)
    before, count = loss_of(plain, numbers)
    assert report["text"]["tokens"] == count
    assert report["before"]["loss"] == pytest.approx(before, rel=1e-6)
    if not is_static:  # rounded inputs amplify the order of sums: the next test compares them by layer
        after, _ = loss_of(served_model(source, packed), numbers)
        assert report["after"]["loss"] == pytest.approx(after, abs=1e-5)
    assert abs(report["after"]["loss"] - before) > 1e-3  # so that the comparison above means something
    assert report["before"]["bits_per_byte"] == pytest.approx(before / math.log(2), rel=0.01)
    assert report["before"]["perplexity"] == pytest.approx(math.exp(before), rel=1e-5)
    assert len(report["layers"]) == 14
    for each in report["layers"]:
        weight = plain.get_submodule(each["name"]).weight.detach().double()
        error = decoded(found, each["name"]) - weight
        snr = 10 * math.log10(weight.square().sum() / error.square().sum())
        assert each["snr_db"] == pytest.approx(snr)
        assert each["largest"] == pytest.approx((error.abs().max() / weight.abs().max()).item())
        assert 15 < snr < 30
    printed = capsys.readouterr().out
    assert "SNR (dB)" in printed
    assert "… and 4 layers with a higher SNR" in printed
    assert f"loss {before:.4f} nats" in printed
    assert ("more for calibration" in printed) == is_static
    assert (report["inputs_beyond_range"] is not None) == is_static


def test_each_layer_computes_with_decoded_weights_and_inputs_rounded_by_the_scales_in_the_files(source):
    calls = []

    def record(layer, inputs, output):
        if isinstance(layer, BitLinear):
            calls.append((layer.weight.detach(), inputs[0].detach(), output.detach()))

    packed = source.parent / "packed"
    with register_module_forward_hook(record):
        report = quantize(source, packed, layout="modelopt", inputs="static", text=options(source))
    found = tensors_of(packed)
    names = [name.removesuffix(".input_scale") for name in found if name.endswith(".input_scale")]
    after = calls[-len(names) * len(numbers_of(True)) :]
    compared, beyond, count = set(), 0, 0
    for weight, x, output in after:
        (name,) = (each for each in names if weight.double().equal(decoded(found, each).to(weight).double()))
        expected = rounded(x, 1 / found[f"{name}.input_scale"].double()).double() @ decoded(found, name).T
        unrounded = x.double() @ decoded(found, name).T
        error, effect = (expected - output).norm(), (expected - unrounded).norm()
        assert error < 0.0025 * expected.norm()  # the result is rounded to bf16
        assert effect > 0.03 * expected.norm()  # so that the line above can fail
        compared.add(name)
        if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj")):  # others read the same tensors
            beyond += int((x.abs() > report["input_maxima"][name]).sum())
            count += x.numel()
    assert compared == set(names)
    assert 0 < beyond < 0.01 * count
    assert report["inputs_beyond_range"] == beyond / count


def watched(source):
    """A model, and a mapping that gets the largest inputs of its projections."""
    model, largest = AutoModelForCausalLM.from_pretrained(source).eval(), {}

    def record(name):
        def hook(_, inputs):
            largest[name] = max(largest.get(name, 0.0), inputs[0].abs().max().item())

        return hook

    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.register_forward_pre_hook(record(name))
    return model, largest


@pytest.mark.parametrize("adds_begin", [True, False])
def test_calibration_begins_with_the_token_that_servers_put_before_a_text(source, capsys, adds_begin):
    begin, folder = 1, source.parent / "tokenizer"  # a byte that the text does not have
    ByteTokenizer().save_pretrained(folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = made.id_to_token(begin)
    if adds_begin:
        parts = {"single": f"{name} $A", "special_tokens": [(name, begin)]}
        made.post_processor = tokenizers.processors.TemplateProcessing(**parts)
    saved = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="\0", bos_token=name)
    saved.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():  # as trained LLaMAs have there
        model.model.embed_tokens.weight[begin] *= 50
    model.save_pretrained(source)
    text = options(source)._replace(tokenizer=str(folder))
    report = quantize(source, source.parent / "packed", layout="modelopt", inputs="static", text=text)
    model, largest = watched(source)
    ids = torch.tensor([*TEXT.encode(), 0])
    first = torch.tensor([begin] * adds_begin, dtype=torch.long)
    for number in numbers_of(False)[::4]:
        start = min(number * LENGTH, len(ids) - 1 - LENGTH)
        model(torch.cat([first, ids[start : start + LENGTH]])[None, :LENGTH])
    assert report["input_maxima"] == pytest.approx(largest)
    assert report["text"]["calibration_begins_with"] == (name if adds_begin else None)
    assert (f"more for calibration, after {name!r} as on servers" in capsys.readouterr().out) == adds_begin
    before, _ = loss_of(model, numbers_of(True))
    assert report["before"]["loss"] == pytest.approx(before, rel=1e-6)  # evaluated text has no such token


def test_input_scales_are_those_of_the_calibration_sequences(source):
    packed = source.parent / "packed"
    report = quantize(source, packed, layout="modelopt", inputs="static", text=options(source))
    model, largest = watched(source)
    calibrating = [number for number in numbers_of(False) if number % 4 == 0]
    loss_of(model, calibrating)
    assert report["input_maxima"] == pytest.approx(largest)
    assert report["text"]["calibration_sequences"] == len(calibrating)
    found = tensors_of(packed)
    for name, maximum in largest.items():
        assert found[f"{name}.input_scale"].item() == 2.0 ** -math.floor(math.log2(2688 / maximum))


def test_layers_of_8_bits_are_evaluated_as_the_folder_has_them(source):
    attention, calls = {}, []
    for name, layer in AutoModelForCausalLM.from_pretrained(source).named_modules():
        if name.endswith("_proj") and "self_attn." in name:
            attention[name] = layer.weight.detach()

    def record(layer, inputs, output):
        if isinstance(layer, BitLinear):
            calls.append((layer.weight.detach(), inputs[0].detach(), output.detach()))

    packed = source.parent / "packed"
    with register_module_forward_hook(record):
        report = quantize(
            source, packed, layout="modelopt", recipe="nvfp4-attention-fp8", inputs="static",
            text=options(source),
        )  # fmt: skip
    assert len(report["input_maxima"]) == len(report["layers"]) == 6
    assert not attention.keys() & report["input_maxima"].keys()
    assert "| recipe | nvfp4-attention-fp8 |" in (packed / "README.md").read_text()
    compared = 0
    for weight, x, output in calls[-14 * len(numbers_of(True)) :]:
        if any(weight.equal(each) for each in attention.values()):
            assert output.equal(torch.nn.functional.linear(x, weight))
            compared += 1
    assert compared == 8 * len(numbers_of(True))


def test_without_a_text_only_weights_are_compared(source, capsys):
    packed = source.parent / "packed"
    report = quantize(source, packed, recipe="mxfp4")
    assert {"before", "after", "text"}.isdisjoint(report)
    assert "14 layers packed as MXFP4 (w4a16, compressed-tensors)" in capsys.readouterr().out
    card = (packed / "README.md").read_text()
    assert "whose weights megalowbit has rounded without training it" in card
    assert "| recipe | mxfp4 |" in card
    assert "| dtype of these weights | mxfp4 (w4a16, compressed-tensors), others bfloat16 |" in card
    with pytest.raises(UserError, match="already exists and is never overwritten"):
        quantize(source, packed)


def test_a_dry_run_writes_nothing(source, capsys):
    before = sorted(source.parent.iterdir())
    text = options(source)
    assert quantize(source, source.parent / "packed", inputs="static", text=text, is_dry_run=True) is None
    assert sorted({*source.parent.iterdir(), *before} - {source.parent / "cache"}) == before
    printed = capsys.readouterr().out
    assert "model.safetensors: " in printed
    assert "14 layers as NVFP4 (compressed-tensors); 1 linear layer in bf16" in printed
    assert "text.txt, " in printed


def test_a_text_of_one_sequence_calibrates_and_is_evaluated_and_says_so(source, capsys):
    report = quantize(source, source.parent / "packed", inputs="static", text=options(source, tokens=LENGTH))
    assert report["text"]["calibration_is_evaluated"]
    assert "too short for two parts, so the same sequence calibrates" in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors needs Python 3.11")
def test_transformers_loads_the_folder_with_the_evaluated_loss(source):
    packed = source.parent / "packed"
    report = quantize(source, packed, text=options(source))
    loaded = AutoModelForCausalLM.from_pretrained(packed).eval()
    assert loss_of(loaded, numbers_of(False))[0] == pytest.approx(report["after"]["loss"], rel=1e-6)


def test_tied_weights_and_tokenizers_are_kept(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True, **SIZES)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    quantize(tmp_path / "hf", tmp_path / "packed", layout="modelopt")
    assert (tmp_path / "packed" / "tokenizer.json").read_text() == "{}"
    found = tensors_of(tmp_path / "packed")
    assert "lm_head.weight" not in found
    assert found["model.embed_tokens.weight"].equal(model.lm_head.weight.detach().bfloat16())


def test_models_and_texts_that_do_not_fit_are_refused_before_anything_is_written(source, tmp_path):
    for arguments, message in (
        ({"inputs": "static"}, "--inputs static needs a text that gives the range of the inputs"),
        ({"text": options(source)._replace(tokenizer=None)}, "has no tokenizer: name its folder"),
        ({"text": options(source)._replace(sequence_length=4096)}, "4096"),
        ({"text": options(source)._replace(path=str(tmp_path / "no.txt"))}, "no.txt"),
        ({"recipe": "metis-nvfp4", "inputs": "static", "text": options(source)}, "split_input"),
    ):
        with pytest.raises(UserError, match=message):
            quantize(source, tmp_path / "packed", **arguments)
    with pytest.raises(UserError, match="is inside"):
        quantize(source, source / "packed")
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="replaces a Conv1D"):
        quantize(tmp_path / "gpt2", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
