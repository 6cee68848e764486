"""`python -m megalowbit evaluate`: the loss of a checkpoint or a Hugging Face folder on held-out text.

It builds the job of a run, with the same model, precision, recipe and layout on any number of processes, and
does what `components/validation.py` does in a run. The corpus of the training need not be there.

If the checkpoint holds the range of the layers' inputs (`components/static_inputs.py`), layers quantise by
it, as servers do: the loss then depends on no batch. With `--inputs dynamic` they quantise by the numbers of
each batch, and a checkpoint gives the losses that its run has recorded, bit for bit on the same process grid.
After a late switch the forward rounds nothing, also with the run's export in `hf/`; `--forward recipe` rounds
as before it, like a packed model.

The configuration is that of the run that the path is in, or any other. If its recipe is that of the
checkpoint, the full state is restored, with a late switch, chosen precisions and split weights; otherwise
only the weights are read. Like training, this needs memory for the optimizer's state. The vocabulary of a
checkpoint keeps its padding, which has no influence on the losses, whatever the configuration says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalowbit.data.cache.build_lines import reported_builds
from megalowbit.data.cache.node_first import run_on_each_node_first
from megalowbit.data.loader import ShardedLoader
from megalowbit.data.packing import PackedDataset
from megalowbit.data.settings import BPE_TOKENIZER, DataSettings
from megalowbit.data.tokenize import FolderTokenizer, Tokenizer, build_tokenizer, check_same_ids
from megalowbit.data.validation import open_validation
from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import agree, gather, raised_on_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.durable_files import atomic_file
from megalowbit.engine.process_start import compute_deterministically, start_process_group
from megalowbit.engine.run_checks.ranks_agree import check_ranks_agree
from megalowbit.errors import UserError, file_system_error
from megalowbit.families.vocabulary import FIELD, padding_multiple
from megalowbit.hf.folders.tokenizer_files import has_tokenizer, tokenizer_folder
from megalowbit.hf.training_checkpoint import (
    find_checkpoint,
    holds_run,
    is_training_checkpoint,
    stored_config,
    stored_static_inputs,
)
from megalowbit.json_text import read_json_object
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.static_inputs import (
    StaticInputs,
    beyond_range,
    needs_static_inputs,
    use_static_inputs,
)
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import check_config, check_kernels
from megalowbit.pretrain.components.late_switch import AS_RECIPE, AS_STORED, LateSwitch
from megalowbit.pretrain.components.validation import Validation, describe
from megalowbit.pretrain.config import PretrainConfig, load_config
from megalowbit.pretrain.job import Job, assemble
from megalowbit.pretrain.records.lines import job_lines
from megalowbit.pretrain.resume import unwritten_tokens
from megalowbit.pretrain.run import report_lost_ranks, start_facts
from megalowbit.pretrain.run_folder.folder import RunFolder, exported_step, run_folder_of
from megalowbit.shipped_files import to_stderr
from megalowbit.telemetry.columns import clock_text
from megalowbit.telemetry.facts import Fact
from megalowbit.values import BLOCK

TEXT_MISSING = (
    'there is no text to evaluate on: name it with --set \'megalowbit.data.validation={"corpus": "…"}\''
)

SHOWN = ("model ", "recipe ", "kernels ", "data ")  # labels of the lines that are printed
SWITCHED = "a late switch of the run has ended the rounding in the forward"
SECONDS_BETWEEN_LINES = 10.0
STATIC, DYNAMIC = INPUTS = ("static", "dynamic")  # whether inputs are quantised by recorded numbers


def evaluate(
    path: Path,
    identity: ProcessIdentity,
    *,
    config_file: Path | None,
    overrides: list[str],
    output: Path | None,
    inputs: str | None = None,
    forward: str = AS_STORED,
) -> dict[str, Fact]:
    """Evaluate the weights in `path` and print the result; every rank calls this once.

    Args:
        path: a run folder, a checkpoint or a Hugging Face folder; it exists.
        identity: this process.
        config_file: the configuration; None: that of the run.
        overrides: as for `load_config`.
        output: file for the figures as JSON; None: none.
        inputs: one of `INPUTS`; None: static, where the recipe needs it and the numbers were recorded.
        forward: one of `FORWARDS`: as the checkpoint rounds, or as the recipe does, also after a late switch.

    Returns:
        The figures, by the names that a run's metrics have.

    Raises:
        UserError: configuration, weights or text cannot be used, or there are no weights yet.
    """
    run = run_folder_of(path)
    is_ours = is_training_checkpoint(path)
    if path == run and not is_ours:
        raise UserError(f"the run in {path} has no complete checkpoint yet: name another, or wait for one")
    source = find_checkpoint(path) if is_ours else path
    padding = _padding(stored_config(source)) if is_ours else {}
    config = _configuration(source, run, config_file, overrides, identity.world_size, padding)
    with report_lost_ranks(identity):
        if config.settings.run.deterministic:
            compute_deterministically()
        start_process_group(identity)
        check_ranks_agree(start_facts(config, is_resume=False))
        agree(_check_output, output)
        agree(lambda: check_config(config))
        agree(lambda: check_kernels(recipe_of(config.recipe)))
        with reported_builds(to_stderr, is_first=identity.local_rank == 0):
            job = assemble(
                config,
                identity,
                RunFolder(run or Path()),
                open_data=partial(_text_only, tokenizer_folder=_tokenizer_folder(source, run)),
            )
        if is_ours and agree(holds_run, source, recipe_of(config.recipe)):
            agree(_check_rows, source, job.engine.module.config.vocab_size)
            job.load(source)
        late_switch = job.find(LateSwitch)
        if late_switch is not None and forward == AS_RECIPE:
            late_switch.undo()
        elif late_switch is not None and agree(_is_exported_after, late_switch.step, source, config):
            late_switch.switch()
        used = _use_inputs(job, agree(stored_static_inputs, source) if is_ours else None, inputs)
        facts, share = _measure(job, identity, used)
        agree(lambda: _report(output, source, job, facts, used.kind, share))
    return facts


def _is_exported_after(switch: int, source: Path, config: PretrainConfig) -> bool:
    """Whether a run has exported `source` after its late switch, and `config` has the recipe of the run."""
    step, run = exported_step(source), run_folder_of(source)
    if step is None or run is None or step <= switch:
        return False
    return recipe_of(read_json_object(RunFolder(run).config)[BLOCK]["recipe"]) == recipe_of(config.recipe)


def _measure(job: Job, identity: ProcessIdentity, used: UsedInputs) -> tuple[dict[str, Fact], float | None]:
    """Evaluate, and say on what; also gives the share of inputs beyond their recorded range. Collective."""
    validation = job.find(Validation)
    assert validation is not None  # `_configuration` has checked that there is a text
    if identity.is_main:
        lines = job_lines(job, identity, validation.describe_text())
        lines = [*(line for line in lines if line.startswith(SHOWN)), *used.lines]
        print("\n".join(lines), flush=True)
    progress = ProgressLines(validation.num_pauses, to_stderr if identity.is_main else lambda _: None)
    facts = validation.measure(progress)
    share = _beyond_share(job) if used.kind == STATIC else None
    return facts, share


class ProgressLines:
    """A line every 10 s about how much of the text is evaluated: `evaluated 12 % of the text, 0:03:20 left`.

    Work that is done in 10 s has none. On GPUs, batches that are queued count as evaluated.

    Args:
        total: number of parts.
        say: takes a line.
        clock: gives seconds.
    """

    def __init__(
        self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._say, self._clock = total, say, clock
        self._done, self._start = 0, clock()
        self._last = self._start

    def __call__(self) -> None:
        """Called before each part."""
        now = self._clock()
        if self._done and now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            left = (now - self._start) * (self._total - self._done) / self._done
            share = self._done / self._total
            self._say(f"evaluated {share:.0%} of the text, {clock_text(left)} left")
        self._done += 1


class UsedInputs(NamedTuple):
    """How layers quantise their inputs.

    Attributes:
        kind: one of `INPUTS`; None: not by numbers of a whole tensor.
        lines: to print.
    """

    kind: str | None
    lines: tuple[str, ...] = ()


def _use_inputs(job: Job, static: StaticInputs | None, inputs: str | None) -> UsedInputs:
    """Make the layers use the recorded numbers, if they need them and `inputs` allows it; collective.

    Raises:
        UserError: `inputs` is "static", but the layers cannot use recorded numbers.
    """
    model = job.engine.module
    layers = bit_layers(model).values()
    needs = any(needs_static_inputs(layer.recipe) or layer.chooser is not None for layer in layers)
    if not any(gather(needs)):
        return _unrounded(job.find(LateSwitch), inputs)
    if inputs == DYNAMIC:
        return UsedInputs(DYNAMIC, ("inputs    dynamic: quantised by the numbers of each batch",))
    reason = "their range was not recorded there"
    if static is not None:
        try:
            use_static_inputs(model, static, count_beyond=True)
            reason = ""
        except UserError as error:
            reason = str(error)
    reasons = [each for each in gather(reason) if each]
    if not reasons:
        return UsedInputs(STATIC, ("inputs    static: quantised by numbers recorded at the end of training",))
    if inputs == STATIC:
        raise raised_on_all_ranks(f"--inputs static: {reasons[0]}")
    use_static_inputs(model, None)
    return UsedInputs(DYNAMIC, (f"inputs    dynamic: quantised by the numbers of each batch; {reasons[0]}",))


def _unrounded(late_switch: LateSwitch | None, inputs: str | None) -> UsedInputs:
    """The inputs of a recipe that needs no numbers of a whole tensor.

    Raises:
        UserError: the checkpoint is from after a late switch, but `inputs` is "static".
    """
    if late_switch is None or not late_switch.is_switched:
        return UsedInputs(None)
    remedy = f"--forward {AS_RECIPE} evaluates with it"
    if inputs == STATIC:
        raise raised_on_all_ranks(f"--inputs {STATIC}: {SWITCHED}: {remedy}")
    return UsedInputs(None, (f"inputs    not quantised: {SWITCHED}; {remedy}",))


def _beyond_share(job: Job) -> float:
    """Share of the quantised elements of inputs that were beyond their recorded range, over all ranks."""
    counts = beyond_range(job.engine.module)
    if process_group.world_size() > 1:
        counts = counts.to(process_group.exchange_device(None, job.engine.device))
        collectives.all_reduce(counts)
    elements, beyond = counts.tolist()
    return beyond / max(1, elements)


def _padding(stored: Mapping[str, Any]) -> dict[str, int | None]:
    """The setting that gives the model's vocabulary the padding that it has in a checkpoint."""
    if (rows := stored.get("vocab_size")) is None:
        return {}
    return {"pad_vocab_to_multiple_of": padding_multiple(stored.get(FIELD, rows), rows)}


def _check_rows(source: Path, found: int) -> None:
    """Reject padding from the command line that is not that of the checkpoint."""
    if (rows := stored_config(source)["vocab_size"]) != found:
        raise UserError(
            f"the vocabulary in {source} has {rows} rows with its padding, and "
            f"{BLOCK}.model.pad_vocab_to_multiple_of makes it {found}: leave that out"
        )


def _configuration(
    source: Path,
    run: Path | None,
    config_file: Path | None,
    overrides: list[str],
    world_size: int,
    padding: Mapping[str, int | None],
) -> PretrainConfig:
    """The configuration with `source` as the model's weights, for this number of processes.

    `padding` comes from the checkpoint; settings on the command line replace it.

    Raises:
        UserError: there is none, it is invalid, or it names no text.
    """
    if config_file is None and run is None:
        raise UserError(f"{source} is not in a run's folder: name a configuration with --ds-config")
    file = config_file or RunFolder(run or Path()).config
    weights = {"checkpoint": str(source.resolve()), "config": None, "outliers": None, **padding}
    sizes = ["train_batch_size=auto", "gradient_accumulation_steps=1"]
    model = [f"{BLOCK}.model.{key}={json.dumps(value)}" for key, value in weights.items()]
    if config_file is None:
        model += [f"{BLOCK}.{key}={json.dumps(value)}" for key, value in unwritten_tokens(file).items()]
    config = load_config(file, [*sizes, *model, *overrides], world_size=world_size)
    if config.settings.data.validation is None:
        raise UserError(f"{file}: {TEXT_MISSING}")
    return config


class _TextOnly(ShardedLoader):
    """A loader that is not used for training, so it need not continue where the run was."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def _text_only(
    settings: DataSettings,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    tokenizer_folder: Path | None,
) -> ShardedLoader:
    """A loader with the text for validation, and zeros for training; arguments as for `build_loader`.

    A trained tokenizer is read from `tokenizer_folder`, if it is there; another must give the ids of that.
    """

    def work() -> ShardedLoader:
        tokenizer = _tokenizer(settings, tokenizer_folder)
        length = settings.sequence_length
        zeros = np.zeros(micro_batch_size * world_size * length, dtype=np.uint8)
        return _TextOnly(
            PackedDataset(zeros, length, fingerprint="zeros", name="zeros"),
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=settings.seed,
            tokenizer=tokenizer,
            validation=open_validation(settings, tokenizer, is_training=False),
        )

    fingerprint: Callable[[ShardedLoader], str] = lambda loader: (  # noqa: E731
        "" if loader.validation is None else loader.validation.fingerprint
    )
    return run_on_each_node_first(work, fingerprint)


def _tokenizer_folder(source: Path, run: Path | None) -> Path | None:
    """The folder with the tokenizer of the weights in `source`; None: they have none."""
    if run is None:
        return tokenizer_folder(source)
    return RunFolder(run).tokenizer if has_tokenizer(RunFolder(run).tokenizer) else None


def _tokenizer(settings: DataSettings, folder: Path | None) -> Tokenizer:
    """The tokenizer of `settings`, which must be that of the model, in `folder`.

    Raises:
        UserError: they give other ids.
    """
    if folder is None:
        return build_tokenizer(settings)
    if settings.tokenizer == BPE_TOKENIZER:
        return FolderTokenizer(folder, parse_special_tokens=settings.parse_special_tokens)
    tokenizer = build_tokenizer(settings)
    remedy = f"and the losses would be of no use: add --set {BLOCK}.data.tokenizer={folder}"
    check_same_ids(tokenizer, settings, folder, remedy=remedy)
    return tokenizer


def _check_output(output: Path | None) -> None:
    """Reject a file in a folder that does not exist, before the text is evaluated."""
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}: the folder does not exist: make it, or name another")


def _report(
    output: Path | None,
    source: Path,
    job: Job,
    facts: Mapping[str, Fact],
    inputs: str | None,
    beyond_share: float | None,
) -> None:
    """Write the figures to `output`, if there is one, and then print them."""
    if output is not None:
        content = {"path": str(source), "step": job.step or None, "recipe": job.recipe.name, **facts}
        late_switch = job.find(LateSwitch)
        content |= {"inputs": inputs, "inputs_beyond_range": beyond_share}
        content["late_switch"] = late_switch is not None and late_switch.is_switched
        try:
            with atomic_file(output) as file:
                file.write(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            message = f"--output {output} cannot be written ({error.strerror}): name another file"
            raise file_system_error(message, error) from error
    beyond = "" if beyond_share is None else f"; {beyond_share:.2%} of the inputs beyond their recorded range"
    print(f"\n{source}: {describe(facts)}{beyond}", flush=True)
