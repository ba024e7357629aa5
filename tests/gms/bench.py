"""Real servers and real clients for the shell's tests: processes, sockets, SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

from gms import messages as msg
from gms import names
from gms.client import Keeper, Reader, Writer, open_session
from gms.server import journal
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import gms_journal, gms_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import close_all
from plumbing.wire.messages import Message
from tests.helpers import run_command, until
from tests.standin import build

DEVICE = "HOST-0"
GPU = build.GPU_A
IDENTITY = {"model": "tiny", "shards": {"a": "1"}}
OTHER = {"model": "tiny", "shards": {"a": "2"}}
MIB = 1 << 20
ANSWER_S = 30.0


class GmsProcess:
    """One device's server, in a process of its own."""

    def __init__(
        self,
        directory: str,
        device_bytes: int = 64 * MIB,
        stall_s: float = 120,
        device: str = DEVICE,
    ) -> None:
        self.directory, self.device = directory, device
        self.device_bytes, self.stall_s = device_bytes, stall_s
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self.process = subprocess.Popen(
            self.words, stderr=subprocess.DEVNULL, env=self.environment()
        )
        try:
            until(self.is_up, "the server's hello")
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def words(self) -> list[str]:
        flags = ["--dir", self.directory, "--device", self.device, "--memory", self.kind]
        flags += ["--device-bytes", str(self.device_bytes), "--stall-s", str(self.stall_s)]
        return [sys.executable, "-m", "gms.cli", "serve-device", *flags]

    def environment(self) -> dict[str, str]:
        visible = {"CUDA_VISIBLE_DEVICES": self.device} if self.kind == "cuda" else {}
        return {**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid()), **visible}

    @property
    def kind(self) -> str:
        return "host" if names.is_host(self.device) else "cuda"

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_up(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        try:
            return bool(self.status()["pid"] == self.pid)
        except UnderstudyError:
            return False

    def client(self) -> BlockingClient:
        return BlockingClient(gms_socket(self.directory, self.device), msg.CATALOGUE)

    def status(self) -> dict[str, Any]:
        return ask_status(gms_socket(self.directory, self.device), msg.CATALOGUE)

    def open(self, mode: str = "rw_or_ro", **more: Any) -> Reader | Writer:
        how = {name: more.pop(name) for name in ("on_wait", "memory") if name in more}
        wanted = {"identity": IDENTITY, "wait_ms": 20_000, "engine": "engine-0"}
        request = msg.AttachMsg(**{**wanted, "incarnation": "i-0", "mode": mode, **more})
        return open_session(self.directory, self.device, request, **how)

    def writer(self, **more: Any) -> Writer:
        session = self.open(**more)
        assert isinstance(session, Writer)
        return session

    def reader(self, **more: Any) -> Reader:
        session = self.open("ro", **more)
        assert isinstance(session, Reader)
        return session

    def load(self, nbytes: int = 64, **more: Any) -> Reader:
        """Write one tensor `t` of `nbytes` sevens and commit it."""
        writer = self.writer(**more)
        writer.plan(nbytes)
        writer.place("t", nbytes, (nbytes,), "uint8")
        writer.write("t", b"\7" * nbytes)
        return writer.commit(more.get("identity", IDENTITY))

    def drop(self) -> None:
        """What is committed, if anything is, mapped or not."""
        with contextlib.suppress(RemoteError), self.client() as client:
            client.request(msg.DropMsg(even_if_mapped=True), timeout_s=20)

    def reload(self, nbytes: int = 64, **more: Any) -> Reader:
        self.drop()
        return self.load(nbytes, **more)

    def refusal(self, *messages: Message) -> RemoteError:
        """The error that the last of `messages`, all on one connection, gets."""
        with self.client() as client:
            for message in messages[:-1]:
                close_all(client.request(message).fds)
            try:
                client.request(messages[-1])
            except RemoteError as error:
                return error
        raise AssertionError("no error came")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait()


class ClientProcess:
    """A client in a process of its own, that does one thing per line; see `client_process.py`."""

    def __init__(
        self, directory: str, mode: str, engine: str = "engine-9", device: str = DEVICE
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gms.client_process", directory, mode, engine, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        end = time.monotonic() + ANSWER_S
        while b"\n" not in self._buffer:
            rest_s = end - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, rest_s))
            assert ready, "the client said nothing"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the client ended with {self.process.wait()}"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def expect(self, what: str) -> dict[str, Any]:
        """Read lines up to the one that says `what`."""
        while True:
            answer = self.line()
            if answer["is"] == what:
                return answer
            assert answer["is"] == "waiting", answer

    def do(self, command: str) -> dict[str, Any]:
        self.ask(command)
        return self.line()

    def ask(self, command: str) -> None:
        """Its answer is read later."""
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> int:
        self.process.kill()
        return self.end()

    def end(self) -> int:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        return self.process.wait()


@contextlib.contextmanager
def kept(reader: Reader, **more: Any) -> Iterator[Keeper]:
    keeper = Keeper(reader, **more)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.close()


def condemn(gms: GmsProcess, reader: Reader) -> None:
    """The canaries of two incarnations fail on what it reads."""
    with gms.reader(engine="engine-8", incarnation="i-8") as other:
        for each in (reader, other):
            each.client.notify(msg.CondemnMsg("other tokens"))
        until(lambda: gms.status()["epoch"] != reader.epoch, "the epoch to be condemned")


def inodes(reader: Reader) -> list[int]:
    return [os.fstat(fd).st_ino for fd in reader.slab_fds()]


def command(gms: GmsProcess, *words: str) -> tuple[int, Any]:
    """Run `gms WORDS… --json` as a user does: exit code, and its JSON or the sentence why not."""
    flags = ("--dir", gms.directory, "--json")
    done = run_command([sys.executable, "-m", "gms.cli", *words, *flags], stdin=subprocess.DEVNULL)
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    failed = document.get("error")
    return done.returncode, failed["message"] if failed else document


def digested(gms: GmsProcess) -> str:
    """The digest of what is committed, once it is computed."""
    found = until(lambda: (s := gms.status())["digest"] not in (None, "pending") and s, "a digest")
    return str(found["digest"])


def is_committed_with(gms: GmsProcess, count: int) -> bool:
    status = gms.status()
    return status["state"] == "committed" and len(status["sessions"]) == count


def journalled(gms: GmsProcess) -> str | None:
    record = journal.peek(gms_journal(gms.directory, gms.device))
    return record.epoch if record is not None else None


def hand_back_of(reader: Reader, **more: Any) -> msg.HandBackMsg:
    """What `reader` says to a restarted server, in one frame."""
    held = msg.HeldEpoch(
        more.pop("was_committed", True),
        more.pop("identity", reader.identity),
    )
    fields: dict[str, Any] = {
        "engine": "engine-0",
        "incarnation": "i-0",
        "region": reader.epoch,
        "slab_sizes": reader.slab_sizes,
        "epoch": held,
        "manifest": reader.manifest,
    }
    return msg.HandBackMsg(**{**fields, **more})
