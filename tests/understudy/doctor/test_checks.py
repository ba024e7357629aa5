"""What checks judge of documents, one thing amiss at a time; what they ask the kernel for is in
`test_doctor.py`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from pool.pool_file import digests, parse, settle
from tests.documents import mismatches
from tests.understudy.doctor.examining import FAIL, PASS, SKIP, WARN
from tests.understudy.pools import pool
from understudy.doctor import CHECKS, ExaminedPod, examine, report
from understudy.schema import DoctorDocument

GPU, OTHER = "GPU-5A0F1b2c-0000", "GPU-5a0f1b2c-1111"
HELD_BY_NOBODY = 2**22 + 1  # no process has this pid
PLAIN: dict[str, Any] = {
    "lockserver": {"locks": {}, "service": {"active": {}}},
    "gateway": {"load": {}, "accepting": True},
    "gms": [{"device_uuid": "HOST-0"}],
    "engines": [{"engine": {"id": "engine-0"}, "lock": {"connected": True}}],
}
WITH_PROBLEM = {"engine": {"id": "e"}, "problems": ["it"]}
NOTHING = {"lockserver": {"error": "gone"}, "gateway": None, "gms": [], "engines": []}


def seen(view: dict[str, Any] | None = None, **facts: Any) -> ExaminedPod:
    """A pod that cannot be seen but for its documents: `view` beside what is well."""
    return ExaminedPod("/nowhere/pod", {**PLAIN, **(view or {})}, **facts)


def gpu(**more: Any) -> ExaminedPod:
    """A pod that serves the only GPU."""
    found = {"uuid": GPU, "instances": [], "is_mig": False}
    found |= {"compute_mode": "default", "processes": []}
    gpus = {"gpus": [{**found, **more}], "driver_version": "580"}
    return seen(gpus=gpus, served=(GPU,))


def held_by(pid: int) -> ExaminedPod:
    return gpu(processes=[{"pid": pid, "used_bytes": 1}])


def of_file(text: str, *models: dict[str, Any], **changes: Any) -> ExaminedPod:
    """A pool that runs what the file says."""
    file = settle(parse("pool.yaml", text))
    says = {"file": {"path": "pool.yaml", "digests": digests(file)}}
    view = {"pool": pool(*models, **{**says, **changes})}
    return seen(view, pool_path="pool.yaml", pool_file=file)


FILE = "devices: [HOST-0]\nmodels:\n  chat: {model: /m}\n"


@pytest.mark.parametrize(
    ("check", "pod", "status"),
    [
        ("shared", seen(NOTHING), SKIP),
        ("engines", seen(), PASS),
        ("engines", seen(NOTHING), SKIP),
        ("engines", seen({"engines": [WITH_PROBLEM]}), WARN),
        ("shared_memory", seen(sockets={"engine_x.sock": None}), SKIP),
        ("flock", seen(), SKIP),
        ("driver", gpu(), PASS),
        ("driver", seen(gpus={"gpus": [], "driver_version": "580"}), WARN),
        ("driver", seen(), SKIP),
        ("device_uuid", gpu(), PASS),
        ("device_uuid", replace(gpu(), served=(f"{GPU}.chat",)), PASS),
        ("device_uuid", replace(gpu(), served=(OTHER,)), FAIL),
        ("device_uuid", replace(gpu(), served=("GPU-5a0f",)), PASS),
        ("device_uuid", seen(), SKIP),
        ("mig_mode", gpu(is_mig=True, instances=["MIG-1"]), PASS),
        ("mig_mode", gpu(is_mig=True), FAIL),
        ("sharing_mode", gpu(compute_mode="prohibited"), FAIL),
        ("memory_outside", seen(), SKIP),
        ("memory_outside", held_by(HELD_BY_NOBODY), FAIL),
        ("memory_outside", replace(held_by(HELD_BY_NOBODY), served=("HOST-0",)), WARN),
        ("memory_outside", replace(held_by(7), pids=frozenset({7})), PASS),
        ("memory_outside", replace(held_by(7), sockets={"a.sock": None}), SKIP),
        ("pool_file", seen(), SKIP),
        ("pool_file", of_file(FILE), PASS),
        ("pool_file", of_file(FILE, file={"digests": {"chat": "another"}}), WARN),
        ("pool_file", seen(pool_path="pool.yaml", pool_file="line 3 is wrong"), FAIL),
    ],
)
def test_each_check_names_the_problem_and_its_fix(check, pod, status):
    """Goal: one problem, one finding. Method: a table over what documents may say."""
    judge = next(each for each in CHECKS.values() if each.__name__ == check)
    finding = judge(pod)
    assert finding.status == status, finding
    assert bool(finding.fix) == (status in (FAIL, WARN))


def test_every_check_is_in_the_reference_in_order():
    """Goal: ids are stable, unique and explained. Method: docs/reference.md."""
    page = (Path(__file__).parents[3] / "docs/reference.md").read_text()
    section = page.partition("\n## Doctor")[2].partition("\n## ")[0]
    found = re.findall(r"^- `(\w+)`", section, re.MULTILINE)
    assert found == [judge.__name__ for judge in CHECKS.values()]
    assert len(set(found)) == len(CHECKS)


def test_document_and_lines_agree_most_serious_first():
    """Goal: people and programs read the same report, and the worst finding is its status."""
    document = examine(seen(pool_path="pool.yaml", pool_file="line 3 is wrong"))
    found, text = to_builtins(document), report(document)
    assert sum(found["counts"].values()) == len(CHECKS)
    words = [line.split()[0] for line in text[:-1] if not line.startswith(" ")]
    assert words == sorted(words, key=["fail", "warn", "pass", "skip"].index)
    assert text[1].strip().startswith("→ ")
    for check in found["checks"]:
        assert any(check["found"] in line for line in text)
    assert mismatches(found, DoctorDocument) == []
    assert found["status"] == FAIL
    assert examine(seen({"engines": [WITH_PROBLEM]})).status == WARN
