import hashlib
import json

import torch
import transformers
from huggingface_hub import ModelCard

from megalowbit.hf.folders.model_card import model_card, versions
from megalowbit.layers.recipe import recipe

CONFIG = {"megalowbit": {"data": {"corpus": "/home/somebody/secret/corpus.txt"}, "run": {"steps": 1200}}}
RUN = {
    "megalowbit": {"step": 1200, "config": CONFIG, "hf_config": {"model_type": "llama"}},
    "progress": {
        "totals": {"tokens": 1_228_800, "final_loss": 3.25},
        "validation": {"last": {"validation/loss": 3.5}, "last_step": 1000},
    },
    "ds_version": "0.19.8",
}


def card(header=RUN, recipe="metis-nvfp4"):
    text = model_card(header, recipe, dtype="bfloat16")
    parsed = ModelCard(text, ignore_metadata_errors=False)
    lines = [line.removeprefix("| ").removesuffix(" |") for line in text.splitlines() if line.startswith("|")]
    rows = dict(line.split(" | ", 1) for line in lines[2:])  # behind the head of the table
    return text, parsed.data.to_dict(), rows


def test_a_run_is_described_by_what_it_recorded():
    text, front, rows = card()
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megalowbit", "llama", "metis-nvfp4"],
    }
    assert rows == {
        "recipe": "metis-nvfp4",
        "data": "corpus.txt",
        "steps": "1,200",
        "tokens": "1,228,800",
        "loss of the last step": "3.2500",
        "validation loss": "3.5000 at step 1,000",
        "SHA-256 of the configuration": hashlib.sha256(
            json.dumps(CONFIG, sort_keys=True).encode()
        ).hexdigest(),
        "dtype of these weights": "bfloat16",
        "exported with": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "trained with": "deepspeed 0.19.8",
    }
    assert "secret" not in text


def test_versions_are_those_of_the_libraries():
    found = versions()
    assert (found["torch"], found["transformers"]) == (torch.__version__, transformers.__version__)


def test_what_was_not_recorded_has_no_line():
    _, _, rows = card({"megalowbit": {"hf_config": {"model_type": "gpt2"}}})
    assert rows.keys() == {"recipe", "training", "dtype of these weights", "exported with"}
    assert rows["training"] == "none: these are imported weights"
    _, front, rows = card({"megalowbit": {"hf_config": {"model_type": "gpt2"}}}, recipe=None)
    assert front["tags"] == ["megalowbit", "gpt2"]
    assert "recipe" not in rows
    progress = {"totals": {"final_loss": None}, "validation": None}
    _, _, rows = card({"megalowbit": {"step": 3}, "progress": progress})
    assert rows.keys() == {"recipe", "steps", "dtype of these weights", "exported with"}


def test_recipes_of_single_layers_are_named():
    whole = recipe({"base": "nvfp4", "layers": {"*.mlp.*": "mxfp8", "*.h.0": {"q_forward_input": "fp32"}}})
    header = {**RUN, "megalowbit": {**RUN["megalowbit"], "recipe": whole.to_dict()}}
    _, _, rows = card(header, recipe=whole.name)
    assert rows["other recipes"] == "`*.mlp.*`: mxfp8, `*.h.0`: own q_forward_input fp32"


def test_several_sources_are_all_named():
    sources = {"a": {"corpus": "owner/name"}, "b": {"corpus": "~/b.txt"}, "c": {}}
    config = {"megalowbit": {"data": {"corpus": "blend", "sources": sources}}}
    _, _, rows = card({**RUN, "megalowbit": {**RUN["megalowbit"], "config": config}})
    assert rows["data"] == "owner/name, b.txt"


def test_values_of_any_kind_make_a_card():
    for value in (None, 1, "x | y\n---", [1], {"a": 1}, 1e400, True):
        header = {"megalowbit": value, "progress": value, "ds_version": value}
        assert len(card(header)[0].splitlines()) < 20
        for key in RUN["megalowbit"]:
            card({**RUN, "megalowbit": {**RUN["megalowbit"], key: value}})
        for key in RUN["progress"]:
            card({**RUN, "progress": {**RUN["progress"], key: value}})
