"""Run a command while its processes are slow now and then, to find tests that depend on timing:

    python -m hack.stutter delay --who servers -- make test-all ARGS="tests/lockserver"
    python -m hack.stutter starve --who any --log stalls.txt -- make test-all ARGS="tests/engine"

A test that looks at something before it is known passes on a quiet machine, and fails once in a
thousand runs on a busy one. Two ways to make such failures frequent:

* `delay` (needs a C compiler) waits for up to 60 ms before or after one in twenty of the system
  calls by which processes tell each other something, in every process: two facts that become known
  "at once" then do so one by one.
* `starve` (needs root, and the cpu controller of cgroup v1) takes the CPU away from one process at
  a time, anywhere in its work, for 20 to 300 ms.

`--who`: `servers` is what the tests have started, `tests` is pytest and its workers; `starve` also
knows `threads`, one thread of either. Judge each failure by reading: a budget of the product that
is shorter than a stall may rightly be exceeded, but a test must not set one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hack.stutter import delay, starve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.stutter", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("how", choices=("delay", "starve"))
    parser.add_argument("--who", choices=starve.WHO, default="any")
    parser.add_argument("--percent", type=float, default=5, help="delay: of the calls")
    parser.add_argument("--most-ms", type=float, help="of a delay (60) or a stall (300)")
    parser.add_argument(
        "--pause-ms", type=float, default=50, help="starve: between stalls, average"
    )
    parser.add_argument("--seed", type=int, help="starve: of the pauses and the stalls")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="starve: who, when")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # the command ends, and then this program
    with tempfile.TemporaryDirectory(prefix="stutter-") as directory, contextlib.ExitStack() as end:
        if options.how == "delay":
            most_ms = options.most_ms or delay.MOST_MS
            library = delay.build(Path(directory))
            environ = delay.environment(library, options.who, options.percent, most_ms)
            return subprocess.run(options.command, env={**os.environ, **environ}).returncode
        log = end.enter_context(open(options.log, "a", encoding="utf-8"))
        rng = random.Random(options.seed)
        stalls = starve.Stalls(
            options.who, options.most_ms or starve.MOST_MS, options.pause_ms, rng
        )
        command = subprocess.Popen(options.command)
        stalls.run(command, log)
        return command.returncode


if __name__ == "__main__":
    sys.exit(main())
