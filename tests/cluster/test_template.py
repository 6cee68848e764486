import pytest

from megalowbit.cluster.template import fill
from megalowbit.errors import UserError


def test_values_replace_their_placeholders():
    assert fill("a={{a}} b={{b}}\n", {"a": "1", "b": "2"}) == "a=1 b=2\n"


def test_a_template_line_without_a_value_is_omitted():
    template = "#SBATCH --qos={{qos}}\n#SBATCH --time={{time}}\nset {{time}} {{qos}}\n"
    assert fill(template, {"qos": None, "time": "5"}) == "#SBATCH --time=5\n"


def test_a_template_line_with_a_list_is_repeated():
    template = "{\n    export {{pair}} # {{why}}\n}\n"
    filled = fill(template, {"pair": ["A=1", "B=2"], "why": "so"})
    assert filled == "{\n    export A=1 # so\n    export B=2 # so\n}\n"
    assert fill(template, {"pair": [], "why": "so"}) == "{\n}\n"


def test_notes_for_readers_of_the_template_are_left_out():
    assert fill("#: how {{to}} read\n# kept\n    #: also\n", {}) == "# kept\n"


def test_placeholders_in_values_are_not_expanded():
    values = {"a": "{{b}}", "b": "{{a}}", "list": ["{{a}}"]}
    assert fill("{{a}} {{b}}\n{{list}} {{b}}\n", values) == "{{b}} {{a}}\n{{a}} {{a}}\n"


def test_other_shell_braces_are_kept():
    text = 'x=${x:-y} "${a[@]}" { {a} }} ${{\n'
    assert fill(text, {}) == text


def test_an_unknown_placeholder_names_its_neighbour():
    with pytest.raises(UserError, match=r"unknown placeholder 'tme': did you mean 'time'\?"):
        fill("{{tme}}", {"time": "5", "nodes": "2"})
