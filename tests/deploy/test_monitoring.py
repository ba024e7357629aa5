"""Goal: the alerts fire for what they name and clear after it, and all ask for metrics that exist.

Method: `promtool` on the rules as they are deployed; the names in rules and dashboard against the
pages of a real pod.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, PODS, ROOT, containers, labels, workload
from tests.e2e.pods import Pod, home_with, in_pod
from tests.helpers import auntil, run_command
from tests.pool.neighbours import MIB, World, pool_process
from tests.pool.test_pool_process import FILE as POOL_FILE
from understudy.http_get import get

MONITORING = DEPLOY / "monitoring"
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus",
)
# Of the kubelet's and Prometheus' own; everything else in an expression is a metric of ours.
# What a gateway exports of a pool: `tests/gateway/server/test_pool.py` reads it there.
OF_A_POOL = {"understudy_pool_requests_total", "understudy_gateway_pool_connected"}
# Of a front: `tests/gateway/server/test_fleet.py`.
OF_A_FRONT = {"understudy_gateway_pods", "understudy_gateway_replays_differed_total"}
NAME = re.compile(r"\bunderstudy_[a-z_]+")


def rules() -> dict[str, Any]:
    """What Prometheus itself would read of the operator's resource."""
    document: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    return {"groups": document["spec"]["groups"]}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in rules()["groups"] for rule in group["rules"]]


home = home_with()


# ------------------------------------------------------------------ the files by themselves


def test_every_alert_has_a_runbook_that_is_there():
    """Its section of the operations page, by the name of the alert."""
    text = (ROOT / "docs" / "operations.md").read_text()
    for alert in alerts():
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        assert anchor == alert["alert"].lower()
        assert f"\n### {alert['alert']}\n" in text


def test_every_port_of_the_pod_is_scraped():
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    ports = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
    engines = {f"engine-{number}" for number in range(8)}
    assert ports == {"http", "lockserver", "gms", "gateway", "pool", *engines}
    for pod in PODS:
        named = {port["name"] for each in containers(pod) for port in each["ports"]}
        assert named - {"lock", "hop"} <= ports


@pytest.mark.parametrize("pod", PODS)
def test_every_pod_is_scraped(pod: str):
    """Goal: no pod of ours is overlooked. Method: the selector against the labels of each."""
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert all(selector.items() <= each.items() for each in labels(workload(pod)))


@pytest.mark.slow
@in_pod
async def test_names_of_metrics_are_those_of_a_pod(pod: Pod):
    """Whatever the rules and the dashboard ask for is on a page of a running pod."""
    asked = NAME.findall("\n".join(alert["expr"] for alert in alerts()))
    asked += NAME.findall((MONITORING / "dashboard.json").read_text())
    assert len(set(asked)) > 10
    pages, ports = "", pod.local.ports
    for port in (ports.lockserver, ports.gms, ports.gateway, *ports.engines):
        answer = await get(f"http://127.0.0.1:{port}/metrics", 10)
        pages += answer.body.decode()
    of_others = OF_A_POOL | OF_A_FRONT
    assert {it for it in set(asked) - of_others if "_pool_" not in it} <= names_on(pages)


async def test_names_of_a_pools_metrics_are_those_of_a_pool(tmp_path: Path):
    """The same for a pool, beside stand-ins for the other parts of its pod."""
    asked = NAME.findall("\n".join(alert["expr"] for alert in alerts()))
    asked += NAME.findall((MONITORING / "dashboard.json").read_text())
    of_pool = {name for name in asked if name.startswith("understudy_pool_")} - OF_A_POOL
    assert len(of_pool) > 10
    tmp_path.chmod(0o700)
    file = tmp_path / "pool.yaml"
    file.write_text(POOL_FILE)
    async with World(str(tmp_path), ("chat", "coder"), 50 * MIB) as world:
        with pool_process(str(tmp_path), str(file)) as pool:
            await auntil(lambda: world.doors, "the pool to run")
            answer = await get(f"http://127.0.0.1:{pool.http_port}/metrics", 10)
    assert of_pool <= names_on(answer.body.decode())


def names_on(page: str) -> set[str]:
    return set(re.findall(r"^(\w+)", page, re.MULTILINE))


# ------------------------------------------------------------------ promtool


CASES = (Path(__file__).parent / "alerts.yaml").read_text()


@NEEDS_PROMETHEUS
def test_rules_do_what_they_say(tmp_path: Path):
    """Every alert has a case in which it fires; most have one just before it."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules()))
    (tmp_path / "tests.yml").write_text(CASES)
    tested = set(re.findall(r"alertname: (\w+)", CASES))
    assert tested == {alert["alert"] for alert in alerts()}
    for words in (("check", "rules", "rules.yml"), ("test", "rules", "tests.yml")):
        done = run_command(["promtool", *words], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
