"""Command lines called in this process, which is as cheap as a function, where no start is tested."""

import functools
import importlib.util
import subprocess

from launchers import ROOT


@functools.cache
def module_of(path):
    """A program's file, imported as a module; `path` is relative to the repository."""
    spec = importlib.util.spec_from_file_location((ROOT / path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_main(path, *arguments, capsys):
    """Call `main(arguments)` of a program; returns what `subprocess.run` would.

    Args:
        path: of the program, relative to the repository.
        arguments: of its command line.
        capsys: pytest's fixture.
    """
    capsys.readouterr()
    try:
        code = module_of(path).main([str(each) for each in arguments])
    except SystemExit as end:  # --help
        code = end.code
    printed = capsys.readouterr()
    return subprocess.CompletedProcess([path, *arguments], code, printed.out, printed.err)
