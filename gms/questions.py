"""One question to one device's server, each on a connection of its own. Blocking."""

from __future__ import annotations

from typing import Any, TypeVar

from gms import messages
from plumbing.errors import ProtocolError
from plumbing.pod.paths import gms_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

AnswerT = TypeVar("AnswerT", bound=Message)


def ask(
    directory: str,
    device: str,
    question: Message,
    answer: type[AnswerT],
    timeout_s: float,
) -> AnswerT:
    """The answer of the device's server."""
    path = gms_socket(directory, device)
    with BlockingClient(path, messages.CATALOGUE, connect_timeout_s=timeout_s) as client:
        found = client.request(question, timeout_s=timeout_s).message
    if not isinstance(found, answer):
        raise unexpected_answer(found.TYPE, question.TYPE)
    return found


def status_of(directory: str, device: str, timeout_s: float) -> dict[str, Any]:
    """The server's status document; raises as `ask`."""
    answer = messages.StatusReplyMsg
    return ask(directory, device, messages.StatusMsg(), answer, timeout_s).document


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
