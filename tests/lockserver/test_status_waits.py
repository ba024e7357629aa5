"""No wait is silent: of each state that can last, `status` says who, since when, what evidence
remains and what to do, in the document and in the text at 80 columns.

Each state is made with a real server and real processes, and looked at with the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lockserver.status_text import span, text_of
from tests.helpers import auntil
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.members import Member
from tests.lockserver.processes import ServerProcess, free_port
from understudy.pod.http_get import get

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = 80
QUICK = ("--silent-ms", "300", "--window-ms", "50")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
UNREACHABLE, TIMEOUT = 3, 5


@dataclass
class Scene:
    """What a state is made of."""

    directory: str
    server: Callable[..., ServerProcess]
    engine: Callable[..., EngineProcess]


@dataclass
class Told:
    """What must be told. Words of `evidence` and `mend` are all to be there."""

    reason: str
    engine: str | None
    evidence: tuple[str, ...]
    mend: tuple[str, ...]
    lock: str = "active"
    token: int | None = None
    pid: int | None = None
    is_fault: bool = True
    by_http: ServerProcess | None = None


def kills(*pids: int) -> str:
    return f"kill -9 {' '.join(map(str, pids))}"


def pids_of(holder: EngineProcess) -> list[int]:
    return sorted(holder.pids[1:])


# ---------------------------------------------------------------------- how each state is made


@asynccontextmanager
async def silent_holder(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server(*QUICK)
    holder = scene.engine("engine-0")
    holder.granted()
    holder.signal(signal.SIGSTOP, tree=False)
    await auntil(lambda: server.lock()["holder"]["unresponsive"], "the silence to be seen")
    supervisor, *backends = holder.pids
    yield Told(
        "unresponsive",
        "engine-0",
        (f"pid {backends[0]} (", f"pid {backends[1]} (", f"pid {supervisor}, not readable"),
        ("kill -9", str(supervisor), *map(str, backends)),
        token=1,
        pid=supervisor,
    )


@asynccontextmanager
async def orphans(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    holder = scene.engine("engine-0", fate="outlives_parent")
    holder.granted()
    holder.signal(signal.SIGKILL, tree=False)
    await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
    yield Told(
        "releasing",
        "engine-0",
        (*(f"pid {pid} (" for pid in pids_of(holder)), "its supervisor has ended"),
        (kills(*pids_of(holder)),),
        token=1,
    )


@asynccontextmanager
async def given_back_too_early(scene: Scene) -> AsyncIterator[Told]:
    """A supervisor says that its launch is over, and a process of it lives."""
    server = scene.server()
    async with Engine(scene.directory, "engine-0") as holder:
        incarnation = holder.launch()
        holder.want("active")
        await holder.granted()
        holder.relent()
        await auntil(lambda: server.lock()["state"] == "releasing", "the lock to be given back")
        lock = server.lock()
        assert lock["cause"] == "not_wanted"
        assert lock["waits"][0]["incarnation"] == incarnation
        pid = holder.backends[0].pid
        evidence = (f"pid {pid} (", "says that this launch is over")
        yield Told("releasing", "engine-0", evidence, (kills(pid),), token=1, pid=os.getpid())


@asynccontextmanager
async def cut_connection(scene: Scene) -> AsyncIterator[Told]:
    """The supervisor (this process) lives and is no longer connected."""
    server = scene.server()
    async with Engine(scene.directory, "engine-0") as holder:
        holder.launch()
        holder.want("active")
        await holder.granted()
        await holder.disconnect()
        await auntil(lambda: server.lock()["cause"] == "connection_closed", "the cut to be seen")
        me, backend = os.getpid(), holder.backends[0].pid
        yield Told(
            "releasing",
            "engine-0",
            (f"pid {backend} (", f"pid {me}, not readable"),
            (kills(me, backend),),
            token=1,
            pid=me,
        )


@asynccontextmanager
async def restarted(scene: Scene, window_ms: str) -> AsyncIterator[tuple[ServerProcess, Any]]:
    """A restarted server, and a holder that does not speak."""
    server = scene.server("--window-ms", window_ms, "--silent-ms", "300")
    holder = scene.engine("engine-0")
    holder.granted()
    holder.signal(signal.SIGSTOP, tree=True)
    server.kill()
    await asyncio.to_thread(server.start)
    yield server, holder


@asynccontextmanager
async def recovering_in_the_window(scene: Scene) -> AsyncIterator[Told]:
    async with restarted(scene, "3600000") as (_, holder):
        pids = tuple(f"pid {pid} (" for pid in pids_of(holder))
        evidence = (*pids, "has not been heard by this server")
        yield Told("recovering", "engine-0", evidence, ("nothing yet", "connect again"), token=1)


@asynccontextmanager
async def recovering_after_the_window(scene: Scene) -> AsyncIterator[Told]:
    async with restarted(scene, "50") as (server, holder):
        await auntil(lambda: server.lock()["holder"]["unresponsive"], "the window to end")
        pids = pids_of(holder)
        evidence = (*(f"pid {pid} (" for pid in pids), "has not been heard by this server")
        yield Told("unresponsive", "engine-0", evidence, (kills(*pids),), token=1)


@asynccontextmanager
async def unknown_holder(scene: Scene) -> AsyncIterator[Told]:
    """The state file is gone, and the holder, which could claim, does not speak."""
    server = scene.server(*QUICK)
    holder = scene.engine("engine-0")
    holder.granted()
    holder.signal(signal.SIGSTOP, tree=True)
    server.kill()
    os.unlink(os.path.join(scene.directory, "lockserver.json"))
    await asyncio.to_thread(server.start)
    name = witness_names(scene.directory, "engine-0")[0]
    pids = pids_of(holder)
    evidence = (f"witness {name} held by", *(f"pid {pid} (" for pid in pids))
    yield Told("unknown_holder", None, evidence, (kills(*pids), "claim by themselves"))


def witness_names(directory: str, engine: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(f"witness_{engine}_")]


@asynccontextmanager
async def without_witness(scene: Scene, *, is_replaced: bool) -> AsyncIterator[Told]:
    scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    (name,) = witness_names(scene.directory, "engine-0")
    path = os.path.join(scene.directory, name)
    os.rename(path, f"{path}.old")
    if is_replaced:
        Path(path).touch()
    evidence = (f"witness {name} removed or replaced", f"pid {holder.pids[0]}, not readable")
    mend = ("once none of its processes lives", "move lockserver.json away")
    yield Told("witness_lost", "engine-0", evidence, mend, token=1, pid=holder.pids[0])


def witness_removed(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_witness(scene, is_replaced=False)


def witness_replaced(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_witness(scene, is_replaced=True)


def may_write(server: ServerProcess, size_bytes: int) -> None:
    """How long the files may be that `server` writes: 0 as on a read-only file system, 1 lets it
    seal a witness and write no state."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


@asynccontextmanager
async def failing_disk(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    may_write(server, 1)
    async with Engine(scene.directory, "engine-0") as engine:
        engine.launch()
        engine.want("active")
        await auntil(lambda: server.status()["problem"], "the problem to be seen")
        evidence = ("grants cannot be written", "lockserver.json")
        yield Told("write_failed", "engine-0", evidence, (f"df -h {scene.directory}",))


@asynccontextmanager
async def witness_that_cannot_be_sealed(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    may_write(server, 0)
    holder.signal(signal.SIGKILL, tree=True)
    await auntil(holder.is_gone, "the end of the holder")
    (name,) = witness_names(scene.directory, "engine-0")
    await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
    evidence = (f"witness {name} free", "its supervisor has ended")
    yield Told("witness_unsealed", "engine-0", evidence, ("make", "writable"), token=1)


@asynccontextmanager
async def hand_over(scene: Scene, timeout_s: float) -> AsyncIterator[tuple[Any, Told]]:
    """A holder that is asked to hand over, and takes its time."""
    server = scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    scene.engine("engine-1")
    await auntil(lambda: server.lock()["waiters"], "the waiter to be in line")
    command = [sys.executable, "-m", "lockserver.cli", "switchover", "--dir", scene.directory]
    asker = await asyncio.create_subprocess_exec(
        *(*command, f"--timeout={timeout_s}"), stderr=subprocess.PIPE
    )
    try:
        await auntil(lambda: server.lock()["switchover"], "the switchover to begin")
        pid, evidence = holder.pids[0], ("it finishes its requests",)
        yield asker, Told("switchover", "engine-0", evidence, (), token=1, pid=pid)
    finally:
        if asker.returncode is None:
            asker.kill()
        await asker.communicate()


@asynccontextmanager
async def switchover(scene: Scene) -> AsyncIterator[Told]:
    async with hand_over(scene, 3600) as (asker, told):
        evidence = (*told.evidence, "s of its time are left")
        mend = ("nothing: engine-1 has it as soon as",)
        yield replace(told, evidence=evidence, mend=mend, is_fault=False)
        assert asker.returncode is None


@asynccontextmanager
async def switchover_that_takes_too_long(scene: Scene) -> AsyncIterator[Told]:
    async with hand_over(scene, 0.05) as (asker, told):
        assert await asker.wait() == TIMEOUT
        evidence = (*told.evidence, "its time is up")
        mend = ("engine status --engine-id engine-0", "ask again")
        yield replace(told, evidence=evidence, mend=mend)


@asynccontextmanager
async def silent_waiter(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server(*QUICK)
    holder = scene.engine("engine-0")
    holder.granted()
    waiter = scene.engine("engine-1")
    await auntil(lambda: server.lock()["waiters"], "the waiter to be in line")
    waiter.signal(signal.SIGSTOP, tree=False)
    await auntil(lambda: server.lock()["waiters"][0]["silent"], "the silence to be seen")
    pid = waiter.pids[0]
    yield Told(
        "waiter_silent",
        "engine-1",
        ("no heartbeat since", f"pid {pid}, not readable"),
        (kills(pid), "kill -CONT"),
        pid=pid,
        is_fault=False,
    )


@asynccontextmanager
async def nobody_is_there(scene: Scene) -> AsyncIterator[Told]:
    scene.server()
    mend = (f"engine run --dir {scene.directory}",)
    yield Told("nobody_asks", None, ("no engine is connected",), mend, is_fault=False)


@asynccontextmanager
async def nobody_is_prepared(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    async with Engine(scene.directory, "engine-0") as first:
        incarnation = first.launch()
        first.want()
        async with Engine(scene.directory, "engine-1"):
            await auntil(lambda: len(server.status()["supervisors"]) == 2, "both to be known")
            evidence = (f"prepares {incarnation}", "engine-1", "has no launch")
            mend = ("engine status", "--engine-id engine-0")
            yield Told("nobody_asks", None, evidence, mend, is_fault=False)


@asynccontextmanager
async def queue(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    waiter = scene.engine("engine-1")
    await auntil(lambda: server.lock()["waiters"], "the waiter to be in line")
    evidence = ("engine-0 holds it, token 1, heard", "ms ago")
    mend = ("nothing: engine-1 is granted when engine-0", "lockserver switchover --to engine-1")
    yield Told("queue", "engine-1", evidence, mend, pid=waiter.pids[0], is_fault=False)


@asynccontextmanager
async def queue_for_the_weights(scene: Scene) -> AsyncIterator[Told]:
    """A plain lock: no switchover is offered."""
    server = scene.server()
    async with Engine(scene.directory, "engine-0") as holder:
        holder.launch()
        holder.want("loader")
        await holder.granted("loader")
        async with Engine(scene.directory, "engine-1") as waiter:
            waiter.launch()
            waiter.want("loader")
            await auntil(lambda: server.lock("loader")["waiters"], "the waiter to be in line")
            assert "switchover" not in server.lock("loader")["waits"][0]["mend"]
            evidence = ("engine-0 holds it, token 1",)
            mend = ("nothing: engine-1 is granted when engine-0",)
            me = os.getpid()
            yield Told("queue", "engine-1", evidence, mend, "loader", pid=me, is_fault=False)


@asynccontextmanager
async def queue_behind_the_dead(scene: Scene) -> AsyncIterator[Told]:
    async with orphans(scene):
        waiter = scene.engine("engine-1")
        evidence = ("the lock is releasing, as said above",)
        mend = ("engine-1 is granted once the lock is free",)
        yield Told("queue", "engine-1", evidence, mend, pid=waiter.pids[0], is_fault=False)


@asynccontextmanager
async def socket_of_a_stranger(scene: Scene) -> AsyncIterator[Told]:
    """A file where the server's socket was: the command is answered from the state file, so the
    server is asked over HTTP."""
    server = scene.server()
    path = Path(scene.directory, "lockserver.sock")
    (stranger := path.with_name("other")).touch()
    stranger.rename(path)
    await auntil(lambda: "lock.unreachable" in server.log(), "the stranger to be found")
    evidence = ("nobody new can connect", str(path))
    yield Told("unreachable", None, evidence, (f"ls -la {scene.directory}",), by_http=server)


@asynccontextmanager
async def address_of_a_stranger(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    server.kill()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        server.flags = ("--service", f"active=127.0.0.1:{port}")
        await asyncio.to_thread(server.start)
        assert server.status()["service"]["active"]["state"] == "waiting_for_hand_back"
        evidence = (f"127.0.0.1:{port} is in use by pid {os.getpid()}",)
        yield Told("address_away", None, evidence, ("stop who has it", "--service"))


# ---------------------------------------------------------------------- over TCP


@asynccontextmanager
async def members_of(scene: Scene, count: int, *flags: str) -> AsyncIterator[Any]:
    """A server over TCP, and `count` members of engine-0 that are connected."""
    lease = ("--lease-ms", "300", "--lease-margin-ms", "100")
    server = scene.server("--listen", f"tcp://127.0.0.1:{free_port()}", *lease, *flags)
    found = [Member(server.flags[1], None, "engine-0", index, 2) for index in range(count)]
    try:
        for each in found:
            await each.connect()
        yield server, found
    finally:
        for each in found:
            await each.close()


@asynccontextmanager
async def member_missing(scene: Scene) -> AsyncIterator[Told]:
    async with members_of(scene, 1) as (server, (member,)):
        member.launch("active")
        await auntil(lambda: server.lock()["state"] == "free", "the time of strangers to end")
        evidence = ("member 0", "lease ends in", "member 1: no lease, not connected, never heard")
        mend = ("engine status --engine-id engine-0", "--members 2 --member 1")
        yield Told("members_missing", "engine-0", evidence, mend, is_fault=False)


@asynccontextmanager
async def member_that_does_not_end(scene: Scene) -> AsyncIterator[Told]:
    """One of two says that it is reaped, and the other one goes on renewing its lease."""
    async with members_of(scene, 2) as (server, members):
        for each in members:
            each.launch("active")
        token = await members[0].granted()
        members[1].reap()
        await members[0].lost()
        await auntil(lambda: server.lock()["state"] == "releasing", "the loss to be seen")
        evidence = ("member 0", "lease ends in", "member 1", "no lease", "ms ago")
        mend = ("the last lease ends in", "a member (0) hangs and renews", "host")
        yield Told("releasing", "engine-0", evidence, mend, token=token)


@asynccontextmanager
async def leases_on_file(scene: Scene) -> AsyncIterator[Told]:
    """A restarted server that waits for the leases of a holder that it does not hear."""
    async with members_of(scene, 2) as (server, members):
        for each in members:
            each.launch("active")
        token = await members[0].granted()
        server.kill()
        server.flags = (*server.flags, "--lease-margin-ms", "3600000")
        await asyncio.to_thread(server.start)
        evidence = tuple(f"member {index}: lease ends in 3" for index in range(2))
        yield Told("recovering", "engine-0", evidence, ("connect again",), token=token)


@asynccontextmanager
async def leases_of_strangers(scene: Scene) -> AsyncIterator[Told]:
    async with members_of(scene, 0, "--lease-margin-ms", "3600000"):
        evidence = ("leases that began before this server may last for 3",)
        yield Told("unknown_holder", None, evidence, ("connect and claim by themselves",))


@asynccontextmanager
async def no_server_over_tcp(scene: Scene) -> AsyncIterator[Told]:
    async with members_of(scene, 2) as (server, members):
        for each in members:
            each.launch("active")
        token = await members[0].granted()
        server.kill()
        evidence = ("leases of 2 members over TCP, 0.3 s each",)
        yield Told("no_server", "engine-0", evidence, ("who serves stops",), token=token)


@asynccontextmanager
async def no_server(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    holder = scene.engine("engine-0")
    holder.granted()
    server.kill()
    pids = tuple(f"pid {pid} (" for pid in pids_of(holder))
    mend = (f"lockserver serve --dir {scene.directory}", "nobody is granted")
    yield Told("no_server", "engine-0", ("held by", *pids), mend, token=1)


@asynccontextmanager
async def no_server_and_no_holder(scene: Scene) -> AsyncIterator[Told]:
    scene.server().kill()
    mend = (f"lockserver serve --dir {scene.directory}",)
    yield Told("no_server", None, ("nobody is on file",), mend, "loader")


STATES = (
    silent_holder,
    orphans,
    given_back_too_early,
    cut_connection,
    recovering_in_the_window,
    recovering_after_the_window,
    unknown_holder,
    witness_removed,
    witness_replaced,
    failing_disk,
    witness_that_cannot_be_sealed,
    switchover,
    switchover_that_takes_too_long,
    silent_waiter,
    nobody_is_there,
    nobody_is_prepared,
    queue,
    queue_for_the_weights,
    queue_behind_the_dead,
    address_of_a_stranger,
    socket_of_a_stranger,
    member_missing,
    member_that_does_not_end,
    leases_on_file,
    leases_of_strangers,
    no_server_over_tcp,
    no_server,
    no_server_and_no_holder,
)


# ---------------------------------------------------------------------- what is told of it


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_status_of_a_state_that_lasts_says_who_since_when_what_remains_and_what_to_do(
    state: Callable[[Scene], AbstractAsyncContextManager[Told]],
    pod_dir: str,
    start_server: Callable[..., ServerProcess],
    start_engine: Callable[..., EngineProcess],
):
    """Goal: no wait is silent. Method: make the state, ask the command as a program and as people
    do, and look for the four things."""

    async def scenario() -> None:
        async with state(Scene(pod_dir, start_server, start_engine)) as told:
            document = await (ask(pod_dir) if told.by_http is None else fetch(told.by_http))
            check_document(document, told)
            check_text(text_of(document, COLUMNS), document, told)

    asyncio.run(scenario())


async def ask(directory: str, *flags: str, code: int = 0) -> Any:
    """What the command prints, as JSON."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lockserver.cli", "status", "--dir", directory, "--json", *flags),
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == code, said
    return json.loads(said)


async def fetch(server: ServerProcess) -> Any:
    return (await get(f"http://127.0.0.1:{server.http_port}/status")).json()


def wait_of(document: Any, told: Told) -> Any:
    waits = document["locks"][told.lock]["waits"]
    found = [each for each in waits if each["reason"] == told.reason]
    assert len(found) == 1, waits
    return found[0]


def check_document(document: Any, told: Told) -> None:
    lock, wait = document["locks"][told.lock], wait_of(document, told)
    assert (wait["engine"], wait["token"], wait["pid"]) == (told.engine, told.token, told.pid)
    assert (wait["incarnation"] or "").startswith(told.engine or "")
    assert TIME.fullmatch(wait["since"])
    assert wait["for_ms"] >= 0
    evidence = "; ".join(wait["evidence"])
    assert [words for words in told.evidence if words not in evidence] == [], evidence
    assert [words for words in told.mend if words not in wait["mend"]] == [], wait["mend"]
    assert wait["is_fault"] == told.is_fault
    faults = [each for each in lock["waits"] if each["is_fault"]]
    if told.reason not in ("address_away", "unreachable"):  # which are told elsewhere, too
        assert bool(lock["problem"]) == bool(faults)
    assert TIME.fullmatch(lock["since"])


def check_text(text: str, document: Any, told: Told) -> None:
    wait = wait_of(document, told)
    lines = text.splitlines()
    too_long = [line for line in lines if len(line) > COLUMNS and len(line.split()) > 2]
    assert too_long == []  # what is one word is there to be copied
    block = [line for line in lines if line.startswith(" ")]
    plain = " ".join(" ".join(block).split())
    who = wait["engine"] or "nobody"
    parts = [who, wait["incarnation"], wait["token"] and f"token {wait['token']}"]
    parts += [wait["pid"] and f"supervisor pid {wait['pid']}"]
    assert f"who {' '.join(each for each in parts if each)}" in plain
    assert f"since {wait['since']} ({span(wait['for_ms'])})" in plain
    for evidence in wait["evidence"]:
        assert f"evidence {evidence}" in plain
    assert f"to do {wait['mend']}" in plain


def test_status_in_an_80_columns_terminal_and_its_exit_codes(pod_dir, start_server, start_engine):
    """Goal: what people see is folded, and scripts can rely on the code. Method: the command as a
    process with COLUMNS, with a server, with its file alone, and with neither."""
    server = start_server()
    start_engine("engine-0").granted()

    def run(columns: int) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "lockserver.cli", "status", "--dir", pod_dir],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": str(columns)},
            check=False,
        )
        return done.returncode, done.stdout

    code, text = run(COLUMNS)
    assert code == 0
    assert "active   held        engine-0  token 1  pid " in text
    wide = run(500)[1]
    assert len(wide.splitlines()) < len(text.splitlines())
    server.kill()
    code, text = run(COLUMNS)
    assert (code, "offline view" in text) == (0, True)
    os.unlink(os.path.join(pod_dir, "lockserver.json"))
    assert run(COLUMNS) == (UNREACHABLE, "")


def test_a_pod_that_is_well_is_told_in_less_than_15_lines(pod_dir, start_server, start_engine):
    """Goal: all is well is a short story. Method: a holder, a standby, a service; count lines."""
    server = start_server("--service", f"active=127.0.0.1:{free_port()}")
    start_engine("engine-0").granted()
    start_engine("engine-1")

    async def scenario() -> None:
        await auntil(lambda: server.lock()["waiters"], "the standby to be in line")
        document = await ask(pod_dir)
        assert len(text_of(document, COLUMNS).splitlines()) < 15
        assert document["locks"]["active"]["problem"] is None

    asyncio.run(scenario())


def test_every_reason_is_a_state_here_and_a_line_of_the_page():
    """Goal: no reason is added that nobody has seen or that the page does not explain. Method: the
    words in the code, the states above by what they tell, the table of operations.md."""
    files = [*(ROOT / "lockserver").glob("wait_*.py"), ROOT / "lockserver" / "offline.py"]
    code = "".join(path.read_text() for path in files)
    reasons = set(re.findall(r"(?:Wait|wait)\(\s*\"(\w+)\"", code))
    made = set(re.findall(r"Told\(\s*\"(\w+)\"", Path(__file__).read_text()))
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("### What a lock waits for")[2].partition("\n## ")[0]
    assert reasons == made == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (60_000, "1 min"),
        (200_000, "3 min 20 s"),
        (7_500_000, "2 h 5 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_how_long_is_told_in_two_units(ms: int, text: str):
    """Goal: a glance is enough. Method: a table."""
    assert span(ms) == text
