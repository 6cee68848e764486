"""The page as a browser shows it: wide and narrow, light and dark, with values under the pointer."""

import pytest
from browser import NEEDS_BROWSER, open_browser
from made_runs import write_checks, write_layers, write_run

from megalowbit.report.page import write_report

pytestmark = NEEDS_BROWSER
WIDTHS = (1280, 390)
# the lowest contrast of text that WCAG 2 accepts at level AA, for large and for normal text
LEAST_CONTRAST = 4.5
CONTRAST = """
const numbers = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((each) => {
  const part = each / 255;
  return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
});
const light = (colour) => { const [r, g, b] = numbers(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const page = light(getComputedStyle(document.body).backgroundColor);
const found = {};
for (const each of document.querySelectorAll("h1, h2, p, td, th, figcaption, .plot i, .legend span, nav a")) {
  const text = light(getComputedStyle(each).color);
  const ratio = (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
  found[each.tagName] = Math.min(found[each.tagName] ?? 99, ratio);
}
return found;
"""
# elements that reach beyond the right edge of the screen although nothing around them scrolls
BEYOND = """
return [...document.querySelectorAll("body *")].filter((each) => {
  if (each.closest(".wide:not(.chart), nav, pre, details, svg")) return false;
  const box = each.getBoundingClientRect();
  return box.width > 0 && box.right > window.innerWidth + 1;
}).map((each) => each.outerHTML.slice(0, 80));
"""
OVERLAPS = """
const found = [];
for (const plot of document.querySelectorAll(".plot")) {
  for (const kind of ["x", "y"]) {
    const boxes = [...plot.querySelectorAll(`i.${kind}`)]
      .filter((each) => getComputedStyle(each).display !== "none")
      .map((each) => each.getBoundingClientRect()).filter((each) => each.width);
    boxes.sort((a, b) => (kind === "x" ? a.left - b.left : a.top - b.top));
    boxes.slice(1).forEach((box, number) => {
      const before = boxes[number];
      const isOver = kind === "x" ? before.right > box.left : before.bottom > box.top + 2;
      if (isOver) found.push(plot.outerHTML.slice(0, 120));
    });
  }
}
return found;
"""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run and of three."""
    folder = tmp_path_factory.mktemp("pages")

    def rows(step, record):
        record["loss_scale"] = 2.0 ** (16 + step // 900)
        if step % 500 == 0:
            record["validation/loss"] = record["loss"] + 0.1
        if step % 10 == 1:
            record |= {"speculation/share_int8": 0.5, "speculation/share_bf16": 0.5}
        return record

    run = write_run(folder / "nvfp4", 2500, rows=rows)
    write_layers(run, steps=2500, layers=40)
    write_checks(run, steps=2500, layers=8)
    others = [
        write_run(folder / name, 2500, rows=rows, seed=seed, changes={"megalowbit.recipe": name})
        for seed, name in enumerate(("bf16", "a-run-with-a-long-name-that-says-everything-about-it"), start=1)
    ]
    return {
        "one": write_report([run], folder / "one.html"),
        "three": write_report([others[0], run, others[1]], folder / "three.html"),
    }


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_beyond_the_edge_or_overlaps(browser, pages, name, width):
    browser.open_page(pages[name], width=width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(BEYOND) == []
    assert browser.run(OVERLAPS) == []
    assert browser.errors() == []


@pytest.mark.parametrize("is_dark", [False, True])
def test_texts_can_be_read_in_light_and_dark(browser, pages, is_dark):
    browser.open_page(pages["three"], is_dark=is_dark)
    page = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(19, 21, 24)" if is_dark else "rgb(255, 255, 255)")
    contrasts = browser.run(CONTRAST)
    assert {name: ratio for name, ratio in contrasts.items() if ratio < LEAST_CONTRAST} == {}


def test_lines_fill_the_width_of_their_chart_at_any_width(browser, pages):
    script = """
      const plot = document.querySelector(".plot"), line = plot.querySelector("polyline.line");
      return [line.getBoundingClientRect().width, plot.getBoundingClientRect().width];
    """
    for width in WIDTHS:
        browser.open_page(pages["one"], width=width)
        line, plot = browser.run(script)
        assert line == pytest.approx(plot, rel=0.02)


def centre_of(browser, selector, number=0):
    """Scroll the middle of an element to that of the screen; returns where it is."""
    return browser.run(
        """const each = document.querySelectorAll(arguments[0])[arguments[1]];
        each.scrollIntoView({block: "center"});
        const box = each.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];""",
        selector,
        number,
    )


def test_the_pointer_shows_values_of_every_run_and_the_same_step_in_other_charts(browser, pages):
    browser.open_page(pages["three"])
    browser.move_to(*centre_of(browser, ".plot[data-x]"))
    tip = browser.run("return document.querySelector('.tip').innerText")
    step, *rows = tip.splitlines()
    assert 1200 <= int(step.removeprefix("step ").replace(",", "")) <= 1300
    assert [row.rpartition(" ")[0] for row in rows] == [
        "bf16", "nvfp4", "a-run-with-a-long-name-that-says-everything-about-it",
    ]  # fmt: skip
    assert all(2.4 < float(row.rpartition(" ")[2]) < 2.7 for row in rows)  # 2.5 + 3·exp(-4), and noise
    assert browser.run("return document.querySelectorAll('.cursor').length") > 5
    browser.move_to(1, 1)
    assert browser.run("return document.querySelectorAll('.tip, .cursor').length") == 0


def test_a_value_of_another_step_is_shown_with_its_step(browser, pages):
    browser.open_page(pages["one"])
    across, down = centre_of(browser, ".plot[data-x]")
    width = browser.run("return document.querySelector('.plot[data-x]').getBoundingClientRect().width")
    rows = []
    for step in (1500, 1600):
        browser.move_to(across + width * (step - 1250) / 2500, down)
        rows.append(browser.run("return document.querySelector('.tip').innerText").splitlines())
    (step, training, validation), (_, _, later) = rows
    assert 1490 <= int(step.removeprefix("step ").replace(",", "")) <= 1510
    assert training.startswith("training, mean 2.")
    assert validation.startswith("validation 2.")
    assert " at " not in validation
    assert later == f"{validation} at 1,500"


def test_the_pointer_shows_the_value_of_a_cell_of_a_map(browser, pages):
    browser.open_page(pages["one"])
    maps = browser.run("return [...document.querySelectorAll('.map')].map((each) => each.dataset.unit)")
    for number in (maps.index("%"), maps.index("int8,bf16")):
        browser.move_to(*centre_of(browser, ".map", number))
        name, steps, value = browser.run("return document.querySelector('.tip').innerText").splitlines()
        if maps[number] == "%":  # layer n of 40 saturates n of 1000 elements
            assert (name, steps, value) == ("5.mlp.a", "steps 1,201–1,300", "≈ 2 %")
        else:
            assert name == "h.4.attn" or name == "4.attn"
            assert value == "int8"
    assert browser.errors() == []


def test_a_phone_shows_a_chart_without_a_script(browser, pages, tmp_path):
    text = pages["one"].read_text()
    start, end = text.index("<script>"), text.index("</script>") + len("</script>")
    plain = tmp_path / "plain.html"
    plain.write_text(text[:start] + text[end:])
    browser.open_page(plain, width=390)
    assert browser.run("return document.querySelectorAll('polyline').length") > 10
    assert browser.run("return document.querySelector('.map img').naturalWidth") > 1
