"""How far a token's logits depend on what causal attention hides: later tokens, the batch, and the cache.

    python launch/pretrain.py --ds-config configs/gpt2_tiny_quality.json --set megalowbit.recipe=bf16 \\
        --set megalowbit.checkpoint.export_hf=true --run-dir runs/causality
    python benchmarks/causality.py --checkpoint runs/causality/hf

Scales of a whole tensor, means over tokens and split directions are taken from all tokens of a forward. Each
recipe quantises the same trained weights; sequences are bytes of the standard library, cut in halves:

    again          logits of the same sequence once more, where rounding draws new random numbers
    later tokens   logits of the first half, where the second half is another text
    batch          logits of a sequence alone, and among seven others
    cache          logits of the second half, decoded token by token with past_key_values, and in one forward
    quantisation   logits of the recipe, and of the weights unquantised

Every figure is ‖change‖ / ‖logits‖ in percent, over all sequences and tokens, of logits without their mean.
All but `again` start from the same random numbers. A model in bf16 changes by its products' order of sums.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megalowbit as mlb
from megalowbit.layers.carried_state import forget_uses

SEQUENCES = 8
COLUMNS = ("again", "later tokens", "batch", "cache", "quantisation")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--checkpoint", type=Path, required=True, help="folder of a Hugging Face model on bytes"
    )
    options.add_argument(
        "--recipe", action="append", type=recipe, help="name or JSON block; default: all names"
    )
    options.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    chosen = options.parse_args()
    if not (chosen.checkpoint / "config.json").is_file():
        sys.exit(
            f"--checkpoint {chosen.checkpoint} has no config.json: name a folder that save_pretrained wrote"
        )
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(chosen.checkpoint, trust_remote_code=False).eval()
    plain = plain.to(getattr(torch, chosen.precision))
    length = plain.config.max_position_embeddings
    tokens, other = texts(length).split(SEQUENCES)
    reference = logits(plain, tokens)
    print(f"torch {torch.__version__}, {chosen.precision}, {SEQUENCES} sequences of {length} bytes; percent")
    names = [name for name in mlb.recipes() if name != "bf16"]
    print(f"{'':<32}" + "".join(f"{column:>14}" for column in COLUMNS))
    for each in [mlb.recipe("bf16"), *(chosen.recipe or map(mlb.recipe, names))]:
        model = copy.deepcopy(plain)
        mlb.convert(model, each)
        found = (*changes(model, tokens, other), change(logits(model, tokens), reference))
        print(f"{each.name:<32}" + "".join(f"{100 * value:14.5f}" for value in found))


def recipe(text: str) -> mlb.Recipe:
    """A recipe's name, or its block as JSON."""
    try:
        return mlb.recipe(json.loads(text) if text.startswith("{") else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def texts(length: int) -> Tensor:
    """(2 · SEQUENCES, length) bytes, from as many places of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = [file.read_bytes() for file in files]
    long = [each for each in content if len(each) > 2000 + length][: 2 * SEQUENCES]
    return torch.stack([torch.tensor(list(each[2000 : 2000 + length])) for each in long])


def changes(model: PreTrainedModel, tokens: Tensor, other: Tensor) -> tuple[float, float, float, float]:
    """From one time to the next, by other later tokens, by the batch, by decoding with a cache; as shares."""
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
    """(sequences, length, vocabulary), of the random numbers of a first use unless `forgets` is off."""
    if forgets:
        forget_uses(model)
    found: Tensor = model(tokens, use_cache=False).logits
    return found


@torch.no_grad()
def decoded(model: PreTrainedModel, tokens: Tensor, start: int) -> Tensor:
    """Logits from `start` on: one forward of what comes before, then a token at a time."""
    forget_uses(model)
    cache = model(tokens[:, :start], use_cache=True).past_key_values
    found = []
    for position in range(start, tokens.shape[1]):
        step = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(step.logits)
    return torch.cat(found, dim=1)


def change(one: Tensor, other: Tensor) -> float:
    """‖one - other‖ / ‖other‖; a constant added to all logits of a token is no change."""
    one, other = (each.double() - each.double().mean(2, keepdim=True) for each in (one, other))
    return ((one - other).norm() / other.norm()).item()


if __name__ == "__main__":
    main()
