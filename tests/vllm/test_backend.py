"""Goal: what vLLM's answers mean for an incarnation: ranks that fail or fall silent, invalid
tokens, a loop that hangs.

Method: the backend around a fake engine and front, whose answers are chosen.
"""

import asyncio
import math
import socket
from types import SimpleNamespace

import pytest

from engine.backends.vllm.api import backend as backend_module
from engine.backends.vllm.api import kept_memory
from engine.backends.vllm.api.backend import StepCounter, VllmBackend, generate_one
from engine.backends.vllm.api.kept_memory import KeptMemory, KvChoice
from engine.backends.vllm.resume.answer import Continuing
from engine.messages import WokenMsg
from gms.names import KV, socket_path
from plumbing.errors import UnderstudyError
from plumbing.gateway_protocol import Continuation
from plumbing.wire.fds import OwnedFd
from tests.vllm.fake_engine import FINE, POOL, STATUS, FakeEngine, FakeFront


@pytest.fixture
def engine():
    """Of two ranks, without a pool."""
    found = FakeEngine()
    found.answers["understudy_status"] = [STATUS, {**STATUS, "rank": 1}]
    found.answers["understudy_take_kv"] = [{**FINE, "kv_bytes": 7}] * 2
    return found


def _backend(engine, *more, **named):
    return VllmBackend(engine, FakeFront(engine), StepCounter(), *more, **named)


def test_an_engine_is_parked_before_it_reports_prepared(engine):
    """Goal: an engine holds no KV memory when it reports `prepared`; method: the order of calls."""
    prepared = asyncio.run(_backend(engine).prepare())
    asked = [("sleep", 1, "abort"), "understudy_status", "understudy_into_huge_pages"]
    assert engine.asked == asked
    of_both = (prepared.weights_bytes, prepared.kv_bytes, prepared.epoch)
    assert of_both == (20, 40, "e")


@pytest.mark.parametrize("why", ["", "the seed is lost"])
def test_without_a_proof_nothing_is_continued_published_or_put_to_sleep(engine, why):
    """The engine serves all the same. A reason of its own, which stood before, is kept."""
    found = Continuing(Continuation.STATE, "an id")
    kept = KeptMemory(KvChoice(is_shared=True))
    seat = SimpleNamespace()

    async def prove(run):
        return why

    backend = _backend(engine, None, kept, seat, lambda identity: found, prove)
    prepared = asyncio.run(backend.prepare())
    assert prepared.continuation == ("" if why else "an id")
    assert prepared.can_rest == (not why)
    assert [why in each for each in prepared.warnings] == ([True, True] if why else [])
    assert kept.problem == why
    assert engine.continuing == (Continuing() if why else found)


def test_a_parked_engine_that_falls_silent_is_reported_dead(engine, monkeypatch):
    """Goal: a standby that could not take over is found before it is needed; method: a call to the
    ranks that never ends, after the engine has been prepared."""
    monkeypatch.setattr(backend_module, "PARKED_WAIT_S", 0.01)
    monkeypatch.setattr(backend_module, "PARKED_CHECK_S_PER_RANK", 0.0)

    async def scenario():
        backend = _backend(engine)
        await backend.prepare()
        engine.hangs.add("understudy_status")
        said = []

        def dead(error):
            said.append(error)
            engine.errored = True  # what ends the watch; the process would be gone

        await backend.watch(dead)
        return said

    said = asyncio.run(scenario())
    assert said[0].code == "vllm.silent"


@pytest.mark.parametrize(
    ("token", "logprob", "what"),
    [(5, float("nan"), "nan"), (5, float("inf"), "inf"), (5, 0.5, "0.5"), (100, -1.0, "100")],
)
def test_an_invalid_token_fails_the_canary_and_is_reported(engine, token, logprob, what):
    """Goal: damaged weights do not serve, and their epoch is distrusted; method: numbers that no
    sound model gives. A positive number is none of a log-probability, but may be a logit."""

    async def scenario():
        backend = _backend(engine)
        await backend.prepare()
        backend.phases.step("wake")
        assert (await backend.run_canary()).ok
        engine.token, engine.logprob = token, logprob
        return await backend.run_canary()

    canary = asyncio.run(scenario())
    assert not canary.ok
    assert what in canary.detail
    assert engine.asked[-1] == ("understudy_distrust", canary.detail)
    engine.model_config.logprobs_mode = "raw_logits"
    is_number = math.isfinite(logprob) and token < 100
    assert (asyncio.run(generate_one(engine, "r")) is None) == is_number


def test_a_loop_that_does_not_turn_counts_as_work_without_progress(engine, monkeypatch):
    """Goal: a hang of vLLM's own loop is found although another thread answers; method: a clock
    that has gone on while the loop has not."""
    backend = _backend(engine)
    assert backend.health().in_flight == 0
    later = backend_module.time.monotonic() + 2 * backend_module.LATE_S
    monkeypatch.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: later))
    assert backend.health().in_flight == 1


def test_an_engine_that_fails_its_trial_does_not_become_a_standby(engine):
    """Goal: what would fail at the takeover fails before; method: a trial canary without a number,
    on the CPU, where the KV cache is real while the engine prepares."""
    engine.logprob = float("nan")
    with pytest.raises(UnderstudyError) as error:
        asyncio.run(_backend(engine).prepare())
    assert error.value.code == "vllm.trial_failed"


def test_a_wake_asks_every_rank_before_it_takes_memory(engine, tmp_path):
    """Goal: a rank that hangs costs seconds and not the wait for memory; method: the order of the
    calls of a wake, and one whose ranks are silent."""

    async def scenario():
        backend = _backend(engine)
        await backend.prepare()
        engine.asked.clear()
        with OwnedFd(socket.socket().detach()) as listening:
            taken = await backend.wake("engine-0", 3, listening)
        await backend.drain(0.0)  # closes the copy that it has kept
        return taken

    assert asyncio.run(scenario()) == WokenMsg(14)
    assert engine.asked == ["understudy_join", "understudy_take_kv", "wake_up"]


SHARED = KvChoice(is_shared=True)
AUTO = KvChoice(is_shared=True, may_be_private=True)


def _woken(engine, tmp_path, monkeypatch, core, problem="", choice=SHARED):
    """The answer to a wake of an engine on the memory service's KV memory."""
    monkeypatch.setenv("GMS_SOCKET_DIR", str(tmp_path))
    monkeypatch.setenv("UNDERSTUDY_INCARNATION", "engine-0-1")
    engine.engine_core = SimpleNamespace(call_utility_async=core)
    engine.answers["understudy_take_kv"] = [{**FINE, "kv_bytes": 7, "pool": POOL}]
    kept = KeptMemory(choice, problem)
    backend = _backend(engine, kv=kept)

    async def scenario():
        await backend.prepare()
        engine.asked.clear()
        engine.arguments.clear()
        try:
            with OwnedFd(socket.socket().detach()) as listening:
                return await backend.wake("engine-0", 3, listening, era="e" * 16)
        finally:
            await backend.drain(0.0)  # closes the copy that it has kept

    return asyncio.run(scenario())


def test_a_wake_on_borrowed_memory_says_what_was_adopted(engine, tmp_path, monkeypatch):
    """Every rank is told by which grant it borrows, and the core which pools there are."""

    async def core(method, asked):
        assert (method, asked["ranks"], asked["may_adopt"]) == ("understudy_begin_kv", [POOL], True)
        return {"problem": "", "adopted": 5, "why_empty": "", "torn": 0}

    woken = _woken(engine, tmp_path, monkeypatch, core)
    assert woken == WokenMsg(7, "gms", 5)
    ((_, lending),) = engine.arguments["understudy_take_kv"]
    assert (lending["incarnation"], lending["token"], lending["era"]) == ("engine-0-1", 3, "e" * 16)
    assert "understudy_forget_kv" not in engine.asked


@pytest.mark.parametrize("problem", ["", "prefix caching is off"])
def test_an_index_that_nobody_keeps_is_forgotten_before_the_first_step(
    engine, tmp_path, monkeypatch, problem
):
    """The core fails, or is not even asked: the engine is about to write over blocks that the index
    describes."""

    async def core(method, asked):
        raise RuntimeError("no pool")

    woken = _woken(engine, tmp_path, monkeypatch, core, problem)
    assert woken.kv_note.startswith("no block is published")
    assert (problem or "no pool") in woken.kv_note
    assert engine.asked[-2:] == ["understudy_forget_kv", "wake_up"]
    engine.answers["understudy_forget_kv"] = [{**FINE, "code": "c.d", "problem": "x"}]
    with pytest.raises(UnderstudyError, match="x"):
        _woken(engine, tmp_path, monkeypatch, core, problem)


async def no_core(method, *asked):
    raise AssertionError("the core is not asked: there is no pool")


@pytest.mark.parametrize(
    ("problem", "why"), [("", "lends none for HOST-0"), ("no caching", "no caching")]
)
def test_private_memory_is_taken_where_none_is_lent_or_nothing_is_kept(
    engine, tmp_path, monkeypatch, problem, why
):
    """By default only: no service in the directory, or no block could be kept."""
    woken = _woken(engine, tmp_path, monkeypatch, no_core, problem, AUTO)
    assert (woken.kv_memory, woken.adopted_blocks) == ("private", 0)
    assert woken.kv_note.startswith("private KV memory: ")
    assert woken.kv_note.endswith(why)
    (asked,) = engine.arguments["understudy_take_kv"]
    assert len(asked) == 1, "no rank borrows"


@pytest.mark.parametrize("passable", ["gms.kv_too_large", "wire.unreachable", "wire.closed"])
def test_a_pool_that_can_never_fit_or_a_service_that_vanishes_is_no_reason_not_to_wake(
    engine, tmp_path, monkeypatch, passable
):
    """By default every rank is asked again, for private memory; another refusal ends the wake, and
    so does this one where the service's memory was asked for."""
    asked = []

    def refusing(code):
        async def rpc(method, timeout, args):  # noqa: ASYNC109  # as vLLM names it
            if method != "understudy_take_kv":
                return [STATUS]
            asked.append(len(args))
            refused = {**FINE, "code": code, "problem": "too much"}
            return [refused] if len(args) > 1 else [{**FINE, "kv_bytes": 7, "pool": {}}]

        return rpc

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_path(str(tmp_path), "HOST-0", KV))
        server.listen()
        engine.collective_rpc = refusing(passable)
        woken = _woken(engine, tmp_path, monkeypatch, no_core, choice=AUTO)
        assert (woken.kv_memory, asked) == ("private", [2, 1])
        assert "too much" in woken.kv_note
        for code, choice in ((passable, SHARED), ("gms.kv_busy", AUTO)):
            engine.collective_rpc = refusing(code)
            with pytest.raises(UnderstudyError, match="too much"):
                _woken(engine, tmp_path, monkeypatch, no_core, choice=choice)


def test_what_is_published_is_followed_until_the_core_gives_it_up(engine, monkeypatch):
    """A core that is busy is asked again; what it has said is in the answer to `health`."""
    monkeypatch.setattr(kept_memory, "REPORT_EVERY_S", 0.01)
    reported = {"code": "", "problem": "", "published": 3, "kept": 2}
    answers = [reported, None, reported | {"published": 4}, {**reported, "problem": "why"}]
    seen = []

    async def core(method, *asked):
        if method == "understudy_begin_kv":
            return {"problem": "", "adopted": 1, "why_empty": "new", "torn": 0}
        seen.append((kept.published, backend.health().kept_blocks))
        answer = answers.pop(0)
        return answer if answer is not None else await asyncio.Event().wait()

    monkeypatch.setenv("GMS_SOCKET_DIR", "/nowhere")
    engine.engine_core = SimpleNamespace(call_utility_async=core)
    kept = KeptMemory(KvChoice(is_shared=True))
    backend = _backend(engine, kv=kept)

    async def scenario():
        began = await kept.begin(engine, None, [{"pool": POOL}])
        assert began == (1, "no block was adopted: new", 0)
        await kept.follow(engine)

    asyncio.run(scenario())
    assert (seen, kept.problem) == ([(0, 1), (3, 2), (3, 2), (4, 2)], "why")
    assert (backend.health().published_blocks, backend.health().kept_blocks) == (3, 0)
