from megalowbit.doctor.notices import by_level, merged, note, problem, warning


def test_notices_are_sorted_by_level_and_listed_once():
    found = [note("c", "3"), problem("a", "1"), warning("b", "2"), problem("a", "1")]
    assert [each.code for each in by_level(found)] == ["a", "b", "c"]


def test_what_all_hosts_have_is_said_without_hosts():
    same, other = warning("x", "slow"), problem("y", "old")
    found = merged([("n1", same), ("n2", same), ("n2", other)], 2)
    assert [(each.code, each.hosts) for each in found] == [("x", ()), ("y", ("n2",))]


def test_text_names_hosts_code_and_fix():
    assert (
        str(problem("x", "it is old", "update it", ["n1", "n2"]))
        == "  ✗ n1, n2: it is old [x]\n    → update it"
    )
    assert problem("x", "it", hosts=["n1"]).to_dict()["hosts"] == ["n1"]
