"""What the death of a memory server must not change, and what is waited for after it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.messages import KillMsg
from gms.client import messages as gms_messages
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.wire.server import Server
from understudy.drill import part_killer
from understudy.drill.part_killer import (
    Standing,
    committed_devices,
    kill_server,
    readers_of,
    wait_recovered,
)
from understudy.drill.records import (
    PARTS,
    TARGETS,
    VLLM_TARGETS,
    MemoryKill,
    asked_of_engine,
    check_target,
    targets_of,
)

READERS = ("engine-0-a", "engine-1-b")


def view(active: str = "engine-0", token: int = 7, incarnation: str = "engine-0-a") -> dict:
    engines = [
        {"engine": {"id": "engine-0", "incarnation": incarnation}},
        {"engine": {"id": "engine-1", "incarnation": "engine-1-b"}},
    ]
    return {"active": active, "token": token, "engines": engines, "gms": []}


def device(pid: int = 2, state: str = "committed", epoch: str = "e", readers=READERS) -> dict:
    sessions = [{"incarnation": each, "rank": 0, "epoch": epoch} for each in readers]
    return {
        "device_uuid": "HOST-0",
        "tag": "weights",
        "pid": pid,
        "state": state,
        "epoch": epoch,
        "sessions": sessions,
    }


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (view(), []),
        (view(incarnation="engine-0-c"), ["engine-0 restarted (engine-0-a is now engine-0-c)"]),
        (view(token=8), ["engine-0 is active under token 8 instead of engine-0 under 7"]),
        (view("engine-1", 8), ["engine-1 is active under token 8"]),
        ({**view(), "engines": []}, ["is now unreachable", "is now unreachable"]),
    ],
)
def test_standing_says_what_has_changed(after: dict, words: list[str]):
    """Goal: only the server may have died. Method: one change at a time."""
    changes = Standing.of(view()).changes(Standing.of(after))
    assert len(changes) == len(words)
    for sentence, word in zip(changes, words, strict=True):
        assert word in sentence


class Answers:
    """A device's server that gives one answer after the other, and the last one for ever."""

    def __init__(self, documents: list[dict]) -> None:
        self.documents = documents

    def opened(self, conn) -> None:
        pass

    def closed(self, conn, reason) -> None:
        pass

    def received(self, conn, message, request_id, fds) -> None:
        document = self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]
        conn.send(gms_messages.StatusReplyMsg(document), request_id)


async def recover(directory: Path, *documents: dict) -> MemoryKill:
    kill = MemoryKill("HOST-0", "weights", 1, "e", readers_of(device()), part_killer.clock.now_ms())
    path = str(directory / "gms_HOST-0_weights.sock")
    server = Server(path, gms_messages.CATALOGUE, Answers(list(documents)), service="gms")
    await server.start()
    try:
        await wait_recovered(directory, kill, lambda line: None)
    finally:
        await server.close()
    return kill


def test_recovery_is_another_server_with_the_same_epoch_and_readers(tmp_path: Path):
    """Goal: nothing short of what was there. Method: every stage on the way, in turn."""
    answers = (
        device(pid=1),
        device(state="recovering"),
        device(readers=READERS[:1]),
        device(),
    )
    kill = asyncio.run(recover(tmp_path, *answers))
    assert kill.recovered_ms is not None
    assert kill.recovered_ms >= kill.killed_ms


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (device(pid=1), "pid 1. still answers"),
        (device(epoch="other"), "its epoch is other instead of e"),
        (device(readers=READERS[:1]), "not attached: engine-1-b rank 0"),
        (device(state="recovering"), "it is recovering"),
    ],
)
def test_each_stage_of_a_failed_recovery_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict, words: str
):
    """Goal: a drill ends with a reason. Method: a server that stays at each stage."""
    monkeypatch.setattr(part_killer, "RECOVERY_DEADLINE_S", 0.1)
    with pytest.raises(WaitTimeoutError, match=words) as caught:
        asyncio.run(recover(tmp_path, answer))
    assert caught.value.code == "drill.no_recovery"


def test_nothing_committed_is_nothing_to_kill(tmp_path: Path):
    """Goal: no drill of an empty service. Method: a directory without a pod."""
    with pytest.raises(UnderstudyError, match="has committed weights") as caught:
        asyncio.run(kill_server(tmp_path, 0))
    assert caught.value.code == "drill.no_memory"
    two = {**device(), "device_uuid": "HOST-1"}
    seen = {"gms": [device(), two, {"name": "gms_HOST-2", "error": "gone"}]}
    assert list(committed_devices(seen)) == ["HOST-0", "HOST-1"]


def test_targets_are_the_three_and_every_other_rank():
    """Goal: what is killed in turn. Method: the processes of one rank, of three, of nobody."""
    http, model, supervisor = TARGETS
    assert targets_of(None, ()) == TARGETS
    assert targets_of("reference", ("http", "model")) == TARGETS
    ranks = ("backend-model-1", "backend-model-2")
    processes = ("model-2", "http", "model", "model-1")
    assert targets_of("reference", processes) == (http, model, *ranks, supervisor)
    for part in PARTS:
        assert check_target(part) == part
    for each in (*TARGETS, *ranks):
        assert check_target(each) == asked_of_engine(each).target == each
    for wrong in ("model", "backend-model-0", "backend-model-x", ""):
        with pytest.raises(ValueError, match="must be one of backend-http"):
            check_target(wrong)


def test_targets_of_vllm_go_by_their_plain_names():
    """Goal: api, core and workers, whatever the engine calls them. Method: one rank, eleven."""
    *base, supervisor = VLLM_TARGETS
    assert targets_of("vllm", ("core", "api", "worker")) == VLLM_TARGETS
    ranks = tuple(f"worker-{number}" for number in range(1, 11))
    processes = ("api", "core", "worker", *reversed(ranks))
    assert targets_of("vllm", processes) == (*base, *ranks, supervisor)
    for each in (*base, *ranks):
        assert check_target(each) == check_target(f"backend-{each}") == each
        assert asked_of_engine(each) == KillMsg(f"backend-{each}")
    assert asked_of_engine(supervisor) == KillMsg(supervisor)


def test_process_of_an_engine_can_be_stopped_instead():
    """Goal: `stop:` and what takes it. Method: both backends' names, and what is no engine's."""
    assert asked_of_engine(check_target("stop:worker-1")) == KillMsg(
        "backend-worker-1", is_stop=True
    )
    assert check_target("stop:backend-api") == "stop:api"
    assert check_target("stop:backend-model-1") == "stop:backend-model-1"
    assert check_target("stop:supervisor") == "stop:supervisor"
    for wrong in ("stop:lockserver", "stop:gms", "stop:stop:api", "stop:", "stop"):
        with pytest.raises(ValueError, match=r"processes of an engine|must be one of"):
            check_target(wrong)
