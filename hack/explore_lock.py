"""Every order of events for the lock, exhaustively: `python -m hack.explore_lock --faults 2`.

The explorer runs on the tests' simulated world and is part of it (tests/sim/lock_explorer.py);
nothing here may import the tests, so this only starts that program.
"""

from __future__ import annotations

import os
import sys

from hack.rig import ROOT

if __name__ == "__main__":
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "tests.sim.lock_explorer", *sys.argv[1:]])
