"""Goal: `/health`, `/ping`, `/version` and `/metrics` are answered whatever engine is active and
while none is, and the three gauges that endpoint pickers read are never absent.

Method: doors in this process, stub engines, and prometheus_client's parser as the scraper.
"""

from __future__ import annotations

import asyncio
import json

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.events import DoorSet, NobodyGranted
from gateway.core.machine import NEVER_MS
from gateway.server import endpoints
from gateway.server.endpoints import RequestLoad, page_of
from pool.core.events import RefusedDoor, Running, ShutDoor
from tests.gateway.server.harness import CHAT, Answer, Bench, scene
from tests.gateway.server.test_limits import file_of_keys
from tests.gateway.server.test_models import LANES, models_scene
from tests.gateway.stub_engine import StubReply, StubRequest
from tests.helpers import auntil

STREAM = {"messages": [], "max_tokens": 8, "stream": True}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# As vLLM 0.32 writes it: `_by_reason` begins with the name of another one.
PAGE = """# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="NAME"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="NAME"} 2.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="NAME",reason="capacity"} 2.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="NAME"} 0.25
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="NAME"} 7.0
"""


def page(name: str = "stub"):
    async def route(request: StubRequest, reply: StubReply) -> None:
        body = PAGE.replace("NAME", name).encode()
        reply.head(content_type="text/plain; version=0.0.4; charset=utf-8", length=len(body))
        reply.write(body)
        await reply.writer.drain()

    return route


async def metrics(bench: Bench, path: str = "/metrics") -> dict[str, Metric]:
    """By name; each name stands there once."""
    answer = await bench.once(path)
    assert (answer.status, answer.is_whole) == (200, True)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = list(text_string_to_metric_families(answer.body.decode()))
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


async def gauges(bench: Bench, path: str = "/metrics") -> dict[tuple[str, str], list[float]]:
    """By model and engine: the three."""
    found = await metrics(bench, path)
    values: dict[tuple[str, str], list[float]] = {}
    for name in GAUGES:
        for sample in found[f"vllm:{name}"].samples:
            key = (sample.labels["model_name"], sample.labels["engine"])
            values.setdefault(key, []).append(sample.value)
    return values


async def health(bench: Bench, prefix: str = "") -> int:
    """`/ping` says the same."""
    status = (await bench.once(f"{prefix}/health")).status
    assert (await bench.once(f"{prefix}/ping")).status == status
    assert (await bench.once(f"{prefix}/ping", b"")).status == status
    return status


def version(answer: Answer) -> str | None:
    document = json.loads(answer.body)
    assert document["understudy"]
    found: str | None = document["version"]
    return found


@scene()
async def test_all_four_answer_before_any_engine_was_active_through_a_rest_and_a_failover(bench):
    """Goal: a takeover is healthy for the hold time, the gauges keep their labels, what waits in
    the gateway is counted; an engine that rests is neither asked nor woken for any of the four."""
    assert await health(bench) == 503
    assert version(await bench.once("/version")) is None
    assert await gauges(bench) == {("", "0"): [0.0, 0.0, 0.0]}
    assert bench.load.in_flight == 0
    engine = await bench.active(hold_after_groups=2, routes={"/metrics": page()})
    assert await health(bench) == 200
    assert version(await bench.once("/version")) == "0.32.0"
    found = await metrics(bench)
    assert {"python_info", "vllm:cache_config_info", "vllm:prompt_tokens"} < set(found)
    assert await gauges(bench) == {("stub", "0"): [3.0, 2.0, 0.25]}
    for expected_ms, status in ((None, 200), (NEVER_MS, 503)):
        shut = ShutDoor(Running.FINISH, expected_ms, "it sleeps")
        bench.exchange.told(DoorSet(door=shut))
        assert await health(bench) == status
    asked = engine.accepted
    assert await gauges(bench) == {("stub", "0"): [0.0, 0.0, 0.25]}
    assert version(await bench.once("/version")) == "0.32.0"
    assert engine.accepted == asked
    bench.exchange.told(DoorSet())
    client = await bench.asking(CHAT, STREAM)
    await client.head()
    engine.die()
    bench.exchange.told(NobodyGranted("the engine has died"))
    await auntil(lambda: bench.load.parked == 1, "the stream to be parked")
    assert await health(bench) == 200
    assert version(await bench.once("/version")) == "0.32.0"
    assert await gauges(bench) == {("stub", "0"): [0.0, 1.0, 0.25]}
    await bench.grant(await bench.engine("engine-1", 2, routes={"/metrics": page()}))
    await client.chunks()
    assert await gauges(bench) == {("stub", "0"): [3.0, 2.0, 0.25]}


@scene(hold_ms=0)
async def test_health_fails_once_no_takeover_has_come_in_the_hold_time(bench):
    engine = await bench.active()
    engine.die()
    bench.exchange.told(NobodyGranted("the engine has died"))
    refused = await bench.once("/health")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert await gauges(bench) == {("stub", "0"): [0.0, 0.0, 0.0]}


def test_waiting_requests_are_added_to_what_the_engine_says(tmp_path):
    """Method: the page of an engine that is known to serve and is greeted anew, so that the request
    waits in the gateway."""
    load = RequestLoad("stub", running=9, waiting=4, kv_usage=0.5)
    found = {
        each.name: each
        for each in text_string_to_metric_families(
            page_of([(load, PAGE.replace("NAME", "stub").encode())], is_pool=False).decode()
        )
    }
    values = [found[f"vllm:{name}"].samples[0].value for name in GAUGES]
    assert values == [3.0, 6.0, 0.25]
    assert found["vllm:num_requests_waiting_by_reason"].samples[0].value == 2.0


@scene()
async def test_an_engine_that_does_not_give_its_page_delays_it_only_so_long(bench, monkeypatch):
    monkeypatch.setattr(endpoints, "PAGE_S", 0.05)

    async def hang(request: StubRequest, reply: StubReply) -> None:
        await asyncio.Event().wait()

    async def refuse(request: StubRequest, reply: StubReply) -> None:
        reply.head(status=404, length=0)

    engine = await bench.active(hold_after_groups=1)
    client = await bench.asking(CHAT, STREAM)
    await client.head()
    for route in (hang, refuse):
        engine.routes["/metrics"] = route
        assert await gauges(bench) == {("stub", "0"): [1.0, 0.0, 0.0]}
    client.close()


GUARDED = [
    *(("/v1/models", None), ("/metrics", b"{}"), ("/health", b""), ("/metrics/", None)),
    *(("/ping", b"a" * 5000), ("/m/chat/metrics", b"{}"), ("/m/chat/v1/models", None)),
    ("/m%2Fa/health", None),
]


@scene(api_keys=file_of_keys)
async def test_the_four_need_no_key_as_with_vllm(bench):
    await bench.active()
    assert await health(bench) == 200
    assert version(await bench.once("/version")) == "0.32.0"
    assert len(await gauges(bench)) == 1
    for path, document in GUARDED:
        assert (await bench.once(path, document)).status == 401, path


@scene(api_keys=file_of_keys, lanes=LANES)
async def test_the_four_of_a_model_need_no_key(bench):
    assert await gauges(bench, "/m/chat/metrics") == {("chat", "0"): [0.0] * 3}
    assert await health(bench, "/m/chat") == 503
    assert version(await bench.once("/m/chat/version")) is None
    assert (await bench.once("/m/chat/status")).status == 401


@models_scene()
async def test_in_a_pool_each_model_has_its_own_gauges(models):
    """Goal: one page, of the awake engine and of the gateway for the model that sleeps."""
    bench = models.bench
    for name, engine in models.engines.items():
        engine.routes["/metrics"] = page(name)
    await auntil(lambda: models.engines["chat"].accepted > 0, "chat to be greeted")
    waiting = await bench.asking(CHAT, {"model": "coder", **STREAM})
    await auntil(lambda: len(models.demand("coder").tickets) == 1, "it to wait")
    asleep = models.engines["coder"].accepted

    async def is_said() -> bool:
        return (await gauges(bench))["chat", "0"] == [3.0, 2.0, 0.25]

    while not await is_said():
        pass
    assert (await gauges(bench))["coder", "0"] == [0.0, 1.0, 0.0]
    assert await gauges(bench, "/m/coder/metrics") == {("coder", "0"): [0.0, 1.0, 0.0]}
    assert "python_info" not in await metrics(bench)
    assert models.engines["coder"].accepted == asleep
    models.open("coder")
    await waiting.answer()
    both = await gauges(bench)
    assert both == {("chat", "0"): [3.0, 2.0, 0.25], ("coder", "0"): [3.0, 2.0, 0.25]}
    assert version(await bench.once("/version")) == "0.32.0"
    assert version(await bench.once("/m/coder/version")) == "0.32.0"
    assert await health(bench) == await health(bench, "/m/coder") == 200
    models.set("coder", RefusedDoor("pool.failed", "coder has failed", None))
    assert await health(bench, "/m/coder") == 503
    assert await health(bench) == 200
    for path in ("/m/other/health", "/m/other/metrics"):
        assert (await bench.once(path)).status == 404
