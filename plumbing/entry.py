"""The first module of every command: Ctrl-C is silent from here on.

Importing a command takes half a second, and longer on a busy machine. Until that is done SIGINT has
its default action, so a process ends as any other does, without a stack trace; and again once the
command has ended, while the interpreter closes. In between, a command that is interrupted exits
with 130. Only Python's own start comes before it, so it imports nothing of ours.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from importlib import import_module

INTERRUPTED = 130  # what shells report for a program ended by SIGINT


def _run(module: str) -> None:
    """Run `main` of `module`."""
    # Ignored by the parent, such as `nohup` or a shell's `&`: it stays so.
    is_ours = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # The command has imported it already.
        import_module("plumbing.pod.cli").run_command(main)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


understudy = partial(_run, "understudy.cli.main")
lockserver = partial(_run, "lockserver.cli")
gms = partial(_run, "gms.cli")
engine = partial(_run, "engine.cli")
gateway = partial(_run, "gateway.cli")
pool = partial(_run, "pool.cli")
