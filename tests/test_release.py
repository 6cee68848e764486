"""What a release consists of: one version everywhere, and notes from the changelog."""

import subprocess
import sys

import pytest

import megalowbit
from launchers import ROOT

TOOL = ROOT / "tools" / "release_notes.py"


@pytest.fixture
def release_notes(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import release_notes

    return release_notes


def output(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_distribution_command_and_changelog_have_one_version(release_notes):
    version = megalowbit.__version__
    assert output("setup.py", "--version").splitlines()[-1] == version
    assert output("-m", "megalowbit", "--version") == f"megalowbit {version}\n"
    text = (ROOT / "CHANGELOG.md").read_text()
    assert next(iter(release_notes.sections(text))) == version


def test_notes_are_the_section_of_a_version(release_notes, monkeypatch, tmp_path, capsys):
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## 0.2.0 (unreleased)\n\n### Added\n- b\n\n## 0.1.0 (2026-01-02)\n- a\n"
    )
    monkeypatch.setattr(release_notes, "CHANGELOG", changelog)
    assert release_notes.main([]) == 0
    assert capsys.readouterr().out == "### Added\n- b\n"
    assert release_notes.main(["0.1.0"]) == 0
    assert capsys.readouterr().out == "- a\n"
    assert release_notes.main(["0.1.1"]) == 2
    assert "unknown version '0.1.1': did you mean '0.1.0'?" in capsys.readouterr().err


def test_two_sections_of_a_version_are_an_error(release_notes):
    with pytest.raises(megalowbit.UserError, match=r"two sections 0\.1\.0: join them"):
        release_notes.sections("## 0.1.0\n- a\n## 0.1.0 (unreleased)\n- b\n")


def test_the_newest_section_has_notes(release_notes):
    notes = release_notes.notes(None)
    assert "### Added\n" in notes
    assert "\n## " not in notes
