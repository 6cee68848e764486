"""Checks in one process; tests/distributed/test_run_checks.py tests comparisons between ranks."""

import importlib.metadata

import pytest
import torch

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.engine.run_checks import ranks_agree
from megalowbit.engine.run_checks.ranks_agree import (
    PACKAGE,
    check_ranks_agree,
    code_digest,
    configuration_facts,
    installation_facts,
    model_facts,
    version_of,
)


def parts(**block):
    return read_deepspeed_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "megalowbit": block,
        }
    )


def model():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16, bias=False))


def test_one_process_agrees_with_itself_without_a_group():
    assert check_ranks_agree({"seed": "0"}) is None


def test_the_code_digest_covers_names_and_contents_of_the_sources(tmp_path):
    def digest():
        return code_digest(tmp_path)

    (tmp_path / "a.py").write_text("x = 1\n")
    first = digest()
    (tmp_path / "notes.txt").write_text("not code")
    assert digest() == first
    (tmp_path / "a.py").write_text("x = 2\n")
    second = digest()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    third = digest()
    (tmp_path / "kernel.cu").write_text("")
    assert len({first, second, third, digest()}) == 4


def test_an_installation_is_described_by_short_texts():
    facts = installation_facts()
    assert facts["version of torch"] == importlib.metadata.version("torch")
    assert {"code of megalowbit", "version of deepspeed", "device"} <= facts.keys()
    assert all(isinstance(value, str) and len(value) < 100 for value in facts.values())
    assert facts["code of megalowbit"] == code_digest(PACKAGE)
    assert version_of("megalowbit-has-no-such-part") is None


def test_a_process_hashes_its_code_once(monkeypatch):
    first = installation_facts()
    monkeypatch.setattr(ranks_agree, "code_digest", lambda folder: "of a later installation")
    assert installation_facts() == first


@pytest.mark.parametrize(("name", "value"), [("MEGALOWBIT_BACKEND", "torch"), ("MEGALOWBIT_APEX", "1")])
def test_the_description_includes_the_choice_of_kernels(monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    before = installation_facts()
    monkeypatch.setenv(name, value)
    after = installation_facts()
    assert {each for each in before if before[each] != after[each]} == {f"environment variable {name}"}


def test_configurations_compare_key_by_key_with_defaults_filled_in():
    facts = configuration_facts(parts(precision="bf16"))
    assert facts["configuration key optimizer.params.betas"] == "[0.9, 0.95]"
    assert facts == configuration_facts(parts())  # bf16 is the default
    other = configuration_facts(parts(precision="fp16"))
    assert facts["configuration key megalowbit.precision"] != other["configuration key megalowbit.precision"]


def test_paths_may_differ_between_nodes():
    one, two = (configuration_facts(parts(data={"cache_dir": place, "seed": 1})) for place in ("/a", "/b"))
    assert one == two
    assert one["configuration key megalowbit.data.seed"] == "1"


def test_paths_of_sources_may_differ_between_nodes_and_their_weights_may_not():
    def facts(place, weight):
        sources = {"web-text": {"corpus": place, "weight": weight}, "code": {"corpus": "c", "weight": 1}}
        return configuration_facts(parts(data={"sources": sources}))

    assert facts("/a", 1) == facts("/b", 1)
    key = "configuration key megalowbit.data.sources.web-text.weight"
    assert (facts("/a", 1)[key], facts("/a", 2)[key]) == ("1", "2")


def test_long_values_are_compared_beyond_the_printed_part():
    one, two = ({"values": list(range(200)), "x": index} for index in range(2))
    two["values"][100] = -1
    facts = [configuration_facts(parts(run=run)) for run in (one, two)]
    key = "configuration key megalowbit.run.values"
    assert facts[0][key] != facts[1][key]
    assert len(facts[0][key]) < 110


def test_a_model_is_compared_by_names_shapes_and_types_of_its_parameters():
    net = model()
    net[1].weight.requires_grad_(False)
    assert model_facts(net) == {
        "parameter count": "528",
        "parameter 0.weight": "float32 (16, 16)",
        "parameter 0.bias": "float32 (16,)",
        "parameter 1.weight": "float32 (16, 16) frozen",
    }
