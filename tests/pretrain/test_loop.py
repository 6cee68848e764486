import json
import math
import shutil
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from megalowbit.errors import UserError
from megalowbit.layers.surgery import bit_layers
from megalowbit.pretrain.loop import Ending, pretrain, train, train_step
from megalowbit.pretrain.recorder import Recorder
from megalowbit.pretrain.stop_signals import STOP_SIGNALS, block_stop_signals
from megalowbit.process_group import ProcessIdentity
from megalowbit.telemetry.console import Console


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


def test_a_run_ends_with_checkpoint_summary_and_model(resolve, tmp_path, capsys):
    config = resolve("megalowbit.run.steps=4", "megalowbit.telemetry.layers_every=2")
    folder = tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=False)
    assert (folder / "checkpoints" / "step-00000004" / "manifest.json").exists()
    assert (folder / "hf" / "model.safetensors").exists()
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == 4
    assert summary["final_loss"] == rows[-1]["loss"]
    assert summary["tokens"] == 4 * 128
    table = [json.loads(line) for line in (folder / "overflow_layers.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in table}) == [2, 4]
    resolved = json.loads((folder / "config.json").read_text())
    assert resolved == config.to_dict()
    output = capsys.readouterr().out
    assert "8 layers swapped, 1 kept" in output
    assert "4/4" in output


def test_a_finished_run_that_is_resumed_has_nothing_to_do_and_an_extended_one_goes_on(
    resolve, tmp_path, capsys
):
    folder = tmp_path / "run"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=False)
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=True)
    assert "nothing left to do" in capsys.readouterr().out
    first = torch.load(folder / "checkpoints" / "step-00000002" / "mp_rank_00_model_states.pt")["module"]
    pretrain(resolve("megalowbit.run.steps=3"), ProcessIdentity(), run_dir=folder, is_resume=True)
    assert "megalowbit.run.steps: 2 → 3" in capsys.readouterr().out
    exports = {name: load_file(folder / name / "model.safetensors") for name in ("hf", "hf-step-00000002")}
    bias = "transformer.h.0.mlp.c_fc.bias"
    assert torch.equal(exports["hf-step-00000002"][bias], first[bias])
    last = torch.load(folder / "checkpoints" / "step-00000003" / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(exports["hf"][bias], last[bias])
    assert not torch.equal(first[bias], last[bias])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_run_killed_before_its_first_checkpoint_starts_again(resolve, tmp_path):
    config, folder = resolve("megalowbit.run.steps=2"), tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=False)
    shutil.rmtree(folder / "checkpoints")
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.params.lr=1e-5", r"optimizer\.params\.lr was 0\.003 .* is 1e-05 now"),
        ("megalowbit.recipe=bf16", r"megalowbit\.recipe was 'nvfp4'"),
        ("megalowbit.model.overrides.n_head=4", "n_head"),
    ],
)
def test_a_resume_that_would_make_another_run_is_refused_and_leaves_the_first_alone(
    resolve, tmp_path, override, message
):
    folder = tmp_path / "run"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), run_dir=folder, is_resume=False)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        pretrain(
            resolve("megalowbit.run.steps=4", override), ProcessIdentity(), run_dir=folder, is_resume=True
        )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_records_that_cannot_be_opened_are_one_clear_error(resolve, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        pretrain(resolve(), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=True)


def test_a_run_in_fp8_says_at_its_end_what_its_products_ran_in(resolve, tmp_path, capsys):
    recipe = 'megalowbit.recipe={"base": "mxfp4", "gemm": "fp8"}'
    config = resolve("megalowbit.run.steps=1", recipe)
    pretrain(config, ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("products")]
    # 8 layers, two micro-batches
    assert sum(int(word) for word in line.replace(",", " ").split() if word.isdigit()) == 3 * 8 * 2
    assert "output 16 fp8" in line


def test_layouts_are_configured_like_any_recipe(build_job):
    job = build_job('megalowbit.recipe={"base": "nvfp4", "layout": "per_gemm", "hadamard": true}')
    facts, is_skipped, *_ = train_step(job)
    assert not is_skipped
    assert math.isfinite(facts["loss"])


def test_the_regularizer_is_reported_beside_the_loss(build_job):
    job = build_job("megalowbit.regularizer.strength=1e-3", "megalowbit.regularizer.epsilon=1e-3")
    weights = [layer.weight.detach().double() for layer in bit_layers(job.engine.module).values()]
    expected = sum(1e-3 * (w**2 + 1 / (w**2 + 1e-3)).mean().item() for w in weights)
    facts, *_ = train_step(job)
    assert facts["regularization"] == pytest.approx(expected, rel=1e-6)
    assert facts["loss"] < 10  # the language model's alone
    plain, *_ = train_step(build_job())
    assert "regularization" not in plain
    assert plain["loss"] == facts["loss"]


def test_the_learning_rate_reported_is_the_one_weights_moved_by(build_job):
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


@pytest.fixture
def stop_signals():
    """Blocked as in a program of its own, and none left waiting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    block_stop_signals()
    yield
    while signal.sigtimedwait(STOP_SIGNALS, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def test_a_finished_run_is_marked_and_a_stopped_one_is_not(resolve, tmp_path, stop_signals, capsys):
    arguments = {"run_dir": tmp_path / "run", "is_resume": True}
    done = tmp_path / "run" / "DONE"
    pretrain(resolve("megalowbit.run.steps=2"), ProcessIdentity(), **arguments)
    assert json.loads(done.read_text()) == {"step": 2}
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), **arguments)
    assert "stopped after step 3 as asked: go on with --resume auto" in capsys.readouterr().out
    assert not done.exists()
    signal.sigtimedwait([signal.SIGTERM], 0)
    for _ in range(2):  # the second time nothing is left to do
        pretrain(resolve("megalowbit.run.steps=4"), ProcessIdentity(), **arguments)
        assert json.loads(done.read_text()) == {"step": 4}


def test_a_run_killed_after_its_last_checkpoint_is_summed_up_and_exported_by_the_next_start(
    resolve, tmp_path
):
    settings = (
        "megalowbit.run.steps=2",
        "megalowbit.telemetry.layers_every=3",
        "megalowbit.late_switch.at=1",
    )
    config, run = resolve(*settings), tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=run, is_resume=False)
    whole = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    summary = json.loads(whole["summary.json"])
    for name in ("summary.json", "DONE"):
        (run / name).unlink()
    shutil.rmtree(run / "hf")
    pretrain(config, ProcessIdentity(), run_dir=run, is_resume=True)
    for name in ("metrics.jsonl", "overflow_layers.jsonl", "DONE"):
        assert (run / name).read_bytes() == whole[name]
    again = json.loads((run / "summary.json").read_text())
    assert again == {**summary, "tokens_per_second": None}  # which nobody has measured
    assert (run / "hf" / "model.safetensors").exists()


def test_skips_in_a_row_are_counted_over_a_kill(resolve, tmp_path):
    limit = "megalowbit.run.max_consecutive_skips=4"
    scaler = 'megalowbit.grad_scaler={"initial_scale": 1e30, "min_scale": 1e30, "max_scale": 1e30}'
    arguments = ("megalowbit.precision=fp16", scaler, limit, "megalowbit.run.steps=9")
    config, run = resolve(*arguments, "megalowbit.checkpoint.every=3"), tmp_path / "run"
    for _ in range(2):  # as if killed before the fourth
        with pytest.raises(UserError, match=r"4 steps in a row were not finite \(step 4"):
            pretrain(config, ProcessIdentity(), run_dir=run, is_resume=True)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
