"""The command `megalowbit`: each command is found, helps at once, and is the same code as its script."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from programs import module_of

from launchers import ROOT, check_refusal
from megalowbit.commands.completion import SHELLS
from megalowbit.commands.runs import diagnose
from megalowbit.commands.table import COMMANDS, build_parser, listed, main
from megalowbit.errors import TransientError, UserError
from megalowbit.one_line_parser import printing_user_errors

DOORS = {
    "pretrain": "launch/pretrain.py",
    "submit": "launch/slurm/submit.py",
    "convert": "tools/convert_hf.py",
    "goodput": "tools/goodput.py",
    "preprocess": "tools/preprocess_data.py",
    "plan-layers": "tools/plan_layers.py",
    "calibrate": "tools/calibrate_speculation.py",
    "study": "tools/study.py",
}
HEAVY = "{'torch', 'deepspeed', 'transformers', 'datasets'}"


def command(*words, code=None, **more):
    """`python -m megalowbit` as a process; `code` runs instead of it."""
    start = ["-c", code] if code else ["-m", "megalowbit"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, env=env, **more)


def examples(text):
    return re.findall(r"^    (megalowbit (?:.*\\\n)?.*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def helps(tmp_path_factory):
    """Command → its help, then what is heavy among all modules that have been imported by then."""
    code = (
        "import sys\nfrom megalowbit.commands.table import main\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        main([name, '--help'])\n    except SystemExit:\n        pass\n"
        f"    print('heavy:', *({HEAVY} & set(sys.modules)), end='\\0')\n"
    )
    done = command(*COMMANDS, code=code, cwd=tmp_path_factory.mktemp("helps"))
    assert done.stdout.count("\0") == len(COMMANDS), done.stderr
    return dict(zip(COMMANDS, done.stdout.split("\0"), strict=False))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse_and_imports_nothing_heavy(name, helps):
    assert helps[name].startswith(f"usage: megalowbit {name} ")
    assert helps[name].endswith("heavy:")
    found = examples(helps[name])
    assert found
    for example in found:
        words = shlex.split(example.replace("\\\n", "").partition(" > ")[0])
        if words[1] == name:
            COMMANDS[name].load().build_parser().parse_args(words[2:])


def test_listing_recipes_imports_nothing_heavy():
    code = (
        "import sys\nfrom megalowbit.commands.table import main\n"
        f"main(['recipes'])\nprint('heavy:', *({HEAVY} & set(sys.modules)))\n"
    )
    done = command(code=code)
    assert done.stdout.startswith("nvfp4 "), done.stderr
    assert done.stdout.endswith("\nheavy:\n")


def test_the_list_has_every_command_and_its_own_examples_parse():
    done = command("--help")
    assert done.returncode == 0
    assert done.stdout == listed() + "\n"
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\S", done.stdout, re.MULTILINE)
    for example in examples(done.stdout):
        words = shlex.split(example)
        if words[1] in COMMANDS:
            build_parser().parse_args(words[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command is named: name one of "),
        (["pretrian"], "unknown command 'pretrian': did you mean 'pretrain'? known: "),
        (["--local_rank=1", "nothing"], "unknown command 'nothing'"),
        (["pretrain"], "the following arguments are required: --ds-config"),
        (["recipes", "nvfp5"], "unknown recipe 'nvfp5': did you mean"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    code = main(words)
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess(words, code, printed.out, printed.err), message)


def test_a_full_disk_is_one_line(capsys):
    @printing_user_errors
    def write():
        with Path("/dev/full").open("w") as file:
            file.write("text")
        return 0

    assert write() == 2
    reason = "error: No space left on device: free space, and run the same command again\n"
    assert capsys.readouterr().err == reason


def test_a_full_disk_is_one_line_with_the_file(tmp_path):
    """In a process that may write files of at most a kilobyte."""
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from megalowbit.durable_files import atomic_file\n"
        "from megalowbit.one_line_parser import printing_user_errors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "@printing_user_errors\n"
        "def main():\n"
        "    with atomic_file(Path('text.json')) as file:\n"
        "        file.write('text' * 1024)\n"
        "    return 0\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: text.json: File too large: raise the limit on the size of files (ulimit -f), and run the "
        "same command again\n"
    )
    assert not list(tmp_path.iterdir())


def test_version_is_that_of_the_package(capsys):
    from megalowbit import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megalowbit {__version__}\n"


@pytest.mark.parametrize(("name", "script"), DOORS.items())
def test_a_script_has_the_functions_of_its_command(name, script):
    door, module = module_of(script), COMMANDS[name].load()
    assert getattr(door, "main", module.main) is module.main
    text = (ROOT / script).read_text(encoding="utf-8")
    assert f"from {module.__name__} import " in text
    assert len(text.splitlines()) <= 15


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("goodput", ["--nodes", "64", "--node-mtbf-hours", "600", "--days", "1", "--save-seconds", "9"]),
        ("submit", ["--ds-config", "nowhere.json"]),
        ("pretrain", ["--ds-config", "nowhere.json"]),
    ],
)  # fmt: skip
def test_command_and_script_print_the_same(name, arguments):
    ours = command(name, *arguments, cwd=ROOT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, DOORS[name], *arguments]
    theirs = subprocess.run(script, capture_output=True, text=True, env=env, cwd=ROOT)
    assert ours.stdout + ours.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_without_shtab_names_the_remedy_and_with_it_every_command(shell, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", shell]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "pip install 'megalowbit[completion]'" in printed.err
    monkeypatch.undo()
    shtab = pytest.importorskip("shtab")
    assert shtab.SUPPORTED_SHELLS
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in (*COMMANDS, "--ds-config", "to-megalowbit"):
        assert name in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("2 mistakes:\n  - one\n  - two"), 2), (TransientError("a\nb"), 75)]
)
def test_a_user_error_of_a_command_is_printed_with_its_exit_code(capsys, error, code):
    @printing_user_errors
    def main(arguments):
        raise error

    assert main([]) == code
    expected = "2 mistakes:\n  - one\n  - two" if code == 2 else "a b"
    assert capsys.readouterr() == ("", f"error: {expected}\n")


def test_results_and_other_errors_of_a_command_pass_through():
    assert printing_user_errors(lambda arguments: arguments)(7) == 7
    with pytest.raises(KeyError):
        printing_user_errors({}.__getitem__)("x")


def test_a_command_that_meets_a_passing_fault_says_with_75_that_a_retry_may_help(
    monkeypatch, capsys, tmp_path
):
    def read_run(folder):
        raise TransientError(f"{folder} does not answer")

    monkeypatch.setattr(diagnose, "read_run", read_run)
    assert diagnose.main([str(tmp_path)]) == 75
    assert capsys.readouterr().err == f"error: {tmp_path} does not answer\n"
