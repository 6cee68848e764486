"""Draws the pictures of the docs into docs/pictures/, from the code and the recorded results.

    python docs/site/pictures.py            # write those that have changed
    python docs/site/pictures.py --check    # exit code 1 if one is out of date

The build of the site draws them, too; tests/docs/test_pictures.py compares. They are in the repository: a
viewer of the repository shows the pages without a build.
"""

import json
import sys
from pathlib import Path

from svg import BLUE, BLUE_PALE, GREEN, GREEN_PALE, GREY, INK, ORANGE, ORANGE_PALE, PALE, Picture

DOCS = Path(__file__).resolve().parents[1]
FOLDER = DOCS / "pictures"
WIDEST = 5.0  # an interval of two pairs can be wider than the picture
RECIPES = {"nvfp4": ORANGE, "nvfp4-keep-positions": BLUE, "nvfp4-first-block-fp8": GREEN}
LEGEND = (200, 280, 455)  # where their names begin
# two blocks of 16 numbers; the second has an outlier
NUMBERS = [
    0.12, -0.31, 0.05, 0.48, -0.22, 0.37, -0.09, 0.6, -0.41, 0.16, 0.27, -0.52, 0.03, -0.14, 0.33, -0.25,
]  # fmt: skip
WITH_OUTLIER = [
    0.2, -0.1, 0.15, 1.8, -0.3, 0.4, -0.05, 0.22, -0.18, 0.11, -0.36, 0.28, 0.07, -0.24, 0.31, -0.02,
]  # fmt: skip


def grid() -> Picture:
    """The numbers of E2M1 on a line."""
    from megalowbit.formats.element import ELEMENTS

    element = ELEMENTS["e2m1"]
    picture = Picture(720, 110, "The fifteen numbers of E2M1 on a line from -6 to 6")
    unit = 320 / element.max
    picture.line(30, 55, 690, 55)
    for value in sorted({sign * magnitude for magnitude in element.grid for sign in (1, -1)}):
        x = 360 + unit * value
        picture.circle(x, 55, 5)
        is_above = abs(value) in (0.5, 1.5)  # neighbours are close: two rows of labels
        picture.text(x, 38 if is_above else 80, f"{value:g}", 12, anchor="middle")
    picture.text(
        360, 103, f"{element.bits} bits: a sign, two bits of exponent, one of mantissa", 12, GREY, "middle"
    )
    return picture


def blocks() -> Picture:
    """32 numbers before and after NVFP4, rounded to nearest."""
    import torch

    from megalowbit.quantize.names import quantizer

    exact = NUMBERS + WITH_OUTLIER
    packed = quantizer("nvfp4e2m1bnosr").quantize(torch.tensor([exact]))
    rounded = packed.dequantize()[0].tolist()
    spacings = (packed.scales.float().flatten() * packed.tensor_scale.float()).tolist()
    picture = Picture(720, 290, "Two blocks of 16 numbers before and after rounding to NVFP4")
    unit, middle = 110 / max(map(abs, exact)), 165
    for block in range(2):
        left = 20 + 350 * block
        picture.rectangle(left, 40, 330, 190, BLUE_PALE if block == 0 else ORANGE_PALE)
        note = "of about equal size" if block == 0 else "with an outlier"
        picture.text(left + 165, 30, f"block {block + 1}: 16 numbers {note}", 13, anchor="middle", bold=True)
        picture.line(left + 5, middle, left + 325, middle)
        for place in range(16):
            x, index = left + 10 + 20 * place, 16 * block + place
            for value, shift, colour in ((exact[index], 0, "#a9b6c3"), (rounded[index], 8, BLUE)):
                height = abs(value) * unit
                picture.rectangle(
                    x + shift, middle - max(value, 0) * unit, 7, max(height, 1), colour, radius=1
                )
        num_zeros = sum(value == 0 for value in rounded[16 * block : 16 * block + 16])
        line = (
            f"block scale {spacings[block]:.3f}; smallest step {spacings[block] / 2:.3f}; {num_zeros} zeros"
        )
        picture.text(left + 165, 250, line, 12, GREY, "middle")
    picture.rectangle(250, 266, 12, 12, "#a9b6c3", radius=1)
    picture.text(268, 277, "exact", 12)
    picture.rectangle(340, 266, 12, 12, BLUE, radius=1)
    picture.text(358, 277, "after NVFP4, to nearest", 12)
    return picture


def layout() -> Picture:
    """The bits of one NVFP4 block."""
    picture = Picture(
        720, 120, "Memory of an NVFP4 block: 16 codes of 4 bits, one E4M3 scale, one scale for the tensor"
    )
    for place in range(16):
        picture.rectangle(20 + 25 * place, 30, 23, 36, BLUE_PALE, BLUE)
        picture.text(31.5 + 25 * place, 53, "4", 12, BLUE, "middle")
    picture.text(220, 90, "16 codes, 4 bits each", 12, GREY, "middle")
    picture.box(440, 30, 90, 36, "E4M3", fill=ORANGE_PALE, stroke=ORANGE)
    picture.text(485, 90, "block scale, 8 bits", 12, GREY, "middle")
    picture.box(570, 30, 110, 36, "fp32", fill=GREEN_PALE, stroke=GREEN)
    picture.text(625, 90, "one for the tensor", 12, GREY, "middle")
    picture.text(
        360, 114, f"(16 · 4 + 8) ÷ 16 = {(16 * 4 + 8) / 16:g} bits an element", 13, INK, "middle", bold=True
    )
    return picture


def layer() -> Picture:
    """The three products of a low-bit layer."""
    picture = Picture(720, 345, "The three products of a BitLinear and their quantised operands")
    picture.text(20, 24, "forward", 13, GREY, bold=True)
    picture.text(20, 162, "backward", 13, GREY, bold=True)
    picture.line(20, 140, 700, 140, dashed=True)
    rows = (
        (40, ("input", BLUE), ("weight", BLUE), "output = input · weightᵀ"),
        (175, ("grad_output", ORANGE), ("weight", BLUE), "grad_input = grad_output · weight"),
        (255, ("grad_output", ORANGE), ("input", BLUE), "grad_weight = grad_outputᵀ · input"),
    )
    for top, first, second, product in rows:
        for place, (operand, colour) in enumerate((first, second)):
            y = top + 34 * place
            fill = BLUE_PALE if colour == BLUE else ORANGE_PALE
            picture.box(15, y, 95, 26, operand)
            picture.arrow((110, y + 13), (143, y + 13))
            picture.box(145, y, 75, 26, "quantise", fill=fill, stroke=colour)
            picture.arrow((220, y + 13), (263, top + 30))
        kind = "main_grad, fp32" if "weight =" in product else "bf16 or fp16"
        picture.box(265, top, 285, 60, product, "operands FP4, sums fp32", fill=GREEN_PALE, stroke=GREEN)
        picture.arrow((550, top + 30), (583, top + 30))
        picture.box(585, top + 8, 120, 44, kind)
    picture.text(20, 122, "the codes are kept for backward, 4.5 bits an element", 12, GREY)
    picture.text(
        15, 336, "blue: rounded to nearest even; orange: rounded stochastically (recipe nvfp4)", 12, GREY
    )
    return picture


def step() -> Picture:
    """An optimizer step in mixed precision."""
    picture = Picture(720, 250, "One optimizer step in mixed precision, with the skip of an overflow")
    top = (
        ("loss × S", "fp32"),
        ("backward", "fp16 or bf16"),
        ("sum, average", "main_grad, fp32"),
        ("÷ S, inf or NaN?", "one host read"),
    )
    for place, lines in enumerate(top):
        x = 20 + 178 * place
        is_check = place == len(top) - 1
        picture.box(
            x,
            30,
            146,
            56,
            *lines,
            fill=ORANGE_PALE if is_check else PALE,
            stroke=ORANGE if is_check else GREY,
        )
        if place:
            picture.arrow((x - 32, 58), (x - 2, 58))
    bottom = (("weights", "in half precision"), ("Adam on masters", "fp32"), ("clip", "by the global norm"))
    for place, lines in enumerate(bottom):
        picture.box(20 + 178 * place, 155, 146, 56, *lines, fill=GREEN_PALE, stroke=GREEN)
    picture.arrow((600, 86), (600, 183), (526, 183))
    picture.text(592, 140, "no", 13, GREEN, "end", bold=True)
    picture.arrow((376, 183), (348, 183))
    picture.arrow((198, 183), (170, 183))
    picture.arrow((650, 86), (650, 150))
    picture.text(658, 120, "yes", 13, ORANGE, bold=True)
    picture.box(610, 152, 96, 56, "skip", "S falls", fill=ORANGE_PALE, stroke=ORANGE)
    picture.text(
        20,
        240,
        "S is the loss scale. All ranks skip the same step; a skipped step changes no weight and no moment.",
        12,
        GREY,
    )
    return picture


def split() -> Picture:
    """A spectral split and its product."""
    picture = Picture(
        720, 190, "An operand split into low-rank factors and a residual, which are quantised separately"
    )
    picture.box(20, 60, 90, 70, "M", "an operand")
    picture.arrow((110, 80), (168, 45))
    picture.arrow((110, 110), (168, 145))
    picture.box(170, 18, 190, 52, "U · diag(S) · Vᵀ", "a few large directions", fill=BLUE_PALE, stroke=BLUE)
    picture.box(170, 120, 190, 52, "residual", "M − Q(U) · S · Q(V)ᵀ", fill=ORANGE_PALE, stroke=ORANGE)
    picture.arrow((360, 44), (418, 44))
    picture.arrow((360, 146), (418, 146))
    picture.box(420, 18, 120, 52, "Q(U), S, Q(V)", "thin products", fill=BLUE_PALE, stroke=BLUE)
    picture.box(420, 120, 120, 52, "Q(residual)", "one product", fill=ORANGE_PALE, stroke=ORANGE)
    picture.arrow((540, 44), (598, 82))
    picture.arrow((540, 146), (598, 108))
    picture.box(600, 60, 100, 70, "sum", "of products", fill=GREEN_PALE, stroke=GREEN)
    return picture


def speculation() -> Picture:
    """How the precision of a product is chosen."""
    picture = Picture(720, 200, "Precision speculation: statistics, predicted SNR, choice, measurement")
    boxes = (
        ("statistics", "of each operand"),
        ("predicted SNR", "of each candidate"),
        ("choice", "cheapest that is good"),
        ("measured SNR", "of parts of products"),
    )
    for place, lines in enumerate(boxes):
        x = 15 + 178 * place
        fill, stroke = ((BLUE_PALE, BLUE), (BLUE_PALE, BLUE), (GREEN_PALE, GREEN), (ORANGE_PALE, ORANGE))[
            place
        ]
        picture.box(x, 30, 150, 60, *lines, fill=fill, stroke=stroke)
        if place:
            picture.arrow((x - 28, 60), (x - 2, 60))
    picture.arrow((624, 90), (624, 125), (446, 125), (446, 92))
    picture.text(535, 145, "below the threshold: bf16 for a while", 12, ORANGE, "middle")
    picture.arrow((371, 90), (371, 165), (90, 165), (90, 92))
    picture.text(230, 185, "every few steps, between two steps, equal on all ranks", 12, GREY, "middle")
    return picture


def gap() -> Picture:
    """Gap to bf16 at the end, with intervals, from docs/results/default.json."""
    results = json.loads((DOCS / "results" / "default.json").read_text(encoding="utf-8"))
    sizes = {"0.8M": "0.84 M", "2M": "1.85 M", "8M": "7.52 M"}
    texts = {"python": "Python sources", "docstrings": "docstrings"}
    found = {
        (each["steps"], each["size"], each["text"]): each["rows"]
        for each in results["groups"]
        if each["text"] in texts
    }
    height, first, last = 52, -1, 7  # of a group, in pixels; of the axis, in percent
    left, bottom = 270, 30 + height * len(found)
    unit = 435 / (last - first)
    picture = Picture(
        720, bottom + 40, "Gap to bf16 at the end of 1,500 and of 3,000 steps, in percent of the loss"
    )
    for percent in range(first, last + 1):
        x = left + unit * (percent - first)
        picture.line(x, 24, x, bottom, PALE if percent else GREY)
        picture.text(x, bottom + 16, f"{percent} %", 12, GREY, "middle")
    for number, (steps, size, text) in enumerate(sorted(found)):
        y = 50 + height * number
        rows = {row["label"]: row["percent"] for row in found[steps, size, text]}
        pairs = rows["nvfp4"]["num_pairs"]
        few = f", ± {most / 2:.0f} %: not drawn" if (most := _widest(rows)) >= WIDEST else ""
        picture.text(15, y + 4, f"{sizes[size]}, {steps:,} steps, {texts[text]}", 13)
        picture.text(15, y + 20, f"{pairs} pair{'s' if pairs > 1 else ''}{few}", 11, GREY)
        for shift, (name, colour) in zip((-14, 0, 14), RECIPES.items(), strict=True):
            if name not in rows:
                continue
            mean, low, high = (rows[name][each] for each in ("mean", "low", "high"))
            if low is not None and high - low < WIDEST:
                ends = (left + unit * (each - first) for each in (low, high))
                picture.line(next(ends), y + shift, next(ends), y + shift, colour, 2)
            picture.circle(left + unit * (mean - first), y + shift, 5, colour)
    for x, (name, colour) in zip(LEGEND, RECIPES.items(), strict=True):
        picture.circle(x, bottom + 32, 5, colour)
        picture.text(x + 10, bottom + 36, name, 12)
    return picture


def _widest(rows: dict) -> float:
    """The width of the widest interval of the recipes drawn, in percent; 0 without any."""
    drawn = [rows[name] for name in RECIPES if name in rows and rows[name]["low"] is not None]
    return max((each["high"] - each["low"] for each in drawn), default=0.0)


def gap_of_recipes() -> Picture:
    """Gap to bf16 of recipes and of parts of `nvfp4`, with intervals, from docs/results/gap.json."""
    results = json.loads((DOCS / "results" / "gap.json").read_text(encoding="utf-8"))
    group = next(
        each
        for each in results["groups"]
        if (each["size"], each["steps"], each["text"]) == ("0.8M", 1500, "all")
    )
    percent = {row["label"]: row["percent"] for row in group["rows"]}
    order = sorted(percent, key=lambda label: percent[label]["mean"])
    height, first, last = 30, -1, 3  # of a row, in pixels; of the axis, in percent
    left, bottom = 230, 20 + height * len(order)
    unit = 450 / (last - first)
    title = "Gap to bf16 at the end of 1,500 steps, mean of two texts, in percent of the loss"
    picture = Picture(720, bottom + 34, title)
    for each in range(first, last + 1):
        x = left + unit * (each - first)
        picture.line(x, 12, x, bottom, PALE if each else GREY)
        picture.text(x, bottom + 20, f"{each} %", 12, GREY, "middle")
    for number, label in enumerate(order):
        y, colour = 30 + height * number, BLUE if label.startswith("only-") else ORANGE
        low, middle, high = (left + unit * (percent[label][each] - first) for each in ("low", "mean", "high"))
        picture.text(15, y + 4, label, 13)
        picture.line(low, y, high, y, colour, 2)
        picture.circle(middle, y, 5, colour)
    return picture


def gap_over_steps() -> Picture:
    """Gap to bf16 over 3,000 steps, of each pair and in the mean, from docs/results/default.json."""
    results = json.loads((DOCS / "results" / "default.json").read_text(encoding="utf-8"))
    steps, window = 3000, 150
    curves = {name: _gap_curves(results["cells"], name, steps, window) for name in RECIPES}
    fewest, most = (of(map(len, curves.values())) for of in (min, max))
    pairs = f"{most}" if fewest == most else f"{fewest} to {most}"
    picture = Picture(720, 350, f"Gap to bf16 over {steps} steps, {pairs} pairs and their mean, in nats")
    left, bottom, wide, high, lowest = 60, 270, 620, 1650, -0.02

    def place(step, value):
        return left + wide * step / steps, bottom - high * (value - lowest)

    for value in (-0.02, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12):
        picture.line(*place(0, value), *place(steps, value), PALE if value else GREY)
        picture.text(left - 8, place(0, value)[1] + 4, f"{value:g}", 12, GREY, "end")
    for step in range(0, steps + 1, 500):
        picture.text(place(step, 0)[0], bottom + 18, f"{step:,}", 12, GREY, "middle")
    picture.line(*place(0.7 * steps, lowest), *place(0.7 * steps, 0.13), GREY, dashed=True)
    picture.text(place(0.7 * steps, 0)[0] + 6, 22, "late switch (not in nvfp4)", 11, GREY)
    for name, colour in RECIPES.items():
        pale = {ORANGE: "#e9b48f", BLUE: "#a9c8f5", GREEN: "#a5d6b0"}[colour]
        means = [sum(values) / len(values) for values in zip(*curves[name], strict=True)]
        for curve, stroke, width in (*((each, pale, 1) for each in curves[name]), (means, colour, 2.5)):
            points = zip(range(window, steps + 1, window), curve, strict=True)
            picture.path([place(step, value) for step, value in points], stroke, width)
    for x, (name, colour) in zip(LEGEND, RECIPES.items(), strict=True):
        picture.circle(x, 308, 5, colour)
        picture.text(x + 10, 312, name, 12)
    picture.text(60, 336, "pale: single pairs; above: steps", 12, GREY)
    return picture


def _gap_curves(cells: dict, recipe: str, steps: int, window: int) -> list[list[float]]:
    """For each seed, gaps of the means of `window` steps that follow each other."""
    found = []
    for name, cell in cells.items():
        size, text, length, label, seed = name.split(",")
        baseline = cells.get(f"{size},{text},{length},bf16,{seed}")
        if (size, text, length, label) == ("0.8M", "docstrings", str(steps), recipe) and baseline:
            both = [each["losses"]["means"] for each in (cell, baseline)]
            blocks = window // cell["losses"]["block"]
            gaps = [own - other for own, other in zip(*both, strict=True)]
            found.append([sum(gaps[i : i + blocks]) / blocks for i in range(0, len(gaps), blocks)])
    return found


PICTURES = (grid, blocks, layout, layer, step, split, speculation, gap, gap_of_recipes, gap_over_steps)


def drawn() -> dict[str, str]:
    """The SVG text of each picture, by the name of its file."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in PICTURES}


def outdated() -> dict[str, str]:
    """Those that differ from their file or have none."""
    files = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    return {name: text for name, text in drawn().items() if files.get(name) != text}


def write() -> list[str]:
    """Write the pictures that have changed; returns their names."""
    FOLDER.mkdir(exist_ok=True)
    changed = outdated()
    for name, text in changed.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return list(changed)


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if arguments == ["--check"]:
        names = outdated()
        if names:
            print(f"out of date: {', '.join(names)}: run python docs/site/pictures.py", file=sys.stderr)
        return int(bool(names))
    if arguments:
        print("usage: python docs/site/pictures.py [--check]", file=sys.stderr)
        return 2
    print("\n".join(write()) or "no picture has changed")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    sys.exit(main(sys.argv[1:]))
