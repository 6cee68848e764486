"""The site builds strictly; and what makes it strict does: each kind of mistake in a page fails the build.

A build takes a quarter of a minute of one core, most of it for the signatures of the API. Quick tests look at
what the extension does to a page's text.
"""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import megalowbit
from launchers import ROOT

SITE = ROOT / "docs" / "site"
sys.path.insert(0, str(SITE))
BROKEN = {
    "[page](nowhere.md)": "nowhere.md",
    "[anchor](runs.md#no-such-heading)": "no-such-heading",
    "[file](../configs/nowhere.json)": "nowhere.json",
    "![picture](pictures/nowhere.svg)": "nowhere.svg",
}


@pytest.fixture(scope="module")
def pages():
    import pages

    return pages


def build(source, target):
    """Build with the options of `make docs`; returns exit code and output."""
    options = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "-c",
        str(source / "docs/site"),
        "-d",
        str(target / "doctrees"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(target / "html")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=source, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_builds_without_a_warning_in_a_minute(tmp_path):
    began = time.process_time(), os.times().children_user
    code, output = build(ROOT, tmp_path)
    assert code == 0, output
    assert os.times().children_user - began[1] < 60
    index = (tmp_path / "html" / "docs" / "index.html").read_text()
    assert index.count('class="caption"') == len(
        re.findall(r"^## ", (ROOT / "docs/index.md").read_text(), re.M)
    )
    assert "docs/index.html" in (tmp_path / "html" / "index.html").read_text()
    api = (tmp_path / "html" / "docs" / "api.html").read_text()
    assert [name for name in megalowbit.__all__ if f'id="megalowbit.{name}"' not in api] == []
    assert (tmp_path / "html" / "docs" / "decisions" / "0001-user-errors-are-one-exception.html").exists()


@pytest.mark.slow
def test_each_kind_of_mistake_fails_the_build(tmp_path):
    source = tmp_path / "source"
    (source / "docs" / "decisions").mkdir(parents=True)
    (source / "docs" / "site").symlink_to(SITE)
    (source / "megalowbit").symlink_to(ROOT / "megalowbit")
    (source / "docs" / "runs.md").write_text("# Runs\n")
    (source / "docs" / "left-out.md").write_text("# A page that no list names\n")
    (source / "docs" / "index.md").write_text(
        "# Index\n\n## A\n\n- [Runs](runs.md)\n\n" + "\n\n".join(BROKEN)
    )
    code, output = build(source, tmp_path)
    assert code != 0
    assert re.search(r"left-out.md: WARNING: document isn't included in any toctree", output)
    for part in BROKEN.values():
        assert any("WARNING" in line and part in line for line in output.splitlines()), (part, output)


def test_the_lists_of_the_index_are_the_navigation(pages):
    text = pages.with_navigation(
        "# T\n\n## Start\n\n- [One](one.md): about it\n- [Two](../TWO.md)\n\n## Train\n\n- [X](x.md)\n"
    )
    assert ":caption: Start\n\nOne <one.md>\nTwo <../TWO.md>\n" in text
    assert ":caption: Train\n\nX <x.md>\n" in text


def test_every_page_is_in_one_list_of_the_index():
    listed = re.findall(r"^- \[[^\]]+\]\(([^)#:]+\.md)\)", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert sorted(set(listed)) == sorted(listed)
    paths = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    paths = {path for path in paths if not path.startswith("decisions/0") and path != "index.md"}
    missing = sorted(paths - set(listed))
    assert not missing, "add a line for the page to docs/index.md"


def test_every_public_name_is_on_the_api_page_once():
    listed = re.findall(r"^- `mlb\.(\w+)`", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(listed) == sorted(megalowbit.__all__)


def test_a_name_on_the_api_page_gets_its_signature(pages):
    text = pages.with_docstrings("- `mlb.convert`\n- `mlb.BitLinear`\n")
    assert ".. autofunction:: megalowbit.convert" in text
    assert ".. autoclass:: megalowbit.BitLinear" in text


def test_links_to_folders_are_resolved_and_code_is_left_alone(pages):
    docs = ROOT / "docs"
    assert pages.without_folder_links("[d](decisions/)", docs) == "[d](decisions/README.md)"
    assert pages.without_folder_links("[e](../examples)", docs) == "e"
    assert pages.without_folder_links("[r](runs.md)", docs) == "[r](runs.md)"
    code = "```\n[e](../examples)\n```"
    assert pages.without_folder_links(code, docs) == code


def test_the_entrance_leads_to_the_index_only_if_the_build_went_well(pages, tmp_path):
    app = SimpleNamespace(config=SimpleNamespace(root_doc="docs/index", project="p"), outdir=tmp_path)
    pages.write_entrance(app, RuntimeError())
    assert not (tmp_path / "index.html").exists()
    pages.write_entrance(app, None)
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()


def test_a_docstring_is_turned_into_restructured_text(pages):
    assert (
        pages.as_rst("`a\nb`s, f(*args), ``x*y`` and 2 * 3") == "``a b``\\ s, f(\\*args), ``x*y`` and 2 * 3"
    )
    assert pages.as_rst("* a list\n* of `two`") == "* a list\n* of ``two``"


def test_a_fence_in_a_docstring_becomes_a_directive_with_its_lines_unchanged(pages):
    text = "Do `it`:\n\n```\nf(*a,\n    b=`1`)\n\ng()\n```\n\nThen."
    assert pages.as_rst(text) == (
        "Do ``it``:\n\n.. code-block:: python\n\n    f(*a,\n        b=`1`)\n\n    g()\n\n\nThen."
    )
    assert pages.as_rst("```json\n{}\n```").startswith(".. code-block:: json\n\n    {}\n")
