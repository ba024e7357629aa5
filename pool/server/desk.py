"""The pool's socket: gateways, leases and users. Owns what is answered, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from plumbing.errors import ProtocolError, UnderstudyError, UsageError
from plumbing.pod.observers import Observers
from plumbing.pod.paths import pool_socket
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from pool import messages as msg
from pool.core.events import Order, Ordered, PoolEvent
from pool.server import explain, report
from pool.server.parts import PoolParts

SPARE_FDS = 4  # so that at the limit two more may connect, and ask what is wrong


class PoolDesk(Handler):
    """Serves the socket in `directory`. `change(model, setting, value)` sets something."""

    def __init__(
        self,
        directory: str,
        log: EventLog,
        parts: Callable[[], PoolParts],
        feed: Callable[[PoolEvent], None],
        change: Callable[[str, str, str | None], None],
    ) -> None:
        self._log, self._parts, self._feed, self._change = log, parts, feed, change
        self._observers = Observers(log, lambda: report.document(parts()))
        path = pool_socket(directory)
        self.server = Server(path, msg.CATALOGUE, self, service="pool", spare_fds=SPARE_FDS)

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)
        self._parts().gateways.left(conn)
        self._parts().leases.left(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        parts = self._parts()
        match message:
            case msg.DemandMsg():
                parts.gateways.said(conn, message)
            case msg.LeaseMsg():
                parts.leases.asked(conn, message, request_id, parts.clock.now_ms())
            case msg.StatusMsg():
                conn.send(msg.StatusReplyMsg(report.document(parts)), request_id)
            case msg.WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case msg.OrderMsg() | msg.SetMsg() | msg.ExplainMsg():
                try:
                    conn.send(self._obey(message), request_id)
                except UnderstudyError as error:  # a refusal, no fault of the connection's
                    conn.fault(error, request_id, close=False)
            case _:
                raise ProtocolError(
                    "pool.not_a_request", f"{message.TYPE} is not a request to a pool"
                )

    def _obey(self, message: msg.OrderMsg | msg.SetMsg | msg.ExplainMsg) -> Message:
        """
        Raises:
            UnderstudyError: it is not obeyed, and nothing has changed.
        """
        parts = self._parts()
        if message.model is not None and message.model not in parts.told.models:
            known = ", ".join(parts.told.models)
            raise UsageError(
                "model_not_found", f"this pool has no model {message.model}; it has {known}"
            )
        match message:
            case msg.OrderMsg():
                return self._order(message)
            case msg.SetMsg():
                try:
                    self._change(message.model or "", message.setting, message.value)
                except OSError as error:
                    why = f"it cannot be written to the state file: {error.strerror}"
                    raise UnderstudyError("pool.state_unwritable", why) from error
                whose = f"of {message.model}" if message.model else "of the pool"
                value = "as in the pool file" if message.value is None else f"now {message.value}"
                sentence = f"{message.setting} {whose} is {value}"
                self._log.record("pool.set", sentence, data={"setting": message.setting})
                return msg.OrderedMsg("accepted", None, sentence)
            case msg.ExplainMsg():
                return msg.ExplainedMsg(explain.document(parts, message.model))

    def _order(self, message: msg.OrderMsg) -> msg.OrderedMsg:
        parts = self._parts()
        known = parts.pool.situation.models[message.model]
        before, was_pinned = known.model.state, known.is_pinned
        self._feed(Ordered(message.model, message.order, message.is_forced))
        now = known.model.state
        is_same = now is before and before in explain.DONE.get(message.order, ())
        if message.order in (Order.PIN, Order.UNPIN):
            is_same = was_pinned is (message.order is Order.PIN)
        result = f"already_{_DONE_NAMES.get(message.order, now)}" if is_same else "accepted"
        sentence = explain.sentence(parts, message.model)
        if not is_same:
            text = f"an operator orders: {message.order} {message.model}"
            data = {"model": message.model, "order": message.order}
            self._log.record("pool.order", text, data=data)
        return msg.OrderedMsg(result, now, sentence[: msg.SENTENCE_CHARS_MAX])


_DONE_NAMES = {Order.PIN: "pinned", Order.UNPIN: "unpinned"}
