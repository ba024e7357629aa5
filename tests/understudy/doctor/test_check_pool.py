"""Goal: a pool that cannot do what its file asks for is named before a request finds out.

Method: a table over every branch of the pool's checks, on facts that are well but for one thing.
"""

from __future__ import annotations

from typing import Any

import pytest

from pool.pool_file import named, parse, settle
from pool.settings import digests
from tests.understudy.doctor.facts import NO_POD, POOL, POOL_PATH, VIEW, WELL, ask, spoilt
from understudy.doctor.facts import FindingStatus, PodFacts, PoolFileFacts
from understudy.doctor.probe import look_at_pool_file

FAIL, WARN, PASS, SKIP = (
    FindingStatus.FAIL,
    FindingStatus.WARN,
    FindingStatus.PASS,
    FindingStatus.SKIP,
)
GIB = 1 << 30


def pool(**changes: Any) -> PodFacts:
    """With these keys in the pool's status."""
    return spoilt(view={**VIEW, "pool": {**POOL, **changes}})


def models(**changes: dict[str, Any]) -> PodFacts:
    """With these keys of models, by name."""
    return pool(models=[{**each, **changes.get(each["model"], {})} for each in POOL["models"]])


def sizes(weights: int, kv: int, base: int = GIB) -> dict[str, Any]:
    found = {"base": base, "weights": weights, "kv": kv}
    return {"sizes": {kind: {"HOST-0": size} for kind, size in found.items()}}


def file(*lines: str, facts: PodFacts = WELL, **keys: str) -> PodFacts:
    """With this pool file; `lines`: what its models say."""
    head = [f"{name}: {value}" for name, value in {"devices": "[HOST-0]", **keys}.items()]
    text = "\n".join([*head, "models:", *(f"  {line}" for line in lines)])
    found = settle(parse(POOL_PATH, text))
    return spoilt(facts, pool_file=PoolFileFacts(POOL_PATH, found, digests(found)))


AWAY = spoilt(view={**VIEW, "pool": {"name": "pool", "error": "no process is listening"}})
CHAT, CODER = "chat: {model: /models/chat}", "coder: {model: /models/coder}"
OFFLOADS = "chat: {model: /models/chat, rest: offloaded}"
SLOW = "coder: {model: /models/coder, min_runtime: 10m}"
ENDLESS = "chat: {model: /models/chat, drain_timeout: {cut: never}}"


@pytest.mark.parametrize(
    ("check", "facts", "status"),
    [
        ("pool", WELL, PASS),
        ("pool", NO_POD, SKIP),
        ("pool", AWAY, FAIL),
        ("pool", pool(problems=["no gateway is connected"]), WARN),
        ("pool", spoilt(models(chat={"recovering": True}), view=pool(recovering=True).view), WARN),
        ("pool", models(chat={"state": "failed", "fault": "no file"}), FAIL),
        ("pool_file", WELL, PASS),
        ("pool_file", NO_POD, SKIP),
        ("pool_file", spoilt(pool_file=None), SKIP),
        ("pool_file", pool(changed={"chat": {"park": "1s"}}), PASS),
        (
            "pool_file",
            spoilt(pool_file=PoolFileFacts(POOL_PATH, problem="pool.yaml:3: models.chat: unknown")),
            FAIL,
        ),
        ("pool_file", file(CHAT, SLOW, margin="1GiB"), WARN),
        ("pool_file", file(CHAT, CODER), WARN),
        ("pool_file", file(CHAT, margin="1GiB"), WARN),
        ("pool_file", file(CHAT, devices="[0, 1]", facts=spoilt(view=NO_POD.view)), WARN),
        ("pool_sizes", WELL, PASS),
        ("pool_sizes", NO_POD, SKIP),
        ("pool_sizes", AWAY, SKIP),
        ("pool_sizes", models(chat={"estimated": True}), WARN),
        ("pool_sizes", models(chat={"sizes": None}), WARN),
        ("pool_fit", WELL, PASS),
        ("pool_fit", NO_POD, SKIP),
        ("pool_fit", AWAY, SKIP),
        ("pool_fit", models(chat=sizes(3 * GIB, 4 * GIB)), FAIL),
        ("pool_fit", models(chat={"pinned": True}), FAIL),
        ("pool_fit", models(chat={"pinned": True}, coder={"pinned": True}), FAIL),
        (
            "pool_fit",
            models(chat={"pinned": True, **sizes(2 * GIB, 3 * GIB)}, coder=sizes(0, 0)),
            PASS,
        ),
        ("pool_fit", file(OFFLOADS, CODER), WARN),
        ("pool_fit", file(CHAT, CODER, host_memory="99GiB"), FAIL),
        ("pool_fit", file(OFFLOADS, CODER, host_memory="3GiB"), WARN),
        ("pool_fit", file(OFFLOADS, CODER, host_memory="4GiB"), PASS),
        ("pool_waits", WELL, PASS),
        ("pool_waits", NO_POD, SKIP),
        ("pool_waits", spoilt(pool_file=None), SKIP),
        ("pool_waits", file(CHAT, SLOW), WARN),
        ("pool_waits", file(ENDLESS, CODER), WARN),
    ],
)
def test_each_check_of_a_pool_names_the_problem_and_its_fix(check, facts, status):
    finding = ask(check, facts)
    assert finding.status == status, finding
    assert bool(finding.fix) == (status in (FAIL, WARN))


def test_three_resting_processes_beside_a_pinned_model_are_too_many():
    """Goal: `pinned + base` is judged apart from what must fit. Method: four models of which each
    fits beside the pinned one, and whose bases together do not."""
    pinned = {**POOL["models"][0], "pinned": True, **sizes(3 * GIB, 2 * GIB)}
    others = [{**POOL["models"][1], "model": f"m{n}", **sizes(0, 0, GIB // 2)} for n in range(3)]
    finding = ask("pool_fit", pool(models=[pinned, *others]))
    assert finding.status is WARN
    assert "1.5 GiB" in finding.found


def test_file_that_runs_is_read_with_the_names_of_the_devices(tmp_path):
    """Goal: a file with numbers does not differ from the pool that was given their names. Method:
    the facts as they are looked up, from a file on disk."""
    path = tmp_path / "pool.yaml"
    path.write_text("devices: [0]\nmargin: 1GiB\nmodels:\n  chat: {model: /models/chat}\n")
    runs = {"file": {"path": str(path)}, "devices": [{"device": "HOST-0"}, {"device": "HOST"}]}
    found = look_at_pool_file(runs, {})
    assert found is not None
    assert found.digests == digests(named(settle(parse("x", path.read_text())), ["HOST-0"]))
    assert look_at_pool_file(None, {}) is None
    gone = look_at_pool_file(None, {"UNDERSTUDY_POOL": "/nowhere.yaml"})
    assert gone is not None
    assert "/nowhere.yaml" in str(gone.problem)
