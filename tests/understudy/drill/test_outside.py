"""A drill whose clients use an address outside the pod."""

from __future__ import annotations

import itertools
import ssl
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError
from tests.plumbing.wire.certificates import Authority
from tests.understudy.drill.fake_pod import FakePod
from tests.understudy.drill.outside import PREFIX, REFUSALS, Outside
from understudy.cli.drill import drill_running_pod
from understudy.drill.clients import Target, outside_target
from understudy.drill.run import DrillPlan
from understudy.drill.targets import BACKEND
from understudy.drill.verdict import DrillReport

BACKENDS = (f"{BACKEND}model",)


async def drilled(directory: Path, target: Target, kills: int = 2, **more: float) -> DrillReport:
    plan = DrillPlan(kills, BACKENDS, clients=3, outside=target, **more)
    result = await drill_running_pod(directory, plan, lambda line: None)
    assert result is not None
    return result


def url(outside: Outside, scheme: str = "http") -> str:
    return f"{scheme}://localhost:{outside.port}{PREFIX}/"


async def test_clients_send_everything_through_the_address(directory: Path):
    """Method: a proxy with a path prefix; whose Host header it gets."""
    async with FakePod(directory) as pod, Outside(pod.port) as outside:
        report = await drilled(directory, outside_target(url(outside)))
    assert report.problems == []
    assert report.passed
    assert outside.requests > report["requests"] > 0
    assert outside.hosts == {f"localhost:{outside.port}"}
    assert report.to_dict()["url"] == url(outside)


async def test_https_is_verified_for_the_name_that_is_asked_for(directory: Path, monkeypatch):
    """Method: a certificate of a CA that the machine trusts; for another name, then the URL's."""
    authority = Authority(directory.parent)
    monkeypatch.setenv("SSL_CERT_FILE", authority.path)
    for host in ("llm.example", "localhost"):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issued = authority.issue(f"proxy-{host}", hosts=(host,))
        server.load_cert_chain(issued.cert, issued.key)
        async with FakePod(directory) as pod, Outside(pod.port, server) as outside:
            drilling = drilled(directory, outside_target(url(outside, "https")), kills=1)
            if host == "localhost":
                assert (await drilling).passed
                continue
            with pytest.raises(UnderstudyError, match="certificate") as refused:
                await drilling
            assert refused.value.code == "drill.no_answers"


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_what_the_address_refuses_is_counted_and_fails_the_drill(
    directory: Path, refusal: str
):
    """Method: a proxy that refuses the second and every tenth request after the first kill. The
    clients send at least three after it, however slow the machine is."""
    async with FakePod(directory) as pod, Outside(pod.port) as outside:
        count = itertools.count(1)

        def refuses() -> str | None:
            is_learned = pod.token > 1  # after the first kill
            return refusal if is_learned and next(count) % 10 == 2 else None

        outside.refuses = refuses
        report = await drilled(directory, outside_target(url(outside)))
    assert report["refused"] > 0
    assert report["wrong_tokens"] == 0
    assert not report.passed
    (problem,) = [each for each in report.problems if url(outside) in each]
    assert f"refused {report['refused']} of {report['requests']} requests" in problem


async def test_address_of_another_pod_is_refused(directory: Path):
    """Method: answers with a token that the pod's lock has not granted."""
    async with FakePod(directory) as pod, Outside(pod.port) as outside:
        outside.token = "7"
        with pytest.raises(UnderstudyError, match=r"drill\.other_pod"):
            await drilled(directory, outside_target(url(outside)))
