import json
import math
import signal
import threading

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.pretrain.loop import Ending, train, train_step
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.telemetry.sinks.console import Console


def reference_loss(module, batches):
    """Mean cross entropy of next tokens, in float64 from the module's own logits."""
    losses = []
    with torch.no_grad():
        for batch in batches:
            logits = module(batch["input_ids"]).logits.double()[:, :-1]
            targets = batch["input_ids"][:, 1:]
            picked = logits.gather(-1, targets[..., None])[..., 0]
            losses.append((logits.logsumexp(-1) - picked).mean().item())
    return sum(losses) / len(losses)


def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches(build_job):
    overrides = [
        f"megalowbit.model.overrides.{name}=0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    ]
    job = build_job("megalowbit.precision=fp32", *overrides)
    position = job.loader.position
    batches = [next(job.loader) for _ in range(2)]
    job.loader.position = position
    job.engine.module.eval()
    expected = reference_loss(job.engine.module, batches)
    job.engine.module.train()
    facts, is_skipped, *_ = train_step(job)
    assert facts["loss"] == pytest.approx(expected, rel=1e-5)
    assert not is_skipped


def test_a_step_with_an_infinite_gradient_is_recorded_as_skipped_and_changes_nothing(build_job):
    job = build_job(
        "megalowbit.precision=fp16",
        'megalowbit.grad_scaler={"initial_scale": 1024, "hysteresis": 1}',
    )
    train_step(job)
    before = [parameter.clone() for parameter in job.engine.module.parameters()]
    rate = job.engine.optimizer.param_groups[0]["lr"]
    weight = job.engine.module.transformer.h[0].mlp.c_fc.weight
    hook = weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    facts, is_skipped, *_ = train_step(job)
    hook.remove()
    assert is_skipped
    assert facts["skipped_steps"] == 1
    assert facts["loss_scale"] == 1024  # the scale this step was made with
    assert facts["grad_norm"] is None
    assert job.step == 2
    assert job.engine.optimizer.loss_scale == 512
    assert job.engine.optimizer.param_groups[0]["lr"] == rate
    after = list(job.engine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_training_that_only_skips_stops_with_the_reason(build_job, tmp_path):
    job = build_job("megalowbit.run.steps=20", "megalowbit.run.max_consecutive_skips=3")
    with torch.no_grad():
        job.engine.module.transformer.ln_f.weight.fill_(math.nan)
    console = Console(20, is_main=False)
    with (
        Recorder(job, console, is_main=True, is_resume=False) as recorder,
        pytest.raises(
            UserError, match=r"3 steps in a row were not finite \(step 3, loss nan, loss scale 1\)"
        ),
    ):
        train(job, recorder)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[-1])["loss"] is None


def test_skips_that_are_not_in_a_row_do_not_stop_a_run(build_job, tmp_path):
    job = build_job("megalowbit.run.steps=5", "megalowbit.run.max_consecutive_skips=2")
    weight = job.engine.module.transformer.ln_f.weight
    weight.register_hook(
        lambda gradient: torch.full_like(gradient, math.inf) if job.step % 2 == 0 else gradient
    )
    with Recorder(job, Console(5, is_main=False), is_main=True, is_resume=False) as recorder:
        train(job, recorder)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [1, 1, 2, 2, 3]


def test_layouts_are_configured_in_the_recipe(build_job):
    job = build_job('megalowbit.recipe={"base": "nvfp4", "layout": "per_gemm", "hadamard": true}')
    facts, is_skipped, *_ = train_step(job)
    assert not is_skipped
    assert math.isfinite(facts["loss"])


def test_the_regularizer_is_reported_next_to_the_loss(build_job):
    job = build_job("megalowbit.regularizer.strength=1e-3", "megalowbit.regularizer.epsilon=1e-3")
    weights = [layer.weight.detach().double() for layer in bit_layers(job.engine.module).values()]
    expected = sum(1e-3 * (w**2 + 1 / (w**2 + 1e-3)).mean().item() for w in weights)
    facts, *_ = train_step(job)
    assert facts["regularization"] == pytest.approx(expected, rel=1e-6)
    assert facts["loss"] < 10  # the language model's alone
    plain, *_ = train_step(build_job())
    assert "regularization" not in plain
    assert plain["loss"] == facts["loss"]


def test_the_reported_learning_rate_is_the_one_used_by_the_update(build_job):
    job = build_job()
    (rate, _) = [group["lr"] for group in job.engine.optimizer.param_groups]
    job.engine.optimizer.param_groups[0]["lr_scale"] = 0.5
    facts, *_ = train_step(job)
    assert facts["lr"] == 0.5 * rate


def ask_to_stop_after(job, step):
    """Send the signal of a time limit while the forward of `step` runs, to the thread that blocks it.

    Threads that earlier tests have left do not, and one of them would end the process.
    """

    def send(module, inputs, output):
        if job.step + 1 == step:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    return job.engine.module.register_forward_hook(send)


def recorded(job):
    return Recorder(job, Console(6, log_every=1, start_step=0), is_main=True, is_resume=True)


def test_a_stop_signal_ends_training_after_its_step_with_a_checkpoint(build_job, stop_signals):
    job = build_job("megalowbit.checkpoint.every=4")
    ask_to_stop_after(job, 3)
    with recorded(job) as recorder:
        assert train(job, recorder) is Ending.STOPPED
    assert (job.step, job.store.steps()) == (3, [3])
    assert not job.folder.done.exists()


def test_a_signal_at_a_saved_step_or_the_last_one_saves_once(build_job, stop_signals):
    job = build_job("megalowbit.checkpoint.every=2")
    hook = ask_to_stop_after(job, 2)
    with recorded(job) as recorder:
        assert train(job, recorder) is Ending.STOPPED
    assert job.store.steps() == [2]
    hook.remove()
    signal.sigtimedwait([signal.SIGUSR1], 0)
    ask_to_stop_after(job, 6)
    with recorded(job) as recorder:
        assert train(job, recorder) is Ending.DONE
    assert job.store.steps() == [2, 4, 6]
