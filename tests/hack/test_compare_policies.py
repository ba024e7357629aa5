"""Goal: the comparison keeps its promises, names what it is, and would notice if ours broke them.
Method: the short form, once; then our policy with one rule broken."""

import json

import pytest

from hack import compare_policies
from hack.policies.ours import OurRules
from hack.policies.peers import LlamaSwap
from hack.policies.traces import traces


def test_ours_keeps_its_bound_and_the_others_are_named_as_re_implemented():
    found = compare_policies.compare(is_quick=True)
    assert json.loads(json.dumps(found)) == found
    assert found["problems"] == []
    assert found["passed"]
    assert "re-implemented" in found["note"]
    names = set(found["sources"])
    assert {"understudy", "llama-swap", "Ollama", "llama.cpp router", "GF", "MB"} <= names
    for trace in found["traces"].values():
        assert set(trace["rules"]) == names
    busy = found["traces"]["one request beside a busy model"]["rules"]
    assert busy["llama-swap"]["starved"] == 1
    assert "problem" not in "\n".join(compare_policies.lines(found))


@pytest.mark.parametrize("rule", ["yield only at zero in flight", "cut at the drain", "no turns"])
def test_broken_rule_is_noticed(rule):
    busy, saturated, *_ = traces(is_quick=True)

    class NoParking(OurRules):
        def view(self, world, model):
            for each in model.running:
                each.client.can_park = False
            return super().view(world, model)

    class NoTurns(OurRules):
        def __init__(self):
            super().__init__()
            fields = {name: getattr(self.rules, name) for name in self.rules.__struct_fields__}
            fields |= {"min_runtime_ms": 0.0, "max_wait_ms": 0.0, "park_ms": 0.0}
            self.rules = type(self.rules)(**fields)

    trace, rules = {
        "yield only at zero in flight": (busy, LlamaSwap()),
        "cut at the drain": (saturated, NoParking()),
        "no turns": (saturated, NoTurns()),
    }[rule]
    figures = compare_policies.run(trace, rules)
    found = compare_policies.row(figures, compare_policies.bound_ms(trace), trace)
    assert compare_policies.problems_of(trace, found)
