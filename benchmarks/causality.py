"""How much a token's logits depend on what causal attention hides: later tokens, the batch, the cache.

    python launch/pretrain.py --ds-config configs/gpt2_tiny_quality.json --set megalowbit.recipe=bf16 \\
        --set megalowbit.checkpoint.export_hf=true --run-dir runs/causality
    python benchmarks/causality.py --checkpoint runs/causality/hf

Tensor scales, means over tokens and split directions depend on all tokens of a forward. Each recipe quantises
the same trained weights. Sequences are bytes of the standard library, divided into halves. The columns
compare:

    again          the same sequence twice; rounding draws new random numbers
    later tokens   the first half of a sequence, with two different second halves
    batch          a sequence alone, and among seven others
    cache          the second half, decoded token by token with past_key_values, and in one forward
    quantisation   the recipe, and the unquantised weights

Where inputs can be quantised by recorded numbers, a second row does so ("static"). Their range is recorded in
eight more sequences of other files. The last column is the loss of 64 further sequences, in batches of eight
(in nats); with `--only-loss` it is the only one.

Every figure is ‖change‖ / ‖logits‖ in percent, over all sequences and tokens. The mean over the vocabulary is
subtracted from the logits first. All columns but `again` start from the same random numbers. A bf16 model
also changes because its products are summed in another order.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megalowbit as mlb
from megalowbit.layers.conversion.carried_state import forget_uses
from megalowbit.layers.conversion.static_inputs import needs_static_inputs, why_not_static

SEQUENCES = 8
LOSS_BATCHES = 8
COLUMNS = ("again", "later tokens", "batch", "cache", "quantisation")


class Texts(NamedTuple):
    """Sequences, each (n, length).

    Attributes:
        tokens: whose logits are compared.
        other: whose second halves replace theirs.
        recorded: in which ranges of inputs are recorded.
        of_loss: whose loss is measured.
    """

    tokens: Tensor
    other: Tensor
    recorded: Tensor
    of_loss: Tensor


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--checkpoint", type=Path, required=True, help="folder of a Hugging Face model on bytes"
    )
    options.add_argument(
        "--recipe", action="append", type=recipe, help="name or JSON block; default: all names"
    )
    options.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--only-loss", action="store_true", help="measure only the loss")
    chosen = options.parse_args()
    if not (chosen.checkpoint / "config.json").is_file():
        sys.exit(
            f"--checkpoint {chosen.checkpoint} has no config.json: pass a folder written by save_pretrained"
        )
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(chosen.checkpoint, trust_remote_code=False).eval()
    plain = plain.to(getattr(torch, chosen.precision))
    length = plain.config.max_position_embeddings
    text = Texts(*texts(length).split([SEQUENCES] * 3 + [SEQUENCES * LOSS_BATCHES]))
    reference = logits(plain, text.tokens)
    print(f"torch {torch.__version__}, {chosen.precision}, {SEQUENCES} sequences of {length} bytes; percent")
    names = [name for name in mlb.recipes() if name != "bf16"]
    columns = () if chosen.only_loss else COLUMNS
    print(f"{'':<32}" + "".join(f"{column:>14}" for column in (*columns, "loss")))
    for each in [mlb.recipe("bf16"), *(chosen.recipe or map(mlb.recipe, names))]:
        model = copy.deepcopy(plain)
        mlb.convert(model, each)
        print_row(each.name, model, text, None if chosen.only_loss else reference)
        if needs_static_inputs(each) and why_not_static(each) is None:
            with mlb.record_inputs(model) as ranges:
                logits(model, text.recorded)
            mlb.use_static_inputs(model, ranges.result())
            print_row(f"{each.name}, static", model, text, None if chosen.only_loss else reference)


def print_row(title: str, model: PreTrainedModel, text: Texts, reference: Tensor | None) -> None:
    """A line: changes in percent, and the loss. `reference`: unquantised logits; `None`: only the loss."""
    found: tuple[float, ...] = ()
    if reference is not None:
        quantisation = change(logits(model, text.tokens), reference)
        found = (*changes(model, text.tokens, text.other), quantisation)
    cells = "".join(f"{100 * value:14.5f}" for value in found)
    print(f"{title:<32}{cells}{loss(model, text.of_loss):14.5f}", flush=True)


def loss(model: PreTrainedModel, tokens: Tensor) -> float:
    """Mean loss of all predictions, in batches of `SEQUENCES`."""
    losses = []
    for batch in tokens.split(SEQUENCES):
        predicted = logits(model, batch)[:, :-1].flatten(0, 1).double()
        losses.append(torch.nn.functional.cross_entropy(predicted, batch[:, 1:].flatten()))
    return torch.stack(losses).mean().item()


def recipe(text: str) -> mlb.Recipe:
    """A recipe's name, or its block as JSON."""
    try:
        return mlb.recipe(json.loads(text) if text.startswith("{") else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def texts(length: int) -> Tensor:
    """(n, length) bytes, each row from another source file of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = [file.read_bytes() for file in files]
    long = [each for each in content if len(each) > 2000 + length][: (3 + LOSS_BATCHES) * SEQUENCES]
    return torch.stack([torch.tensor(list(each[2000 : 2000 + length])) for each in long])


def changes(model: PreTrainedModel, tokens: Tensor, other: Tensor) -> tuple[float, float, float, float]:
    """The changes of the columns again, later tokens, batch and cache, as fractions."""
    half = tokens.shape[1] // 2
    whole = torch.cat([logits(model, each[None]) for each in tokens])
    turned = torch.cat([tokens[:, :half], other[:, half:]], dim=1)
    replaced = torch.cat([logits(model, each[None]) for each in turned])
    again = torch.cat([logits(model, each[None], forgets=False) for each in tokens])
    return (
        change(again, whole),
        change(replaced[:, :half], whole[:, :half]),
        change(logits(model, tokens), whole),
        change(torch.cat([decoded(model, each[None], half) for each in tokens]), whole[:, half:]),
    )


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, *, forgets: bool = True) -> Tensor:
    """(sequences, length, vocabulary). `forgets` restarts the random numbers from the first use."""
    if forgets:
        forget_uses(model)
    found: Tensor = model(tokens, use_cache=False).logits
    return found


@torch.no_grad()
def decoded(model: PreTrainedModel, tokens: Tensor, start: int) -> Tensor:
    """Logits from `start` on: one forward over the tokens before it, then one token at a time."""
    forget_uses(model)
    cache = model(tokens[:, :start], use_cache=True).past_key_values
    found = []
    for position in range(start, tokens.shape[1]):
        step = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(step.logits)
    return torch.cat(found, dim=1)


def change(one: Tensor, other: Tensor) -> float:
    """‖one - other‖ / ‖other‖; a constant added to all logits of a token does not count."""
    one, other = (each.double() - each.double().mean(2, keepdim=True) for each in (one, other))
    return ((one - other).norm() / other.norm()).item()


if __name__ == "__main__":
    main()
