"""The pictures of docs/pictures/ are those that the script draws; pages show each with a description."""

import re
import sys
from xml.etree import ElementTree

import pytest

from launchers import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import pictures
from svg import Picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    return pictures.drawn()


def test_the_pictures_are_up_to_date(drawn):
    files = {path.name: path.read_text(encoding="utf-8") for path in pictures.FOLDER.iterdir()}
    assert files == drawn, "run python docs/site/pictures.py"


def test_a_picture_out_of_date_is_named_and_written_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    monkeypatch.setattr(pictures, "PICTURES", (pictures.grid, pictures.step))
    assert pictures.main([]) == 0
    (tmp_path / "grid.svg").write_text("<svg/>")
    assert pictures.main(["--check"]) == 1
    assert "out of date: grid.svg" in capsys.readouterr().err
    assert pictures.write() == ["grid.svg"]
    assert pictures.main(["--check"]) == 0


def test_everything_lies_inside_its_picture(drawn):
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        width, height = map(float, root.get("viewBox").split()[2:])
        assert root.find(f"{SVG}title").text, name
        for shape in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(shape.get(key, 0)) for key in ("x", "y", "width", "height"))
            is_inside = 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
            assert is_inside, (name, shape.attrib)
        for curve in root.iter(f"{SVG}polyline"):
            places = [tuple(map(float, place.split(","))) for place in curve.get("points").split()]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in places), (name, curve.attrib)
        for label in root.iter(f"{SVG}text"):
            half = len(label.text) * float(label.get("font-size")) * 0.27  # about half its width
            x, anchor = float(label.get("x")), label.get("text-anchor")
            left = x - {"start": 0, "middle": half, "end": 2 * half}[anchor]
            is_inside = left >= 0 and left + 2 * half <= width and float(label.get("y")) <= height
            assert is_inside, (name, label.text)


def test_each_picture_is_shown_with_a_description(drawn):
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]*)\]\((?:\.\./)?pictures/(\w+\.svg)\)", pages))
    assert sorted(shown.values()) == sorted(drawn)
    assert all(len(description) > 20 for description in shown)


def test_text_is_escaped_and_numbers_are_short():
    picture = Picture(10, 10, "a < b")
    picture.text(1 / 3, 2.0, "x & y")
    assert "<title>a &lt; b</title>" in picture.svg()
    assert 'x="0.3" y="2"' in picture.svg()
    assert "x &amp; y" in picture.svg()
