"""Forged messages to the parts of a serving pod, an engine with other weights, and a holder that is
stopped: no other part is harmed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from engine import messages as control
from gms.client import messages as gms
from lockserver.client import messages as lock_messages
from plumbing.errors import GivenUpError, RemoteError
from plumbing.pod.observers import ask
from plumbing.wire.messages import Catalogue
from tests.e2e.pods import BIN, ENVIRONMENT, Pod, in_pod
from tests.e2e.processes import Processes, kill
from understudy.status.gather import part_of, status_of


@in_pod
async def test_forged_messages_affect_only_their_sender(pod: Pod):
    """Goal: well-formed messages cannot take what belongs to others. Method: claims by a foreign
    client at every socket, each answered with its code; the pod continues to serve under its
    token."""
    before = await pod.whole()
    active = (await pod.engine(before.engine))["engine"]

    def at(name: str, catalogue: Catalogue) -> tuple[str, Catalogue]:
        return str(pod.directory / f"{name}.sock"), catalogue

    lock = at("lockserver", lock_messages.CATALOGUE)
    memory = at("gms_HOST-0_weights", gms.CATALOGUE)
    engines = [at(f"engine_engine-{number}", control.CONTROL) for number in (0, 1)]
    claim = {
        "supervisor": "0" * 16,
        "engine": before.engine,
        "incarnation": active["incarnation"],
        "lock": "active",
        "is_wanted": True,
        "token": before.token,
    }
    stranger = {**claim, "engine": "engine-9", "incarnation": "engine-9-" + "0" * 16}
    want = lock_messages.WantMsg
    cases = [
        (lock, want(**claim), "lock.engine_id_taken"),
        (lock, want(**{**stranger, "incarnation": "engine-9-../../" + "0" * 9}), "lock.bad_want"),
        (lock, want(**stranger), "lock.stale_claim"),
        (lock, lock_messages.BeatMsg(1), "lock.want_first"),
        (memory, gms.AttachMsg("e", "i", "rw_or_ro", identity={}), "gms.identity_mismatch"),
        (memory, gms.AttachMsg("e", "i", "ro", identity={"a": 1}), "gms.identity_mismatch"),
        (memory, gms.AllocateMsg(4096), "gms.not_attached"),
        *((each, control.KillMsg("init"), "engine.unknown_target") for each in engines),
    ]
    async with pod.load() as load:
        for (path, catalogue), message, code in cases:
            with pytest.raises(RemoteError) as caught:
                await ask(path, catalogue, message)
            assert caught.value.code == code
        await load.answers()
        assert not load.lost()
        assert load.tokens() == {before.token}
    assert await pod.whole() == before


@pytest.mark.slow
@in_pod
async def test_third_engine_with_other_weights_ends_and_says_why(pod: Pod, tmp_path: Path):
    """Goal: cause and fix, no relaunch, no effect on others. Method: a checkpoint of the same name
    and shape, of which a few numbers differ."""
    before = await pod.whole()
    model = tmp_path / pod.local.model.name  # its name is its identity
    shutil.copytree(pod.local.model, model)
    (path,) = model.glob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(byte ^ 1 for byte in content[-64:]))
    process = await asyncio.create_subprocess_exec(
        *(BIN / "engine", "run", f"--dir={pod.directory}", "--http-port=0"),
        *("--", "--model", model),
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "ENGINE_ID": "engine-2"},
    )
    _, said = await process.communicate()
    assert process.returncode == GivenUpError.exit_code, said.decode()
    assert "[gms.identity_mismatch]" in said.decode().splitlines()[-1]
    async with pod.load() as load:
        await load.answers()
    assert load.tokens() == {before.token}
    assert await pod.whole() == before


STATUS_ASKED = 20  # after the window: how many times the check must see no grant


@pytest.mark.slow
@in_pod
async def test_stopped_holder_is_not_replaced_by_a_restarted_lock_server(pod: Pod):
    """Goal: no split brain. Method: SIGSTOP the whole tree of the active engine under load, SIGKILL
    the lock server; wait past its window; SIGCONT: the holder continues under its token."""
    before = await pod.whole()
    incarnation = (await pod.engine(before.engine))["engine"]["incarnation"]
    # One number per grant, of any lock.
    granted = (await status_of(part_of(pod.directory, "lockserver")))["token"]
    tree = pod.tree(before.engine)
    with Processes(tree) as holder:
        async with pod.load() as load:
            await load.answers()
            holder.signal(signal.SIGSTOP)
            restarts = pod.runner.restarts()["lockserver"]
            kill(pod.pid("lockserver"))
            await pod.restarted("lockserver", restarts)
            async with pod.grants(holder) as grants:
                await check_no_grant(pod, granted, tree)
                holder.signal(signal.SIGCONT)
                await load.answers()
                after = await pod.whole()
            assert not grants.made
            assert (after.engine, after.token) == (before.engine, before.token)
            assert (await status_of(part_of(pod.directory, "lockserver")))["token"] == granted
            load.lost_nothing(before.token)
            assert (await pod.engine(before.engine))["engine"]["incarnation"] == incarnation


async def check_no_grant(pod: Pod, granted: int, tree: list[int]) -> None:
    """Past the window: `recovering`, unresponsive, with the pids to kill and the same token, with
    another engine in the queue."""

    async def overdue():
        lock = (
            (await status_of(part_of(pod.directory, "lockserver")))
            .get("locks", {})
            .get("active", {})
        )
        return lock if lock and lock["holder"]["unresponsive"] and lock["waiters"] else None

    while (lock := await overdue()) is None:
        pass
    assert lock["state"] == "recovering"
    backend = set(tree[1:])
    assert {each["pid"] for each in lock["waiting_for"]} == backend
    assert all(f"pid {pid} (" in lock["problem"] for pid in backend)
    for _ in range(STATUS_ASKED):
        document = await status_of(part_of(pod.directory, "lockserver"))
        assert document["token"] == granted
        assert document["locks"]["active"]["state"] == "recovering"
        assert [each["engine"] for each in document["locks"]["active"]["waiters"]]
