"""Goal: a pause is two events of a span in the client's own trace, and nothing else is told."""

import sys

import pytest

from gateway.server import tracing
from gateway.server.tracing import RequestSpans
from plumbing.errors import UsageError
from tests.gateway.server.harness import CHAT, scene
from tests.gateway.server.test_streams import ASKED, assert_whole
from tests.helpers import auntil

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter():
    """What was exported, of a provider as users configure it."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    found.provider = sdk.TracerProvider()
    found.provider.add_span_processor(SimpleSpanProcessor(found))
    yield found
    found.provider.shutdown()


@pytest.mark.parametrize("of_all", [False, True], ids=["pauses", "requests"])
@scene()
async def test_a_span_continues_the_clients_trace_and_a_pause_is_in_it(bench, exporter, of_all):
    """Method: the SDK's in-memory exporter; a stream whose engine dies, and one that nothing
    happens to."""
    spans = bench.exchange.accounts._spans = RequestSpans(exporter.provider, of_all=of_all)
    first = await bench.active(cut_after_groups=2)
    second = await bench.engine("engine-1", 2)
    client = await bench.client()
    client.ask(
        CHAT + "?secret=1",
        {**ASKED, "messages": ["secret"]},
        Traceparent=f"00-{TRACE}-{PARENT}-01",
        Tracestate="vendor=1",
    )
    await first.died.wait()
    await bench.grant(second)
    answer = await client.answer()
    assert answer.is_whole
    assert second.requests[0].headers["traceparent"] == f"00-{TRACE}-{PARENT}-01"
    assert_whole(await bench.once(CHAT, ASKED))
    await auntil(lambda: not bench.load.in_flight, "both to end")
    paused, *others = exporter.get_finished_spans()
    assert len(others) == of_all
    assert f"{paused.context.trace_id:032x}" == TRACE
    assert f"{paused.parent.span_id:016x}" == PARENT
    assert paused.context.trace_state["vendor"] == "1"
    assert [each.name for each in paused.events] == ["understudy.paused", "understudy.resumed"]
    assert paused.events[0].attributes["understudy.engine"] == "engine-0"
    assert paused.events[0].attributes["understudy.cause"] == "closed"
    assert paused.events[1].attributes["understudy.engine"] == "engine-1"
    assert paused.events[1].attributes["understudy.replayed_tokens"] == 2
    times = [paused.start_time, *(each.timestamp for each in paused.events), paused.end_time]
    assert times == sorted(times)
    assert paused.attributes["understudy.pauses"] == 1
    assert paused.attributes["url.path"] == CHAT
    assert "secret" not in paused.to_json()
    assert not spans._events


def test_tracing_without_its_libraries_is_refused_with_what_to_install(monkeypatch):
    """Goal: no gateway serves without the spans that it was told to send; off needs nothing."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert tracing.open_spans("off") is None
    with pytest.raises(UsageError, match=r"pip install 'understudy\[otel\]'"):
        tracing.open_spans("pauses")
