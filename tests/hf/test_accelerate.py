"""Accelerate with a converted model and megalowbit's optimizer; with DeepSpeed: test_other_loops_page.py."""

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from tiny_trainers import DATASET, differing, llama
from transformers import LlamaForCausalLM

import megalowbit as mlb

ACCUMULATED = 2


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset()  # of other tests, too
    yield
    reset()


def reset():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def built():
    """A model of bf16, our optimizer and the loader."""
    model = llama(dtype=torch.bfloat16)
    optimizer = mlb.get_megatron_optimizer(model, mlb.OptimizerConfig(lr=1e-3, bf16=True, clip_grad=0.0))
    return model, optimizer, torch.utils.data.DataLoader(DATASET[:8], batch_size=2)


def epoch(accelerator, model, optimizer, loader):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_prepared_model_trains_saves_and_resumes_as_a_plain_loop_does(tmp_path, mixed_precision):
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision, gradient_accumulation_steps=ACCUMULATED
    )
    inner, optimizer, loader = built()
    accelerator.register_for_checkpointing(mlb.random_stream(inner))
    prepared = accelerator.prepare(inner, optimizer, loader)
    mlb.check_training(prepared[0], optimizer=prepared[1])
    epoch(accelerator, *prepared)
    accelerator.save_state(str(tmp_path / "state"))
    epoch(accelerator, *prepared)
    expected = copied(inner)
    accelerator.load_state(str(tmp_path / "state"))
    assert differing(expected, inner.state_dict())
    epoch(accelerator, *prepared)
    assert differing(expected, inner.state_dict()) == []

    assert accelerator.unwrap_model(prepared[0]) is inner
    inner.save_pretrained(tmp_path / "model", state_dict=accelerator.get_state_dict(prepared[0]))
    read = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert differing(expected, read.state_dict()) == []

    if mixed_precision == "no":
        model, optimizer, loader = built()
        for step, batch in enumerate([*loader, *loader]):
            (model(**batch).loss / ACCUMULATED).backward()
            if step % ACCUMULATED == ACCUMULATED - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                assert optimizer.step().is_applied
        assert differing(expected, model.state_dict()) == []
