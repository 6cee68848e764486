"""Statistics of inputs, against the same ones of all inputs at once."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.operands import BATCH, HEADINGS, Statistics, main, statistics
from launchers import write_config
from megalowbit.quantize.names import quantizer

FORMAT = "nvfp4e2m1bnosr"


def expected_row(name, x, weight, rounded):
    x, rounded, weight = (each.double().numpy() for each in (x, rounded, weight))
    error = rounded - x
    exact, wrong = x @ weight, error @ weight
    blocks = np.abs(x).reshape(-1, 16)
    peak = np.median(blocks.max(1) / np.sqrt((blocks**2).mean(1)))
    return (
        name,
        str(x.shape[1] // 16),
        f"{10 * np.log10((x**2).sum() / (error**2).sum()):.1f}",
        f"{10 * np.log10(exact.var(0).sum() / wrong.var(0).sum()):.1f}",
        f"{(x**4).mean() / (x**2).mean() ** 2:.1f}",
        f"{peak:.2f}",
        f"{100 * (x.mean(0) ** 2).sum() / (x**2).mean(0).sum():.0f} %",
        f"{100 * (x > 0).mean():.0f} %",
        f"{100 * ((x != 0) & (rounded == 0)).sum() / (x != 0).sum():.0f} %",
    )


def test_a_row_is_that_of_all_tokens_together():
    torch.manual_seed(0)
    x = torch.randn(63, 48).exp() + torch.randn(48)  # heavy tails, and means by channel
    x[0, :3] = 0
    weight, chosen = torch.randn(48, 20), quantizer(FORMAT)
    found = Statistics(weight)
    rounded = chosen(x)
    for part in (slice(0, 40), slice(40, 63)):
        found.add(x[part], rounded[part])
    assert found.row("layer") == expected_row("layer", x, weight, rounded)


def test_each_converted_layer_of_a_model_has_the_inputs_that_it_reads():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=64)).eval()
    sequences = torch.randint(64, (BATCH + 2, 17))
    found = statistics(model, sequences, FORMAT)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(found) == [f"transformer.h.0.{name}" for name in names]
    assert {each.tokens for each in found.values()} == {16 * (BATCH + 2)}
    block = model.transformer.h[0]
    hidden = model.transformer.wte(sequences[:, :-1]) + model.transformer.wpe(torch.arange(16))
    first = block.ln_1(hidden).detach().flatten(0, 1)
    found_sums = found["transformer.h.0.attn.c_attn"].sums
    assert torch.allclose(found_sums, first.double().sum(0), rtol=0, atol=1e-4)
    assert torch.equal(found["transformer.h.0.attn.c_attn"].weight, block.attn.c_attn.weight.double())


def test_the_command_prints_a_line_for_each_layer(tmp_path, capsys):
    torch.manual_seed(0)
    config = write_config(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=256))
    model.save_pretrained(tmp_path / "hf")
    text = tmp_path / "heldout.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    arguments = ["--ds-config", str(config), "--weights", str(tmp_path / "hf"), "--text", str(text)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| " + " | ".join(HEADINGS) + " |"
    assert len(lines) == 3 + 8


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (32, ["--format", "fp32"], "--format fp32 rounds nothing"),
        (24, [], "c_attn reads 24 numbers, which are no whole blocks of 16"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_no_table(tmp_path, capsys, width, options, message):
    config = write_config(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=1, n_head=2, n_positions=64, vocab_size=256))
    model.save_pretrained(tmp_path / "hf")
    text = tmp_path / "heldout.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    arguments = ["--ds-config", str(config), "--weights", str(tmp_path / "hf"), "--text", str(text), *options]
    assert main(arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert message in done.err
