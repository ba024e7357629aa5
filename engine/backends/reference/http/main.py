"""The backend's main process: HTTP in front, the model process behind, the supervisor above.

    python -m engine.backends.reference.http.main --model DIR [--max-context N] [--slots N]
        [--kv-bytes SIZE] [--tensor-parallel N] [--served-model-name NAME] [--standalone --port N]

Started by `engine run --backend reference -- …`, or with `--standalone` by hand, to try the decoder
without lock, memory service or supervisor. Owns the start: the witness first, then the model
processes, one per tensor-parallel rank, and only then the slow imports, which so run beside the
load. Knows neither numpy nor weights.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from engine.backends import HELP, process
from engine.backends.reference.config import read_config
from engine.backends.reference.http.spawn import ModelProcess, spawn
from engine.backends.reference.link import PROMPT_TOKENS_MAX, Configure
from engine.messages import CHANNEL, RANKS_MAX
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.config import size_bytes
from plumbing.service.fd_limit import raise_fd_limit
from plumbing.service.log import configure
from plumbing.wire.blocking import BlockingClient

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 4
DEFAULT_PORT = 8000


class Arguments(argparse.Namespace):
    model: str
    max_context: int | None
    slots: int
    kv_bytes: int | None
    tensor_parallel: int
    served_model_name: str | None
    standalone: bool
    port: int

    def settings(self) -> Configure:
        return Configure(
            directory=self.model,
            slots=self.slots,
            max_context=self.max_context,
            kv_bytes=self.kv_bytes,
            is_standalone=self.standalone,
            ranks=self.tensor_parallel,
        )

    @property
    def model_name(self) -> str:
        return self.served_model_name or os.path.basename(os.path.realpath(self.model))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("engine.backend_arguments", f"reference backend: {message}")


def parse(argv: list[str]) -> Arguments:
    """Raises UsageError `engine.backend_arguments`."""
    parser = _Parser(prog="engine run --backend reference --", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--max-context", type=_whole(2, PROMPT_TOKENS_MAX), help="positions per request"
    )
    parser.add_argument(
        "--slots",
        type=_whole(1, 1024),
        default=DEFAULT_SLOTS,
        help="requests at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-bytes", type=size_bytes, help="most memory for KV per rank, such as 2GiB"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=_whole(1, RANKS_MAX),
        default=1,
        help="so many model processes, each with its part of the weights on a device of its own "
        "(default: %(default)s)",
    )
    parser.add_argument("--served-model-name", help="default: the directory's name")
    parser.add_argument("--standalone", action="store_true", help="no lock, no memory service")
    parser.add_argument(
        "--port",
        type=_whole(0, 65535),
        default=DEFAULT_PORT,
        help="with --standalone (default: %(default)s)",
    )
    return parser.parse_args(argv, Arguments())


class _whole:
    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not self._least <= value <= self._most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {self._least} to {self._most}"
            )
        return value


def main() -> int:
    configure("backend-http")
    if "--standalone" in sys.argv or HELP.intersection(sys.argv):
        return _alone()
    try:
        sock = process.take_channel()
    except UnderstudyError as error:
        return _refuse(error)
    try:
        process.enter("http")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the supervisor's
        arguments, models = _start()
    except UnderstudyError as error:
        logger.error("%s", error)
        _report(sock, error)
        return error.exit_code
    from engine.backends.reference.http import serve

    return serve.run(serve.supervised(arguments.model, arguments.model_name, sock, models))


def _start() -> tuple[Arguments, list[ModelProcess]]:
    """Check what can be checked cheaply, then let the model processes begin."""
    arguments = parse(sys.argv[1:])
    read_config(arguments.model).of_rank(0, arguments.tensor_parallel)
    raise_fd_limit()
    return arguments, spawn(arguments.settings())


def _alone() -> int:
    try:
        arguments, models = _start()
        from engine.backends.reference.http import serve

        return serve.run(serve.alone(arguments.model, arguments.model_name, arguments.port, models))
    except UnderstudyError as error:
        return _refuse(error)


def _refuse(error: UnderstudyError) -> int:
    sys.stderr.write(f"error: {error}\n")
    return error.exit_code


def _report(sock: socket.socket, error: UnderstudyError) -> None:
    with BlockingClient.from_socket(sock, CHANNEL) as client, contextlib.suppress(UnderstudyError):
        client.notify(process.fault_report(error))


if __name__ == "__main__":
    sys.exit(main())
