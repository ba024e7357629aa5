"""The backend's main process: HTTP in front, the model process behind, the supervisor above.

    python -m engine.backends.reference.http.main --model DIR [--max-context N] [--slots N]
        [--kv-bytes SIZE] [--tensor-parallel N] [--served-model-name NAME]

Started by `engine run --backend reference -- …`. Owns the start: the witness first, then the model
processes, one per tensor-parallel rank, and only then the slow imports, which so run while the
weights load. Knows neither numpy nor weights.
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

from engine.backends import process
from engine.backends.reference.config import read_config
from engine.backends.reference.http.spawn import spawn
from engine.backends.reference.link import PROMPT_TOKENS_MAX, ConfigureMsg
from engine.backends.registry import HELP
from engine.messages import CHANNEL, RANKS_MAX
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.config import size_bytes
from plumbing.service.fd_limit import raise_fd_limit
from plumbing.service.log import configure
from plumbing.wire.blocking import BlockingClient

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 4


class ReferenceArguments(argparse.Namespace):
    model: str
    max_context: int | None
    slots: int
    kv_bytes: int | None
    tensor_parallel: int
    served_model_name: str | None

    def settings(self) -> ConfigureMsg:
        return ConfigureMsg(
            directory=self.model,
            slots=self.slots,
            max_context=self.max_context,
            kv_bytes=self.kv_bytes,
            ranks=self.tensor_parallel,
        )

    @property
    def model_name(self) -> str:
        return self.served_model_name or os.path.basename(os.path.realpath(self.model))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("engine.backend_arguments", f"reference backend: {message}")


def parse(argv: list[str]) -> ReferenceArguments:
    """Raises UsageError `engine.backend_arguments`."""
    parser = _Parser(prog="engine run --backend reference --", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--max-context",
        type=_whole(2, PROMPT_TOKENS_MAX),
        help="most tokens per request, prompt and answer together (default: up to 4096)",
    )
    parser.add_argument(
        "--slots",
        type=_whole(1, 1024),
        default=DEFAULT_SLOTS,
        help="requests that run at the same time (default: %(default)s)",
    )
    parser.add_argument("--kv-bytes", type=size_bytes, help="most KV memory per rank, such as 2GiB")
    parser.add_argument(
        "--tensor-parallel",
        type=_whole(1, RANKS_MAX),
        default=1,
        help="number of model processes, each with its part of the weights on its own device "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--served-model-name", help="name in /v1/models (default: the directory's name)"
    )
    return parser.parse_args(argv, ReferenceArguments())


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
    try:
        if HELP.intersection(sys.argv):
            parse(sys.argv[1:])
        sock = process.take_channel()
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        process.enter("http")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the supervisor's
        arguments = parse(sys.argv[1:])
        read_config(arguments.model).of_rank(0, arguments.tensor_parallel)  # the cheap checks
        raise_fd_limit()
        models = spawn(arguments.settings())
    except UnderstudyError as error:
        logger.error("%s", error)
        _report(sock, error)
        return error.exit_code
    from engine.backends.reference.http import serve

    return serve.run(arguments.model, arguments.model_name, arguments.slots, sock, models)


def _report(sock: socket.socket, error: UnderstudyError) -> None:
    with BlockingClient.from_socket(sock, CHANNEL) as client, contextlib.suppress(UnderstudyError):
        client.notify(process.fault_report(error))


if __name__ == "__main__":
    sys.exit(main())
