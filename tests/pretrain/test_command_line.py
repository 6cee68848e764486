import gc
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from launchers import ROOT, write_config
from megalowbit.data.token_files.megatron import MegatronWriter
from megalowbit.errors import UserError
from megalowbit.pretrain import command_line
from megalowbit.pretrain.command_line import METIS_FLAGS, WITHOUT_COUNTERPART, build_parser, main
from megalowbit.standard_streams import run_until_unread

START = "start     importing torch and DeepSpeed\n"


def test_launcher_arguments_are_accepted_and_ranks_come_from_the_environment(tmp_path):
    config = str(tmp_path / "x.json")
    options = build_parser().parse_args(["--local_rank=3", "--deepspeed", "--deepspeed_config", config])
    assert str(options.ds_config) == config
    assert options.resume == "no"


def test_set_may_be_repeated():
    options = build_parser().parse_args(["--ds-config", "x", "--set", "a=1", "--set", "b=2"])
    assert options.overrides == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ds-config"),
        (["--ds-config", "missing.json"], "missing.json"),
        (["--ds-config", "x.json", "--resume", "maybe"], "maybe"),
        (["--ds-config", "x.json", "--ds-conf", "y"], "--ds-conf"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_other_ranks_wait_for_the_main_rank_to_report_first(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--ds-config", "missing.json"]) == 2
    assert waited == [command_line.MAIN_RANK_HEAD_START_SECONDS]
    assert capsys.readouterr().err.startswith("error on rank 1: ")


def test_a_defect_keeps_its_traceback(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    monkeypatch.setattr("megalowbit.pretrain.estimate.dry_run.describe", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--ds-config", str(config), "--dry-run"])


@pytest.mark.parametrize(("local_size", "share"), [("1", 1.0), ("2", 0.5), ("64", 0.0)])
def test_cores_are_shared_between_the_processes_of_a_node(local_size, share, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_SIZE", local_size)
    main(["--ds-config", str(write_config(tmp_path)), "--dry-run"])
    cores = len(os.sched_getaffinity(0))
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, int(cores * share)))


def test_a_thread_count_chosen_by_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    main(["--ds-config", str(write_config(tmp_path)), "--dry-run"])
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_data_can_be_prepared_in_advance(tmp_path, capsys):
    config = str(write_config(tmp_path))
    assert main(["--ds-config", config, "--prepare-data"]) == 0
    found = capsys.readouterr()
    lines = found.out.splitlines()
    assert found.err == START
    assert lines[0].startswith("data      tokenising ")  # before the work, which may take minutes
    assert "sequences of 32 tokens are ready in" in lines[-1]
    assert main(["--ds-config", config, "--prepare-data"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-1:]
    assert list((tmp_path / "cache").rglob("*.npy"))


def test_token_ids_are_ready_where_they_are(tmp_path, capsys):
    with MegatronWriter(tmp_path / "ids", 256) as writer:
        writer.add_document(np.append(np.arange(1, 199), 0))  # with its end
    config = str(write_config(tmp_path))
    chosen = f"megalowbit.data.corpus={tmp_path / 'ids'}"
    assert main(["--ds-config", config, "--prepare-data", "--set", chosen]) == 0
    line = f"6 sequences of 32 tokens are ready in {tmp_path / 'ids'} (read in place)"
    assert capsys.readouterr().out.splitlines() == [line]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"corpus": "ids", "packing": "best_fit"}, "ids (read in place) and cache (plans of best_fit)"),
        ({"packing": "best_fit"}, "cache"),
        ({"sources": {"a": "text.txt", "b": "ids", "c": "more"}}, "ids, more (read in place) and cache"),
        ({"sources": {"b": "ids", "c": "more"}}, "ids, more (read in place)"),
        ({"sources": {"a": "text.txt", "d": "other.txt"}}, "cache"),
    ],
)
def test_prepared_data_are_said_to_be_where_they_are(tmp_path, capsys, data, place):
    for name, least in (("ids", 1), ("more", 2)):
        with MegatronWriter(tmp_path / name, 256) as writer:
            writer.add_document(np.append(np.arange(least, 199), 0))
    (tmp_path / "other.txt").write_text("another text " * 99)
    path = write_config(tmp_path)
    raw = json.loads(path.read_text())
    section = raw["megalowbit"]["data"]
    if "sources" in data:
        del section["corpus"]
        data["sources"] = {
            name: {"corpus": str(tmp_path / each), "weight": 1} for name, each in data["sources"].items()
        }
    section |= {key: str(tmp_path / each) if key == "corpus" else each for key, each in data.items()}
    path.write_text(json.dumps(raw))
    assert main(["--ds-config", str(path), "--prepare-data"]) == 0
    said = capsys.readouterr().out.splitlines()[-1].replace(f"{tmp_path}/", "")
    assert said.endswith(f"sequences of 32 tokens are ready in {place}")


def test_an_output_without_arrows_gets_escapes(tmp_path, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # as of LC_ALL=en_US.ISO-8859-1, or so
    monkeypatch.setattr(sys, "stdout", output)
    config = write_config(tmp_path)
    corpus = (tmp_path / "text.txt").rename(tmp_path / "größe.txt")
    words = ["--ds-config", str(config), "--dry-run", "--set", f"megalowbit.data.corpus={corpus}"]
    assert run_until_unread(lambda: main(words)) == 0
    assert b"gr\\xf6\\xdfe.txt" in output.buffer.getvalue()


FOR_FOUR = ["--set", "tensor_parallel.autotp_size=4"]


def test_data_of_a_run_on_many_processes_is_prepared_by_one(tmp_path, capsys):
    assert main(["--ds-config", str(write_config(tmp_path)), "--prepare-data", *FOR_FOUR]) == 0
    assert "are ready in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "count", "said"),
    [
        ([], 4, "== processes\n4 (1 × 4: data 1, tensor 4), the smallest process grid of this configuration"),
        (["--processes", "8"], 8, "== processes\n8 (2 × 4: data 2, tensor 4)\n"),
        (
            ["--set", "gradient_accumulation_steps=16", "--set", "train_micro_batch_size_per_gpu=2"],
            16,
            "== processes\n16 (4 × 4: data 4, tensor 4), the smallest",
        ),
    ],
)
def test_one_process_sizes_a_run_of_many(more, count, said, capsys, tmp_path):
    config = write_config(tmp_path)
    batch = ["--set", "train_batch_size=128"]
    model = ["--set", "megalowbit.model.overrides.n_head=4", "--set", "megalowbit.model.overrides.n_embd=64"]
    batch += ["--set", "gradient_accumulation_steps=auto"]
    assert main(["--ds-config", str(config), "--dry-run", *FOR_FOUR, *batch, *model, *more]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert f"\n== memory of one of {count} processes (estimate)\n" in printed


@pytest.mark.parametrize("more", [["--processes", "0", "--dry-run"], ["--processes", "4"]])
def test_a_number_of_processes_is_only_for_a_dry_run(more, capsys, tmp_path):
    assert main(["--ds-config", str(write_config(tmp_path)), *more]) == 2
    assert "needs --dry-run and a value of at least 1" in capsys.readouterr().err


def test_an_unsuitable_number_of_processes_is_reported(capsys, tmp_path):
    arguments = ["--ds-config", str(write_config(tmp_path)), "--dry-run", "--processes", "6", *FOR_FOUR]
    assert main(arguments) == 2
    assert "does not divide the 6 processes" in capsys.readouterr().err


IMPORTS = "megalowbit.engine.process_start.import_deepspeed"


@pytest.mark.parametrize(
    ("more", "place", "out", "message"),
    [
        ([], IMPORTS, START, "interrupted: --resume auto continues from the last checkpoint, or starts at"),
        (
            ["--benchmark"],
            IMPORTS,
            START,
            "interrupted before the end of the benchmark; no figures are written",
        ),
        (
            ["--dry-run"],
            "megalowbit.pretrain.estimate.dry_run.describe",
            "",
            f"{START}interrupted before the end of the dry run",
        ),
        (
            ["--prepare-data"],
            "megalowbit.data.loader.count_samples",
            "",
            f"{START}interrupted before the data were ready",
        ),
    ],
    ids=["run", "benchmark", "dry-run", "prepare-data"],
)
def test_ctrl_c_says_what_was_not_done_and_whether_it_can_continue(
    more, place, out, message, capsys, tmp_path, monkeypatch
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    config = ["--ds-config", str(write_config(tmp_path)), *more]
    assert main(config) == 130
    found = capsys.readouterr()
    assert found.out == out  # before imports that take seconds
    assert found.err.startswith(message)
    assert found.err.count("\n") == message.count("\n") + 1
    assert (found.out + found.err).count(START) == 1
    if not more:
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert main(config) == 130
        assert capsys.readouterr() == ("", "")  # only the main rank speaks


@pytest.mark.parametrize("reaches_step", [True, False])
def test_the_garbage_collector_pauses_until_the_first_step_or_an_error(tmp_path, monkeypatch, reaches_step):
    seen = []

    def pretrain(*_, at_first_step, **__):
        seen.append(gc.isenabled())
        if not reaches_step:
            raise UserError("x")
        at_first_step()
        seen.append(gc.isenabled())

    monkeypatch.setattr("megalowbit.pretrain.run.pretrain", pretrain)
    # the process group of this worker's other tests stays
    monkeypatch.setattr("megalowbit.engine.process_start.stop_process_group", lambda _: None)
    code = main(["--ds-config", str(write_config(tmp_path)), "--run-dir", str(tmp_path / "run")])
    assert code == (0 if reaches_step else 2)
    assert [*seen, gc.isenabled()] == ([False, True, True] if reaches_step else [False, True])


def test_a_flag_of_metis_points_to_the_page_that_translates_it(capsys):
    page = (ROOT / "docs" / "spectral.md").read_text(encoding="utf-8")
    table = page.partition("## Metis's command line, key by key\n")[2].partition("\n## ")[0]
    rows = [row.partition(" | ")[0] for row in table.splitlines()]
    documented = {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)", row)}
    known = {f"--{name}" for name in METIS_FLAGS.split()}
    others = {f"--{name}" for name in WITHOUT_COUNTERPART.split()}
    assert known | others == documented - {"--local-rank"} | {"--reg-beta"}  # a launcher's; without a row
    without = next(row for row in table.splitlines() if "no counterpart" in row).partition(" | ")[0]
    assert others == set(re.findall(r"`(--[a-z-]+)", without)) - {"--local-rank"} | {"--reg-beta"}
    for flag in known | others:
        sentence = "is a key of the configuration here: docs/spectral.md names it"
        if flag in others:
            sentence = "has no key in the configuration here: docs/spectral.md says what replaces it"
        with_underscores = "--" + flag[2:].replace("-", "_")
        for given in ([flag, "1"], [f"{flag}=1"], [with_underscores], ["--ds-config", "x.json", flag]):
            assert main(given) == 2
            word = next(each for each in given if each.startswith("--") and each != "--ds-config")
            word = word.partition("=")[0]
            table_name = "in the table of Metis's command line"
            assert capsys.readouterr().err == f"error: {word} {sentence}, {table_name}\n"
    assert main(["--tag-of-mine"]) == 2
    assert "required: --ds-config" in capsys.readouterr().err
    assert main(["--ds-config", "x.json", "--enable-low"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --enable-low; see --help\n"


@pytest.mark.parametrize("is_verbose", [False, True])
def test_remarks_of_other_libraries_at_import_are_hidden_unless_verbose(is_verbose):
    code = (
        "import logging; from megalowbit.pretrain.command_line import prepare_environment; "
        f"prepare_environment(is_verbose={is_verbose}); "
        "logging.getLogger('torchao').warning('no kernels'); logging.getLogger('torchao').error('broken')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines() == ["no kernels"] * is_verbose + ["broken"]
