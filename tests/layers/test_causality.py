"""Which recipes let a later token change an earlier one's numbers: what docs/formats.md says of each."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.recipe import recipe, recipes

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
LENGTH, WIDTH = 32, 64
ROWS = re.findall(r"^\| (`.*`) \| (yes|no)\b", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
DOCUMENTED = {name: said == "yes" for names, said in ROWS for name in re.findall(r"`([\w-]+)`", names)}


def outputs(name, x):
    """Of the same weights and the same random numbers each time."""
    torch.manual_seed(0)
    attention = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))  # a recipe names these layers
    made = torch.nn.Sequential(OrderedDict(attn=attention, mlp=torch.nn.Linear(WIDTH, 48)))
    convert(made, {"base": name, "keep_last": 0})
    with torch.no_grad():
        return made.eval()(x)


def test_the_page_names_every_recipe_that_quantises():
    assert set(DOCUMENTED) == {name for name in recipes() if recipe(name).quantizes}


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_later_token_changes_earlier_ones_only_in_recipes_documented_as_such(name):
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    half, turned = LENGTH // 2, x.clone()
    turned[:, half:] *= 3e5  # a power-of-two tensor scale matters to much smaller blocks only
    before, after = (outputs(name, each)[:, :half] for each in (x, turned))
    assert torch.equal(before, after) == DOCUMENTED[name]


def test_a_causal_recipe_decodes_with_a_cache_as_in_one_forward():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()  # sums in another order must turn no code
    convert(model, "mxfp4")
    tokens = torch.randint(1, 64, (3, 8))
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(tokens)
    cached = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))
    with torch.no_grad():
        whole = model(cached, use_cache=False).logits
        past = model(cached[:, :12], use_cache=True)
        later = model(cached[:, 12:13], past_key_values=past.past_key_values).logits
    torch.testing.assert_close(later, whole[:, 12:13], rtol=0, atol=1e-9)
