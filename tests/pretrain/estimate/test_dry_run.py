import json

import pytest
from quick_cases import slow_except
from tiny_models import KINDS, tiny_config

from launchers import write_config
from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.dry_run import describe, estimate_run, split_ranks


def sections(text):
    return dict(part.split("\n", 1) for part in text.removeprefix("== ").split("\n\n== "))


def test_the_report_has_configuration_layers_sizes_and_memory(resolve):
    config = resolve()
    parts = sections(describe(config))
    assert json.loads(parts["configuration"]) == config.to_dict()
    assert "converted 7 layers" in parts["layers"]
    # embeddings (256 + 64)·32, two blocks of 12·32² + 13·32, final norm 2·32; projections 12·32² each block,
    # of which 3·32² of the first stay in high precision
    assert parts["parameters"] == f"{320 * 32 + 2 * (12 * 1024 + 13 * 32) + 64:,}, of which " + (
        f"{(2 * 12 - 3) * 1024:,} ({(2 * 12 - 3) * 1024 / 35712:.1%}) in low-bit layers"
    )
    assert "128 tokens per step" in parts["data"]
    assert parts["products"].startswith("bf16 on ")
    assert "saved for backward" in parts["memory of the only process (estimate)"]


CUTS = {"tensor": "tensor_parallel.autotp_size=2", "pipeline": 'pipeline={"stages": 2}'}
QUICK = [("pipeline", "gpt2")]


@pytest.mark.parametrize(("cut", "kind"), slow_except(QUICK, [(cut, kind) for cut in CUTS for kind in KINDS]))
def test_every_family_is_sized_unsharded_and_sharded(tmp_path, kind, cut):
    """With FP8, which shards of any size can be quantised to."""
    path = write_config(tmp_path)
    fields = tiny_config(kind, vocab_size=256, positions=64, hidden_size=512, num_layers=4).to_diff_dict()
    (tmp_path / "model.json").write_text(json.dumps(fields))
    changes = ["megalowbit.recipe=fp8", "megalowbit.checkpoint.export_hf=false"]  # bytes are no ids of Qwen2
    configs = [load_config(path, [*changes, *cuts], world_size=2) for cuts in ([], [CUTS[cut]])]
    reports = [sections(describe(config)) for config in configs]
    count = 4 * len(family(kind).projections)
    assert all(f"converted {count} layers" in parts["layers"] for parts in reports)
    whole, share = (estimate_run(config, recipe(config.recipe)) for config in configs)
    # half of the projections or of the blocks; embedding, head and norms are not cut, but are in some stage
    assert 0.49 * whole.parameters < share.parameters < 0.7 * whole.parameters
    assert share.saved_for_backward < whole.saved_for_backward


def test_a_dry_run_describes_models_that_do_not_fit_on_this_machine(resolve):
    overrides = {"n_embd": 8192, "n_layer": 4, "n_head": 64, "vocab_size": 50304}
    config = resolve(*(f"megalowbit.model.overrides.{key}={value}" for key, value in overrides.items()))
    parts = sections(describe(config))
    assert "3,634," in parts["parameters"]


def test_a_gemm_missing_on_this_machine_is_only_noted_in_a_dry_run(resolve):
    recipe = '{"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"}'
    parts = sections(describe(resolve(f"megalowbit.recipe={recipe}")))
    assert "cannot run on cpu" in parts["products"] or parts["products"].startswith("fp4 on cuda")


def test_ranks_of_splits_are_given_as_a_range_over_the_layers(resolve):
    splits = {
        "split_input": {"method": "mean"},
        "split_grad_output": {"rank": 0.05},  # of 32, 32·0.05 rounded up
        "parameter_split": {"rank": 1.0},
    }
    report = describe(resolve(f"megalowbit.recipe={json.dumps({'base': 'nvfp4', **splits})}"))
    assert sections(report)["layers"].splitlines()[-3:] == [
        "split_input: rank 1 in all layers",
        "split_grad_output: rank 2 in all layers",
        "parameter_split: rank 32 in all layers",
    ]
    assert ": rank" not in sections(describe(resolve()))["layers"]


def test_a_range_of_split_ranks_is_described_by_both_ends():
    split = {"base": "nvfp4", "split_weight": {"rank": 0.5}}
    layers = [BitLinear(*sizes, recipe=split) for sizes in ((32, 16), (64, 48), (4, 64))]
    assert split_ranks(layers) == ["split_weight: rank 2 (4→64) … 24 (64→48)"]


def test_packing_and_padding_are_named_and_sized(resolve):
    plain, changed = (
        resolve(*overrides)
        for overrides in (
            (),
            ("megalowbit.data.packing=best_fit", "megalowbit.model.pad_vocab_to_multiple_of=96"),
        )
    )
    parts = sections(describe(changed))
    assert "\npacking best_fit" in parts["data"]
    assert "\nvocabulary: 256 tokens, padded to 288 rows" in parts["parameters"]
    assert parts["parameters"].startswith(f"{35712 + 32 * 32:,}, ")
    assert "\npacking" not in sections(describe(plain))["data"]
    before, after = (estimate_run(each, recipe(each.recipe)) for each in (plain, changed))
    assert after.parameters - before.parameters == 32 * 32 * 2  # bf16
    assert after.temporaries - before.temporaries >= 2 * 32 * 32 * 4  # logits of the padding, in fp32
    assert after.saved_for_backward - before.saved_for_backward >= 2 * 32 * 32 * 2  # a mask, in bf16


def test_sources_are_listed_and_not_downloaded(resolve, tmp_path):
    sources = {
        "web": {"corpus": "someone/some-text", "weight": 3},
        "own": {"corpus": str(tmp_path / "text.txt"), "epochs": 2},
    }
    data = {"sources": sources, "sequence_length": 32, "validation": {"share": 0.1}}
    found = sections(describe(resolve(f"megalowbit.data={json.dumps(data)}")))["data"]
    assert found.splitlines() == [
        f"own: 2 epochs, from {tmp_path / 'text.txt'} (documents not held out)",
        "web: 100.0000% of the samples that tokens and epochs leave, from data set someone/some-text (not "
        "downloaded); 128 tokens per step on 1 process, 768 in 6 steps",
        "validation: data set someone/some-text, train (not downloaded)",
    ]
    sources["own"] = {**sources["own"], "epochs": None, "weight": 1}
    data["phases"] = [{"from_step": 2, "weights": {"web": 0, "own": 1}}]
    found = sections(describe(resolve(f"megalowbit.data={json.dumps(data)}")))["data"]
    assert (
        "own: 25.0000% of the samples until step 2, then 100.0000%; 75.0000% of the whole run, from" in found
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("megalowbit.data.corpus=missing.txt", "does not exist"),
        ("megalowbit.model.config=missing.json", r"missing\.json"),
        ('megalowbit.recipe={"base": "nvfp4", "keep": ["nothing"]}', "nothing"),
        ("megalowbit.recipe=nvfp5", "did you mean 'nvfp4'"),
    ],
)
def test_errors_of_a_run_also_fail_its_dry_run(resolve, override, message):
    with pytest.raises(UserError, match=message):
        describe(resolve(override))
