"""Runs with flash attention, whose kernel is plain attention here, against runs with masks."""

import json

import flash_kernel
import pytest
import torch
from quick_cases import slow_except
from tiny_models import tiny_config

from launchers import metrics, training_text
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.batches.upload import upload
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain import checks, overflow_retry
from megalowbit.pretrain.checks import check_config
from megalowbit.pretrain.estimate.dry_run import describe, estimate_run
from megalowbit.pretrain.run import pretrain

DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BEST_FIT = ("megalowbit.data.packing=best_fit", "megalowbit.data.eod_mask_loss=true")
RETRIES = ("megalowbit.run.overflow_retries=1", 'megalowbit.grad_scaler={"initial_scale": 16}')


def attention(name):
    overrides = json.dumps({**DROPOUT, "attn_implementation": name})
    return f"megalowbit.model.overrides={overrides}"


@pytest.fixture
def blend(tmp_path):
    """Two sources of short documents, and text for validation."""
    lines = training_text().splitlines()
    for name, of_file in (("prose", lines[40:]), ("shout", map(str.upper, lines[40:])), ("held", lines[:40])):
        documents = [json.dumps({"text": line[: 7 + 5 * (place % 6)]}) for place, line in enumerate(of_file)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(documents))
    data = {
        "sources": {
            name: {"corpus": str(tmp_path / f"{name}.jsonl"), "weight": 0.5} for name in ("prose", "shout")
        },
        "sequence_length": 32,
        "validation": {"corpus": str(tmp_path / "held.jsonl")},
    }
    return f"megalowbit.data={json.dumps(data)}"


@pytest.mark.parametrize("is_chunked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_has_the_losses_of_one_with_masks(monkeypatch, resolve, blend, tmp_path, is_chunked):
    """Those of steps, of sources and of validation, with padding, windows and two micro-batches in a step."""
    tiny_config("qwen3", vocab_size=256, positions=64).save_pretrained(tmp_path / "qwen3")
    monkeypatch.setattr(checks, "HALF", ("fp32",))  # which the kernels of GPUs do not have
    kernel, rows = flash_kernel.install(monkeypatch), []
    for name in ("sdpa", flash_kernel.NAME):
        chosen = (
            f"megalowbit.model.config={tmp_path / 'qwen3' / 'config.json'}",
            f'megalowbit.model.overrides={{"attn_implementation": "{name}"}}',
            blend, *BEST_FIT, "megalowbit.precision=fp32", "megalowbit.recipe=bf16",
            "megalowbit.validation.every=2", f"megalowbit.chunked_cross_entropy={str(is_chunked).lower()}",
            "megalowbit.activation_checkpointing.every=2",
        )  # fmt: skip
        assert not kernel.calls
        pretrain(resolve(*chosen), ProcessIdentity(), run_dir=tmp_path / name, is_resume=False)
        rows.append(metrics(tmp_path / name))
    with_mask, found = rows
    assert len(found) == len(with_mask) == 6
    names = [name for name in with_mask[-1] if "loss" in name and name != "loss_scale"]
    assert {"loss", "loss/prose", "loss/shout", "validation/loss"} <= {*names}
    for expected, row in zip(with_mask, found, strict=True):
        for name in (*names, "grad_norm"):
            assert row.get(name) == (
                None if expected.get(name) is None else pytest.approx(expected[name], 1e-5)
            )
    assert None not in kernel.calls  # documents have bounds in each forward
    assert all(len(bounds) > 3 for bounds in kernel.calls)  # and there are several in rows
    assert all({0, 32, 64} <= {*bounds} for bounds in kernel.calls)


def test_a_step_whose_documents_have_no_bounds_is_refused(monkeypatch, resolve, tmp_path):
    kernel = flash_kernel.install(monkeypatch)
    monkeypatch.setattr(overflow_retry, "upload", lambda batch, device, _: upload(batch, device))
    tiny_config("gpt2", vocab_size=256, positions=64).save_pretrained(tmp_path / "gpt2")
    config = resolve(
        f"megalowbit.model.config={tmp_path / 'gpt2' / 'config.json'}", attention(flash_kernel.NAME),
        "megalowbit.precision=bf16", "megalowbit.data.packing=documents",
    )  # fmt: skip
    with pytest.raises(ValueError, match="bounds of the documents in several rows"):
        pretrain(config, ProcessIdentity(), run_dir=tmp_path / "flash", is_resume=False)
    assert not kernel.calls


@pytest.mark.parametrize(
    ("kind", "precision", "more"),
    slow_except(
        [("gpt2", "bf16", ())],
        [
            ("gpt2", "bf16", ()),
            ("qwen3", "bf16", ("megalowbit.autocast.enabled=true",)),
            ("qwen3", "fp16", ("zero_optimization.stage=3", *RETRIES)),
        ],
    ),
)
def test_low_bit_layers_give_the_kernel_half_precision(monkeypatch, resolve, tmp_path, kind, precision, more):
    """The only one that it takes."""
    kernel = flash_kernel.install(monkeypatch)
    tiny_config(kind, vocab_size=256, positions=64).save_pretrained(tmp_path / kind)
    chosen = (
        f"megalowbit.model.config={tmp_path / kind / 'config.json'}",
        f'megalowbit.model.overrides={{"attn_implementation": "{flash_kernel.NAME}"}}',
        "megalowbit.recipe=nvfp4", f"megalowbit.precision={precision}", "megalowbit.data.packing=documents",
        "megalowbit.run.steps=2", *more,
    )  # fmt: skip
    pretrain(resolve(*chosen), ProcessIdentity(), run_dir=tmp_path / "flash", is_resume=False)
    assert kernel.dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert None not in kernel.calls


def test_flash_attention_is_chosen_in_the_configuration(resolve):
    chosen = resolve(attention(flash_kernel.NAME), *BEST_FIT)
    check_config(chosen)  # bf16
    with pytest.raises(
        UserError, match=r"computes in fp16 or bf16 only, and megalowbit\.precision is 'fp32'"
    ):
        check_config(resolve(attention(flash_kernel.NAME), "megalowbit.precision=fp32"))
    with pytest.raises(UserError, match="'somebody/flash', code that would be downloaded"):
        check_config(resolve(attention("somebody/flash")))


def test_estimates_need_no_kernel_and_have_no_mask(resolve):
    """A dry run may be on a machine without a GPU."""
    plain, flash, masked = (
        resolve(attention(name), *packing)
        for name, packing in (("sdpa", ()), (flash_kernel.NAME, BEST_FIT), ("sdpa", BEST_FIT))
    )
    assert "packing best_fit" in describe(flash)
    saved = [estimate_run(each, recipe(each.recipe)).saved_for_backward for each in (plain, flash, masked)]
    assert saved[0] == saved[1] < saved[2]
