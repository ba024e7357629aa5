"""A backend of real processes that does everything a backend does, except inference.

Run by `engine run --backend command -- python fake_backend.py SWITCHES`. Each switch makes it bad
in one way. When it serves, it answers every connection with one line: engine and token; on a
private socket only after a request, and the canary with a verdict.
"""

from __future__ import annotations

import _multiprocessing
import argparse
import contextlib
import ctypes
import fcntl
import os
import platform
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine import messages as m
from engine.backends import process
from plumbing.errors import UnreachableError
from plumbing.wire.blocking import BlockingClient, Reply


def arguments() -> argparse.Namespace:
    """A request is named by its type; a file is named that a switch depends on."""
    parser = argparse.ArgumentParser()
    for on in (
        *("as-child", "rest", "leaves-resident", "fail-canary", "serve-early", "load"),
        *("permanent", "advance"),  # the fault is permanent; the shared page counts
        "leave-behind",  # one of everything that stays after a SIGKILL
    ):
        parser.add_argument(f"--{on}", action="store_true")
    for text in (
        *("hang-at", "crash-at"),  # a request, or `prepare`, or `launch`
        *("crash-if", "hang-generation-if", "accept-none-if"),  # while that file exists
        *("answer-late-if", "load-until"),  # as long as, or until, that file exists
        *("note-drain", "note-wake"),  # where to write what the request said
        *("continuation", "fault", "child-skips", "grandchild"),
    ):
        parser.add_argument(f"--{text}", default="")
    parser.add_argument("--obey", type=int, help="the descriptor of a socket")
    parser.add_argument("--ranks", nargs="*", help="load as so many ranks, of these models")
    return parser.parse_args()


WAIT_S = 60.0
KV_BYTES = 1024
CHILDREN: list[subprocess.Popen[bytes]] = []  # kept: a forgotten Popen warns


class Serving:
    """The serving file, in this process and in its child; and a proof that no other engine serves:
    a file that is locked by whoever may."""

    def __init__(self, member: process.BackendProcess, switches: argparse.Namespace) -> None:
        self._seat = member.seat
        self._skips = switches.child_skips
        self._child: socket.socket | None = None
        self._alone = -1

    def spawn(self) -> None:
        """The child, which is told what to do over a socket."""
        self._child, theirs = socket.socketpair()
        self._child.settimeout(WAIT_S)
        with theirs:
            command = [sys.executable, __file__, "--as-child", "--obey", str(theirs.fileno())]
            environ = process.child_environment()
            CHILDREN.append(subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()]))

    def join(self, token: int) -> None:
        if self._seat is None:
            return
        self._seat.join(token)
        self._tell(token, "join")
        path = os.path.join(os.environ["UNDERSTUDY_DIR"], "alone")
        self._alone = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alone, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or two engines serve

    def leave(self) -> None:
        if self._seat is None:
            return
        os.close(self._alone)
        self._tell(0, "leave")
        self._seat.leave()

    def _tell(self, token: int, what: str) -> None:
        if self._child is not None and self._skips != what:
            self._child.sendall(token.to_bytes(8, "big"))
            assert self._child.recv(1) == b"k"


def obey(member: process.BackendProcess, fd: int) -> None:
    """Join for each token that is not 0, leave for 0."""
    orders = socket.socket(fileno=fd)
    assert member.seat is not None
    while order := orders.recv(8):
        token = int.from_bytes(order, "big")
        if token:
            member.seat.join(token)
        else:
            member.seat.leave()
        orders.sendall(b"k")


class Backend:
    def __init__(
        self,
        switches: argparse.Namespace,
        channel: BlockingClient,
        serving: Serving,
        counts: m.Counts,
    ) -> None:
        self.switches = switches
        self.counts = counts
        self.channel = channel
        self.residence = serving
        self.listener: socket.socket | None = None
        self.token = 0
        self.serving = False

    def run(self) -> None:
        while True:
            waiting = [self.channel.fileno()]
            pause_s = 0.01 if self.is_stuck else None
            if self.serving and self.listener is not None and not self.is_stuck:
                waiting.append(self.listener.fileno())
            # What was read along with the frame before is announced by no descriptor.
            ready, _, _ = select.select(waiting, [], [], 0 if self.channel._pending else pause_s)
            if self.channel._pending or self.channel.fileno() in ready:
                self.answer(self.channel.receive())
            elif ready and not self.is_stuck:
                self.accept()

    @property
    def is_private(self) -> bool:
        return self.listener is not None and self.listener.family == socket.AF_UNIX

    @property
    def is_stuck(self) -> bool:
        return os.path.exists(self.switches.accept_none_if)

    def answer(self, asked: Reply) -> None:
        kind = asked.message.TYPE
        if kind == self.switches.crash_at:
            os._exit(13)
        if kind == self.switches.hang_at:
            hang()
        if isinstance(asked.message, m.HealthMsg):
            until(lambda: not os.path.exists(self.switches.answer_late_if))
        self.channel._send(  # the blocking client of the wire only asks; this end answers
            self.reply_to(asked), asked.request_id, (), time.monotonic() + 5
        )

    def reply_to(self, asked: Reply) -> m.Message:
        switches = self.switches
        match asked.message:
            case m.WakeMsg() if switches.serve_early:
                return m.CanaryMsg(ok=True)
            case m.WakeMsg(token=token, era=era):
                if switches.note_wake:
                    with open(switches.note_wake, "w", encoding="ascii") as note:
                        note.write(f"{token} {era}")
                self.listener = socket.socket(fileno=asked.fds[0].detach())
                self.token = token
                self.residence.join(token)
                return m.WokenMsg()
            case m.RunCanaryMsg() | m.ServeMsg():
                self.serving = not switches.fail_canary
                return m.CanaryMsg(self.serving, "token 7 is 8")
            case m.HealthMsg():
                hung = os.path.exists(switches.hang_generation_if)
                if not (hung or self.is_private):  # there it is idle
                    self.counts.progress += 1
                return m.HealthyMsg(in_flight=int(hung))
            case m.DrainMsg(resume=resume, release_ms=release_ms):
                self.serving = False
                if self.listener is not None:
                    self.listener.close()
                if switches.note_drain:
                    with open(switches.note_drain, "w") as note:
                        note.write("resume" if resume else "finish")
                if release_ms is None:
                    return m.DrainedMsg()
                self.channel.notify(m.DrainedMsg())
                self.residence.leave()
                return m.RestedMsg(4096 if switches.leaves_resident else 0)
        raise AssertionError(asked.message)

    def accept(self) -> None:
        assert self.listener is not None
        with contextlib.suppress(BlockingIOError):
            conn, _ = self.listener.accept()
            with conn:
                conn.sendall(self.line)

    @property
    def line(self) -> bytes:
        return f"{os.environ[process.ENGINE_ID_ENV]} {self.token}\n".encode()


def end_main_thread() -> None:
    """As a thread ends, not as a process does: another one lives on, and so does the process."""
    threading.Thread(target=hang_in_thread, daemon=True).start()
    ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)


def hang_in_thread() -> None:
    threading.Event().wait()


def advance(counts: m.Counts, hang_if: str) -> None:
    """A token every 20 ms, whatever the main thread is doing, until generation hangs."""
    while True:
        if not os.path.exists(hang_if):
            counts.progress += 1
        time.sleep(0.02)


def hang() -> None:
    while True:
        signal.pause()


def spawn(kind: str) -> None:
    command = [sys.executable, __file__, "--as-child"]
    if kind == "brief":
        subprocess.run(["true"], check=True, stdin=subprocess.DEVNULL)
    elif kind == "joined":
        CHILDREN.append(subprocess.Popen(command, env=process.child_environment()))
    else:  # its stdin is not the witness, and it never joins
        bare = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, start_new_session=True)
        CHILDREN.append(bare)


def load(member: process.BackendProcess, switches: argparse.Namespace) -> None:
    leave = member.may_load(timeout_s=60)
    if switches.load_until:
        until(lambda: os.path.exists(switches.load_until))
    member.attached({"model": "fake", "mode": leave.mode})


def load_ranks(member: process.BackendProcess, models: list[str]) -> None:
    """Every rank comes to its weights; one whose model is `none` stays away from then on."""
    for rank, model in enumerate(models):
        leave = member.may_load(60, len(models))
        if model != "none":
            member.attached({"model": model, "mode": leave.mode}, rank)


def leave_behind() -> list[object]:
    """One of everything that stays after a SIGKILL; what keeps it in use until then."""
    temporary = tempfile.gettempdir()
    name, meeting = os.path.basename(temporary), f"vllm_dist_{secrets.token_hex(16)}"
    for path in (f"{temporary}/{meeting}", f"/dev/shm/{meeting}-x", f"/dev/shm/{name}-mapped"):
        Path(path).touch()
    return [_multiprocessing.SemLock(1, 1, 1, f"/{name}-semaphore", False)]


def main() -> None:
    switches = arguments()
    if switches.as_child:
        member = process.enter("model")
        if switches.obey:
            obey(member, switches.obey)
        signal.signal(signal.SIGUSR1, lambda *_: end_main_thread())
        hang()
    if switches.crash_at == "launch" or os.path.exists(switches.crash_if):
        os._exit(13)
    member = process.enter("http")
    channel = BlockingClient.from_socket(process.take_channel(), m.CHANNEL)
    if switches.advance:
        threading.Thread(
            target=advance, args=(member.counts, switches.hang_generation_if), daemon=True
        ).start()
    if switches.fault:
        how = switches.fault, switches.permanent, 2
        member.control.request(m.FaultReportMsg(member.incarnation, "fake.fault", *how))
        os._exit(1)
    serving = Serving(member, switches)
    if switches.rest and switches.grandchild:
        serving.spawn()
        wait_for_model(member)
    elif switches.grandchild:
        spawn(switches.grandchild)
        if switches.grandchild == "joined":
            wait_for_model(member)
    if switches.hang_at == "prepare":
        hang()
    if switches.load:
        load(member, switches)
    if switches.ranks:
        load_ranks(member, switches.ranks)
    kept = leave_behind() if switches.leave_behind else []
    channel.notify(
        m.PreparedMsg(
            weights_bytes=0,
            kv_bytes=KV_BYTES,
            epoch="e1",
            continuation=switches.continuation,
            can_rest=switches.rest,
        )
    )
    with contextlib.suppress(UnreachableError):
        Backend(switches, channel, serving, member.counts).run()
    del kept


def wait_for_model(member: process.BackendProcess) -> None:
    def is_there() -> bool:
        reply = member.control.request(m.StatusMsg()).message
        assert isinstance(reply, m.StatusReplyMsg)
        return "model" in reply.document["backend"]["pids"]

    until(is_there)


def until(predicate: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not predicate():
        if time.monotonic() > end:
            raise TimeoutError(f"{WAIT_S:g} s in vain")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
