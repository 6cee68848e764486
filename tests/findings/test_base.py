"""Every name has its place, and a finding becomes plain values."""

import json

from megalowbit.findings import base
from megalowbit.findings.base import CONSEQUENCES, Evidence, Finding


def test_causes_and_their_consequences_are_known_names():
    names = {value for key, value in vars(base).items() if key.isupper() and isinstance(value, str)}
    assert len(names) == 28
    assert CONSEQUENCES.keys() | frozenset().union(*CONSEQUENCES.values()) <= names


def test_an_ending_causes_nothing_and_a_cause_what_its_row_says():
    cause = Finding(name=base.DATA, step=3, title="", evidence=())
    rose = Finding(name=base.ROSE, step=5, title="", evidence=(), role="symptom")
    killed = Finding(name=base.KILLED, step=9, title="", evidence=(), role="ending")
    assert cause.may_cause(rose)
    assert not cause.may_cause(killed)
    assert not killed.may_cause(rose)


def test_a_finding_is_json_and_says_whether_it_is_proven():
    evidence = (Evidence(file="metrics.jsonl", text="loss 9", step=4), Evidence(file=".lock", text="free"))
    found = Finding(name=base.DATA, step=4, title="t", evidence=evidence, remedy=("r",), is_shown=False)
    content = json.loads(json.dumps(found.to_dict()))
    assert content["certainty"] == "likely"
    assert content["evidence"][0] == {"file": "metrics.jsonl", "step": 4, "text": "loss 9"}
    assert [str(each) for each in evidence] == ["metrics.jsonl, step 4: loss 9", ".lock: free"]
