"""The control socket: users ask for status and events, and for a fresh child; a drill says
whom it kills."""

from __future__ import annotations

from gateway import messages as msg
from gateway.supervisor import report
from gateway.supervisor.parts import GatewayParts
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.observers import Observers
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

SPARE_FDS = 4  # so that at the limit two more may connect, and ask what is wrong


class GatewayControl(Handler):
    """Serves the control socket at `path`."""

    def __init__(self, path: str, gateway: GatewayParts) -> None:
        self._gateway = gateway
        self._observers = Observers(gateway.log, lambda: report.document(gateway))
        self.server = Server(path, msg.CONTROL, self, service="gateway", spare_fds=SPARE_FDS)

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case msg.StatusMsg():
                conn.send(msg.StatusReplyMsg(report.document(self._gateway)), request_id)
            case msg.WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case msg.RestartChildMsg():
                self._restart(conn, request_id)
            case msg.ExpectDeathMsg():
                self._gateway.nursery.expect_death(message)
                conn.send(message, request_id)
            case _:
                raise ProtocolError(
                    "gateway.not_a_request", f"{message.TYPE} is not a request to a gateway"
                )

    def _restart(self, conn: Connection, request_id: int) -> None:
        def answer(done: msg.ChildRestartedMsg | UnderstudyError) -> None:
            if isinstance(done, UnderstudyError):
                conn.fault(done, request_id, close=False)
            else:
                conn.send(done, request_id)

        self._gateway.nursery.restart(answer)
