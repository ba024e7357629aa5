"""Kill the holder of `active` again and again: was the fence's order ever violated?

    python -m hack.soak_lock [--kills 1000] [--seed 1] [--json]

After each kill the new holder checks the old tree at the moment it receives its grant: every
process of it must be dead and its witness free (`supervisor.py`). Trees differ: one to four
processes, none to 50 MB of dirty memory in each, orphans that outlive their supervisor for a while.
So do the kills: the supervisor, one backend process, all at once, all together with the lock
server. It is also checked that one supervisor is granted per kill, and that the token grows each
time. Exit code 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from hack.bench_lock.servers import MEMORY
from hack.processes import LockServer
from hack.report import machine
from hack.soak_lock.supervisor import Plan, live
from hack.soak_lock.verdict import Soaked

KILLS = 1000
WAITERS = 2
DIRTY_MIB_MAX = 50
BACKENDS_MAX = 3  # and the supervisor: trees of one to four processes
ORPHANED_S_MAX = 0.05  # how long orphans outlive their supervisor
WAIT_S = 60.0
FDS_MAX = 256  # more than this process ever has
KINDS = ("supervisor", "backend", "all", "supervisor", "backend", "all", "server")
ALONE = ("supervisor", "supervisor", "supervisor", "server")  # a tree of one process


class Child:
    """A supervisor's process, and what it has reported so far."""

    def __init__(self, directory: str, plan: Plan) -> None:
        self.plan = plan
        self.is_queued = self.is_watching = False
        self.pidfds: dict[int, int] = {}  # of its whole tree, once reported: pid → pidfd
        commands_out, self._commands = os.pipe()
        self._reports, reports_in = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in range(3, FDS_MAX):
                if fd not in (commands_out, reports_in):
                    with contextlib.suppress(OSError):
                        os.close(fd)
            live(directory, plan, commands_out, reports_in, parent)
        os.close(commands_out)
        os.close(reports_in)
        self._rest = b""

    def fileno(self) -> int:
        return self._reports

    def lines(self) -> list[dict[str, Any]]:
        """What has arrived; blocks until then."""
        data = os.read(self._reports, 65536)
        if not data:
            raise RuntimeError(f"{self.plan} ended by itself")
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def watch(self, pids: Sequence[int], witness: str) -> None:
        """Tell it what to check when it is granted; it reports when it is ready."""
        self.is_watching = False
        os.write(self._commands, json.dumps({"pids": pids, "witness": witness}).encode() + b"\n")

    def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfds[pid], signal.SIGKILL)

    def close(self) -> None:
        """End the whole tree."""
        self.kill(list(self.pidfds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self._commands, self._reports, *self.pidfds.values()):
            os.close(fd)


class Soak:
    """One lock server, one holder, a few waiters."""

    def __init__(self, directory: str, seed: int) -> None:
        self.soaked = Soaked()
        self._directory = directory
        self._random = random.Random(seed)
        self._count = 0
        self._holder: Child | None = None
        self._waiters: list[Child] = []
        self._grants: list[tuple[Child, dict[str, Any]]] = []
        self._server = LockServer(directory)

    def run(self, kills: int) -> Soaked:
        self._server.start()
        try:
            self._launch()
            held = self._next_grant("the first grant")
            while self.soaked.kills < kills:
                while len(self._waiters) < WAITERS:
                    self._launch()
                self._listen(lambda: all(w.is_queued for w in self._waiters), "queued waiters")
                held = self._kill_and_check(held)
            return self.soaked
        finally:
            for child in [*self._waiters, *filter(None, [self._holder])]:
                child.close()
            self._server.close()

    def _launch(self) -> None:
        self._count += 1
        backends = self._random.randint(0, BACKENDS_MAX)
        dirty_mib = self._random.choice((0, self._random.randint(0, DIRTY_MIB_MAX)))
        orphans = backends > 0 and self._random.random() < 0.25
        plan = Plan(f"engine-{self._count}", backends, dirty_mib, orphans)
        self._waiters.append(Child(self._directory, plan))

    # ------------------------------------------------------------------ one kill

    def _kill_and_check(self, held: dict[str, Any]) -> dict[str, Any]:
        """Kill the holder; what the next holder saw and holds."""
        holder, (supervisor, *backends) = self._holder, held["pids"]
        assert holder is not None
        kind = self._random.choice(KINDS if backends else ALONE)
        # Its backends are always evidence; its supervisor only if it can no longer report: one that
        # sees a backend die reaps the others and releases, which frees the lock at once.
        proven = held["pids"] if kind == "supervisor" or not backends else backends
        for waiter in self._waiters:
            waiter.watch(proven, held["witness"])
        self._listen(lambda: all(w.is_watching for w in self._waiters), "waiters ready to check")
        began_ms = time.monotonic() * 1000
        self._kill(kind, holder, supervisor, backends)
        found = self._next_grant(f"a grant after a kill: {kind}")
        self.soaked.killed(kind, holder.plan, found, began_ms)
        holder.close()
        return found

    def _kill(self, kind: str, holder: Child, supervisor: int, backends: list[int]) -> None:
        if kind == "supervisor":
            holder.kill([supervisor])
            if holder.plan.orphans:
                time.sleep(self._random.uniform(0, ORPHANED_S_MAX))
                holder.kill(backends)
        elif kind == "backend":
            holder.kill([self._random.choice(backends)])
        else:
            tree = self._random.sample([supervisor, *backends], 1 + len(backends))
            is_server_first = kind == "server" and self._random.random() < 0.5
            if is_server_first:
                self._server.kill()
            holder.kill(tree)
            if kind == "server" and not is_server_first:
                self._server.kill()
            if kind == "server":
                self._server.spawn()

    def _next_grant(self, what: str) -> dict[str, Any]:
        self._listen(lambda: bool(self._grants), what)
        grants, self._grants = self._grants, []
        self.soaked.granted([line for _, line in grants])
        self._holder, found = grants[0]
        self._waiters.remove(self._holder)
        return found

    # ------------------------------------------------------------------ reports

    def _listen(self, is_done: Callable[[], bool], what: str) -> None:
        """Read the waiters' reports until `is_done`."""
        end = time.monotonic() + WAIT_S
        while not is_done():
            ready, _, _ = select.select(self._waiters, [], [], max(0.0, end - time.monotonic()))
            if not ready:
                state = json.dumps(self._server.status()["locks"]["active"])
                raise RuntimeError(f"no {what} within {WAIT_S:g} s; the lock: {state}")
            for child in ready:
                for line in child.lines():
                    if not child.pidfds and "pids" in line:
                        child.pidfds = {pid: os.pidfd_open(pid) for pid in line["pids"]}
                    child.is_queued = child.is_queued or "queued" in line
                    child.is_watching = child.is_watching or "watching" in line
                    if "token" in line:
                        self._grants.append((child, line))


def main() -> None:
    parser = argparse.ArgumentParser(description="is the order of the fence ever violated?")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line")
    flags = parser.parse_args()
    began = time.monotonic()
    base = MEMORY if os.path.isdir(MEMORY) else None
    with tempfile.TemporaryDirectory(prefix="soak-", dir=base) as directory:
        soaked = Soak(directory, flags.seed).run(flags.kills)
    report = {"seed": flags.seed, **soaked.to_dict(), "machine": machine()}
    report["took_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(report, indent=None if flags.json else 2))
    sys.exit(1 if soaked.violations else 0)


if __name__ == "__main__":
    main()
