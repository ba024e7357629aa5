"""The command `understudy-init PROGRAM ARGUMENT…`: finds the program and executes a small init.

A console script of Python keeps some 20 MiB of imports; this one replaces itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

INIT = str(Path(__file__).with_name("init.py"))
USAGE = """usage: understudy-init [--replaceable] PROGRAM [ARGUMENT…]

--replaceable: on SIGHUP start a second PROGRAM, which takes over from the first one."""
FLAG = "--replaceable"


def main() -> None:
    """Execute init; PROGRAM is looked for beside this interpreter, then on PATH."""
    flags, words = ([FLAG], sys.argv[2:]) if sys.argv[1:2] == [FLAG] else ([], sys.argv[1:])
    if not words or words[0].startswith("-"):
        print(USAGE)
        sys.exit(0 if words in (["--help"], ["-h"]) else 2)
    name, *arguments = words
    places = ["", os.path.dirname(sys.executable), *os.get_exec_path()]
    found = [name] if "/" in name else [os.path.join(place, name) for place in places if place]
    program = next((path for path in found if os.access(path, os.X_OK)), None)
    if program is None:
        print(f"error: there is no program {name} on PATH [init.no_program]", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, "-I", "-S", INIT, *flags, os.path.abspath(program), *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
