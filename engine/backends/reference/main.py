"""The backend's process: HTTP and the model on its main thread, the supervisor above.

Started by `engine run --backend reference -- …`. Owns the start: the witness first, then the
processes of the other tensor-parallel ranks, and only then the slow imports.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import NoReturn

import msgspec

from engine.backends import process
from engine.backends.reference.config import Settings
from engine.backends.registry import HELP
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.log import configure
from plumbing.service.process import raise_fd_limit

# Sums of floats depend on how many threads share them, and one thread starts faster than many.
# Set here because numpy reads them when it is imported.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

NUMBERS = (
    ("--max-context", "max_context", "Most tokens of prompt and answer (default: up to 4096)."),
    ("--slots", "slots", "Requests that run at the same time (default: 8)."),
    ("--cache-tokens", "cache_tokens", "The prefix cache (default: as much as the slots)."),
    ("--tensor-parallel", "ranks", "Model processes, each with its own device (default: 1)."),
    ("--token-interval-ms", "token_interval_ms", "Least time between two tokens (default: 0)."),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("engine.backend_arguments", f"reference backend: {message}")


def parse(argv: list[str]) -> tuple[Settings, tuple[str, ...]]:
    """Settings and the served model's names. Raises UsageError `engine.backend_arguments`."""
    parser = _Parser(prog="engine run --backend reference --", allow_abbrev=False)
    add = parser.add_argument
    add("--model", dest="directory", required=True, help="Directory of a Hugging Face checkpoint.")
    names = "Name in /v1/models, then aliases (default: the directory's name)."
    add("--served-model-name", nargs="+", metavar="NAME", help=names)
    for name, field, text in NUMBERS:
        add(name, dest=field, type=int, default=argparse.SUPPRESS, help=text)
    no_adoption = "Ignore the KV blocks of earlier engines."
    add("--no-kv-adoption", dest="may_adopt", action="store_false", help=no_adoption)
    found = vars(parser.parse_args(argv))
    names = found.pop("served_model_name")
    try:
        settings = msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    return settings, tuple(names or [os.path.basename(os.path.realpath(settings.directory))])


def main() -> int:
    configure("backend-model")
    try:
        if HELP.intersection(sys.argv):
            parse(sys.argv[1:])
        sock = process.take_channel()
        member = process.enter("model")
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        settings, names = parse(sys.argv[1:])
        raise_fd_limit()
    except UnderstudyError as error:
        member.end(error)
    os.environ |= dict.fromkeys(THREAD_VARIABLES, "1")
    # When imported, aiohttp reads all certificates that a client might need: 30 ms for nothing.
    os.environ["SSL_CERT_FILE"] = os.devnull
    # What is imported lives as long as the process: to look for garbage meanwhile takes a tenth of
    # the time, and later collections need not visit it.
    gc.disable()
    from engine.backends.reference.ranks import start_ranks

    peers = start_ranks(settings)
    import uvloop

    from engine.backends.reference.service import serve

    gc.freeze()
    gc.enable()
    uvloop.run(serve(settings, names, sock, member, peers))
    raise AssertionError("the backend stopped serving by itself")


if __name__ == "__main__":
    sys.exit(main())
