"""What every process of a backend does first, before it opens a device or maps a weight.

The order is fixed: die with the parent, hold the witness on descriptor 0, reserve the seat on the
serving file, then register. In any other order a process could outlive its supervisor unseen. Must
not import asyncio or numpy. Descriptor 0 is the witness, so nothing here reads stdin; a child
inherits it and counts for the lock server, as any process that may use the device should.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine import lifeline
from engine import messages as msg
from lockserver.client import serving, witness
from plumbing.errors import UnderstudyError, UsageError, is_disk_fault
from plumbing.pod.paths import engine_queue
from plumbing.pod.queue_page import QueuePage
from plumbing.service.process import arm_from_environment, parent_environment
from plumbing.wire.blocking import BlockingClient

logger = logging.getLogger(__name__)

CHANNEL_ENV = "UNDERSTUDY_CHANNEL"
WITNESS_ENV = "UNDERSTUDY_WITNESS"
# The path of the incarnation's serving file, and "DEVICE:INODE" of the file that was made there.
# Neither is set where the engine cannot hand over in place.
SERVING_ENV = "UNDERSTUDY_SERVING"
SERVING_ID_ENV = "UNDERSTUDY_SERVING_ID"
INCARNATION_ENV = "UNDERSTUDY_INCARNATION"
ENGINE_SOCKET_ENV = "ENGINE_SOCKET"
ENGINE_ID_ENV = "ENGINE_ID"
FAILURES_ENV = "UNDERSTUDY_FAILURES"  # launches in a row that ended before they were prepared
MODEL_ENV = "UNDERSTUDY_MODEL_NAME"  # of the engine's model; not set in a pod without models

# The supervisor answers immediately; this is for a machine that swaps.
ANSWER_TIMEOUT_S = 30.0
# A process that is about to exit keeps its memory meanwhile, and its supervisor may be stopped.
REPORT_TIMEOUT_S = 5.0

# Errors that the next launch would meet again, besides every UsageError.
PERMANENT = ("gms.identity_mismatch", "gms.larger_than_device", "gms.kv_too_large")


@dataclass(frozen=True)
class BackendProcess:
    """A process of the tree of `incarnation`, known to its supervisor as `name`.

    `seat` is its place on the serving file: to be joined before it accepts or maps KV memory, and
    left after it can do neither. None: this engine cannot hand over in place, nor rest. `counts`
    are seen by the supervisor.
    """

    name: str
    engine: str
    incarnation: str
    control: BlockingClient
    seat: serving.ServingSeat | None = None
    counts: msg.Counts = field(default_factory=msg.Counts)

    def may_load(self, timeout_s: float, ranks: int = 1) -> msg.LoadMsg:
        """Wait until this rank may load its weights; the reply has the mode.

        Raises:
            WaitTimeoutError: another engine has been loading for longer than `timeout_s`.
            UnreachableError: the supervisor is gone.
        """
        reply = self.control.request(msg.MayLoadMsg(self.incarnation, ranks), timeout_s=timeout_s)
        assert isinstance(reply.message, msg.LoadMsg)
        return reply.message

    def attached(self, identity: dict[str, Any], rank: int = 0, place: str = "") -> None:
        """Report that this rank has its weights mapped at `place`, so that the next engine may
        load."""
        known = place if place and os.environ.get(MODEL_ENV) else None
        self.control.request(
            msg.AttachedMsg(self.incarnation, rank, identity, known),
            timeout_s=ANSWER_TIMEOUT_S,
        )

    def report(self, error: Exception) -> None:
        """Report why this process is about to exit: its parent often does not know. It is said
        once, and a reader that is gone or stopped is not waited for."""
        report = fault_report(error, self.incarnation)
        logger.error("%s [%s]", report.message, report.code)
        with contextlib.suppress(UnderstudyError):
            self.control.request(report, timeout_s=REPORT_TIMEOUT_S)

    def end(self, error: Exception) -> NoReturn:
        """Report why, and exit at once: requests in flight have no model, or no owner."""
        self.report(error)
        os._exit(1)


def enter(name: str) -> BackendProcess:
    """Become a process of the incarnation that the environment names.

    Raises:
        UsageError: `engine.not_a_backend`, this was not started by an engine supervisor.
        UnderstudyError: the witness is sealed or replaced: this incarnation is over.
        UnreachableError: the supervisor is gone.
    """
    witness_path = _required(WITNESS_ENV)
    incarnation = _required(INCARNATION_ENV)
    engine = _required(ENGINE_ID_ENV)
    arm_from_environment()
    witness.join(witness_path)
    seat = _seat()
    control = BlockingClient(_required(ENGINE_SOCKET_ENV), msg.CONTROL)
    page, counts = lifeline.hold()
    register = msg.RegisterMsg(incarnation, name, os.getpid())
    control.request(register, [page], timeout_s=ANSWER_TIMEOUT_S)
    return BackendProcess(name, engine, incarnation, control, seat, counts)


def _seat() -> serving.ServingSeat | None:
    path = os.environ.get(SERVING_ENV)
    if not path:
        return None
    dev, _, ino = _required(SERVING_ID_ENV).partition(":")
    file = serving.ServingFile(os.path.basename(path), int(dev), int(ino))
    return serving.ServingSeat(path, file)


def take_channel() -> socket.socket:
    """The socket to the supervisor, for the backend's main process; once.

    Neither the variable nor the descriptor is inherited further: a child with a copy would hide the
    end of the channel from the supervisor.
    """
    number = _required(CHANNEL_ENV)
    del os.environ[CHANNEL_ENV]
    os.set_inheritable(int(number), False)
    return socket.socket(fileno=int(number))


def queue_page() -> QueuePage:
    """Where the process that schedules shows the gateway what it has queued."""
    directory, engine = os.environ.get("UNDERSTUDY_DIR"), os.environ.get(ENGINE_ID_ENV)
    return QueuePage(engine_queue(directory, engine) if directory and engine else "")


def child_environment() -> dict[str, str]:
    """The environment for a child that will `enter`; start it from a thread that lives on."""
    return {**os.environ, **parent_environment()}


def fault_report(error: Exception, incarnation: str) -> msg.FaultReportMsg:
    """For the supervisor: a wrong argument is permanent, and exits with code 2."""
    is_machine = is_disk_fault(error)
    if not isinstance(error, UnderstudyError):
        logger.error("the backend failed", exc_info=error)
        what = f"the backend failed: {type(error).__name__}: {error}"
        error = UnderstudyError("engine.backend_failed", what)
    is_usage = isinstance(error, UsageError) and not is_machine
    is_permanent = is_usage or (error.code in PERMANENT and not is_machine)
    how = is_permanent, 2 if is_usage else 1, is_machine
    return msg.FaultReportMsg(incarnation, error.code, error.message[:4096], *how)


def _required(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise UsageError(
            "engine.not_a_backend",
            f"{variable} is not set: a backend is started by `engine run`, not by hand",
            variable=variable,
        )
    return value
