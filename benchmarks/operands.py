"""What the inputs of a model's linear layers are like, and what a format makes of them.

    python benchmarks/operands.py --ds-config configs/gpt2_tiny_quality.json --weights runs/bf16/hf \
        --text heldout.jsonl --format nvfp4e2m1bnosr

Over all tokens of the text, for each layer that recipes convert, in float64:

blocks: of 16 elements in a row of the input
SNR: of the rounded input, in dB
output: SNR of the layer's output with the exact weight, without the mean over tokens: what tells tokens apart
kurtosis: 3 for a Gaussian; outliers raise it
peak: median over blocks of the largest magnitude ÷ root mean square of the block; 2.07 for a Gaussian
mean: share of the input's power in the means of its channels, which all tokens have in common
positive: share of the elements above 0; 50 % without one prevailing sign
lost: share of the elements that are not 0 and become 0
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.kept_layers import linear_layers, select_layers
from megalowbit.layers.recipe import recipe
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.sweep.layer_damage import check_text, split_into_sequences
from megalowbit.pretrain.sweep.study.evaluation import read_tokens
from megalowbit.quantize.names import quantizer
from megalowbit.shipped_files import find_config

BLOCK = 16
BATCH = 8  # sequences
HEADINGS = ("layer", "blocks", "SNR", "output", "kurtosis", "peak", "mean", "positive", "lost")


class Statistics:
    """Sums over the tokens that a layer has read.

    Args:
        weight: of the layer, (channels, outputs).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.double()
        channels, outputs = weight.shape
        self.tokens = self.positive = self.lost = self.nonzero = 0
        self.power = self.fourth = self.noise = 0.0
        self.sums = torch.zeros(channels, dtype=torch.float64)
        self.output_powers = torch.zeros(2, dtype=torch.float64)  # of the exact output, and of its error
        self.output_sums = torch.zeros(2, outputs, dtype=torch.float64)
        self.peaks: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, rounded: torch.Tensor) -> None:
        """Add inputs (tokens, channels), and the same rounded."""
        x, error = x.double(), rounded.double() - x.double()
        self.tokens += len(x)
        self.positive += int((x > 0).sum())
        self.nonzero += int((x != 0).sum())
        self.lost += int(((x != 0) & (rounded == 0)).sum())
        self.power += x.square().sum().item()
        self.fourth += x.pow(4).sum().item()
        self.noise += error.square().sum().item()
        self.sums += x.sum(0)
        outputs = torch.stack([x, error]) @ self.weight
        self.output_powers += outputs.square().sum((1, 2))
        self.output_sums += outputs.sum(1)
        blocks = x.reshape(len(x), -1, BLOCK)
        self.peaks.append((blocks.abs().amax(-1) / blocks.square().mean(-1).sqrt()).flatten().half())

    def row(self, name: str) -> tuple[str, ...]:
        """The line of a layer."""
        count = self.tokens * len(self.sums)
        exact, error = (self.output_powers - self.output_sums.square().sum(1) / self.tokens).tolist()
        return (
            name,
            str(len(self.sums) // BLOCK),
            f"{10 * math.log10(self.power / self.noise):.1f}",
            f"{10 * math.log10(exact / error):.1f}",
            f"{count * self.fourth / self.power**2:.1f}",
            f"{torch.cat(self.peaks).nanmedian().item():.2f}",
            f"{100 * self.sums.square().sum().item() / self.tokens / self.power:.0f} %",
            f"{100 * self.positive / count:.0f} %",
            f"{100 * self.lost / self.nonzero:.0f} %",
        )


@torch.no_grad()
def statistics(model: Any, sequences: torch.Tensor, name: str) -> dict[str, Statistics]:
    """Of each layer that the recipe `nvfp4` converts, with inputs rounded by the quantizer of this name."""
    chosen, found = quantizer(name), dict[str, Statistics]()
    if chosen.is_identity:
        raise UserError(f"--format {name} rounds nothing: name another quantizer")
    converted = select_layers(model, recipe("nvfp4")).to_swap
    for layer_name, layer in linear_layers(model).items():
        if layer_name not in converted:
            continue
        is_conv = type(layer).__name__ == "Conv1D"
        weight: torch.Tensor = layer.weight if is_conv else layer.weight.T
        if len(weight) % BLOCK:
            raise UserError(f"{layer_name} reads {len(weight)} numbers, which are no whole blocks of {BLOCK}")
        found[layer_name] = kept = Statistics(weight)

        def see(_module: Any, inputs: tuple[torch.Tensor], kept: Statistics = kept) -> None:
            x = inputs[0].flatten(0, -2)
            kept.add(x, chosen(x))

        layer.register_forward_pre_hook(see)
    for batch in sequences.split(BATCH):
        model(batch[:, :-1])
    return found


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument("--ds-config", type=Path, required=True, metavar="X.json")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--weights", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--format", default="nvfp4e2m1bnosr", metavar="QUANTIZER")
    options = parser.parse_args(arguments)
    data = load_config(find_config(options.ds_config), options.set, world_size=1).settings.data
    model: Any = build_model(ModelSettings(checkpoint=options.weights), seed=0).to(torch.bfloat16).eval()
    tokens = read_tokens(data, options.text)
    check_text(model, tokens, data.sequence_length)
    sequences = split_into_sequences(tokens, data.sequence_length, "loss")
    found = statistics(model, sequences, options.format)
    print(f"{sequences.shape[0] * data.sequence_length:,} tokens, {options.format}")
    print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
    for name, of in found.items():
        print("| " + " | ".join(of.row(name)) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
