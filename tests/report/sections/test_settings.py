"""Settings: what differs, where runs were trained, values on one line."""

import re

from made_runs import add_attempt, write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.settings import configurations, differences, environment, value_text


def test_differences_are_of_settings_and_environments(tmp_path):
    first = write_run(tmp_path / "a", 20)
    second = write_run(tmp_path / "b", 20, changes={"megalowbit.recipe": {"base": "nvfp4", "keep": ["x"]}})
    for folder, version in ((first, "1"), (second, "2")):
        add_attempt(folder, {"step": 0, "torch": version, "host": "same", "command": folder.name})
    html = differences(Drawing(read_runs([first, second])))
    assert re.findall("<tr><td>([^<]*)</td>", html) == [
        "megalowbit.recipe", "megalowbit.recipe.base", "megalowbit.recipe.keep", "torch",
    ]  # fmt: skip
    assert "<td>1</td><td>2</td>" in html
    assert "[&quot;x&quot;]" in html
    same = write_run(tmp_path / "c", 20)
    add_attempt(same, {"torch": "1", "host": "same"})
    assert "are equal" in differences(Drawing(read_runs([first, same])))
    assert differences(Drawing(read_runs([first]))) == ""


def test_attempts_are_listed_if_there_were_several(tmp_path):
    run = write_run(tmp_path / "run", 20)
    add_attempt(run, {"step": 0, "host": "node1", "processes": 8})
    assert "Attempts" not in environment(Drawing(read_runs([run])))
    add_attempt(run, {"step": 1200, "host": "node2", "processes": 4})
    html = environment(Drawing(read_runs([run])))
    assert "<td>from the start</td>" in html
    assert "<td>after step 1,200</td>" in html
    assert "<td>processes</td><td>4</td>" in html
    unknown = write_run(tmp_path / "unknown", 20)
    assert "is not known" in environment(Drawing(read_runs([unknown])))


def test_values_are_on_one_line_and_configurations_are_whole(tmp_path):
    assert value_text(["a", None, 1.5]) == '["a", null, 1.5]'
    assert value_text("text") == "text"
    assert len(value_text("x" * 1000)) == 161
    html = configurations(Drawing(read_runs([write_run(tmp_path / "run", 20)])))
    assert "&quot;sequence_length&quot;: 128" in html
