"""Goal: the alerts fire for what they name and clear after it, and all ask for metrics that exist.

Method: `promtool` on the rules as they are deployed; a real Prometheus that scrapes a real pod; the
names in rules and dashboard against the pages of that pod.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, PODS, ROOT, containers, labels, workload
from tests.e2e.pods import Pod, PodHome, make_model
from tests.helpers import POLL_S, auntil
from tests.pool.neighbours import MIB, World, pool_process
from tests.pool.test_pool_process import FILE as POOL_FILE
from understudy.http_get import get
from understudy.pod.ports import free_ports

MONITORING = DEPLOY / "monitoring"
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus",
)
# Of the kubelet's and Prometheus' own; everything else in an expression is a metric of ours.
# What a gateway exports of a pool: `tests/gateway/test_process_pool.py` reads it there.
OF_A_POOL = {"understudy_pool_requests_total", "understudy_gateway_pool_connected"}
NAME = re.compile(r"\bunderstudy_[a-z_]+")


def rules() -> dict[str, Any]:
    """What Prometheus itself would read of the operator's resource."""
    document: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    return {"groups": document["spec"]["groups"]}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in rules()["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodHome]:
    model = make_model(tmp_path_factory.mktemp("m") / "model")
    found = PodHome(tmp_path_factory.mktemp("pod"), model)
    try:
        yield found
    finally:
        found.close()


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
        assert named - {"lock"} <= ports


@pytest.mark.parametrize("pod", PODS)
def test_every_pod_is_scraped(pod: str):
    """Goal: no pod of ours is overlooked. Method: the selector against the labels of each."""
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert all(selector.items() <= each.items() for each in labels(workload(pod)))


@pytest.mark.slow
def test_names_of_metrics_are_those_of_a_pod(home: PodHome):
    """Whatever the rules and the dashboard ask for is on a page of a running pod."""
    asked = NAME.findall("\n".join(alert["expr"] for alert in alerts()))
    asked += NAME.findall((MONITORING / "dashboard.json").read_text())
    assert len(set(asked)) > 10

    async def scenario(pod: Pod) -> None:
        pages = ""
        ports = pod.local.ports
        for port in (ports.lockserver, ports.gms, ports.gateway, *ports.engines):
            answer = await get(f"http://127.0.0.1:{port}/metrics", 10)
            pages += answer.body.decode()
        there = names_on(pages)
        assert {name for name in set(asked) - OF_A_POOL if "_pool_" not in name} <= there

    home.run(scenario)


def test_names_of_a_pools_metrics_are_those_of_a_pool(tmp_path: Path):
    """The same for a pool, beside stand-ins for the other parts of its pod."""
    asked = NAME.findall("\n".join(alert["expr"] for alert in alerts()))
    asked += NAME.findall((MONITORING / "dashboard.json").read_text())
    of_pool = {name for name in asked if name.startswith("understudy_pool_")} - OF_A_POOL
    assert len(of_pool) > 10
    tmp_path.chmod(0o700)
    file = tmp_path / "pool.yaml"
    file.write_text(POOL_FILE)

    async def scenario() -> None:
        async with World(str(tmp_path), ("chat", "coder"), 50 * MIB) as world:
            with pool_process(str(tmp_path), str(file)) as pool:
                await auntil(lambda: world.doors, "the pool to run")
                answer = await get(f"http://127.0.0.1:{pool.http_port}/metrics", 10)
        assert of_pool <= names_on(answer.body.decode())

    asyncio.run(scenario())


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
        done = subprocess.run(
            ["promtool", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ a real one


class Prometheus:
    """A server that scrapes one pod once a second, with our rules."""

    def __init__(self, base: Path, pod: Pod) -> None:
        (self._port,) = free_ports(1)
        ports = pod.local.ports
        parts = (ports.lockserver, ports.gms, ports.gateway, *ports.engines)
        (base / "rules.yml").write_text(yaml.safe_dump(rules()))
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": "understudy",
                    "static_configs": [
                        {
                            "targets": [f"127.0.0.1:{port}" for port in parts],
                            "labels": {"namespace": "here", "pod": "this"},
                        }
                    ],
                }
            ],
        }
        (base / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._command = [
            "prometheus",
            f"--config.file={base / 'prometheus.yml'}",
            f"--storage.tsdb.path={base / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._log = base / "log"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with self._log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(*self._command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()

    async def ask(self, path: str) -> Any:
        answer = await get(f"http://127.0.0.1:{self._port}/api/v1/{path}", 5)
        return json.loads(answer.body)["data"] if answer.status == 200 else None

    async def value(self, query: str) -> float | None:
        """The first result of `query`; None while there is none."""
        found = await self.ask(f"query?query={quote(query)}")
        results = (found or {"result": []})["result"]
        return float(results[0]["value"][1]) if results else None


async def seen(look: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 60.0) -> None:
    """Poll until `look` is True; fail with `what` at the deadline."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not await look():
        assert asyncio.get_running_loop().time() < end, (
            f"waited {deadline_s:g} s in vain for {what}"
        )
        await asyncio.sleep(50 * POLL_S)  # a scrape comes once a second


@NEEDS_PROMETHEUS
def test_failover_is_on_the_page_that_people_look_at(home: PodHome, tmp_path: Path):
    """After a death under load: the dashboard's own queries have a standby, a token, a failover."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = {
        panel["title"]: panel["targets"][0]["expr"] for panel in panels if panel["type"] != "row"
    }

    def filled(title: str) -> str:
        text = queries[title].replace("$namespace", "here").replace("$pod", "this")
        return text.replace("$__range", "5m").replace("$__rate_interval", "1m")

    async def scenario(pod: Pod) -> None:
        prometheus = Prometheus(tmp_path, pod)
        whole = await pod.whole()
        async with prometheus.running():

            async def value(title: str) -> float | None:
                return await prometheus.value(filled(title))

            async def is_known(token: int) -> bool:
                """Every part was scraped: a counter's increase is seen from then on."""
                states = (await value("Active"), await value("Standby"))
                return await value("Token") == token and states == (1, 1)

            async def is_granted() -> bool:
                return await is_known(whole.token)

            async def is_taken_over() -> bool:
                return await is_known(after.token)

            async def is_counted() -> bool:
                return (await value("Failovers") or 0) > 0

            await seen(is_granted, "the grant to be scraped")
            document = await pod.engine(whole.engine)
            os.kill(document["backend"]["pids"]["model"], signal.SIGKILL)
            after = await pod.whole_after(whole.token)
            await seen(is_taken_over, "the failover to be scraped")
            await seen(is_counted, "the failover to be counted")

    home.run(scenario)
